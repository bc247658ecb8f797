//! Rows repeated, and the sum over repeats; see `repeat.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffix};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

const SOURCE: Source = Source {
    name: "repeat",
    parts: &[PRELUDE, include_str!("repeat.cu")],
};

/// Writes each row of x (rows, width) `times` times to y (rows * times, width), both of any one dtype of 2 or 4 bytes.
pub(crate) fn repeat(gpu: &CudaDevice, x: View, width: usize, times: usize, y: View) -> Result<()> {
    let size = x.dtype.size_in_bytes();
    let in_vectors =
        (width * size).is_multiple_of(16) && (x.pointer | y.pointer).is_multiple_of(16);
    let (word, bytes) = match (in_vectors, size) {
        (true, _) => ("16", 16),
        (false, 4) => ("4", 4),
        (false, _) => ("2", 2),
    };
    let [n, width] = [y.len, width].map(|count| count * size / bytes);
    launch(gpu, ("repeat", word), [x, y], [n, width, times])
}

/// Computes dx (rows, width), the sum of each row's repeats in dy (rows * times, width), in f32, rounded once.
pub(crate) fn fold(gpu: &CudaDevice, dy: View, width: usize, times: usize, dx: View) -> Result<()> {
    launch(
        gpu,
        ("fold", suffix(dx.dtype)),
        [dy, dx],
        [dx.len, width, times],
    )
}

fn launch(
    gpu: &CudaDevice,
    (stem, types): (&'static str, &'static str),
    [from, to]: [View; 2],
    [n, width, times]: [usize; 3],
) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    if times > i32::MAX as usize || n.div_ceil(256) > i32::MAX as usize {
        bail!("repeat: expected under 2^31 blocks and repeats, got {n} words, {times} times");
    }
    let kernel = SOURCE.kernel(gpu, stem, types)?;
    let config = launch_config((n.div_ceil(256), 1), (256, 1));
    let (n, width, times) = (n as i64, width as i64, times as i32);
    let mut launch = kernel.builder();
    launch.arg(&from.pointer).arg(&to.pointer);
    launch.arg(&n).arg(&width).arg(&times);
    // SAFETY: the arguments are those of the kernel: n words of the larger buffer, or n elements of the smaller.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
