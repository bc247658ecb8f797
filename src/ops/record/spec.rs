//! What an op says of a call before it runs.

use crate::graph::{Attribute, Target};
use crate::probe::Operand;
use candle_core::{DType, Result, Shape, Tensor};

/// All that a trace needs of an op.
pub(crate) trait Spec {
    /// Shape and dtype of its output, from its inputs'.
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType);

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        Vec::new()
    }

    /// What it reads beside its inputs.
    fn reads(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// [`reads`](Self::reads) as backward has them, of these inputs: what forward has dropped is made again.
    fn reads_again(&self, _inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(self.reads())
    }

    /// What it keeps for backward beside its inputs and its output: names, shapes and dtypes.
    fn kept(&self, _inputs: &[Operand<'_>], _on: Target) -> Vec<(&'static str, Shape, DType)> {
        Vec::new()
    }

    /// An operand as its kernels read it: with its elements in order, unless they take strides.
    fn readable(&self, x: Tensor) -> Result<Tensor> {
        x.contiguous()
    }

    /// An eager forward is done: hands out what the op's caller wants of what is kept.
    fn has_kept(&self, _kept: &[Tensor]) {}

    /// Drops what forward does not leave for backward.
    fn forwarded(&self) {}
}

/// An output like the first input: what most ops have.
pub(crate) fn like_first(inputs: &[Operand<'_>]) -> (Shape, DType) {
    (inputs[0].dims.into(), inputs[0].dtype)
}

pub(super) fn shaped(shape: &Shape, dtype: DType) -> Operand<'_> {
    Operand {
        dims: shape.dims(),
        dtype,
    }
}

/// A call that keeps and reads nothing beside its inputs and its output.
pub(in crate::ops) struct Plain {
    shape: Shape,
    dtype: DType,
    attributes: Vec<(&'static str, Attribute)>,
}

impl Plain {
    /// Which makes an output of this shape and dtype.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            attributes: Vec::new(),
        }
    }

    /// With a parameter.
    pub fn with(mut self, name: &'static str, value: Attribute) -> Self {
        self.attributes.push((name, value));
        self
    }
}

impl Spec for Plain {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.shape.clone(), self.dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes.clone()
    }
}
