//! Flash attention on tensor cores, in f16, bf16, f32 and TF32: the algorithm of FlashAttention-2, forward and
//! backward. Sums are f32, and every run has the same bits.
//!
//! For half precision there are two sets of kernels. `forward.cu` and `backward.cu` run on every GPU since compute
//! capability 8.0 (mma.sync, cp.async). `forward_hopper.cu`, `backward_hopper.cu` and, for heads of 256,
//! `backward_cluster.cu` need Hopper (wgmma, the tensor copy engine, specialized warpgroups for copies and matmuls,
//! clusters of blocks). lse is the same, so forward and backward may come from different sets. For f32 there is one set
//! ([`f32`](self::f32)), which multiplies in TF32 or with the accuracy of f32. Its lse belongs to the computed scores,
//! so both passes of a call must have the same accuracy.
//!
//! A key mask is packed into bits before each pass, with flags of the tiles that it hides completely, which are skipped
//! ([`masks`]). The gradient of a bias has a kernel for every GPU ([`bias_gradient`](self::bias_gradient)).
//!
//! [`tiles`] has the tile sizes for each head dimension; [`forward`] and [`backward`] launch. [`supports`] reports the
//! calls that the kernels support: callers pad or copy the others.

mod arguments;
mod backward;
mod bias_gradient;
mod f32;
mod forward;
mod kernel_config;
mod masks;
mod tiles;
mod workspace;

pub(crate) use arguments::{Heads, ProbabilityDropout};
pub(crate) use backward::{Gradients, Inputs, backward};
pub(crate) use bias_gradient::bias_gradient;
pub(crate) use forward::{ForwardInputs, Outputs, forward};
pub(crate) use masks::{Masks, PerScore};

use super::{in_vector, source};
use crate::kernels::attention::Sizes;
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;

/// Returns whether the GPU has kernels for a call (`tf32` matters only for f32). Rows must be multiples of 16 bytes (8
/// elements, 4 in f32), the scale positive, so that it keeps the order of scores, and the tiles of both passes must fit
/// in the shared memory of a block, of which most GPUs have less than Hopper.
pub(crate) fn supports(gpu: &CudaDevice, dtype: DType, tf32: bool, sizes: &Sizes) -> bool {
    let rows = sizes.batch * sizes.heads * sizes.queries.max(sizes.keys);
    let suits = matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
        && [sizes.head_dim, sizes.value_dim]
            .iter()
            .all(|dim| dim.is_multiple_of(in_vector(dtype)) && (1..=256).contains(dim))
        && sizes.scale > 0.0
        && sizes.queries > 0
        && (1..i32::MAX as usize).contains(&rows);
    let shared_bytes = || {
        let forward = forward::shared_bytes(gpu, dtype, tf32, sizes);
        forward.max(backward::shared_bytes(gpu, dtype, tf32, sizes))
    };
    suits
        && source::is_supported(gpu)
        && source::most_shared_bytes(gpu).is_ok_and(|most| shared_bytes() <= most)
}

/// Returns the element type in kernel names.
fn element(dtype: DType) -> &'static str {
    super::suffix(dtype)
}
