//! What an op says of a call before it runs.

use crate::graph::{Attribute, Target};
use crate::probe::Operand;
use candle_core::{DType, Result, Shape, Tensor};

/// All that a trace needs of an op.
pub(crate) trait Spec {
    /// Shape and dtype of its output, from its inputs': those of the first unless an op says otherwise.
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (inputs[0].dims.into(), inputs[0].dtype)
    }

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

pub(super) fn shaped(shape: &Shape, dtype: DType) -> Operand<'_> {
    Operand {
        dims: shape.dims(),
        dtype,
    }
}

/// A call as data, of an op that keeps nothing besides its inputs and its output. A graph keeps the call: its lists have
/// no spare room.
#[derive(Default)]
pub(in crate::ops) struct CallSpec {
    /// `None` for an output like the first input.
    output: Option<(Shape, DType)>,
    attributes: Vec<(&'static str, Attribute)>,
    reads: Vec<Tensor>,
}

impl CallSpec {
    /// A call whose output has this shape and dtype.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            output: Some((shape.into(), dtype)),
            ..Self::default()
        }
    }

    /// A call whose output is like its first input.
    pub fn like_first() -> Self {
        Self::default()
    }

    /// With a parameter.
    pub fn with(mut self, name: &'static str, value: Attribute) -> Self {
        self.attributes.reserve_exact(1);
        self.attributes.push((name, value));
        self
    }

    /// With these parameters.
    pub fn with_all(self, attributes: impl IntoIterator<Item = (&'static str, Attribute)>) -> Self {
        let all = attributes.into_iter();
        all.fold(self, |call, (name, value)| call.with(name, value))
    }

    /// With one more tensor that it reads besides its inputs.
    pub fn reading(mut self, x: &Tensor) -> Self {
        self.reads.reserve_exact(1);
        self.reads.push(x.clone());
        self
    }
}

impl Spec for CallSpec {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        match &self.output {
            Some(output) => output.clone(),
            None => (inputs[0].dims.into(), inputs[0].dtype),
        }
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes.clone()
    }

    fn reads(&self) -> Vec<Tensor> {
        self.reads.clone()
    }
}
