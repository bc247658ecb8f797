//! What a plan of any loss reads from outside: its inputs, constants and frozen weights.

use super::lower::{Lowered, Tables};
use crate::graph::{self, Graph, Operand, Source, ValueId, View};
use crate::ops::cpu::{cpu_storage, for_stored, ids};
use crate::ops::lowering::Ids;
use crate::ops::strided;
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Tensor, WithDType};

/// The values of a trace, and their tensors: of inputs hollow ones.
#[derive(Clone, Copy)]
pub(super) struct Constants<'a> {
    pub op: &'static str,
    pub graph: &'a Graph,
    pub tensors: &'a [Tensor],
    /// Where the plan is run.
    pub device: &'a Device,
}

/// What is lent in each run, in the order of [`Home::Argument`](super::Home::Argument).
#[derive(Debug)]
pub(super) struct Arguments {
    op: &'static str,
    all: Vec<Argument>,
    /// Inputs that are read as ids.
    ids: Vec<(String, Ids)>,
}

#[derive(Debug)]
enum Argument {
    /// An input, by name: a tensor that each run copies it to, so that it lies where it lay.
    Input { name: String, copy: Tensor },
    /// A constant, or a frozen weight.
    Held(Tensor),
}

impl Arguments {
    /// # Errors
    /// Constants on another device; hollow weights; ids of constants that are out of bounds.
    pub fn new(constants: &Constants<'_>, lowered: &Lowered) -> Result<Self> {
        let all = lowered.arguments.iter().enumerate();
        let all = all.map(|(number, (id, view))| {
            let value = constants.graph.value(*id);
            if let Source::Input(name) = &value.source
                && graph::is_hollow(&constants.tensors[id.0])
            {
                let shape = &value.shape[..];
                return Ok(Argument::Input {
                    name: name.clone(),
                    copy: Tensor::zeros(shape, value.dtype, constants.device)?,
                });
            }
            let home = super::Home::Argument(number);
            Ok(Argument::Held(match (lowered.plan.at_home(home), view) {
                (None, _) => Tensor::zeros(0, value.dtype, constants.device)?, // only dead calls read it
                (_, Some(view)) => constants.viewed(*id, view)?,
                (Some(buffer), None) => {
                    constants.first(*id, lowered.plan.buffer(buffer).elements())?
                }
            }))
        });
        let all = all.collect::<Result<Vec<_>>>()?;
        let ids = checked_ids(constants, lowered, &all)?;
        Ok(Self {
            op: constants.op,
            all,
            ids,
        })
    }

    /// The tensors of a run, with its inputs copied to where they lie.
    ///
    /// # Errors
    /// A missing input, another name, shape, dtype or device than planned, ids out of bounds.
    pub fn given(&self, inputs: &[(&str, &Tensor)]) -> Result<Vec<&Tensor>> {
        let op = self.op;
        let names = self.all.iter().filter_map(|argument| match argument {
            Argument::Input { name, .. } => Some(name.as_str()),
            Argument::Held(_) => None,
        });
        let names: Vec<&str> = names.collect();
        if let Some((other, _)) = inputs.iter().find(|(name, _)| !names.contains(name)) {
            return Err(Error::Order {
                op,
                problem: format!("{other:?} is no input that the loss reads"),
                hint: format!("it reads {}", names.join(", ")),
            });
        }
        let mut given = Vec::new();
        for argument in &self.all {
            if let Argument::Input { name, copy } = argument {
                given.push((copy, input(op, name, copy, inputs)?));
            }
        }
        for (name, check) in &self.ids {
            if let Some((_, tensor)) = inputs.iter().find(|(other, _)| other == name) {
                ids(op, tensor, check.bound, check.ignore)?;
            }
        }
        for (copy, tensor) in given {
            if copy.elem_count() > 0 {
                let flat = tensor.detach().contiguous()?.flatten_all()?;
                copy.flatten_all()?.slice_set(&flat, 0, 0)?;
            }
        }
        let all = self.all.iter().map(|argument| match argument {
            Argument::Input { copy, .. } => copy,
            Argument::Held(held) => held,
        });
        Ok(all.collect())
    }
}

/// The tensor of an input, of the planned shape.
fn input<'t>(
    op: &'static str,
    name: &str,
    planned: &Tensor,
    inputs: &[(&str, &'t Tensor)],
) -> Result<&'t Tensor> {
    let (shape, dtype) = (planned.dims(), planned.dtype());
    let Some((_, tensor)) = inputs.iter().find(|(other, _)| *other == name) else {
        return Err(Error::Order {
            op,
            problem: format!("no tensor for the input {name:?}"),
            hint: format!("pass it to run: {shape:?} in {}", dtype.as_str()),
        });
    };
    if tensor.dims() != shape || tensor.dtype() != dtype {
        return Err(Error::Shape {
            op,
            expected: format!("{name} {shape:?} in {}, as planned", dtype.as_str()),
            got: format!("{:?} in {}", tensor.dims(), tensor.dtype().as_str()),
            hint: "plan another step for another shape".into(),
        });
    }
    check_device(op, name, tensor, planned.device())?;
    Ok(tensor)
}

impl Constants<'_> {
    fn tensor(&self, id: ValueId) -> Result<&Tensor> {
        let tensor = &self.tensors[id.0];
        if graph::is_hollow(tensor) {
            return Err(Error::Order {
                op: self.op,
                problem: format!(
                    "a hollow weight {:?} has no elements to compute with",
                    tensor.dims()
                ),
                hint: "build the model with real weights; only inputs are hollow".into(),
            });
        }
        // A constant that the loss makes beside hollow inputs, which are nowhere, is on the CPU.
        let moves = self.graph.value(id).source == Source::Constant && tensor.device().is_cpu();
        if !moves {
            let what = "a constant or a frozen weight";
            check_device(self.op, what, tensor, self.device)?;
        }
        Ok(tensor)
    }

    /// The first `elements` of a value's storage: its tensor itself, or a copy where that is a view.
    fn first(&self, id: ValueId, elements: usize) -> Result<Tensor> {
        let tensor = self.tensor(id)?;
        let is_all = tensor.layout().start_offset() == 0 && tensor.is_contiguous();
        if is_all && tensor.elem_count() == elements {
            return Ok(tensor.detach().to_device(self.device)?);
        }
        let row = View {
            shape: vec![elements],
            stride: vec![1],
            offset: 0,
        };
        self.viewed(id, &row)
    }

    /// A copy of the elements that a view shows of a value's storage.
    fn viewed(&self, id: ValueId, view: &View) -> Result<Tensor> {
        let tensor = self.tensor(id)?;
        let layout = tensor.layout();
        let is_this = layout.dims() == view.shape
            && layout.stride() == view.stride
            && layout.start_offset() == view.offset;
        if is_this {
            return Ok(tensor.detach().force_contiguous()?.to_device(self.device)?);
        }
        if !tensor.device().is_cpu() {
            return Err(Error::Order {
                op: self.op,
                problem: format!("a constant {:?} is read in several views", tensor.dims()),
                hint: "make each contiguous before the step is planned".into(),
            });
        }
        let (storage, _) = tensor.storage_and_layout();
        Ok(gathered(cpu_storage(&storage)?, view)?.to_device(self.device)?)
    }
}

fn gathered(storage: &CpuStorage, view: &View) -> candle_core::Result<Tensor> {
    match storage {
        CpuStorage::U32(x) => gathered_from(x, view),
        CpuStorage::I64(x) => gathered_from(x, view),
        CpuStorage::U8(x) => gathered_from(x, view),
        other => for_stored!(other.dtype(), T => gathered_from(other.as_slice::<T>()?, view)),
    }
}

fn gathered_from<T: WithDType>(x: &[T], view: &View) -> candle_core::Result<Tensor> {
    let elements: Vec<T> = strided::places(view).map(|place| x[place]).collect();
    Tensor::from_vec(elements, &view.shape[..], &Device::Cpu)
}

impl Tables for Constants<'_> {
    fn table(&self, _: usize, operand: &Operand, dtype: DType) -> Result<Vec<f32>> {
        let elements = match &operand.view {
            None => self.tensor(operand.value)?.detach(),
            Some(view) => self.viewed(operand.value, view)?,
        };
        let rounded = elements.to_dtype(dtype)?.to_dtype(DType::F32)?;
        Ok(rounded.flatten_all()?.to_vec1()?)
    }
}

/// The inputs that are read as ids; constants that are ids are checked here.
fn checked_ids(
    constants: &Constants<'_>,
    lowered: &Lowered,
    arguments: &[Argument],
) -> Result<Vec<(String, Ids)>> {
    let (op, graph) = (constants.op, constants.graph);
    let mut inputs = Vec::new();
    for (id, check) in &lowered.ids {
        let id = &origin(graph, *id);
        if graph.value(*id).source == Source::Node {
            return Err(Error::Order {
                op,
                problem: "token ids that an op makes are not checked before a run".into(),
                hint: "make them an input, or a constant".into(),
            });
        }
        let here = lowered.arguments.iter().zip(arguments);
        for (_, argument) in here.filter(|((other, _), _)| other == id) {
            match argument {
                Argument::Input { name, .. } => inputs.push((name.clone(), *check)),
                Argument::Held(held) => drop(ids(op, held, check.bound, check.ignore)?),
            }
        }
    }
    Ok(inputs)
}

/// Where the elements of a value come from, through copies in order.
fn origin(graph: &Graph, id: ValueId) -> ValueId {
    let makes_it = |node: &&graph::Node| node.output == id && node.op == "contiguous";
    match graph.nodes().find(makes_it) {
        Some(node) => origin(graph, node.inputs[0].value),
        None => id,
    }
}

/// An error unless a tensor is where the plan is run.
pub(super) fn check_device(
    op: &'static str,
    what: &str,
    tensor: &Tensor,
    device: &Device,
) -> Result<()> {
    let location = tensor.device().location();
    match tensor.device().same_device(device) && !device.is_metal() {
        true => Ok(()),
        false => Err(Error::Placement {
            op,
            expected: format!(
                "{what} on {:?}, where the step is planned",
                device.location()
            ),
            got: format!("{location:?}"),
            hint: "build the model, its inputs and constants on one device, the CPU or a CUDA GPU"
                .into(),
        }),
    }
}
