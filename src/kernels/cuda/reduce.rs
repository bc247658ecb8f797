//! Sums along a dimension and their gradient; see `reduce.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_float, launch_config, suffix};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

const SOURCE: Source = Source {
    name: "reduce",
    parts: &[PRELUDE, include_str!("reduce.cu")],
};

/// The longest row that a warp sums.
const SHORT: usize = 512;

/// Computes y (outer, inner), `factor` times the sums of x (outer, n, inner), in x's dtype. `parts` is f64 scratch of
/// (outer, [chunks](crate::kernels::workspace::sum_chunks), inner) elements if the sums are divided into chunks.
pub(crate) fn sum(
    gpu: &CudaDevice,
    x: View,
    [n, inner]: [usize; 2],
    factor: f64,
    y: View,
    parts: Option<View>,
) -> Result<()> {
    check_float("sum", x)?;
    let Some(parts) = parts else {
        return of_chunks(gpu, x, [n, inner], 1, factor, y);
    };
    let chunks = parts.len / y.len.max(1);
    of_chunks(gpu, x, [n, inner], chunks, 1.0, parts)?;
    of_chunks(gpu, parts, [chunks, inner], 1, factor, y)
}

/// Computes y (outer, chunks, inner), `factor` times the sum of each chunk of x (outer, n, inner). One of them is f64.
fn of_chunks(
    gpu: &CudaDevice,
    x: View,
    [n, inner]: [usize; 2],
    chunks: usize,
    factor: f64,
    y: View,
) -> Result<()> {
    if y.len == 0 {
        return Ok(());
    }
    let (stem, blocks) = match inner {
        1 if chunks == 1 && n <= SHORT && x.dtype != DType::F64 => {
            ("sum_short_rows", y.len.div_ceil(8))
        }
        1 => ("sum_rows", y.len),
        _ => ("sum_columns", y.len / inner * inner.div_ceil(32)),
    };
    if blocks > i32::MAX as usize {
        bail!("sum: expected under 2^31 blocks, got {blocks}");
    }
    let types = match (x.dtype, y.dtype) {
        (DType::F64, DType::F16) => "f64_f16",
        (DType::F64, DType::BF16) => "f64_bf16",
        (DType::F64, _) => "f64_f32",
        (DType::F16, DType::F64) => "f16_f64",
        (DType::BF16, DType::F64) => "bf16_f64",
        (_, DType::F64) => "f32_f64",
        (x, _) => suffix(x),
    };
    let kernel = SOURCE.kernel(gpu, stem, types)?;
    let size = match inner {
        1 => y.len as i64,
        _ => inner as i64,
    };
    let per_chunk = n.div_ceil(chunks).next_multiple_of(8) as i64; // chunks of rows begin at 16 bytes
    let (n, chunks) = (n as i64, chunks as i32);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer).arg(&size);
    launch.arg(&chunks).arg(&n).arg(&per_chunk).arg(&factor);
    // SAFETY: the arguments are those of the kernel, buffers of (outer, n, inner) and (outer, chunks, inner) elements.
    unsafe { launch.launch(launch_config((blocks, 1), (256, 1))) }.w()?;
    Ok(())
}

/// Computes dx (outer, n, inner), `factor` times dy (outer, inner) repeated n times, in the same dtype.
pub(crate) fn spread(
    gpu: &CudaDevice,
    dy: View,
    [n, inner]: [usize; 2],
    factor: f64,
    dx: View,
) -> Result<()> {
    check_float("sum_backward", dy)?;
    if dx.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "spread", suffix(dx.dtype))?;
    let config = launch_config((dx.len.div_ceil(2048), 1), (256, 1));
    let (count, n, inner) = (dx.len as i64, n as i64, inner as i64);
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&dx.pointer).arg(&count);
    launch.arg(&n).arg(&inner).arg(&factor);
    // SAFETY: the arguments are those of the kernel, buffers of (outer, inner) and of (outer, n, inner) elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
