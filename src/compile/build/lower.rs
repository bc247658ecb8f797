//! What is in half precision under autocast: which buffers are, and the copies that products read.
//!
//! As [`ops`](crate::ops) has it: products and attention, with what lies between them. The residual stream, the norms'
//! statistics, probabilities, losses, gradients of parameters and of the stream are f32's.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::Op;
use super::super::plan::Operand;
use super::Builder;
use super::forward::{DOWN, GATE_UP, OUT, QKV, weights_of};
use candle_core::DType;

impl Builder<'_> {
    /// A new buffer of the arena, in the dtype that products are computed from.
    pub(super) fn lower(&mut self, name: &str, shape: &[usize]) -> BufferId {
        self.plan
            .arena(name, shape, self.lower_dtype(), Category::Temporary)
    }

    /// Whether that is another one than f32.
    pub(super) fn is_half(&self) -> bool {
        self.lower_dtype() != DType::F32
    }

    pub(super) fn lower_dtype(&self) -> DType {
        self.source.config.precision.dtype()
    }

    /// `x` as products read it: itself, or its copy in half precision.
    pub(super) fn lowered(&mut self, x: BufferId) -> BufferId {
        if !self.is_half() {
            return x;
        }
        let shape = self.plan.buffers[x].shape.clone();
        let copy = self.lower("copy", &shape);
        let elements = shape.iter().product();
        self.plan.call(Op::Cast { elements }, &[x], &[copy]);
        copy
    }

    /// The weights with these names as a product reads them, one under the other: the one itself, or the copy in half
    /// precision, which is made where the first product of a step asks for it, and serves all others.
    pub(super) fn product_weight(&mut self, names: &[String]) -> BufferId {
        let weights: Vec<_> = names.iter().map(|name| self.parameter(name)).collect();
        let (first, weight) = weights[0];
        if !self.is_half() {
            assert_eq!(names.len(), 1, "{names:?}");
            return weight;
        }
        if let Some(copy) = &self.copies[first] {
            return copy.buffer;
        }
        let shape = self.stacked(&weights);
        let home = Home::Arena { offset_bytes: 0 };
        let name = format!("copy of {}", names.join(" and "));
        let dtype = self.lower_dtype();
        let copy = self
            .plan
            .buffers
            .add(&name, &shape, dtype, Category::WeightCopy, home);
        for (number, weight, operand) in self.parts(&weights, copy) {
            let elements = operand.elements.len();
            let weight = self.plan.whole(weight);
            self.copies[number] = Some(operand.clone());
            self.plan
                .call_on(Op::Cast { elements }, vec![weight], vec![operand]);
        }
        copy
    }

    /// The shape of weights one under the other.
    pub(super) fn stacked(&self, weights: &[(usize, BufferId)]) -> Vec<usize> {
        let shapes = weights.iter().map(|(_, id)| &self.plan.buffers[*id].shape);
        let rows = shapes.clone().map(|shape| shape[0]).sum();
        let mut shape = self.plan.buffers[weights[0].1].shape.clone();
        shape[0] = rows;
        shape
    }

    /// Number, buffer and place of each weight in `stack`, where they lie one under the other.
    pub(super) fn parts(
        &self,
        weights: &[(usize, BufferId)],
        stack: BufferId,
    ) -> Vec<(usize, BufferId, Operand)> {
        let mut end = 0;
        let parts = weights.iter().map(|(number, id)| {
            let start = end;
            end += self.plan.buffers[*id].elements();
            let operand = Operand {
                buffer: stack,
                elements: start..end,
            };
            (*number, *id, operand)
        });
        parts.collect()
    }

    /// The copies of all weights that products read, before the first micro-batch: the others find them there.
    pub(super) fn copy_weights(&mut self) {
        if !self.is_half() {
            return;
        }
        for layer in 0..self.source.model.num_layers {
            for (part, names) in [
                ("attn", QKV),
                ("attn", OUT),
                ("ffn", GATE_UP),
                ("ffn", DOWN),
            ] {
                self.plan.path = format!("layers.{layer}/{part}");
                for group in self.groups(names) {
                    self.product_weight(&weights_of(layer, part, group));
                }
            }
        }
        self.plan.path = "lm_head".into();
        self.product_weight(&["lm_head.weight".into()]);
    }
}
