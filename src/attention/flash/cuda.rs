//! Requirements of the GPU kernels on their operands.

use crate::kernels::attention::Sizes;
use crate::kernels::cuda::flash_attention as kernel;
use crate::ops::cuda::gpu;
use candle_core::{Result, Tensor};

/// Whether q's GPU has a kernel for a call, with f32 multiplied in TF32 or with f32's accuracy.
pub(super) fn has_kernel(q: &Tensor, sizes: &Sizes, tf32: bool) -> bool {
    gpu(q).is_ok_and(|gpu| kernel::supports(gpu, q.dtype(), tf32, sizes))
}

/// Returns x (B, H, T, D) with rows that are aligned to 16 bytes and whole multiples of them; copies x if they are
/// not.
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
