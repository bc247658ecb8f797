//! Results that are there already, as an op of candle's graph.

use crate::ops::record::Spec;
use crate::probe::Operand;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, DType, Layout, MetalStorage, Result, Shape, Storage,
    Tensor, bail,
};

/// A forward pass of q, k and v that is done, with its backward: one op however many it took. candle would keep every
/// intermediate tensor of a graph alive, and walks it by recursion.
pub(super) struct Computed<F> {
    pub(super) name: &'static str,
    /// What the op's output is to be.
    pub(super) out: Tensor,
    /// The gradients of q, k and v from these and from out's gradient, in any dtype.
    pub(super) backward: F,
}

impl<F> Spec for Computed<F> {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.out.shape().clone(), self.out.dtype())
    }
}

impl<F> CustomOp3 for Computed<F>
where
    F: Fn([&Tensor; 3], &Tensor) -> Result<[Tensor; 3]> + Send + Sync,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _q: &CpuStorage,
        _q_layout: &Layout,
        _k: &CpuStorage,
        _k_layout: &Layout,
        _v: &CpuStorage,
        _v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (out, layout) = self.out.storage_and_layout();
        match &*out {
            Storage::Cpu(out) => Ok((out.try_clone(layout)?, layout.shape().clone())),
            _ => bail!("{}: q on the CPU, out elsewhere", self.name),
        }
    }

    fn cuda_fwd(
        &self,
        _q: &CudaStorage,
        _q_layout: &Layout,
        _k: &CudaStorage,
        _k_layout: &Layout,
        _v: &CudaStorage,
        _v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (out, layout) = self.out.storage_and_layout();
        match &*out {
            Storage::Cuda(out) => Ok((out.try_clone(layout)?, layout.shape().clone())),
            _ => bail!("{}: q on a CUDA device, out elsewhere", self.name),
        }
    }

    fn metal_fwd(
        &self,
        _q: &MetalStorage,
        _q_layout: &Layout,
        _k: &MetalStorage,
        _k_layout: &Layout,
        _v: &MetalStorage,
        _v_layout: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let (out, layout) = self.out.storage_and_layout();
        match &*out {
            Storage::Metal(out) => Ok((out.try_clone(layout)?, layout.shape().clone())),
            _ => bail!("{}: q on a Metal device, out elsewhere", self.name),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = (self.backward)([q, k, v], d_out)?;
        let like = |gradient: Tensor, x: &Tensor| -> Result<Option<Tensor>> {
            Ok(Some(gradient.reshape(x.shape())?.to_dtype(x.dtype())?))
        };
        Ok((like(dq, q)?, like(dk, k)?, like(dv, v)?))
    }
}
