//! Compositions of candle's own ops, as one op of this crate.

use super::apply::leave;
use super::spec::Spec;
use crate::graph::{self, Attribute, MemoryStep, Target};
use crate::ops::operand::zeros_of;
use crate::probe::{self, Kind, Operand};
use candle_core::{DType, Shape, Tensor};

/// Runs `f`, candle's own ops that stand for the op called `name` on `inputs`, and make an `output` of this shape and
/// dtype. Their backward is candle's, and says nothing. A result without elements depends on all inputs by zeros, and
/// `f` is not run: candle's own depends on the first or on none, and divides by zero on a GPU.
pub(crate) fn composed<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    output: (impl Into<Shape>, DType),
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    composed_as(name, inputs, Composed::new(output.0, output.1), f)
}

/// As [`composed`], for ops whose backward passes the output's gradient through to all inputs, as candle's sum does.
pub(crate) fn composed_handing_on<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    output: (impl Into<Shape>, DType),
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    let op = Composed {
        passes_through: true,
        ..Composed::new(output.0, output.1)
    };
    composed_as(name, inputs, op, f)
}

/// As [`composed`], of this op.
pub(in crate::ops) fn composed_as<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    op: Composed,
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    if graph::is_tracing() {
        let y = graph::record(name, op, inputs, true).map_err(candle_core::Error::from)?;
        return Ok(y);
    }
    let (shape, dtype) = (op.shape, op.dtype);
    let path = probe::op_path(name);
    let range = probe::op(Kind::Op, name, path);
    let y = match shape.dims().contains(&0) {
        true => zeros_of(name, shape, dtype, inputs)?,
        false => f()?,
    };
    if probe::is_listening() {
        leave(range, inputs, &y);
        probe::produced(path, &y);
    }
    Ok(y)
}

/// What candle's ops make in an op's place.
pub(in crate::ops) struct Composed {
    pub shape: Shape,
    pub dtype: DType,
    /// Backward makes nothing.
    pub passes_through: bool,
    pub attributes: Vec<(&'static str, Attribute)>,
}

impl Composed {
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            passes_through: false,
            attributes: Vec::new(),
        }
    }
}

impl Spec for Composed {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.shape.clone(), self.dtype)
    }

    /// Of one op. What several of candle's own keep and take between them is not known here.
    fn backward_steps(&self, inputs: &[Operand<'_>], _: Target) -> Vec<MemoryStep> {
        let step = match self.passes_through {
            true => MemoryStep::PassThrough,
            false => MemoryStep::gradient,
        };
        (0..inputs.len()).map(step).collect()
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes.clone()
    }
}
