//! The op on a GPU.

use super::op::Naive;
use crate::kernels::cuda::cublas;
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::naive_attention as kernel;
use crate::kernels::workspace::naive_heads_at_once;
use crate::ops::cuda::{alloc_uninit, elements, gpu, tensor, view, whole};
use crate::ops::with_last_dim;
use crate::probe;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor};

impl Naive {
    /// Scores of as many heads as are worked on at once.
    fn scores_at_once(&self, dtype: DType) -> usize {
        let sizes = &self.sizes;
        let of_head = sizes.group() * sizes.queries * sizes.keys;
        naive_heads_at_once(sizes.kv_matrices(), of_head, dtype) * of_head
    }

    /// Forward's output; keeps the probabilities.
    pub(super) fn forward_on_gpu(
        &self,
        [(q, q_layout), (k, k_layout), (v, v_layout)]: [(&CudaStorage, &Layout); 3],
    ) -> Result<(CudaStorage, Shape)> {
        let (gpu, dtype) = (&q.device, q.dtype());
        let out_shape = Shape::from(with_last_dim(q_layout.dims(), self.sizes.value_dim));
        let p_shape = Shape::from(with_last_dim(q_layout.dims(), self.sizes.keys));
        let p = alloc_uninit(gpu, dtype, p_shape.elem_count())?;
        let heads = kernel::HeadGroups::of(&self.sizes);
        // f32's are the probabilities' place.
        let scores = match dtype {
            DType::F32 => None,
            _ => Some(alloc_uninit(gpu, DType::F32, self.scores_at_once(dtype))?),
        };
        let out = alloc_uninit(gpu, dtype, out_shape.elem_count())?;
        let mut multiply = |factors: [Matrix; 2], c: Matrix, count| {
            cublas::multiply(gpu, factors, c, count, false)
        };
        kernel::forward(
            gpu,
            &mut multiply,
            &heads,
            [view(q, q_layout)?, view(k, k_layout)?, view(v, v_layout)?],
            whole(scores.as_ref().unwrap_or(&p))?,
            whole(&p)?,
            whole(&out)?,
        )?;
        let p = tensor(p, p_shape);
        probe::kept("probabilities", &p);
        let _ = self.probabilities.set(p); // empty until now: an op runs forward once
        Ok((out, out_shape))
    }

    /// The gradients of q, k and v, all of them contiguous.
    pub(super) fn backward_on_gpu(&self, [d_out, q, k, v, p]: [&Tensor; 5]) -> Result<[Tensor; 3]> {
        let (gpu, dtype) = (gpu(q)?, q.dtype());
        let heads = kernel::HeadGroups::of(&self.sizes);
        let at_once = self.scores_at_once(dtype);
        let d_probabilities = alloc_uninit(gpu, DType::F32, at_once)?;
        let d_scores = match dtype {
            DType::F32 => None,
            _ => Some(alloc_uninit(gpu, dtype, at_once)?),
        };
        let like = |x: &Tensor| alloc_uninit(gpu, dtype, x.elem_count());
        let (dq, dk, dv) = (like(q)?, like(k)?, like(v)?);
        let mut multiply = |factors: [Matrix; 2], c: Matrix, count| {
            cublas::multiply(gpu, factors, c, count, false)
        };
        kernel::backward(
            gpu,
            &mut multiply,
            &heads,
            [
                elements(d_out)?,
                elements(q)?,
                elements(k)?,
                elements(v)?,
                elements(p)?,
            ],
            [
                whole(&d_probabilities)?,
                whole(d_scores.as_ref().unwrap_or(&d_probabilities))?,
            ],
            [whole(&dq)?, whole(&dk)?, whole(&dv)?],
        )?;
        Ok([
            tensor(dq, q.shape()),
            tensor(dk, k.shape()),
            tensor(dv, v.shape()),
        ])
    }
}
