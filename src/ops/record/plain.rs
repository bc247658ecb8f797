//! Calls that say no more than their output and their parameters.

use super::spec::Spec;
use crate::graph::Attribute;
use crate::probe::Operand;
use candle_core::{DType, Shape};

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
