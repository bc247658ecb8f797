//! Kernels for NVIDIA GPUs: plain compute over device buffers, one `.cu` beside each launcher.
//!
//! What lives here: sources, compiled for the GPU they meet ([`source`]), their kernels ([`kernel`]), buffers as a
//! kernel sees them ([`View`]), and a launcher each: grid, block, arguments. What does not: tensors and graphs
//! ([`crate::ops`] wraps these kernels), and products of matrices, which are cuBLAS's ([`matmul`] and [`cublas`] ask
//! for them).
//!
//! Kernels on rows take contiguous buffers in f32, f16 or bf16, AdamW f32, flash attention strided heads in all three.
//! All compute in f32, and sums have a fixed order. Flash attention and cuBLAS multiply f32 with f32's accuracy or in
//! TF32, as they are told.
//!
//! A launcher allocates nothing: what it needs to work in it is given, as long as a function beside it says. Once its
//! kernel is loaded it may be captured in a graph, whose launches read the buffers each time: what changes between them
//! lies there.

pub(crate) mod activation;
pub(crate) mod adamw;
pub(crate) mod arithmetic;
pub(crate) mod bias;
pub(crate) mod cast;
pub(crate) mod cross_entropy;
pub(crate) mod cublas;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod flash_attention;
pub(crate) mod gated;
pub(crate) mod heads;
mod kernel;
pub(crate) mod log_softmax;
pub(crate) mod matmul;
pub(crate) mod naive_attention;
pub(crate) mod norm;
mod norm_rows;
pub(crate) mod normal;
pub(crate) mod reduce;
pub(crate) mod repeat;
pub(crate) mod rope;
pub(crate) mod softmax;
pub(crate) mod source;
pub(crate) mod strided;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use view::{View, copy, set_to_zero};

use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{DType, Result, bail};

/// The generator of random words, in front of the kernels that draw.
const PHILOX: &str = include_str!("philox.cuh");
/// Behind it: which elements are dropped.
const DROPOUT: &str = include_str!("dropout.cuh");

/// What the kernels' names call a dtype.
fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "f32",
    }
}

/// # Errors
/// Another dtype than the kernels' own: `op` is named.
fn check_float(op: &str, x: View) -> Result<()> {
    match x.dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        dtype => bail!("{op}: no CUDA kernel for {dtype:?}"),
    }
}

/// # Errors
/// As [`check_float`], and another length or dtype than `y` has.
fn check_alike(op: &str, x: View, y: View) -> Result<()> {
    check_float(op, x)?;
    match (x.dtype, x.len) == (y.dtype, y.len) {
        true => Ok(()),
        false => bail!(
            "{op}: {} of {:?} to {} of {:?}",
            x.len,
            x.dtype,
            y.len,
            y.dtype
        ),
    }
}

/// What they call two dtypes, x's and y's: one name where these are equal.
fn suffixes(x: DType, y: DType) -> &'static str {
    match (x, y) {
        (DType::F32, DType::F16) => "f32_f16",
        (DType::F32, DType::BF16) => "f32_bf16",
        (DType::F16, DType::F32) => "f16_f32",
        (DType::BF16, DType::F32) => "bf16_f32",
        (DType::F16, DType::BF16) => "f16_bf16",
        (DType::BF16, DType::F16) => "bf16_f16",
        _ => suffix(y),
    }
}

/// How many elements are 16 bytes.
fn in_vector(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// How many vectors a row of `width` elements of x touches: one more where rows do not all begin at 16 bytes.
fn packs(width: usize, x: View) -> usize {
    let n = in_vector(x.dtype);
    let all_begin_well = width.is_multiple_of(n) && x.pointer.is_multiple_of(16);
    width.div_ceil(n) + usize::from(!all_begin_well)
}

/// For so many packs of 16 bytes in a row, `THREAD_PACKS` of prelude.cuh a thread.
fn flat_config(packs: usize) -> LaunchConfig {
    const THREAD_PACKS: usize = 2;
    launch_config((packs.div_ceil(256 * THREAD_PACKS), 1), (256, 1))
}

/// A grid of two dimensions, blocks of two, no dynamic shared memory.
fn launch_config(grid: (usize, usize), block: (usize, usize)) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (grid.0 as u32, grid.1 as u32, 1),
        block_dim: (block.0 as u32, block.1 as u32, 1),
        shared_mem_bytes: 0,
    }
}
