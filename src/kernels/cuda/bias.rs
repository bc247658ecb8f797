//! The bias of a matmul and its gradient; see `bias.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffix, suffixes};
use crate::kernels::workspace::{bias_backward, bias_parts};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "bias",
    parts: &[PRELUDE, include_str!("bias.cu")],
};

/// Fills every row of y (N, width) with the bias (width), which is in y's dtype or in f32.
pub(crate) fn fill(gpu: &CudaDevice, bias: View, y: View) -> Result<()> {
    if y.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, "fill", suffixes(bias.dtype, y.dtype))?;
    let rows = y.len / bias.len;
    let packs = bias.len.div_ceil(4);
    let along_row = packs.next_multiple_of(32).min(256);
    let block_rows = 256 / along_row;
    let blocks = rows.div_ceil(8 * block_rows).min(65_535); // eight rows a thread
    let config = launch_config((packs.div_ceil(along_row), blocks), (along_row, block_rows));
    let (rows, width) = (rows as i64, bias.len as i32);
    let mut launch = kernel.builder();
    launch.arg(&bias.pointer).arg(&y.pointer);
    launch.arg(&rows).arg(&width);
    // SAFETY: the arguments are those of the kernel, buffers of width and of rows * width elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Computes db (width), f32, the sum of the rows of dy (N, width), or adds the sum to db if `adds`. `workspace` is f32
/// scratch of [`bias_backward`] elements.
pub(crate) fn gradient(
    gpu: &CudaDevice,
    dy: View,
    db: View,
    adds: bool,
    workspace: View,
) -> Result<()> {
    let (rows, width) = (dy.len / db.len.max(1), db.len);
    if width == 0 {
        return Ok(());
    }
    let parts = bias_parts(rows);
    let partial = workspace.slice(0, bias_backward(rows, width));
    sums(gpu, dy, partial, [rows, width, parts], false)?;
    sums(gpu, partial, db, [parts, width, 1], adds)
}

fn sums(
    gpu: &CudaDevice,
    x: View,
    out: View,
    [rows, width, parts]: [usize; 3],
    adds: bool,
) -> Result<()> {
    let kernel = SOURCE.kernel(gpu, "sums", suffix(x.dtype))?;
    let config = launch_config((width.div_ceil(32), parts), (32, 8));
    let rows_per_part = rows.div_ceil(parts) as i32;
    let (rows, width, adds) = (rows as i64, width as i32, i32::from(adds));
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&out.pointer);
    launch.arg(&rows).arg(&width);
    launch.arg(&rows_per_part).arg(&adds);
    // SAFETY: the arguments are those of the kernel, buffers of rows * width and of parts * width elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
