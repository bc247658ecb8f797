//! The op on a GPU.

use super::op::Flash;
use crate::attention::AttentionConfig;
use crate::attention::shapes::Shapes;
use crate::kernels::cuda::flash_attention::{self as kernel, Gradients, Heads, Inputs, Outputs};
use crate::kernels::workspace::{self, flash_lse_parts};
use crate::ops::cuda::{alloc_uninit, elements, gpu, strided, tensor, whole};
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};

/// Whether there is a kernel for such a call on q's GPU, in TF32 or exact.
pub(super) fn has_kernel(
    q: &Tensor,
    shapes: &Shapes,
    config: &AttentionConfig,
    tf32: bool,
) -> bool {
    let sizes = shapes.sizes(config);
    gpu(q).is_ok_and(|gpu| kernel::takes(gpu, q.dtype(), tf32, &sizes))
}

/// x (B, H, T, Dh) as the kernels can read it, copied if it lies otherwise: rows of whole 16 bytes, at 16 bytes.
pub(super) fn aligned_or_copied(x: Tensor) -> Result<Tensor> {
    let layout = x.layout();
    let vector = 16 / x.dtype().size_in_bytes(); // elements
    let whole_vectors = match *layout.stride() {
        [ref outer @ .., 1] => {
            let outer = outer
                .iter()
                .all(|stride| *stride > 0 && stride % vector == 0);
            outer && layout.start_offset().is_multiple_of(vector)
        }
        _ => false,
    };
    match whole_vectors {
        true => Ok(x),
        false => x.force_contiguous(),
    }
}

/// The heads of a storage as they lie.
fn heads<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<Heads<'a>> {
    match (layout.stride(), layout.dims()) {
        (&[batch, head, row, 1], &[b, h, t, d]) => Ok(Heads {
            view: strided(storage, layout)?,
            strides: [batch, head, row],
            dims: [b, h, t, d],
        }),
        _ => bail!("a tensor of heads has rows of contiguous elements, not {layout:?}"),
    }
}

/// The heads of a tensor as they lie.
fn heads_of(tensor: &Tensor) -> Result<Heads<'_>> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => {
            let of_storage = heads(storage, layout)?;
            // The guard goes; what the view points to is the tensor's.
            Ok(of_storage.owned_by(tensor))
        }
        _ => bail!("a CUDA kernel was handed a tensor on another device"),
    }
}

impl Flash {
    /// Forward's output; keeps lse, and in half precision what rounding took from the output.
    pub(super) fn forward_on_gpu(
        &self,
        [(q, q_layout), (k, k_layout), (v, v_layout)]: [(&CudaStorage, &Layout); 3],
    ) -> Result<(CudaStorage, Shape)> {
        let sizes = self.sizes();
        let (gpu, dtype) = (&q.device, candle_core::backend::BackendStorage::dtype(q));
        let rows = (sizes.batch, sizes.heads, sizes.queries);
        let shape = Shape::from((rows.0, rows.1, rows.2, sizes.head_dim));
        let out = alloc_uninit(gpu, dtype, shape.elem_count())?;
        let rest = match dtype {
            DType::F32 => None,
            _ => Some(alloc_uninit(gpu, dtype, shape.elem_count())?),
        };
        let of_lse = Shape::from((flash_lse_parts(dtype), rows.0, rows.1, rows.2));
        let lse = alloc_uninit(gpu, DType::F32, of_lse.elem_count())?;
        let workspace = alloc_uninit(gpu, DType::U32, workspace::flash_forward())?;
        let inputs = [
            heads(q, q_layout)?,
            heads(k, k_layout)?,
            heads(v, v_layout)?,
        ];
        let outputs = Outputs {
            out: heads(&out, &Layout::contiguous(shape.clone()))?,
            rounding_error: rest.as_ref().map(whole).transpose()?,
            lse: whole(&lse)?,
        };
        let room = whole(&workspace)?;
        kernel::forward(gpu, sizes, self.tf32, inputs, outputs, room)?;
        let rest = rest.map(|rest| tensor(rest, shape.clone()));
        self.keep(tensor(lse, of_lse), rest);
        Ok((out, shape))
    }

    /// The gradients of q, k and v.
    pub(super) fn backward_on_gpu(
        &self,
        [q, k, v, out, d_out]: [&Tensor; 5],
        lse: &Tensor,
        rest: Option<&Tensor>,
    ) -> Result<[Tensor; 3]> {
        let sizes = self.sizes();
        let gpu = gpu(q)?;
        let d_out = aligned_or_copied(d_out.clone())?;
        let like = |x: &Tensor| -> Result<Tensor> {
            Ok(tensor(
                alloc_uninit(gpu, x.dtype(), x.elem_count())?,
                x.shape(),
            ))
        };
        let (dq, dk, dv) = (like(q)?, like(k)?, like(v)?);
        let inputs = Inputs {
            q: heads_of(q)?,
            k: heads_of(k)?,
            v: heads_of(v)?,
            out: heads_of(out)?,
            rounding_error: rest.map(elements).transpose()?,
            d_out: heads_of(&d_out)?,
            lse: elements(lse)?,
        };
        let gradients = Gradients {
            dq: heads_of(&dq)?,
            dk: heads_of(&dk)?,
            dv: heads_of(&dv)?,
        };
        let workspace = alloc_uninit(gpu, DType::U32, workspace::flash_backward(sizes))?;
        let room = whole(&workspace)?;
        kernel::backward(gpu, sizes, self.tf32, inputs, gradients, room)?;
        Ok([dq, dk, dv])
    }
}
