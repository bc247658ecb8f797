//! Ops of which a call says no more than its output and its parameters: all else is in their lowering.

use super::spec::Spec;
use super::steps;
use crate::graph::{Attribute, MemoryStep, Target};
use crate::ops::info;
use crate::ops::lowering::{Calls, Lowering, Signature};
use crate::probe::Operand;
use candle_core::{DType, Shape};

/// A call that keeps and reads nothing beside its inputs and its output.
pub(in crate::ops) struct Plain {
    name: &'static str,
    shape: Shape,
    dtype: DType,
    attributes: Vec<(&'static str, Attribute)>,
}

impl Plain {
    /// Of the op with this name, which makes an output of this shape and dtype.
    pub fn new(name: &'static str, shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            name,
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

    /// What it lowers to; nothing for candle's own ops in the place of an op that keeps more.
    fn calls(
        &self,
        inputs: &[Operand<'_>],
        target: Target,
        pass: fn(&Lowering, &Signature<'_>) -> Calls,
    ) -> Option<Calls> {
        let info = info::of(self.name).filter(|info| info.lowers_composed)?;
        let signature = Signature {
            attributes: &self.attributes,
            inputs: inputs.to_vec(),
            reads: Vec::new(),
            output: Operand {
                dims: self.shape.dims(),
                dtype: self.dtype,
            },
            kept: Vec::new(),
            target,
        };
        Some(pass(&info.lowering?, &signature))
    }
}

impl Spec for Plain {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.shape.clone(), self.dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes.clone()
    }

    /// Of candle's own ops, where they are in an op's place, what several keep and take between them is not known.
    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        match self.calls(inputs, target, |op, signature| (op.forward)(signature)) {
            Some(calls) => steps::of_forward(&calls),
            None => vec![MemoryStep::Output],
        }
    }

    fn backward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        match self.calls(inputs, target, |op, signature| (op.backward)(signature)) {
            Some(calls) => steps::of_backward(&calls),
            None => (0..inputs.len()).map(MemoryStep::gradient).collect(),
        }
    }
}
