//! Truncated normal numbers; see `normal.cu`.

use super::source::{PRELUDE, Source};
use super::{PHILOX, View, check_float, in_vector, launch_config, suffix};
use crate::kernels::philox::Stream;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "normal",
    parts: &[PRELUDE, PHILOX, include_str!("normal.cu")],
};

/// The kernel's struct of this name.
#[repr(C)]
struct Words([u32; 5]);

// SAFETY: five words, like the kernel's struct.
unsafe impl DeviceRepr for Words {}

/// Computes `y = mean + std z`, where z are the quantiles of the stream's words: y (n).
pub(crate) fn normal(gpu: &CudaDevice, stream: Stream, mean: f64, std: f64, y: View) -> Result<()> {
    check_float("normal", y)?;
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "normal", suffix(y.dtype))?;
    let (n, words) = (y.len as i64, Words(stream.key_and_counter()));
    let mut launch = kernel.builder();
    launch.arg(&y.pointer).arg(&n).arg(&words);
    launch.arg(&mean).arg(&std);
    let packs = y.len.div_ceil(in_vector(y.dtype));
    let config = launch_config((packs.div_ceil(256), 1), (256, 1));
    // SAFETY: the arguments are those of the kernel, a buffer of n elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
