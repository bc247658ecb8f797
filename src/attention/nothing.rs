//! Attention with a dimension of 0: no batch, heads, queries, keys or values.

use super::computed::Computed;
use super::shapes::is_empty;
use crate::Result;
use crate::kernels::attention::Sizes;
use crate::ops::{check_float, record::apply, with_last_dim};
use candle_core::{DType, Tensor};

/// Returns zeros, whose gradients are zeros, if a dimension is 0. No kernel is launched: CUDA refuses an empty grid.
pub(super) fn nothing(
    name: &'static str,
    sizes: &Sizes,
    inputs: &[&Tensor],
) -> Result<Option<Tensor>> {
    if !is_empty(sizes) {
        return Ok(None);
    }
    let q = inputs[0];
    check_float(name, q)?;
    let out = Tensor::zeros(
        with_last_dim(q.dims(), sizes.value_dim),
        q.dtype(),
        q.device(),
    )?;
    let backward = |inputs: &[&Tensor], _: &Tensor| inputs.iter().map(|x| x.zeros_like()).collect();
    let op = Computed {
        name,
        out,
        backward,
    };
    Ok(Some(apply(inputs, op)?))
}

/// Returns the log-sum-exp of no scores, -inf, for each query.
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
