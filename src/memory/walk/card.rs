//! What ops take that have no kernel on a card: candle's own run there, whose views and products are nodes of the graph.

use super::forward::FEED_FORWARD;
use super::{Backward, Size, Value, Walk};
use crate::memory::Holds;

impl Walk {
    /// A product of two, by a kernel or on a card by candle.
    pub(super) fn product(&mut self, what: &'static str, size: Size, inputs: [Value; 2]) -> Value {
        let product = self.op(what, size, &inputs);
        if self.on_card() {
            self.goes_back(Backward::Tracked);
        }
        product
    }

    /// x in another order, by a kernel or on a card by candle, through so many views and a copy.
    pub(super) fn copied(&mut self, what: &'static str, x: Value, views: usize) -> Value {
        if !self.on_card() {
            return self.op(what, x.size, &[x]);
        }
        let x = (0..views).fold(x, |x, _| self.view(x));
        let copy = self.op(what, x.size, &[x]);
        self.goes_back(Backward::HandsOn);
        copy
    }

    /// x in another shape: on a card a node of candle's, whose gradient is added like any other.
    pub(super) fn view(&mut self, x: Value) -> Value {
        if !self.on_card() || !self.keeps_graph() {
            return x;
        }
        let view = self.value(x.what, x.size, x.width, None);
        self.push(view.id, vec![x], Backward::HandsOn);
        view
    }

    /// Both maps and the gate each an op.
    pub(super) fn feed_forward_in_ops(&mut self, x: Value) -> Value {
        let lowered = self.lowered(x);
        let hidden = self.sizes.hidden;
        let [gate, up] = [(); 2].map(|()| {
            let weight = self.weight(FEED_FORWARD, self.sizes.feed_forward);
            let rows = self.view(lowered);
            let transposed = self.view(weight);
            let y = self.product("gate, up", hidden, [rows, transposed]);
            self.drop_weight(weight);
            self.view(y)
        });
        let gated = self.op("silu(gate) up", hidden, &[gate, up]);
        self.drop_copy(lowered, x);
        for gone in [gate, up] {
            self.drop(gone);
        }
        let out = self.linear("w2's output", gated, FEED_FORWARD);
        self.drop(gated);
        out
    }

    /// A weight's copy as a tensor of the graph, which stays as long as that does.
    pub(super) fn cast_in_graph(&mut self, weight: Value, width: usize) -> Value {
        let key = self.take_counted(true, Holds::WeightCasts, weight.what, weight.size, width);
        if self.short_lived {
            self.casts.push(key);
        }
        let copy = self.value(weight.what, weight.size, width, None);
        self.push(copy.id, vec![weight], Backward::Together);
        copy
    }
}
