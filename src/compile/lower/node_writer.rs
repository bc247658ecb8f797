//! Writes the calls of one node: finds the buffer of each operand.

use super::super::op::BufferRange;
use super::super::program::{Kind, Node, Program};
use super::{Lower, cannot_be_planned, sub_range};
use crate::Result;
use crate::ops::lowering::{Accumulate, Calls, KernelCall, Named, Slot};
use candle_core::DType;
use std::collections::HashMap;
use std::rc::Rc;

/// A node whose calls are being written.
pub(super) struct NodeWriter {
    program: Rc<Program>,
    node: usize,
    pub calls: Calls,
    /// The operands that are not values of the program, or that replace a value's buffer.
    pub places: HashMap<Slot, BufferRange>,
    /// By input: its gradient, where calls write a parameter's gradient or add to an existing gradient.
    pub sums: HashMap<usize, Sum>,
}

/// The buffer of a gradient, and whether calls add to it.
#[derive(Clone)]
pub(super) struct Sum {
    place: BufferRange,
    accumulate: Accumulate,
}

/// The kind of call that computes a gradient.
#[derive(Clone, Copy, PartialEq)]
enum MadeBy {
    Product,
    /// One of several matmuls, each over some of the rows.
    Products,
    Other,
}

impl NodeWriter {
    /// Starts with no operand resolved.
    pub fn new(program: &Rc<Program>, node: usize, calls: Calls) -> Self {
        Self {
            program: program.clone(),
            node,
            calls,
            places: HashMap::new(),
            sums: HashMap::new(),
        }
    }

    /// The index of the node.
    pub fn number(&self) -> usize {
        self.node
    }

    pub fn node(&self) -> &Node {
        &self.program.nodes[self.node]
    }

    /// Returns the buffer of an operand. `None` if the node has no such operand: attention without queries saves
    /// nothing, for example.
    pub fn find(&mut self, lower: &mut Lower<'_>, slot: Slot) -> Result<Option<BufferRange>> {
        if let Some(place) = self.places.get(&slot) {
            return Ok(Some(place.clone()));
        }
        let program = self.program.clone();
        let node = &program.nodes[self.node];
        let of_value = match slot {
            Slot::Input(i) => node.inputs.get(i).map(|x| lower.read(x)),
            Slot::ExtraInput(i) => node.extra_inputs.get(i).map(|x| lower.read(x)),
            Slot::Output => Some(lower.value(node.output)),
            Slot::Second => node.second.map(|value| lower.value(value)),
            Slot::Saved(i) => node.saved.get(i).map(|saved| lower.value(saved.value)),
            Slot::Part(i) => {
                let (slot, elements) = self.calls.parts[i].clone();
                let all = self.find(lower, slot)?;
                all.map(|all| sub_range(&all, elements.start, elements.len()))
            }
            slot => {
                let place = self.new_place(lower, slot)?;
                if let Some(place) = &place {
                    self.places.insert(slot, place.clone());
                }
                place
            }
        };
        Ok(of_value)
    }

    /// Allocates the buffer of an operand that is not a value of the program.
    fn new_place(&self, lower: &mut Lower<'_>, slot: Slot) -> Result<Option<BufferRange>> {
        let (program, node) = (&self.program, self.node());
        Ok(match slot {
            Slot::Table(i) => {
                let dtype = program.value(node.inputs[0].value).dtype;
                Some(lower.table("angles", &node.extra_inputs[i], dtype)?)
            }
            Slot::Scratch(i) => {
                let scratch = &self.calls.scratch[i];
                Some(match scratch.name {
                    Some(name) => lower.temporary(name, &scratch.shape, scratch.dtype),
                    None => lower.scratch(&scratch.shape, scratch.dtype),
                })
            }
            Slot::Gradient(i) => node.inputs.get(i).map(|x| {
                let dtype = program.value(x.value).dtype;
                lower.temporary("gradient", program.shape_of(x), dtype)
            }),
            Slot::SecondGradient => node.second.map(|second| {
                let second = program.value(second);
                lower.temporary("gradient", &second.shape, second.dtype)
            }),
            Slot::StepLoss => Some(lower.step_loss()),
            _ => None,
        })
    }

    /// Writes a call.
    pub fn call(&mut self, lower: &mut Lower<'_>, call: KernelCall) -> Result<()> {
        let mut all = |slots: &Named<Slot>| -> Result<Option<Named<BufferRange>>> {
            let mut places = Vec::new();
            for (name, slot) in slots.entries() {
                match self.find(lower, *slot)? {
                    Some(place) => places.push((*name, place)),
                    None => return Ok(None),
                }
            }
            Ok(Some(places.into()))
        };
        let operands = (all(&call.reads)?, all(&call.writes)?);
        let (Some(reads), Some(writes)) = operands else {
            return Err(lower.refused(self.node()));
        };
        lower.plan.call(call.kernel, reads, writes);
        Ok(())
    }

    /// Writes all calls of the node.
    pub fn all_calls(&mut self, lower: &mut Lower<'_>) -> Result<()> {
        let mut calls = std::mem::take(&mut self.calls.calls).into_iter();
        calls.try_for_each(|call| self.call(lower, call))
    }

    /// Returns the inputs whose gradients a call writes, each with the name of the operand.
    pub fn gradients_of(&self, call: &KernelCall) -> Vec<(&'static str, usize)> {
        let writes = call.writes.entries().iter();
        let gradients = writes.filter_map(|(name, slot)| match self.calls.base(*slot) {
            Slot::Gradient(input) => Some((*name, input)),
            _ => None,
        });
        gradients.collect()
    }

    /// Finds the buffers of the gradients that a call writes, where the call can accumulate: the gradient of a
    /// parameter, or the gradient that a value already has.
    pub fn place_gradients(&mut self, lower: &mut Lower<'_>, call: &mut KernelCall) {
        for (operand, input) in self.gradients_of(call) {
            if call.kernel.accumulate(operand) != Some(Accumulate::Never) {
                continue; // it cannot, or adds to what the node has made
            }
            let by = match (call.kernel.is_matmul(), &self.node().kind) {
                (false, _) => MadeBy::Other,
                (true, Kind::Head(_)) => MadeBy::Products,
                (true, _) => MadeBy::Product,
            };
            if !self.sums.contains_key(&input)
                && let Some(sum) = lower.sum_of(self.node(), input, by)
            {
                self.places.insert(Slot::Gradient(input), sum.place.clone());
                self.sums.insert(input, sum);
            }
            if let Some(sum) = self.sums.get(&input) {
                call.kernel = call.kernel.clone().accumulating(operand, sum.accumulate);
            }
        }
    }
}

impl Lower<'_> {
    pub(super) fn refused(&self, node: &Node) -> crate::Error {
        let what = match node.composed {
            true => " composed of candle's own ops",
            false => "",
        };
        let path = match node.path.is_empty() {
            true => node.op.to_string(),
            false => format!("{}/{}", node.path, node.op),
        };
        cannot_be_planned(self.request.function.op, node.op, &path, what)
    }

    /// Returns the buffer in which an input's gradient accumulates: the gradient of a parameter, or one that exists.
    fn sum_of(&mut self, node: &Node, input: usize, by: MadeBy) -> Option<Sum> {
        if !node.needs_grad[input] {
            return None;
        }
        let operand = &node.inputs[input];
        if self.is_trained(operand) {
            let dtype = self.program.value(operand.value).dtype;
            let is_wide = matches!(dtype, DType::F32 | DType::F64);
            if !is_wide && by == MadeBy::Other {
                return None;
            }
            let weights = self.program.weights_of(operand.value);
            let factors = self.program.value(node.inputs[0].value).dtype;
            let dtype = match (by, dtype) {
                (MadeBy::Product, _) => self.dtype_of_matmul_gradient(&weights, factors),
                (_, DType::F64) => DType::F64,
                _ => DType::F32,
            };
            let (place, accumulate) = self.gradient_of_weights(&weights, dtype);
            return Some(Sum { place, accumulate });
        }
        // In `y = x + W x` the existing gradient of x is dy, which the gradient of W reads after this call.
        let (before, dy) = (
            self.gradients.get(operand.value)?,
            self.gradients.get(node.output),
        );
        let is_shared = dy.is_some_and(|dy| before.buffer == dy.buffer);
        if operand.view.is_some() || is_shared {
            return None;
        }
        let place = self.take_own(operand.value)?;
        let accumulate = Accumulate::Always;
        Some(Sum { place, accumulate })
    }
}
