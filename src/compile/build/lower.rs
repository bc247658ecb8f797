//! What is in half precision under autocast: which buffers are, and the copies that products read.
//!
//! As [`ops`](crate::ops) has it: products and attention, with what lies between them. The residual stream, the norms'
//! statistics, probabilities, losses, gradients of parameters and of the stream are f32's.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::Op;
use super::Builder;
use candle_core::DType;

impl Builder<'_> {
    /// A new buffer of the arena, in the dtype that products are computed from.
    pub(super) fn lower(&mut self, name: &str, shape: &[usize]) -> BufferId {
        self.arena(name, shape, self.lower_dtype(), Category::Temporary)
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
        let shape = self.buffers[x.index()].shape.clone();
        let copy = self.lower("copy", &shape);
        let elements = shape.iter().product();
        self.call(Op::Cast { elements }, &[x], &[copy]);
        copy
    }

    /// The weight with this name as products read it: itself, or its copy in half precision, which is made where the first
    /// product of a step asks for it, and serves all others.
    pub(super) fn product_weight(&mut self, name: &str) -> BufferId {
        let (number, weight) = self.parameter(name);
        if !self.is_half() {
            return weight;
        }
        if let Some(copy) = self.copies[number] {
            return copy;
        }
        let shape = self.buffers[weight.index()].shape.clone();
        let elements = shape.iter().product();
        let home = Home::Arena { offset_bytes: 0 };
        let name = format!("copy of {name}");
        let copy = self.add(
            &name,
            &shape,
            self.lower_dtype(),
            Category::WeightCopy,
            home,
        );
        self.copies[number] = Some(copy);
        self.call(Op::Cast { elements }, &[weight], &[copy]);
        copy
    }

    /// The copies of all weights that products read, before the first micro-batch: the others find them there.
    pub(super) fn copy_weights(&mut self) {
        if !self.is_half() {
            return;
        }
        for (name, shape) in self.source.model.parameter_shapes() {
            let is_product = shape.rank() == 2 && name != "token_embeddings.weight";
            if is_product {
                self.path = name.trim_end_matches(".weight").into();
                self.product_weight(&name);
            }
        }
    }
}
