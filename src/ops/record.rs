//! Putting a custom op into candle's graph, or keeping it out under `no_grad`.

use crate::grad::is_grad_enabled;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, Result, Tensor};

pub(crate) fn apply1<C: CustomOp1 + Send + Sync + 'static>(x: &Tensor, op: C) -> Result<Tensor> {
    if is_grad_enabled() {
        x.apply_op1(op)
    } else {
        x.apply_op1_no_bwd(&op)
    }
}

pub(crate) fn apply2<C: CustomOp2 + Send + Sync + 'static>(
    x: &Tensor,
    y: &Tensor,
    op: C,
) -> Result<Tensor> {
    if is_grad_enabled() {
        x.apply_op2(y, op)
    } else {
        x.apply_op2_no_bwd(y, &op)
    }
}

pub(crate) fn apply3<C: CustomOp3 + Send + Sync + 'static>(
    x: &Tensor,
    y: &Tensor,
    z: &Tensor,
    op: C,
) -> Result<Tensor> {
    if is_grad_enabled() {
        x.apply_op3(y, z, op)
    } else {
        x.apply_op3_no_bwd(y, z, &op)
    }
}

/// `x` as a reference implementation should take it: outside the graph under `no_grad`.
pub(crate) fn input(x: &Tensor) -> Tensor {
    if is_grad_enabled() {
        x.clone()
    } else {
        x.detach()
    }
}

/// `x` in a dtype fit for computing: half precision widened to f32.
pub(crate) fn widen(x: &Tensor) -> Result<Tensor> {
    use candle_core::DType;
    match x.dtype() {
        DType::F32 | DType::F64 => Ok(x.clone()),
        _ => x.to_dtype(DType::F32),
    }
}
