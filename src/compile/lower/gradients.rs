//! Gradients of values, and their sums for values that are read several times.

use super::super::buffer::BufferId;
use super::super::op::BufferRange;
use super::Lower;
use crate::Result;
use crate::graph::{self, ValueId};
use crate::ops::arithmetic::lowering::sum;
use crate::ops::lowering::converted;
use crate::ops::strided;
use candle_core::DType;
use std::collections::HashMap;

/// The gradients of values so far, and deferred calls.
#[derive(Default)]
pub(super) struct Gradients {
    values: HashMap<ValueId, BufferRange>,
    /// Calls that are written once a value is recomputed.
    deferred: Vec<Deferred>,
}

type Write = dyn FnOnce(&mut Lower<'_>) -> Result<()>;

/// Calls that are deferred until a value they read is recomputed.
pub(super) struct Deferred {
    /// The value that is recomputed later.
    pub x: ValueId,
    /// The other buffers that they read.
    pub buffers: Vec<BufferId>,
    /// The index of the cost entry that they belong to.
    pub cost_index: Option<usize>,
    pub write: Box<Write>,
}

impl Gradients {
    pub fn has(&self, value: ValueId) -> bool {
        self.values.contains_key(&value)
    }

    pub fn get(&self, value: ValueId) -> Option<BufferRange> {
        self.values.get(&value).cloned()
    }

    pub fn take(&mut self, value: ValueId) -> Option<BufferRange> {
        self.values.remove(&value)
    }

    pub fn set(&mut self, value: ValueId, gradient: BufferRange) {
        self.values.insert(value, gradient);
    }

    /// Returns whether a gradient is in this buffer, or a deferred call still reads it.
    pub fn reads(&self, buffer: BufferId) -> bool {
        let values = self.values.values().map(|gradient| gradient.buffer);
        let waiting = self.deferred.iter().flat_map(|waiting| &waiting.buffers);
        values.chain(waiting.copied()).any(|other| other == buffer)
    }
}

impl Lower<'_> {
    /// Returns whether a gradient is in the arena and nothing else reads it.
    pub(super) fn may_be_overwritten(&self, gradient: &BufferRange) -> bool {
        let is_own = self.plan.buffers[gradient.buffer].is_in_arena();
        is_own && !self.gradients.reads(gradient.buffer)
    }

    /// Removes the gradient of a value and returns it in a buffer that may be overwritten, copying it if necessary.
    pub(super) fn take_own(&mut self, value: ValueId) -> Option<BufferRange> {
        let gradient = self.gradients.take(value)?;
        if self.may_be_overwritten(&gradient) {
            return Some(gradient);
        }
        let dtype = self.plan.buffers[gradient.buffer].dtype;
        let copy = self.temporary("gradient", &[gradient.elements.len()], dtype);
        let op = converted();
        let writes = [("y", copy.clone())];
        self.plan.call(op, [("x", gradient)], writes);
        Some(copy)
    }

    pub(super) fn add_deferred(&mut self, call: Deferred) {
        self.gradients.deferred.push(call);
    }

    /// Records that a value was recomputed at `place`, and writes the calls that were deferred until then.
    pub(super) fn recomputed(&mut self, value: ValueId, place: BufferRange) -> Result<()> {
        self.places[value.0] = Some(place);
        let waiting = std::mem::take(&mut self.gradients.deferred);
        for call in waiting {
            match call.x == value {
                true => {
                    let before = std::mem::replace(&mut self.plan.cost_index, call.cost_index);
                    (call.write)(self)?;
                    self.plan.cost_index = before;
                }
                false => self.gradients.deferred.push(call),
            }
        }
        Ok(())
    }

    /// Returns whether backward recomputes a value in the buffer of its gradient.
    pub(super) fn is_recomputed(&self, value: ValueId) -> bool {
        let is_recomputed =
            |i: usize| self.program.nodes[i].output == value && self.recomputes_output[i];
        self.program.needs_grad(value) && self.program.maker(value).is_some_and(is_recomputed)
    }

    /// Adds the gradient of an operand to that of its value.
    pub(super) fn contribute(&mut self, operand: &graph::ValueRef, dx: BufferRange) {
        let elements = self.elements_of(operand.value);
        let program = self.program.clone();
        let value = program.value(operand.value);
        let is_in_order = operand.view.as_ref().is_none_or(strided::is_contiguous);
        let is_whole = is_in_order && dx.elements.len() == elements;
        let dx = match is_whole {
            true => dx,
            false => {
                let shape = program.shape_of(operand);
                let all = || strided::broadcast(shape, shape);
                let view = operand.view.clone().unwrap_or_else(all);
                self.scattered(dx, view, elements, value.dtype)
            }
        };
        if self.trained(operand.value).is_some() {
            return self.add_to_gradient(operand.value, dx);
        }
        let sum_of_both = match self.gradients.take(operand.value) {
            None => dx,
            Some(before) => {
                let after = self.temporary("gradient", &[elements], value.dtype);
                let reads = [("a", before), ("b", dx)];
                let writes = [("y", after.clone())];
                self.plan.call(sum(), reads, writes);
                after
            }
        };
        self.gradients.set(operand.value, sum_of_both);
    }

    /// Returns a gradient of `elements` elements: zeros, to which `dx` is added at the positions of `view`. Sums are
    /// rounded once.
    fn scattered(
        &mut self,
        dx: BufferRange,
        view: graph::View,
        elements: usize,
        dtype: DType,
    ) -> BufferRange {
        let wide = match dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        };
        let sums = self.temporary("gradient", &[elements], wide);
        let kernel = strided::scatter(view);
        let writes = [("dx", sums.clone())];
        self.plan.call(kernel, [("dy", dx)], writes);
        if wide == dtype {
            return sums;
        }
        let rounded = self.temporary("gradient", &[elements], dtype);
        let cast = converted();
        let writes = [("y", rounded.clone())];
        self.plan.call(cast, [("x", sums)], writes);
        rounded
    }
}
