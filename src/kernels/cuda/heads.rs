//! Heads in and out of the model dimension; see `heads.cu`.

use super::source::Source;
use super::{View, launch_config};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

const SOURCE: Source = Source {
    name: "heads",
    parts: &[include_str!("heads.cu")],
};

/// y (B, N, M, width) = x (B, M, N, width) with its middle dimensions swapped: any dtype of 2 or 4 bytes, the same for both.
pub(crate) fn swap(card: &CudaDevice, x: View, sizes: [usize; 4], y: View) -> Result<()> {
    let [batch, m, n, width] = sizes;
    let rows = batch * m * n;
    if rows * width == 0 {
        return Ok(());
    }
    let size = x.dtype.size_in_bytes();
    let in_vectors =
        (width * size).is_multiple_of(16) && (x.pointer | y.pointer).is_multiple_of(16);
    let (name, words) = match (in_vectors, size) {
        (true, _) => ("16", width * size / 16),
        (false, 4) => ("4", width),
        (false, _) => ("2", width),
    };
    let (Ok(count), Ok(words)) = (i32::try_from(rows), i32::try_from(words)) else {
        bail!("heads of {rows} rows of {width}: the kernel counts to 2^31");
    };
    let lanes = (words as usize).next_power_of_two().min(32);
    let kernel = SOURCE.kernel(card, "swap", name)?;
    let [count, m, n] = [count as u32, m as u32, n as u32];
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer);
    launch.arg(&count).arg(&m).arg(&n).arg(&words);
    let blocks = rows.div_ceil(256 / lanes);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((blocks, 1), (lanes, 256 / lanes))) }.w()?;
    Ok(())
}
