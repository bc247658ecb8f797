//! The results as an op of candle's graph.

use super::{Attention, NAME};
use crate::ops::record::Spec;
use crate::probe::Operand;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, DType, Layout, MetalStorage, Result, Shape, Storage,
    Tensor, bail,
};

/// A forward pass that is done, with what its backward needs. One op whatever the number of tiles: candle would keep every
/// tile of a graph alive, and walks it by recursion.
pub(super) struct Computed {
    pub(super) attention: Attention,
    /// What the op's output is to be.
    pub(super) out: Tensor,
    /// The same before it was rounded, (G, R, Tq, Dh).
    pub(super) wide_out: Tensor,
    /// (G, R, Tq, 1).
    pub(super) lse: Tensor,
}

impl Spec for Computed {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.out.shape().clone(), self.out.dtype())
    }
}

impl CustomOp3 for Computed {
    fn name(&self) -> &'static str {
        NAME
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
            _ => bail!("{NAME}: q on the CPU, out elsewhere"),
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
            _ => bail!("{NAME}: q on a CUDA device, out elsewhere"),
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
            _ => bail!("{NAME}: q on a Metal device, out elsewhere"),
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
        let Self { wide_out, lse, .. } = self;
        let [dq, dk, dv] = self.attention.backward([q, k, v], wide_out, lse, d_out)?;
        let like = |gradient: Tensor, x: &Tensor| -> Result<Option<Tensor>> {
            Ok(Some(gradient.reshape(x.shape())?.to_dtype(x.dtype())?))
        };
        Ok((like(dq, q)?, like(dk, k)?, like(dv, v)?))
    }
}
