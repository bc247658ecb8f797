//! Operands for candle's own ops.

use super::TO_DTYPE;
use super::composed::composed;
use crate::grad::is_grad_enabled;
use crate::graph;
use crate::ops::operand::{check_float, check_supported, inside_storage};

use candle_core::{DType, Result, Tensor};

/// `x` as candle's ops should take it: outside the graph under `no_grad`.
pub(crate) fn input(x: &Tensor) -> Tensor {
    // A view of nothing may begin beyond its storage: elsewhere, if there is room for nothing.
    let x = match x.dims().contains(&0) {
        true => inside_storage("input", x).unwrap_or_else(|_| x.clone()),
        false => x.clone(),
    };
    // A trace knows by itself what has a graph, and follows a value by the node that detaching would leave behind.
    match is_grad_enabled() || graph::is_tracing() {
        true => x,
        false => x.detach(),
    }
}

/// The [`input`] of a `reference`, which is public and so checks by itself that `x` is a float: integers would give
/// wrong results without an error.
pub(crate) fn float_input(op: &'static str, x: &Tensor) -> crate::Result<Tensor> {
    check_float(op, x)?;
    Ok(input(x))
}

/// As [`float_input`], widened to compute in.
pub(crate) fn wide_input(op: &'static str, x: &Tensor) -> crate::Result<Tensor> {
    check_supported(op, x)?;
    Ok(widen(&input(x))?)
}

/// `x` in a dtype fit for computing: half precision widened to f32.
///
/// # Errors
/// Other dtypes: integers have no gradient, and candle hardly converts floats of 8 bits.
pub(crate) fn widen(x: &Tensor) -> Result<Tensor> {
    check_supported("to compute", x)?;
    match x.dtype() {
        DType::F32 | DType::F64 => Ok(x.clone()),
        _ => to_dtype(x, DType::F32),
    }
}

/// `x` in `dtype`, by candle's own conversion.
pub(crate) fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    match graph::is_tracing() && x.dtype() != dtype {
        true => composed(&TO_DTYPE, &[x], (x.shape(), dtype), || x.to_dtype(dtype)),
        false => x.to_dtype(dtype),
    }
}
