//! The op on a card.

use super::Naive;
use crate::kernels::cuda::cublas;
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::naive_attention as kernel;
use crate::kernels::workspace::naive_heads_at_once;
use crate::ops::cuda::{card, elements, room, tensor, view, whole};
use crate::ops::ending;
use crate::probe;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor};

impl Naive {
    /// What the kernels are told.
    fn sizes_on_card(&self) -> kernel::Sizes {
        let sizes = self.sizes;
        kernel::Sizes {
            kv_heads: sizes.kv_batch,
            group: sizes.batch / sizes.kv_batch.max(1),
            queries: sizes.queries,
            keys: sizes.keys,
            mask: self.mask,
            scale: self.scale,
        }
    }

    /// Scores of as many heads as are worked on at once.
    fn scores_at_once(&self, dtype: DType) -> usize {
        let sizes = self.sizes_on_card();
        let of_head = sizes.group * sizes.queries * sizes.keys;
        naive_heads_at_once(sizes.kv_heads, of_head, dtype) * of_head
    }

    /// Forward's output; keeps the probabilities.
    pub(super) fn forward_on_card(
        &self,
        [(q, q_layout), (k, k_layout), (v, v_layout)]: [(&CudaStorage, &Layout); 3],
    ) -> Result<(CudaStorage, Shape)> {
        let (card, dtype) = (&q.device, q.dtype());
        let out_shape = Shape::from(ending(q_layout.dims(), self.sizes.value_dim));
        let p_shape = Shape::from(ending(q_layout.dims(), self.sizes.keys));
        let p = room(card, dtype, p_shape.elem_count())?;
        let sizes = self.sizes_on_card();
        // f32's are the probabilities' place.
        let scores = match dtype {
            DType::F32 => None,
            _ => Some(room(card, DType::F32, self.scores_at_once(dtype))?),
        };
        let out = room(card, dtype, out_shape.elem_count())?;
        let mut multiply = |factors: [Matrix; 2], c: Matrix, count| {
            cublas::multiply(card, factors, c, count, false)
        };
        kernel::forward(
            card,
            &mut multiply,
            &sizes,
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
    pub(super) fn backward_on_card(
        &self,
        [d_out, q, k, v, p]: [&Tensor; 5],
    ) -> Result<[Tensor; 3]> {
        let (card, dtype, sizes) = (card(q)?, q.dtype(), self.sizes_on_card());
        let at_once = self.scores_at_once(dtype);
        let d_probabilities = room(card, DType::F32, at_once)?;
        let d_scores = match dtype {
            DType::F32 => None,
            _ => Some(room(card, dtype, at_once)?),
        };
        let like = |x: &Tensor| room(card, dtype, x.elem_count());
        let (dq, dk, dv) = (like(q)?, like(k)?, like(v)?);
        let mut multiply = |factors: [Matrix; 2], c: Matrix, count| {
            cublas::multiply(card, factors, c, count, false)
        };
        kernel::backward(
            card,
            &mut multiply,
            &sizes,
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
