//! The description of a call of an op before it runs.

use crate::graph::{Attribute, Target};
use crate::probe::Operand;
use candle_core::{DType, Result, Shape, Tensor};

/// The properties of an op's call that traces and lowerings need.
pub(crate) trait Spec {
    /// Returns the shape and dtype of the output, given the inputs'; by default those of the first input.
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (inputs[0].dims.into(), inputs[0].dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        Vec::new()
    }

    /// Returns the extra inputs.
    fn extra_inputs(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// Returns [`extra_inputs`](Self::extra_inputs) for backward on these inputs: what was freed after forward is
    /// recomputed.
    fn extra_inputs_for_backward(&self, _inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(self.extra_inputs())
    }

    /// Returns what is saved for backward in addition to inputs and output: names, shapes and dtypes.
    fn saved(&self, _inputs: &[Operand<'_>], _on: Target) -> Vec<(&'static str, Shape, DType)> {
        Vec::new()
    }

    /// Returns an operand as its kernels read it: contiguous, unless they accept strides.
    fn readable(&self, x: Tensor) -> Result<Tensor> {
        x.contiguous()
    }

    /// Called after an eager forward: may pass saved values to the op's caller.
    fn on_saved(&self, _kept: &[Tensor]) {}

    /// Frees what backward does not need after forward.
    fn free_after_forward(&self) {}
}

pub(super) fn shaped(shape: &Shape, dtype: DType) -> Operand<'_> {
    Operand {
        dims: shape.dims(),
        dtype,
    }
}

/// A call of an op that saves nothing but its inputs and output. A graph keeps many calls, so the lists have no spare
/// capacity.
#[derive(Default)]
pub(in crate::ops) struct CallSpec {
    /// The output's shape and dtype; `None` for those of the first input.
    output: Option<(Shape, DType)>,
    attributes: Vec<(&'static str, Attribute)>,
    reads: Vec<Tensor>,
}

impl CallSpec {
    /// Creates a call whose output has this shape and dtype.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            output: Some((shape.into(), dtype)),
            ..Self::default()
        }
    }

    /// Creates a call whose output has the shape and dtype of its first input.
    pub fn like_first() -> Self {
        Self::default()
    }

    pub fn with(mut self, name: &'static str, value: Attribute) -> Self {
        self.attributes.reserve_exact(1);
        self.attributes.push((name, value));
        self
    }

    pub fn with_all(self, attributes: impl IntoIterator<Item = (&'static str, Attribute)>) -> Self {
        let all = attributes.into_iter();
        all.fold(self, |call, (name, value)| call.with(name, value))
    }

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

    fn extra_inputs(&self) -> Vec<Tensor> {
        self.reads.clone()
    }
}
