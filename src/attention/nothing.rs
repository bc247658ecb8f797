//! Attention of nothing, or to nothing: no batch, heads, queries, keys or values.

use super::computed::Computed;
use super::shapes::Shapes;
use crate::Result;
use crate::ops::{check_float, record::apply, with_last_dim};
use candle_core::{DType, Tensor};

/// Zeros for out, and for every gradient: a sum over no keys. Nothing is launched, which a GPU's driver would refuse
/// for a grid of no blocks. None where there is something to attend to.
pub(super) fn nothing(
    name: &'static str,
    shapes: &Shapes,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<Tensor>> {
    if !shapes.is_empty() {
        return Ok(None);
    }
    check_float(name, q)?;
    let out = Tensor::zeros(
        with_last_dim(q.dims(), shapes.value_dim),
        q.dtype(),
        q.device(),
    )?;
    let backward = |[q, k, v]: [&Tensor; 3], _: &Tensor| {
        Ok([q.zeros_like()?, k.zeros_like()?, v.zeros_like()?])
    };
    let op = Computed {
        name,
        out,
        backward,
    };
    Ok(Some(apply(&[q, k, v], op)?))
}

/// The log-sum-exp of no scores, for each query.
pub(super) fn lse_of_nothing(q: &Tensor) -> Result<Tensor> {
    let shape = &q.dims()[..q.rank() - 1];
    let dtype = match q.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    if shape.contains(&0) {
        return Ok(Tensor::zeros(shape, dtype, q.device())?);
    }
    Ok(Tensor::full(f32::NEG_INFINITY, shape, q.device())?.to_dtype(dtype)?)
}
