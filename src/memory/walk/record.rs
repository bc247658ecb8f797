//! What an op takes in forward, what stays of it, and what backward will find on the tape.

use super::ledger::Key;
use super::{Backward, Entry, Node, Scratch, Size, Value, Walk};
use crate::memory::{Holds, Mode};

/// What the next op takes beside its output.
#[derive(Default)]
pub(super) struct Beside {
    /// What it keeps for backward.
    kept: Vec<Key>,
    /// For the time of its forward.
    now: Scratch,
    /// For the time of its backward.
    later: Scratch,
    /// While backward makes the gradient of each input.
    packing: Vec<Scratch>,
    /// What of it goes in backward.
    lets_go: Option<Key>,
}

impl Walk {
    /// Whether forward builds a graph, which keeps every op's inputs and output, and what ops keep themselves.
    pub(super) fn keeps_graph(&self) -> bool {
        self.workload.mode != Mode::Forward
    }

    /// Has the next op keep something for backward.
    pub(super) fn keep(&mut self, holds: Holds, what: &'static str, size: Size, width: usize) {
        let key = self.take_counted(self.keeps_graph(), holds, what, size, width);
        self.beside.kept.push(key);
    }

    /// Has the next op drop in its backward what it was last told to keep.
    pub(super) fn lets_go(&mut self) {
        self.beside.lets_go = self.beside.kept.last().copied();
    }

    /// What the next op's forward takes for itself.
    pub(super) fn scratch_now(&mut self, what: &'static str, size: Size, width: usize) {
        self.beside.now = Some((what, size, width));
    }

    /// What the next op's backward will take for itself.
    pub(super) fn scratch_later(&mut self, what: &'static str, size: Size, width: usize) {
        self.beside.later = Some((what, size, width));
    }

    /// What the next op's backward will take while it makes the gradient of each input.
    pub(super) fn packs_later(&mut self, packing: Vec<Scratch>) {
        self.beside.packing = packing;
    }

    /// An op whose output has the dtype of its first input.
    pub(super) fn op(&mut self, what: &'static str, size: Size, inputs: &[Value]) -> Value {
        let width = inputs.first().map_or(4, |first| first.width);
        self.op_of(Holds::Activations, what, size, width, inputs)
    }

    /// The loss, a scalar in f32.
    pub(super) fn loss_op(&mut self, inputs: &[Value]) {
        let scalar = Size::new("1", 1.0);
        self.op_of(Holds::Logits, "loss", scalar, 4, inputs);
    }

    /// The sum of two, whose backward hands on the gradient that it gets.
    pub(super) fn sum(&mut self, what: &'static str, inputs: &[Value; 2]) -> Value {
        let sum = self.op(what, inputs[0].size, inputs);
        if let (true, Some(Node::Op(entry))) = (self.keeps_graph(), self.tape.last_mut()) {
            entry.backward = Backward::HandsOn;
        }
        sum
    }

    fn op_of(
        &mut self,
        holds: Holds,
        what: &'static str,
        size: Size,
        width: usize,
        inputs: &[Value],
    ) -> Value {
        let Beside {
            kept,
            now,
            later,
            packing,
            lets_go,
        } = std::mem::take(&mut self.beside);
        let graph = self.keeps_graph();
        let key = self.take_counted(graph, holds, what, size, width);
        let output = self.value(what, size, width, Some(key));
        self.with_scratch(now, |_| ());
        match graph {
            true => self.tape.push(Node::Op(Entry {
                output: output.id,
                inputs: inputs.to_vec(),
                scratch: later,
                packing,
                backward: Backward::Together,
                lets_go,
                count: self.count,
            })),
            false => kept.into_iter().for_each(|key| self.ledger.give_back(key)),
        }
        output
    }

    pub(super) fn value(
        &mut self,
        what: &'static str,
        size: Size,
        width: usize,
        key: Option<Key>,
    ) -> Value {
        self.next_id += 1;
        Value {
            id: self.next_id,
            what,
            size,
            width,
            is_weight: false,
            key,
        }
    }

    /// x in another width, or as it is.
    pub(super) fn cast(&mut self, what: &'static str, x: Value, width: usize) -> Value {
        match x.width == width {
            true => x,
            false => self.op_of(Holds::Activations, what, x.size, width, &[x]),
        }
    }

    /// x as products take it.
    pub(super) fn lowered(&mut self, x: Value) -> Value {
        self.cast("norms' outputs in half", x, self.lower_width())
    }

    /// A weight, as it is.
    pub(super) fn parameter(&mut self, what: &'static str, size: Size) -> Value {
        let weight = self.value(what, size, self.parameter_width(), None);
        Value {
            is_weight: true,
            ..weight
        }
    }

    /// A weight as products take it: in a region with a copy beside it. That stays as long as the graph does or, without
    /// one, the region's cache; if dropped, until the op is done. (Backward then makes another for as long as no gradient
    /// of the weight is there, which is larger.)
    pub(super) fn weight(&mut self, what: &'static str, size: Size) -> Value {
        let weight = self.parameter(what, size);
        let width = self.lower_width();
        if weight.width == width {
            return weight;
        }
        let drops = self.drops_casts();
        let key = self.take_counted(!drops, Holds::WeightCasts, what, size, width);
        if !drops && (self.short_lived || !self.keeps_graph()) {
            self.casts.push(key);
        }
        let key = drops.then_some(key);
        Value { key, ..weight }
    }

    /// The op that a weight was for is done.
    pub(super) fn drop_weight(&mut self, weight: Value) {
        if let Some(copy) = weight.key {
            self.ledger.give_back(copy);
        }
    }

    /// A variable goes; the graph, if there is one, still has what it had.
    pub(super) fn drop(&mut self, x: Value) {
        if let (Some(key), false) = (x.key, self.keeps_graph()) {
            self.ledger.give_back(key);
        }
    }

    /// As [`drop`](Self::drop), if it is another than the original.
    pub(super) fn drop_copy(&mut self, copy: Value, original: Value) {
        if copy.id != original.id {
            self.drop(copy);
        }
    }

    /// The region forgets its copies of weights.
    pub(super) fn end_region(&mut self) {
        for key in std::mem::take(&mut self.casts) {
            self.ledger.give_back(key);
        }
    }

    fn drops_casts(&self) -> bool {
        self.workload.precision.drops_casts()
    }

    /// Bytes an element of the parameters.
    pub(super) fn parameter_width(&self) -> usize {
        self.workload.precision.parameter_dtype().size_in_bytes()
    }

    /// Bytes an element of what products are computed from.
    fn lower_width(&self) -> usize {
        self.workload.precision.dtype().size_in_bytes()
    }
}
