//! Splits and merges heads; see `heads.cu`.

use super::source::Source;
use super::{View, launch_config};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

const SOURCE: Source = Source {
    name: "heads",
    parts: &[include_str!("heads.cu")],
};

/// Writes x (B, M, N, width), of any dtype of 2 or 4 bytes, to y (B, N, M, width). `sizes` are those of x.
pub(crate) fn swap(gpu: &CudaDevice, x: View, sizes: [usize; 4], y: View) -> Result<()> {
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
    if rows.max(words) > i32::MAX as usize {
        bail!("heads: expected under 2^31 rows and columns, got {rows} rows of {width}");
    }
    let lanes = words.next_power_of_two().min(32);
    let blocks = rows.div_ceil(256 / lanes);
    let kernel = SOURCE.kernel(gpu, "swap", name)?;
    let ([rows, m, n], words) = ([rows, m, n].map(|size| size as u32), words as i32);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer);
    launch.arg(&rows).arg(&m).arg(&n).arg(&words);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((blocks, 1), (lanes, 256 / lanes))) }.w()?;
    Ok(())
}
