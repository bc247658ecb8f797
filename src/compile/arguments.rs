//! Arguments of a plan: the tensors that a run reads apart from parameters, namely inputs, constants and frozen
//! weights.

use super::batch::{Batch, D_OUTPUT, DROPOUT};
use super::buffer::Buffer;
use super::lower::{Lowered, TableOf};
use super::plan::Plan;
use super::traced::{TracedFunction, check_device};
use crate::attention::first_keys;
use crate::graph::{self, Attribute, Graph, Source, ValueId, View};
use crate::inplace::storage_address;
use crate::ops::cpu::{ids, narrow_id};
use crate::ops::lowering::Check;
use crate::ops::topk::IDS_BELOW;
use crate::ops::{self, check_size};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};

/// The arguments of a plan, in the order of [`Location::Input`](super::Location::Input) and
/// [`Location::Argument`](super::buffer::Location::Argument).
#[derive(Debug)]
pub(super) struct Arguments {
    op: &'static str,
    all: Vec<Argument>,
    /// Checks of input data, by input name.
    checks: Vec<(String, Check)>,
    /// The constants that the plan's tables were computed from.
    tables: Vec<TableOf>,
}

#[derive(Debug)]
enum Argument {
    /// An input, with its micro-batches stacked in the first dimension.
    Input {
        name: String,
        shape: Vec<usize>,
        dtype: DType,
        /// The tensor on a GPU that each run copies the input to, so that a recorded CUDA graph finds it at a fixed
        /// address. `None` on the CPU, and for the gradient of an output: that may be as large as all activations, and
        /// is read in place.
        copy: Option<Tensor>,
    },
    Constant(Constant),
}

/// A tensor that the function reads and that is neither a parameter nor an input.
#[derive(Debug)]
struct Constant {
    value: ValueId,
    /// The view that is read, made contiguous; `None` if the whole value is.
    view: Option<View>,
    /// The number of elements that are read; `None` if only calls that were removed read it.
    elements: Option<usize>,
    /// The tensor itself, or a copy.
    tensor: Tensor,
}

impl Constant {
    /// Returns the tensor of a trace. With `narrow`, ids in i64 are converted to the u32 that kernels read.
    fn read(&self, function: &TracedFunction, device: &Device, narrow: bool) -> Result<Tensor> {
        let dtype = function.graph.value(self.value).dtype;
        let tensor = match (self.elements, &self.view) {
            (None, _) => Tensor::zeros(0, dtype, device)?,
            (_, Some(view)) => function.copied(self.value, view, device)?,
            (Some(elements), None) => function.first(self.value, elements, device)?,
        };
        match dtype {
            DType::U32 if narrow => narrowed(&tensor),
            _ => Ok(tensor),
        }
    }
}

impl Arguments {
    /// # Errors
    /// Constants on another device; meta weights; constant ids that are out of bounds; with several micro-batches, a
    /// scalar input, which cannot be stacked; an input that does not fit in memory.
    pub fn new(function: &TracedFunction, lowered: &Lowered, device: &Device) -> Result<Self> {
        let all = lowered.arguments.iter().enumerate();
        let all = all.map(|(number, (id, view))| {
            let value = function.graph.value(*id);
            if let Source::Input(name) = &value.source
                && graph::is_meta(&function.tensors[id.0])
            {
                let micro_batches = lowered.plan.micro_batches();
                let shape = stacked(function.op, name, &value.shape, micro_batches)?;
                check_size(function.op, &shape, value.dtype, device)?;
                let copy = || ops::zeros(&shape[..], value.dtype, device);
                return Ok(Argument::Input {
                    name: name.clone(),
                    copy: (!device.is_cpu() && name != D_OUTPUT)
                        .then(copy)
                        .transpose()?,
                    shape,
                    dtype: value.dtype,
                });
            }
            let location = super::buffer::Location::Argument(number);
            let buffer = lowered.plan.at_location(location);
            let mut constant = Constant {
                value: *id,
                view: view.clone(),
                elements: buffer.map(Buffer::elements),
                tensor: Tensor::zeros(0, value.dtype, device)?,
            };
            constant.tensor = constant.read(function, device, true)?;
            Ok(Argument::Constant(constant))
        });
        let all = all.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            op: function.op,
            checks: checks(function, lowered, &all, device)?,
            all,
            tables: lowered.tables.clone(),
        })
    }

    /// Checks that the constants that the plan has a copy or a table of are unchanged in a later trace.
    ///
    /// # Errors
    /// [`Error::Order`], which names the constant and the op that reads it.
    pub fn check_constants(
        &self,
        function: &TracedFunction,
        plan: &Plan,
        device: &Device,
    ) -> Result<()> {
        for argument in &self.all {
            if let Argument::Constant(constant) = argument
                && !are_equal(&constant.read(function, device, true)?, &constant.tensor)?
            {
                return Err(constant_changed(function, constant.value));
            }
        }
        for ((operand, dtype), table) in self.tables.iter().zip(plan.tables()) {
            let now = function.table(operand, *dtype)?;
            if !now
                .iter()
                .map(|x| x.to_bits())
                .eq(table.iter().map(|x| x.to_bits()))
            {
                return Err(constant_changed(function, operand.value));
            }
        }
        Ok(())
    }

    fn inputs(&self) -> impl Iterator<Item = (&str, (&[usize], DType))> {
        self.all.iter().filter_map(|argument| match argument {
            Argument::Input {
                name, shape, dtype, ..
            } => Some((name.as_str(), (&shape[..], *dtype))),
            Argument::Constant(_) => None,
        })
    }

    pub fn reads_input(&self, name: &str) -> bool {
        self.inputs().any(|(input, _)| input == name)
    }

    /// Returns whether a batch has exactly the inputs that the plan reads, in the planned shapes and dtypes (i64 is
    /// also accepted for ids).
    pub fn accepts(&self, batch: &Batch) -> bool {
        let are_read = batch.inputs().all(|(name, _)| self.reads_input(name));
        are_read
            && batch.repeated_name().is_none()
            && self.inputs().all(|(name, planned)| {
                let mut given = batch.inputs();
                let is_it = |(other, tensor): (&str, &Tensor)| {
                    other == name && self.accepts_input(name, planned, tensor)
                };
                name == DROPOUT || given.any(is_it)
            })
    }

    fn accepts_input(
        &self,
        name: &str,
        (shape, dtype): (&[usize], DType),
        tensor: &Tensor,
    ) -> bool {
        let are_ids =
            |(input, check): &(String, Check)| input == name && matches!(check, Check::Ids { .. });
        let may_be_wide = || self.checks.iter().any(are_ids) && tensor.dtype() == DType::I64;
        tensor.dims() == shape && (tensor.dtype() == dtype || may_be_wide())
    }

    /// Checks that the plan [accepts](Self::accepts) the batch that it was made for. The shape of the output's gradient
    /// is not known before the plan is made.
    ///
    /// # Errors
    /// [`Error::Order`] for a missing input or an unknown name, [`Error::Shape`] for another shape or dtype than
    /// planned.
    pub fn check(&self, batch: &Batch) -> Result<()> {
        self.check_names(batch)?;
        let shape_of = |dims: &[usize], dtype: DType| format!("{dims:?} in {}", dtype.as_str());
        for (name, planned) in self.inputs() {
            if let Some((_, tensor)) = batch.inputs().find(|(other, _)| *other == name)
                && !self.accepts_input(name, planned, tensor)
            {
                return Err(Error::Shape {
                    op: self.op,
                    expected: format!("{name} {}", shape_of(planned.0, planned.1)),
                    got: shape_of(tensor.dims(), tensor.dtype()),
                    hint: match name {
                        D_OUTPUT => "pass a gradient of the output's shape and dtype".into(),
                        _ => "pass the planned shape and dtype, or plan for this one".into(),
                    },
                });
            }
        }
        Ok(())
    }

    /// Checks that the plan reads every input of a batch.
    ///
    /// # Errors
    /// [`Error::Order`].
    fn check_names(&self, batch: &Batch) -> Result<()> {
        let Some((other, _)) = batch.inputs().find(|(name, _)| !self.reads_input(name)) else {
            return Ok(());
        };
        let names: Vec<&str> = self.inputs().map(|(name, _)| name).collect();
        Err(Error::Order {
            op: self.op,
            problem: format!("{other:?} is not an input of the loss"),
            hint: format!("it reads {}", names.join(", ")),
        })
    }

    /// Returns the argument tensors of a run with a batch that the plan [accepts](Self::accepts). On a GPU an input is
    /// copied to its fixed address. Otherwise it is used in place if it is contiguous, 16-byte aligned and not part of
    /// a parameter.
    ///
    /// # Errors
    /// Another device than planned; ids out of bounds.
    pub fn run_tensors(
        &self,
        batch: &Batch,
        device: &Device,
        parameters: &[(String, Var)],
    ) -> Result<Vec<Tensor>> {
        let op = self.op;
        let given = |name: &str| {
            let Some((_, tensor)) = batch.inputs().find(|(other, _)| *other == name) else {
                return Err(Error::Order {
                    op,
                    problem: format!("no tensor for the input {name:?}"),
                    hint: "pass it to run".into(),
                });
            };
            if graph::is_meta(tensor) {
                return Err(Error::Order {
                    op,
                    problem: format!("the input {name:?} is a meta tensor"),
                    hint: "meta tensors are for plans; pass a tensor with data to run".into(),
                });
            }
            if !tensor.device().is_cpu() {
                check_device(op, name, tensor, device)?;
            }
            for (_, check) in self.checks.iter().filter(|(input, _)| input == name) {
                checked(op, tensor, *check)?;
            }
            Ok(tensor)
        };
        let inputs = self.inputs().map(|(name, _)| given(name));
        let mut inputs = inputs.collect::<Result<Vec<_>>>()?.into_iter(); // all are checked before one is copied
        let all = self.all.iter().map(|argument| {
            let (dtype, copy, tensor) = match (argument, &mut inputs) {
                (Argument::Constant(constant), _) => return Ok(constant.tensor.clone()),
                (Argument::Input { dtype, copy, .. }, inputs) => (*dtype, copy, inputs.next()),
            };
            let Some(tensor) = tensor else {
                unreachable!("each input was looked up");
            };
            let tensor = tensor.detach().contiguous()?;
            let tensor = match dtype {
                DType::U32 => narrowed(&tensor)?,
                _ => tensor,
            };
            let Some(copy) = copy else {
                let tensor = tensor.to_device(device)?;
                let storage = storage_address(&tensor);
                let mut parameters = parameters.iter();
                let shares_parameter = parameters.any(|(_, var)| storage_address(var) == storage);
                let start = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
                // Parameters are borrowed mutably, and kernels move 16 bytes at a time.
                return Ok(match shares_parameter || !start.is_multiple_of(16) {
                    true => tensor.force_contiguous()?,
                    false => tensor,
                });
            };
            if copy.elem_count() > 0 {
                let flat = tensor.flatten_all()?.to_device(copy.device())?;
                copy.flatten_all()?.slice_set(&flat, 0, 0)?;
            }
            Ok(copy.clone())
        });
        all.collect()
    }
}

fn are_equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    if storage_address(a) == storage_address(b) || a.elem_count() == 0 {
        return Ok(a.dims() == b.dims());
    }
    let (a, b) = (a.flatten_all()?, b.flatten_all()?);
    let are_nan = a.ne(&a)?.mul(&b.ne(&b)?)?;
    let are_equal = a.eq(&b)?.maximum(&are_nan)?;
    let least = are_equal.min_all()?.to_device(&Device::Cpu)?;
    Ok(least.to_scalar::<u8>()? == 1)
}

fn constant_changed(function: &TracedFunction, id: ValueId) -> Error {
    let value = function.graph.value(id);
    let mut nodes = function.graph.nodes();
    let reader = nodes.find(|node| node.reads_value(id));
    let reader = reader.map_or("the output", |node| &node.path);
    changed_since_trace(
        function.op,
        format!(
            "the constant {:?} in {} that {reader} reads",
            value.shape,
            value.dtype.as_str()
        ),
    )
}

/// Returns the error for a captured value that differs from the one that was planned with.
pub(super) fn changed_since_trace(op: &'static str, what: String) -> Error {
    Error::Order {
        op,
        problem: format!("the function has changed since it was traced: {what}"),
        hint: "pass what changes as an input of the batch, or make another step".into(),
    }
}

/// Returns ids in i64 as the u32 that kernels read. The ids must have been checked.
fn narrowed(ids: &Tensor) -> Result<Tensor> {
    if ids.dtype() != DType::I64 {
        return Ok(ids.clone());
    }
    let wide = ids.flatten_all()?.to_vec1::<i64>()?;
    let narrow: Vec<u32> = wide.into_iter().map(narrow_id).collect();
    Ok(Tensor::from_vec(narrow, ids.shape(), ids.device())?)
}

/// Returns the shape of an input with its micro-batches stacked in the first dimension.
fn stacked(
    op: &'static str,
    name: &str,
    shape: &[usize],
    micro_batches: usize,
) -> Result<Vec<usize>> {
    let mut shape = shape.to_vec();
    match (shape.first_mut(), micro_batches) {
        (_, 1) => {}
        (Some(first), _) => *first = first.saturating_mul(micro_batches),
        (None, _) => {
            return Err(Error::shape(op, "a scalar").must_be(
                format!("{name} of a dimension that micro-batches are stacked in"),
                "make it (1), or plan with accumulation: 1",
            ));
        }
    }
    Ok(shape)
}

/// Checks the data of a tensor: ids or first keys.
fn checked(op: &'static str, tensor: &Tensor, check: Check) -> Result<()> {
    match check {
        Check::Ids { bound, ignore } => ids(op, tensor, bound, ignore).map(drop),
        Check::FirstKeys => first_keys::check(op, tensor),
    }
}

/// Returns the checks of inputs, without duplicates. Constants are checked here.
fn checks(
    function: &TracedFunction,
    lowered: &Lowered,
    arguments: &[Argument],
    device: &Device,
) -> Result<Vec<(String, Check)>> {
    let (op, graph) = (function.op, &function.graph);
    let mut inputs = Vec::new();
    for (id, check) in &lowered.checks {
        let id = &origin(graph, *id);
        if graph.value(*id).source == Source::Node {
            check_made(op, graph, *id, *check)?;
            continue;
        }
        let here = lowered.arguments.iter().zip(arguments);
        for (_, argument) in here.filter(|((other, _), _)| other == id) {
            match argument {
                Argument::Input { name, .. } => {
                    let check = (name.clone(), *check);
                    if !inputs.contains(&check) {
                        inputs.push(check);
                    }
                }
                Argument::Constant(constant) => {
                    checked(op, &constant.read(function, device, false)?, *check)?
                }
            }
        }
    }
    Ok(inputs)
}

/// Checks what an op makes before it runs: indices such as [`topk`](ops::topk)'s are under a known bound.
fn check_made(op: &'static str, graph: &Graph, id: ValueId, check: Check) -> Result<()> {
    let mut nodes = graph.nodes();
    let maker = nodes.find(|node| node.output == id);
    let below = maker.and_then(|node| node.attribute(IDS_BELOW));
    match (check, below) {
        (Check::Ids { bound, .. }, Some(Attribute::Count(below))) if below <= bound => Ok(()),
        (Check::Ids { bound, .. }, Some(Attribute::Count(below))) => Err(Error::order(
            op,
            format!("ids that an op makes are under {below}, and are read as ids under {bound}"),
            "the largest index must be one of what it is used for",
        )),
        _ => Err(Error::order(
            op,
            "token ids, or first keys, that an op makes are not checked before a run",
            "make them an input, or a constant",
        )),
    }
}

/// Returns the value that a value is a contiguous copy of, or the value itself.
fn origin(graph: &Graph, id: ValueId) -> ValueId {
    let makes_it = |node: &&graph::Node| node.output == id && node.op == "contiguous";
    match graph.nodes().find(makes_it) {
        Some(node) => origin(graph, node.inputs[0].value),
        None => id,
    }
}
