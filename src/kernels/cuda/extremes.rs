//! The largest or smallest elements along a dimension, and their gradient; see `extremes.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_alike, check_float, launch_config, suffix};
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

const SOURCE: Source = Source {
    name: "extremes",
    parts: &[PRELUDE, include_str!("extremes.cu")],
};

/// Computes y (outer, inner), the largest elements of x (outer, n, inner) along n if `is_largest`, else the smallest.
pub(crate) fn forward(
    gpu: &CudaDevice,
    x: View,
    [n, inner]: [usize; 2],
    is_largest: bool,
    y: View,
) -> Result<()> {
    check_float("max", x)?;
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "extreme", suffix(y.dtype))?;
    let config = config(y.len, inner)?;
    let (count, n, inner) = (y.len as i64, n as i64, inner as i64);
    let sign: f32 = if is_largest { 1.0 } else { -1.0 };
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer).arg(&count);
    launch.arg(&n).arg(&inner).arg(&sign);
    // SAFETY: the arguments are those of the kernel, buffers of (outer, n, inner) and of (outer, inner) elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Computes dx (outer, n, inner): dy (outer, inner) at the first element of x along n that is y, else 0.
pub(crate) fn backward(
    gpu: &CudaDevice,
    [dy, x, y]: [View; 3],
    [n, inner]: [usize; 2],
    dx: View,
) -> Result<()> {
    check_alike("max_backward", x, dx)?;
    if dx.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "extreme_backward", suffix(dx.dtype))?;
    let config = config(y.len, inner)?;
    let (count, n, inner) = (y.len as i64, n as i64, inner as i64);
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&x.pointer).arg(&y.pointer);
    launch.arg(&dx.pointer).arg(&count).arg(&n).arg(&inner);
    // SAFETY: the arguments are those of the kernel, buffers of (outer, inner) and of (outer, n, inner) elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Returns the grid for `count` outputs.
fn config(count: usize, inner: usize) -> Result<LaunchConfig> {
    let blocks = count.div_ceil(if inner == 1 { 8 } else { 256 });
    if blocks > i32::MAX as usize {
        bail!("max: expected under 2^31 blocks, got {blocks}");
    }
    Ok(launch_config((blocks, 1), (256, 1)))
}
