//! The sum of a buffer and its gradient; see `reduce.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_float, launch_config, suffix};
use crate::kernels::workspace::sum_parts;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "reduce",
    parts: &[PRELUDE, include_str!("reduce.cu")],
};

/// Computes y (1), `factor` times the sum of x (n), in x's dtype. `parts` is f64 scratch of [`sum_parts`] elements.
pub(crate) fn sum(gpu: &CudaDevice, x: View, factor: f64, y: View, parts: View) -> Result<()> {
    check_float("sum", x)?;
    let count = sum_parts(x.len);
    let (n, per_part) = (
        x.len as i64,
        x.len.div_ceil(count).next_multiple_of(8) as i64,
    );
    let kernel = SOURCE.kernel(gpu, "sum_parts", suffix(x.dtype))?;
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&parts.pointer);
    launch.arg(&n).arg(&per_part);
    // SAFETY: the arguments are those of the kernel, buffers of n and of `count` elements.
    unsafe { launch.launch(launch_config((count, 1), (256, 1))) }.w()?;

    let kernel = SOURCE.kernel(gpu, "sum_whole", suffix(y.dtype))?;
    let count = count as i32;
    let mut launch = kernel.builder();
    launch.arg(&parts.pointer).arg(&y.pointer);
    launch.arg(&count).arg(&factor);
    // SAFETY: the arguments are those of the kernel, buffers of `count` and of 1 element.
    unsafe { launch.launch(launch_config((1, 1), (1024, 1))) }.w()?;
    Ok(())
}

/// Fills y (n) with `factor` times dy (1), in the same dtype.
pub(crate) fn spread(gpu: &CudaDevice, dy: View, factor: f64, y: View) -> Result<()> {
    check_float("sum_backward", dy)?;
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "spread", suffix(y.dtype))?;
    let n = y.len as i64;
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&y.pointer);
    launch.arg(&n).arg(&factor);
    // SAFETY: the arguments are those of the kernel, buffers of 1 and of n elements.
    unsafe { launch.launch(launch_config((y.len.div_ceil(2048), 1), (256, 1))) }.w()?;
    Ok(())
}
