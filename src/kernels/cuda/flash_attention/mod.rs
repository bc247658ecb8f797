//! Flash attention on tensor cores, in f16, bf16, f32 and TF32: what is computed is FlashAttention-2's, forward and
//! backward, with everything added up in f32 and the same bits every run.
//!
//! Two sets of kernels for half precision. `forward.cu` and `backward.cu` use what every GPU since compute capability
//! 8.0 has (mma.sync, cp.async); `forward_hopper.cu` and `backward_hopper.cu` Hopper's own (wgmma, the tensor copy
//! engine, warpgroups that copy and warpgroups that multiply). lse is the same, so a forward of one goes with a
//! backward of the other. For heads in f32 one set, for every such GPU ([`f32`](self::f32)), with products in TF32 or
//! of f32's accuracy. lse is that of the scores as they were computed, so forward and backward of one call are of one
//! accuracy.
//!
//! What lives here: which kernel, compiled with which tile sizes, for a head dimension ([`tiles`]), and the launches
//! ([`forward`], [`backward`]). What does not: padding and copying what the kernels cannot take; see [`takes`].

mod arguments;
mod backward;
mod f32;
mod form;
mod forward;
mod tiles;
mod workspace;

pub(crate) use arguments::{Dropped, Heads};
pub(crate) use backward::{Gradients, Inputs, backward};
pub(crate) use forward::{ForwardInputs, Outputs, forward};

use super::{in_vector, source};
use crate::kernels::attention::Sizes;
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;

/// Whether the GPU has kernels for such a call (`tf32` matters to f32 alone): rows of whole 16 bytes (8 elements, in
/// f32 4), a scale that leaves the largest score the largest, and tiles that a block's shared memory holds, forward and
/// backward. (Most GPUs have less of it than Hopper's.)
pub(crate) fn takes(gpu: &CudaDevice, dtype: DType, tf32: bool, sizes: &Sizes) -> bool {
    let rows = sizes.batch * sizes.heads * sizes.queries.max(sizes.keys);
    let suits = matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
        && sizes.head_dim.is_multiple_of(in_vector(dtype))
        && (1..=256).contains(&sizes.head_dim)
        && sizes.scale > 0.0
        && sizes.queries > 0
        && (1..i32::MAX as usize).contains(&rows);
    let shared_bytes = || {
        let forward = forward::shared_bytes(gpu, dtype, tf32, sizes);
        forward.max(backward::shared_bytes(gpu, dtype, tf32, sizes))
    };
    suits
        && source::runs_on(gpu)
        && source::most_shared_bytes(gpu).is_ok_and(|most| shared_bytes() <= most)
}

/// What the kernels' names call the element.
fn element(dtype: DType) -> &'static str {
    super::suffix(dtype)
}
