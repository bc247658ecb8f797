//! What a plan reads from outside in each run, but its parameters: inputs, constants and frozen weights.

use super::batch::{Batch, DROPOUT};
use super::lower::Lowered;
use super::traced::{TracedFunction, check_device};
use crate::attention::first_keys;
use crate::graph::{self, Graph, Source, ValueId};
use crate::ops::cpu::{ids, narrow_id};
use crate::ops::lowering::Check;
use crate::ops::{self, check_size};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// What is lent in each run, in the order of [`Location::Input`](super::Location::Input) and
/// [`Location::Argument`](super::Location::Argument).
#[derive(Debug)]
pub(super) struct Arguments {
    op: &'static str,
    all: Vec<Argument>,
    /// What inputs must be.
    checks: Vec<(String, Check)>,
}

#[derive(Debug)]
enum Argument {
    /// An input, by name: a tensor that each run copies it to, so that it lies where it lay. The micro-batches one
    /// after another.
    Input { name: String, copy: Tensor },
    /// A constant, or a frozen weight.
    Held(Tensor),
}

impl Arguments {
    /// # Errors
    /// Constants on another device; hollow weights; ids of constants that are out of bounds; with several
    /// micro-batches, an input without a dimension to stack them in; an input that the memory does not hold.
    pub fn new(function: &TracedFunction, lowered: &Lowered, device: &Device) -> Result<Self> {
        let all = lowered.arguments.iter().enumerate();
        let all = all.map(|(number, (id, view))| {
            let value = function.graph.value(*id);
            if let Source::Input(name) = &value.source
                && graph::is_hollow(&function.tensors[id.0])
            {
                let micro_batches = lowered.plan.micro_batches();
                let shape = stacked(function.op, name, &value.shape, micro_batches)?;
                check_size(function.op, &shape, value.dtype, device)?;
                return Ok(Argument::Input {
                    name: name.clone(),
                    copy: ops::zeros(shape, value.dtype, device)?,
                });
            }
            let location = super::Location::Argument(number);
            Ok(Argument::Held(
                match (lowered.plan.at_location(location), view) {
                    (None, _) => Tensor::zeros(0, value.dtype, device)?, // only dead calls read it
                    (_, Some(view)) => function.copied(*id, view, device)?,
                    (Some(buffer), None) => function.first(*id, buffer.elements(), device)?,
                },
            ))
        });
        let mut all = all.collect::<Result<Vec<_>>>()?;
        let checks = checks(function, lowered, &all)?;
        for ((id, _), argument) in lowered.arguments.iter().zip(&mut all) {
            if let Argument::Held(held) = argument
                && function.graph.value(*id).dtype == DType::U32
            {
                *held = narrowed(held)?;
            }
        }
        Ok(Self {
            op: function.op,
            all,
            checks,
        })
    }

    /// The inputs by name, and the tensors that each run copies them to.
    fn inputs(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.all.iter().filter_map(|argument| match argument {
            Argument::Input { name, copy } => Some((name.as_str(), copy)),
            Argument::Held(_) => None,
        })
    }

    /// Says whether the plan reads an input of this name.
    pub fn reads(&self, name: &str) -> bool {
        self.inputs().any(|(input, _)| input == name)
    }

    /// Says whether a batch has the inputs that the plan reads and no others, in the planned shapes and dtypes (ids in
    /// i64 too).
    pub fn take(&self, batch: &Batch) -> bool {
        let are_read = batch.inputs().all(|(name, _)| self.reads(name));
        are_read
            && self.inputs().all(|(name, planned)| {
                let mut given = batch.inputs();
                let is_it = |(other, tensor): (&str, &Tensor)| {
                    other == name && self.takes(name, planned, tensor)
                };
                name == DROPOUT || given.any(is_it)
            })
    }

    fn takes(&self, name: &str, planned: &Tensor, tensor: &Tensor) -> bool {
        let are_ids =
            |(input, check): &(String, Check)| input == name && matches!(check, Check::Ids { .. });
        let may_be_wide = || self.checks.iter().any(are_ids) && tensor.dtype() == DType::I64;
        tensor.dims() == planned.dims() && (tensor.dtype() == planned.dtype() || may_be_wide())
    }

    /// An error unless a batch is one that the plan [takes](Self::take).
    ///
    /// # Errors
    /// [`Error::Order`] for a missing input or another name, [`Error::Shape`] for another shape or dtype than planned.
    pub fn check(&self, batch: &Batch) -> Result<()> {
        self.check_names(batch)?;
        let shape_of = |x: &Tensor| format!("{:?} in {}", x.dims(), x.dtype().as_str());
        for (name, planned) in self.inputs() {
            if let Some((_, tensor)) = batch.inputs().find(|(other, _)| *other == name)
                && !self.takes(name, planned, tensor)
            {
                return Err(Error::Shape {
                    op: self.op,
                    expected: format!("{name} {}, as planned", shape_of(planned)),
                    got: shape_of(tensor),
                    hint: "plan another for another shape".into(),
                });
            }
        }
        Ok(())
    }

    /// An error for an input that the plan does not read.
    ///
    /// # Errors
    /// [`Error::Order`].
    pub fn check_names(&self, batch: &Batch) -> Result<()> {
        let Some((other, _)) = batch.inputs().find(|(name, _)| !self.reads(name)) else {
            return Ok(());
        };
        let names: Vec<&str> = self.inputs().map(|(name, _)| name).collect();
        Err(Error::Order {
            op: self.op,
            problem: format!("{other:?} is no input that the loss reads"),
            hint: format!("it reads {}", names.join(", ")),
        })
    }

    /// The tensors of a run, with the inputs of a batch that it [takes](Self::take) copied to where they lie.
    ///
    /// # Errors
    /// Another device than planned, ids out of bounds.
    pub fn given(&self, batch: &Batch) -> Result<Vec<&Tensor>> {
        let op = self.op;
        let mut given = Vec::new();
        for (name, copy) in self.inputs() {
            let Some((_, tensor)) = batch.inputs().find(|(other, _)| *other == name) else {
                return Err(Error::Order {
                    op,
                    problem: format!("no tensor for the input {name:?}"),
                    hint: "pass it to run".into(),
                });
            };
            if graph::is_hollow(tensor) {
                return Err(Error::Order {
                    op,
                    problem: format!("the input {name:?} is hollow"),
                    hint: "hollow tensors are for plans; pass a real one to run".into(),
                });
            }
            if !tensor.device().is_cpu() {
                check_device(op, name, tensor, copy.device())?;
            }
            for (_, check) in self.checks.iter().filter(|(input, _)| input == name) {
                checked(op, tensor, *check)?;
            }
            given.push((copy, tensor));
        }
        for (copy, tensor) in given {
            if copy.elem_count() > 0 {
                let flat = tensor.detach().contiguous()?.flatten_all()?;
                let flat = match copy.dtype() {
                    DType::U32 => narrowed(&flat)?,
                    _ => flat,
                };
                let flat = flat.to_device(copy.device())?;
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

/// Checked ids as kernels read them, in u32.
fn narrowed(ids: &Tensor) -> Result<Tensor> {
    if ids.dtype() != DType::I64 {
        return Ok(ids.clone());
    }
    let wide = ids.flatten_all()?.to_vec1::<i64>()?;
    let narrow: Vec<u32> = wide.into_iter().map(narrow_id).collect();
    Ok(Tensor::from_vec(narrow, ids.shape(), ids.device())?)
}

/// The shape of an input of so many micro-batches, one after another in its first dimension.
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
            return Err(Error::Shape {
                op,
                expected: format!("{name} of a dimension that micro-batches are stacked in"),
                got: "a scalar".into(),
                hint: "make it (1), or plan with accumulation: 1".into(),
            });
        }
    }
    Ok(shape)
}

/// An error unless a tensor is as it should be.
fn checked(op: &'static str, tensor: &Tensor, check: Check) -> Result<()> {
    match check {
        Check::Ids { bound, ignore } => ids(op, tensor, bound, ignore).map(drop),
        Check::FirstKeys => first_keys::check(op, tensor),
    }
}

/// What inputs must be, once each; constants are checked here.
fn checks(
    function: &TracedFunction,
    lowered: &Lowered,
    arguments: &[Argument],
) -> Result<Vec<(String, Check)>> {
    let (op, graph) = (function.op, &function.graph);
    let mut inputs = Vec::new();
    for (id, check) in &lowered.checks {
        let id = &origin(graph, *id);
        if graph.value(*id).source == Source::Node {
            return Err(Error::Order {
                op,
                problem: "token ids, or first keys, that an op makes are not checked before a run"
                    .into(),
                hint: "make them an input, or a constant".into(),
            });
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
                Argument::Held(held) => checked(op, held, *check)?,
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
