//! What the kernels on a GPU take.

use crate::attention::AttentionConfig;
use crate::attention::shapes::Shapes;
use crate::kernels::cuda::flash_attention as kernel;
use crate::ops::cuda::gpu;
use candle_core::{Result, Tensor};

/// Whether there is a kernel for such a call on q's GPU, in TF32 or with f32's accuracy.
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
