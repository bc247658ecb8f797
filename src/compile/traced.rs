//! A traced function that plans are made from: its graph, its tensors and its parameters.

use super::config::{PlanKind, StepConfig};
use super::lower::{self, LowerRequest, Lowered};
use super::program::Recompute;
use crate::graph::{self, Graph, Source, Target, Traced, ValueId, ValueRef, View};
use crate::inplace::{for_elements, storage_address};
use crate::ops::Reduction;
use crate::ops::cpu::cpu_storage;
use crate::ops::strided;
use crate::optim::Rule;
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Tensor, WithDType};
use std::collections::HashMap;
use std::rc::Rc;

/// A variable that a plan updates, or reads in each run.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    pub name: String,
    /// The size of the whole variable. (The graph may have seen a view of it first.)
    pub elements: usize,
    /// The shape of the whole variable.
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// The rule of its update, and how it is planned if the loss does not depend on it.
    pub rule: Rule,
}

/// A function's trace and its parameters.
pub(super) struct TracedFunction {
    /// The op name for errors.
    pub op: &'static str,
    pub target: Target,
    /// The graph. Token ids are u32 in it; i64 ids are converted before they are passed to a plan.
    pub graph: Graph,
    /// A tensor of each value, by id: a meta tensor for an input, the variable itself for a weight.
    pub tensors: Vec<Tensor>,
    /// The parameters, in the order of [`Location::Parameter`](super::Location::Parameter).
    pub parameters: Vec<Parameter>,
    /// The parameter index of values that are parameters.
    pub numbers: HashMap<ValueId, usize>,
    /// The reduction of a loss over the micro-batch's targets, the mean or the sum. For a sum, each run is passed the
    /// divisor.
    pub reduction: Reduction,
}

impl TracedFunction {
    /// Traces `function`, whose variables are `parameters`: real ones, or meta tensors if only a plan is needed.
    ///
    /// # Errors
    /// Errors of the function and of its trace.
    pub fn new<'p>(
        op: &'static str,
        target: Target,
        parameters: impl Iterator<Item = (&'p str, &'p Tensor)>,
        function: impl FnOnce() -> Result<Vec<Tensor>>,
    ) -> Result<Self> {
        let traced = graph::trace_with_tensors(target, function)?;
        Self::of(op, target, parameters, traced)
    }

    /// Same as [`new`](Self::new), with every meta weight that the function reads as a parameter.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_meta_weights(
        op: &'static str,
        target: Target,
        function: impl FnOnce() -> Result<Vec<Tensor>>,
    ) -> Result<Self> {
        let traced = graph::trace_with_tensors(target, function)?;
        let weights = traced.graph.weights();
        let weights = weights.map(|(id, name)| (name.to_string(), traced.tensors[id.0].clone()));
        let meta = weights.filter(|(_, weight)| graph::is_meta(weight));
        let meta: Vec<(String, Tensor)> = meta.collect();
        let parameters = meta.iter().map(|(name, weight)| (name.as_str(), weight));
        Self::of(op, target, parameters, traced)
    }

    fn of<'p>(
        op: &'static str,
        target: Target,
        parameters: impl Iterator<Item = (&'p str, &'p Tensor)>,
        Traced { mut graph, tensors }: Traced,
    ) -> Result<Self> {
        narrow_ids(op, &mut graph)?;
        let (mut all, mut places) = (Vec::new(), HashMap::new());
        for (name, tensor) in parameters {
            places.insert(storage_address(tensor), all.len());
            all.push(Parameter {
                name: name.into(),
                elements: tensor.elem_count(),
                shape: tensor.dims().to_vec(),
                dtype: tensor.dtype(),
                rule: Rule::default(),
            });
        }
        let numbers = tensors.iter().enumerate();
        let numbers = numbers.filter_map(|(value, tensor)| {
            Some((ValueId(value), *places.get(&storage_address(tensor))?))
        });
        Ok(Self {
            op,
            target,
            numbers: numbers.collect(),
            graph,
            tensors,
            parameters: all,
            reduction: Reduction::Mean,
        })
    }

    /// Returns constants and frozen weights: the values that are neither parameters, inputs nor outputs of nodes.
    pub fn constants(&self) -> Vec<ValueId> {
        let is_constant = |id: &ValueId| match self.graph.value(*id).source {
            Source::Constant => true,
            Source::Weight(_) => !self.numbers.contains_key(id),
            Source::Input(_) | Source::Node => false,
        };
        let ids = (0..self.graph.values.len()).map(ValueId);
        ids.filter(is_constant).collect()
    }

    /// Returns the elements of a constant operand, rounded to `dtype`.
    ///
    /// # Errors
    /// Meta weights; views that cannot be copied.
    pub fn table(&self, operand: &ValueRef, dtype: DType) -> Result<Vec<f32>> {
        let elements = match &operand.view {
            None => self.tensor(operand.value)?.detach(),
            Some(view) => self.view_of(operand.value, view)?,
        };
        let rounded = elements.to_dtype(dtype)?.to_dtype(DType::F32)?;
        Ok(rounded.flatten_all()?.to_vec1()?)
    }

    /// Returns the first `elements` of a value's storage on `device`: the value's tensor itself if it is exactly those,
    /// else a copy.
    ///
    /// # Errors
    /// Those of [`table`](Self::table); a constant on another device.
    pub fn first(&self, id: ValueId, elements: usize, device: &Device) -> Result<Tensor> {
        let tensor = self.tensor(id)?;
        let is_all = tensor.layout().start_offset() == 0 && tensor.is_contiguous();
        let tensor = match is_all && tensor.elem_count() == elements {
            true => tensor.detach(),
            false => {
                let row = View {
                    shape: vec![elements],
                    stride: vec![1],
                    offset: 0,
                };
                self.view_of(id, &row)?
            }
        };
        self.to_device(id, &tensor, device)
    }

    /// Returns a contiguous copy of a view of a value's storage, on `device`.
    ///
    /// # Errors
    /// Those of [`first`](Self::first).
    pub fn copied(&self, id: ValueId, view: &View, device: &Device) -> Result<Tensor> {
        self.to_device(id, &self.view_of(id, view)?, device)
    }

    fn tensor(&self, id: ValueId) -> Result<&Tensor> {
        let tensor = &self.tensors[id.0];
        match graph::is_meta(tensor) {
            false => Ok(tensor),
            true => Err(Error::Order {
                op: self.op,
                problem: format!(
                    "the weight {:?} is a meta tensor, which has no data",
                    tensor.dims()
                ),
                hint: "build the model with real weights; only inputs may be meta tensors".into(),
            }),
        }
    }

    /// Moves a constant to `device`. A constant that the function creates while tracing is on the CPU, because meta
    /// tensors have no device. Weights are not moved.
    fn to_device(&self, id: ValueId, tensor: &Tensor, device: &Device) -> Result<Tensor> {
        let moves = self.graph.value(id).source == Source::Constant && tensor.device().is_cpu();
        if !moves {
            let what = "a constant or a frozen weight";
            check_device(self.op, what, tensor, device)?;
        }
        Ok(tensor.to_device(device)?)
    }

    fn view_of(&self, id: ValueId, view: &View) -> Result<Tensor> {
        let tensor = self.tensor(id)?;
        let layout = tensor.layout();
        let is_this = layout.dims() == view.shape
            && layout.stride() == view.stride
            && layout.start_offset() == view.offset;
        if is_this {
            return Ok(tensor.detach().force_contiguous()?);
        }
        if !tensor.device().is_cpu() {
            return Err(Error::Order {
                op: self.op,
                problem: format!("a constant {:?} is read in several views", tensor.dims()),
                hint: "make each contiguous before the step is planned".into(),
            });
        }
        let (storage, _) = tensor.storage_and_layout();
        Ok(gathered(cpu_storage(&storage)?, view)?)
    }
}

/// A plan and the function that it was made from.
pub(super) struct Planned {
    pub function: Rc<TracedFunction>,
    pub lowered: Lowered,
}

impl Planned {
    pub fn arena_bytes(&self) -> u64 {
        self.lowered.plan.arena_bytes()
    }
}

impl TracedFunction {
    /// Plans the function.
    ///
    /// # Errors
    /// An op that cannot be planned; an output that a plan of this kind does not support; a parameter that the output
    /// does not depend on.
    pub fn plan(
        self: &Rc<Self>,
        kind: PlanKind,
        config: &StepConfig,
        recompute: Recompute,
    ) -> Result<Planned> {
        let job = LowerRequest {
            function: self,
            kind,
            config,
            recompute,
        };
        Ok(Planned {
            lowered: lower::plan(&job)?,
            function: self.clone(),
        })
    }
}

/// Converts token ids in i64 to the u32 that kernels read. Ids are i64 values that ops read as extra inputs, and
/// contiguous copies of such values.
///
/// # Errors
/// Ids that an op also uses as numbers, because an ignored id is a different number in u32.
fn narrow_ids(op: &'static str, graph: &mut Graph) -> Result<()> {
    let is_wide = |graph: &Graph, id: ValueId| graph.value(id).dtype == DType::I64;
    let reads = graph.nodes().flat_map(|node| &node.extra_inputs);
    if !reads.map(|x| x.value).any(|id| is_wide(graph, id)) {
        return Ok(());
    }
    let numbers = graph.nodes().find(|node| {
        let takes_wide = node.inputs.iter().any(|x| is_wide(graph, x.value));
        takes_wide && graph.value(node.output).dtype != DType::I64 // not a copy
    });
    if let Some(node) = numbers {
        return Err(Error::Order {
            op,
            problem: format!(
                "{} takes integers in i64 as numbers, in a step of ids in i64",
                node.path
            ),
            hint: "pass the ids in u32, or those numbers in a float dtype".into(),
        });
    }
    let wide = graph.values.iter_mut();
    for value in wide.filter(|value| value.dtype == DType::I64) {
        value.dtype = DType::U32;
    }
    Ok(())
}

/// Checks that a tensor is on the plan's device.
pub(super) fn check_device(
    op: &'static str,
    what: &str,
    tensor: &Tensor,
    device: &Device,
) -> Result<()> {
    let location = tensor.device().location();
    match tensor.device().same_device(device) && !device.is_metal() {
        true => Ok(()),
        false => Err(Error::placement(op, format!("{location:?}")).must_be(
            format!(
                "{what} on {:?}, where the step is planned",
                device.location()
            ),
            "build the model, its inputs and constants on one device, the CPU or a CUDA GPU",
        )),
    }
}

fn gathered(storage: &CpuStorage, view: &View) -> candle_core::Result<Tensor> {
    fn from<T: WithDType>(x: &[T], view: &View) -> candle_core::Result<Tensor> {
        let elements: Vec<T> = strided::offsets(view).map(|place| x[place]).collect();
        Tensor::from_vec(elements, &view.shape[..], &Device::Cpu)
    }
    for_elements!(storage, x => from(x, view))
}
