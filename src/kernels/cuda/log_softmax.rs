//! Log-softmax of rows; see `log_softmax.cu`.

use super::source::{PRELUDE, Source};
use super::{View, check_alike, in_vector, launch_config, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "log_softmax",
    parts: &[PRELUDE, include_str!("log_softmax.cu")],
};

/// Computes y (rows, width) from x.
pub(crate) fn forward(gpu: &CudaDevice, x: View, width: usize, y: View) -> Result<()> {
    launch(gpu, "log_softmax", &[x, y], width)
}

/// Computes dx (rows, width) from dy and x.
pub(crate) fn backward(gpu: &CudaDevice, [dy, x]: [View; 2], width: usize, dx: View) -> Result<()> {
    launch(gpu, "log_softmax_backward", &[dy, x, dx], width)
}

fn launch(gpu: &CudaDevice, stem: &'static str, buffers: &[View], width: usize) -> Result<()> {
    let x = buffers[0];
    let mut others = buffers.iter();
    others.try_for_each(|other| check_alike(stem, x, *other))?;
    if x.len == 0 {
        return Ok(());
    }
    let of_row = (32 * width.div_ceil(128 * in_vector(x.dtype))).min(512);
    let of_block = (128 / of_row).max(1);
    let kernel = SOURCE.kernel(gpu, stem, suffix(x.dtype))?;
    let rows = x.len / width;
    let config = launch_config((rows.div_ceil(of_block), 1), (of_row, of_block));
    let (rows, width) = (rows as i64, width as i32);
    let mut launch = kernel.builder();
    for buffer in buffers {
        launch.arg(&buffer.pointer);
    }
    launch.arg(&rows).arg(&width);
    // SAFETY: the arguments are those of the kernel, buffers of rows * width elements each.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
