//! Where candle's backward begins: scalars whose backward makes gradients that are known.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor,
};

/// (scalar, x), whose gradient this is, to a scalar.
pub(super) struct Seed(pub Tensor);

impl CustomOp2 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(
        &self,
        scalar: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        zero(scalar)
    }

    fn cuda_fwd(
        &self,
        scalar: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        zero(scalar)
    }

    fn metal_fwd(
        &self,
        scalar: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        zero(scalar)
    }

    fn bwd(
        &self,
        scalar: &Tensor,
        _: &Tensor,
        _: &Tensor,
        d_scalar: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d_scalar = scalar.track_op().then(|| d_scalar.clone());
        Ok((d_scalar, Some(self.0.clone())))
    }
}

/// A scalar of the dtype and device of another tensor.
fn zero<S: BackendStorage>(like: &S) -> Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let scalar = Shape::from(());
    let storage = like.device().zeros_impl(&scalar, like.dtype())?;
    Ok((storage, scalar))
}
