//! Dropout; see `dropout.cu`.

use super::source::{PRELUDE, Source};
use super::{DROPOUT, PHILOX, View, check_alike, flat_config, in_vector, suffix};
use crate::kernels::Dropout;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "dropout",
    parts: &[PRELUDE, PHILOX, DROPOUT, include_str!("dropout.cu")],
};

/// Computes `y = x / (1 - p)` for kept elements, else 0; x, y (n) in rows of `width`, key (4) u32. y may be x's buffer.
pub(crate) fn dropout(
    gpu: &CudaDevice,
    x: View,
    key: View,
    dropout: Dropout,
    width: usize,
    y: View,
) -> Result<()> {
    check_alike("dropout", x, y)?;
    if x.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "dropout", suffix(x.dtype))?;
    // If rows fill their counters, their half words are contiguous, so all elements can form one row.
    let width = if width.is_multiple_of(8) {
        x.len
    } else {
        width
    } as i64;
    let (n, threshold, scale) = (
        x.len as i64,
        u32::from(dropout.threshold()),
        dropout.scale() as f32,
    );
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&key.pointer).arg(&y.pointer);
    launch.arg(&n).arg(&width).arg(&dropout.site);
    launch.arg(&threshold).arg(&scale);
    let config = flat_config(x.len.div_ceil(in_vector(x.dtype)));
    // SAFETY: the arguments are those of the kernel, buffers of n elements and a key of 4.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
