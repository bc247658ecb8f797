//! An op of candle's graph whose output is already computed.

use crate::ops::record::{ForwardResult, Op, Spec, Storages};
use crate::probe::Operand;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, DType, MetalStorage, Result, Shape, Storage, Tensor, bail,
};

/// An op with inputs q, k, v and perhaps a bias, a finished output and a custom backward. It replaces the ops that
/// computed the output: candle would keep all of their intermediate tensors alive, and walks a graph recursively.
pub(super) struct Computed<F> {
    pub(super) name: &'static str,
    /// The output of the op.
    pub(super) out: Tensor,
    /// Computes the gradients of the inputs, in any dtype, from the inputs and the output's gradient.
    pub(super) backward: F,
}

impl<F> Spec for Computed<F> {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.out.shape().clone(), self.out.dtype())
    }
}

impl<F> Op for Computed<F>
where
    F: Fn(&[&Tensor], &Tensor) -> Result<Vec<Tensor>> + Send + Sync + 'static,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: Storages<'_, CpuStorage>) -> ForwardResult<CpuStorage> {
        let (out, layout) = self.out.storage_and_layout();
        match &*out {
            Storage::Cpu(out) => Ok((out.try_clone(layout)?, layout.shape().clone())),
            _ => bail!("{}: q on the CPU, out elsewhere", self.name),
        }
    }

    fn cuda_fwd(&self, _: Storages<'_, CudaStorage>) -> ForwardResult<CudaStorage> {
        let (out, layout) = self.out.storage_and_layout();
        match &*out {
            Storage::Cuda(out) => Ok((out.try_clone(layout)?, layout.shape().clone())),
            _ => bail!("{}: q on a CUDA device, out elsewhere", self.name),
        }
    }

    fn metal_fwd(&self, _: Storages<'_, MetalStorage>) -> ForwardResult<MetalStorage> {
        let (out, layout) = self.out.storage_and_layout();
        match &*out {
            Storage::Metal(out) => Ok((out.try_clone(layout)?, layout.shape().clone())),
            _ => bail!("{}: q on a Metal device, out elsewhere", self.name),
        }
    }

    fn bwd(&self, inputs: &[&Tensor], _: &Tensor, d_out: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let gradients = (self.backward)(inputs, d_out)?;
        let like = |(gradient, x): (Tensor, &&Tensor)| -> Result<Option<Tensor>> {
            Ok(Some(gradient.reshape(x.shape())?.to_dtype(x.dtype())?))
        };
        gradients.into_iter().zip(inputs).map(like).collect()
    }
}
