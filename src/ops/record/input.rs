//! Preparation of operands for candle's own ops and for kernels.

use super::apply::{ForwardResult, Op, Storages, applied, composed};
use super::{CONTIGUOUS, TO_DTYPE};
use crate::grad::is_grad_enabled;
use crate::graph;
use crate::ops::operand::{check_float, check_supported, inside_storage};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, DType, MetalStorage, Result, Tensor};

/// Returns `x` for candle's ops: detached from the graph under `no_grad`.
pub(crate) fn input(x: &Tensor) -> Tensor {
    // An empty view may begin beyond its storage; it is replaced if memory allows.
    let x = match x.dims().contains(&0) {
        true => inside_storage("input", x).unwrap_or_else(|_| x.clone()),
        false => x.clone(),
    };
    // A trace tracks gradients itself, and follows a value by its node, which detaching would lose.
    match is_grad_enabled() || graph::is_tracing() {
        true => x,
        false => x.detach(),
    }
}

/// Returns the [`input`] of a `reference`. References are public, so they check that `x` is a float: integers would
/// give wrong results without an error.
pub(crate) fn float_input(op: &'static str, x: &Tensor) -> crate::Result<Tensor> {
    check_float(op, x)?;
    Ok(input(x))
}

pub(crate) fn wide_input(op: &'static str, x: &Tensor) -> crate::Result<Tensor> {
    check_supported(op, x)?;
    Ok(widen(&input(x))?)
}

/// Returns `x` in a compute dtype: half precision is widened to f32.
///
/// # Errors
/// Dtypes other than f16, bf16, f32 and f64: integers have no gradient, and candle barely supports 8-bit floats.
pub(crate) fn widen(x: &Tensor) -> Result<Tensor> {
    check_supported("cast", x)?;
    match x.dtype() {
        DType::F32 | DType::F64 => Ok(x.clone()),
        _ => to_dtype(x, DType::F32),
    }
}

/// Converts `x` to `dtype` with candle's own conversion.
pub(crate) fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    match graph::is_tracing() && x.dtype() != dtype {
        true => composed(&TO_DTYPE, &[x], (x.shape(), dtype), || x.to_dtype(dtype)),
        false => x.to_dtype(dtype),
    }
}

/// Returns `x` with contiguous elements, a copy if they are not.
pub(crate) fn contiguous(x: &Tensor) -> Result<Tensor> {
    if x.is_contiguous() {
        return Ok(x.clone());
    }
    match graph::is_tracing() {
        true => composed(&CONTIGUOUS, &[x], (x.shape(), x.dtype()), || x.contiguous()),
        false => applied(&[x], Contiguous),
    }
}

struct Contiguous;

impl Op for Contiguous {
    fn name(&self) -> &'static str {
        CONTIGUOUS.op
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> ForwardResult<CpuStorage> {
        copy(inputs)
    }

    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> ForwardResult<CudaStorage> {
        copy(inputs)
    }

    fn metal_fwd(&self, inputs: Storages<'_, MetalStorage>) -> ForwardResult<MetalStorage> {
        copy(inputs)
    }

    fn bwd(&self, _: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(dy.clone())])
    }
}

fn copy<S: BackendStorage<Device: BackendDevice<Storage = S>>>(
    inputs: Storages<'_, S>,
) -> ForwardResult<S> {
    let (x, layout) = inputs[0];
    let shape = layout.shape().clone();
    // SAFETY: the copy writes every element.
    let mut y = unsafe { x.device().alloc_uninit(&shape, x.dtype())? };
    x.copy_strided_src(&mut y, 0, layout)?;
    Ok((y, shape))
}
