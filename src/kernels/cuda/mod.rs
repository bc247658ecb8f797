//! Kernels for NVIDIA GPUs: a `.cu` file next to each launcher.
//!
//! A launcher sets grid, block and arguments. [`source`] compiles for the GPU at run time, [`kernel`] loads and caches
//! kernels, and a [`View`] is a buffer. cuBLAS multiplies matrices ([`matmul`], [`cublas`]). [`crate::ops`] wraps the
//! kernels for tensors.
//!
//! Row kernels expect contiguous buffers in f32, f16 or bf16, updates f32, flash attention strided heads in all three.
//! All compute in f32, and sums have a fixed order. Flash attention and cuBLAS multiply f32 with the accuracy of f32 or
//! in TF32, as configured.
//!
//! A launcher does not allocate: scratch memory is an argument, of the size that [`workspace`](super::workspace)
//! reports. A launch of a loaded kernel may be captured in a CUDA graph. Values that change between runs are therefore
//! read from device memory.

pub(crate) mod activation;
pub(crate) mod arithmetic;
pub(crate) mod bias;
pub(crate) mod cast;
pub(crate) mod cross_entropy;
pub(crate) mod cublas;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod extremes;
pub(crate) mod flash_attention;
pub(crate) mod gated;
pub(crate) mod heads;
pub(crate) mod index;
mod kernel;
pub(crate) mod log_softmax;
pub(crate) mod matmul;
pub(crate) mod naive_attention;
pub(crate) mod newton_schulz;
pub(crate) mod norm;
mod norm_rows;
pub(crate) mod normal;
pub(crate) mod reduce;
pub(crate) mod repeat;
pub(crate) mod rope;
pub(crate) mod select;
pub(crate) mod softmax;
pub(crate) mod source;
pub(crate) mod strided;
#[cfg(test)]
mod tests;
pub(crate) mod update;
mod view;

pub(crate) use view::{View, copy, set_to_zero};

use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{DType, Result, bail};

/// The random generator, included before kernels that draw random words.
const PHILOX: &str = include_str!("philox.cuh");
/// The dropout mask, included after [`PHILOX`].
const DROPOUT: &str = include_str!("dropout.cuh");

/// Returns the suffix of kernel names for a dtype.
fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "f32",
    }
}

/// Checks that the kernels support the dtype of `x`.
///
/// # Errors
/// Another dtype; the error names `op`.
fn check_float(op: &str, x: View) -> Result<()> {
    match x.dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        dtype => bail!("{op}: no CUDA kernel for {dtype:?}"),
    }
}

/// Checks that `x` and `y` have the same length and dtype.
///
/// # Errors
/// Those of [`check_float`]; another length or dtype.
fn check_alike(op: &str, x: View, y: View) -> Result<()> {
    check_float(op, x)?;
    match (x.dtype, x.len) == (y.dtype, y.len) {
        true => Ok(()),
        false => bail!(
            "{op}: expected {} elements of {:?}, got {} of {:?}",
            y.len,
            y.dtype,
            x.len,
            x.dtype
        ),
    }
}

/// Returns the suffix of kernel names for the dtypes of x and y: one name if they are equal.
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

/// Returns the number of elements in 16 bytes.
fn in_vector(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// Returns the number of 16-byte packs that a row of x touches: one more if not all rows begin at 16 bytes.
fn packs(width: usize, x: View) -> usize {
    let n = in_vector(x.dtype);
    let all_begin_well = width.is_multiple_of(n) && x.pointer.is_multiple_of(16);
    width.div_ceil(n) + usize::from(!all_begin_well)
}

/// Returns the grid for a flat buffer of `packs` packs of 16 bytes, with `THREAD_PACKS` of prelude.cuh per thread.
fn flat_config(packs: usize) -> LaunchConfig {
    const THREAD_PACKS: usize = 2;
    launch_config((packs.div_ceil(256 * THREAD_PACKS), 1), (256, 1))
}

/// Returns a configuration with a two-dimensional grid and block, without dynamic shared memory.
fn launch_config(grid: (usize, usize), block: (usize, usize)) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (grid.0 as u32, grid.1 as u32, 1),
        block_dim: (block.0 as u32, block.1 as u32, 1),
        shared_mem_bytes: 0,
    }
}
