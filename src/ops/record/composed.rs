//! Compositions of candle's own ops, as one op of this crate.

use super::apply::leave;
use super::plain::Plain;
use super::spec::Spec;
use super::traced::traced;
use crate::graph;
use crate::ops::info;
use crate::ops::operand::zeros_of;
use crate::probe::{self, Kind};
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
    composed_as(name, inputs, Plain::new(output.0, output.1), f)
}

/// As [`composed`], of this call.
pub(in crate::ops) fn composed_as<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    call: Plain,
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    if graph::is_tracing() {
        let info = info::of(name).filter(|info| info.lowers_composed);
        let lowering = info.and_then(|info| info.lowering);
        return Ok(traced(name, call, inputs, lowering, true).map_err(candle_core::Error::from)?);
    }
    let (shape, dtype) = call.output(&[]);
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
