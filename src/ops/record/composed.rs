//! Compositions of candle's own ops, as one op of this crate.

use super::apply::leave;
use super::plain::Plain;
use super::spec::Spec;
use super::traced::traced;
use crate::graph;
use crate::ops::info::OpInfo;
use crate::ops::operand::zeros_of;
use crate::probe::{self, Kind};
use candle_core::{DType, Shape, Tensor};

/// Runs `f`, candle's own ops that stand for `op` on `inputs`, and make an `output` of this shape and
/// dtype. Their backward is candle's, and says nothing. A result without elements depends on all inputs by zeros, and
/// `f` is not run: candle's own depends on the first or on none, and divides by zero on a GPU.
pub(crate) fn composed<E: From<candle_core::Error>>(
    op: &OpInfo,
    inputs: &[&Tensor],
    output: (impl Into<Shape>, DType),
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    composed_as(op, inputs, Plain::new(output.0, output.1), f)
}

/// As [`composed`], of this call.
pub(in crate::ops) fn composed_as<E: From<candle_core::Error>>(
    op: &OpInfo,
    inputs: &[&Tensor],
    call: Plain,
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    if graph::is_tracing() {
        return Ok(traced(op.op, call, inputs, true).map_err(candle_core::Error::from)?);
    }
    let (shape, dtype) = call.output(&[]);
    let range = probe::op(Kind::Op, op.op, probe::op_path(op.op));
    let y = match shape.dims().contains(&0) {
        true => zeros_of(op.op, shape, dtype, inputs)?,
        false => f()?,
    };
    if probe::is_listening() {
        leave(range, inputs, &y);
    }
    Ok(y)
}
