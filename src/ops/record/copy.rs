//! The elements of a view, one after another.

use super::CONTIGUOUS;
use super::apply::{Made, Op, Storages, applied};
use super::composed::composed;
use crate::graph;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, MetalStorage, Result, Tensor};

/// `x` with its elements in order, one after another: a copy where they are not.
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

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        copy(inputs)
    }

    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        copy(inputs)
    }

    fn metal_fwd(&self, inputs: Storages<'_, MetalStorage>) -> Made<MetalStorage> {
        copy(inputs)
    }

    fn bwd(&self, _: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(dy.clone())])
    }
}

fn copy<S: BackendStorage<Device: BackendDevice<Storage = S>>>(inputs: Storages<'_, S>) -> Made<S> {
    let (x, layout) = inputs[0];
    let shape = layout.shape().clone();
    // SAFETY: the copy writes every element.
    let mut y = unsafe { x.device().alloc_uninit(&shape, x.dtype())? };
    x.copy_strided_src(&mut y, 0, layout)?;
    Ok((y, shape))
}
