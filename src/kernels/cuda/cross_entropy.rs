//! Cross-entropy; see `cross_entropy.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, packs, suffix};
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "cross_entropy",
    parts: &[PRELUDE, include_str!("cross_entropy.cu")],
};

/// The targets of the rows of logits, already checked.
#[derive(Clone, Copy)]
pub(crate) struct Targets<'a> {
    /// (rows) u32.
    pub ids: View<'a>,
    /// The target that does not count.
    pub ignore: Option<u32>,
    /// The divisor of the sum of the losses: for a mean, the number of targets that count.
    pub divisor: usize,
    /// Label smoothing and the coefficient of the z-loss; 0 for none.
    pub terms: [f32; 2],
}

impl Targets<'_> {
    fn ignored(&self) -> i64 {
        self.ignore.map_or(-1, i64::from)
    }
}

/// Computes the mean loss (1) f32 of logits (rows, classes), and the statistics (rows, 2) f32: each row's top and
/// total. `losses` (rows) f32 is scratch.
pub(crate) fn forward(
    gpu: &CudaDevice,
    logits: View,
    targets: Targets,
    losses: View,
    statistics: View,
    mean: View,
) -> Result<()> {
    rows(gpu, logits, targets, losses, statistics)?;
    mean_of(gpu, losses, None, targets.divisor, (mean.pointer, 0), false)
}

/// Like [`forward`], but computes the losses (rows) f32 themselves: 0 for targets that do not count.
pub(crate) fn rows(
    gpu: &CudaDevice,
    logits: View,
    targets: Targets,
    losses: View,
    statistics: View,
) -> Result<()> {
    let rows = targets.ids.len;
    let classes = logits.len / rows;
    let kernel = SOURCE.kernel(gpu, "cross_entropy_forward", suffix(logits.dtype))?;
    let (x, y) = block(classes, logits, 512);
    let (count, ignore, width) = (rows as i64, targets.ignored(), classes as i32);
    let [smoothing, z_loss] = targets.terms;
    let mut launch = kernel.builder();
    launch.arg(&logits.pointer);
    launch.arg(&targets.ids.pointer).arg(&ignore);
    launch.arg(&smoothing).arg(&z_loss);
    launch.arg(&losses.pointer).arg(&statistics.pointer);
    launch.arg(&count).arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((rows.div_ceil(y), 1), (x, y))) }.w()?;
    Ok(())
}

/// Computes y (1) f32: x (1), f32 or f64, divided by the number of targets that count; NaN or infinite if none does.
pub(crate) fn divide_by_counted(
    gpu: &CudaDevice,
    targets: Targets,
    x: View,
    y: View,
) -> Result<()> {
    let types = if x.dtype == DType::F64 { "f64" } else { "f32" };
    let kernel = SOURCE.kernel(gpu, "cross_entropy_divide_by_counted", types)?;
    let (rows, ignore) = (targets.ids.len as i64, targets.ignored());
    let mut launch = kernel.builder();
    launch.arg(&targets.ids.pointer).arg(&rows).arg(&ignore);
    launch.arg(&x.pointer).arg(&y.pointer);
    // SAFETY: the arguments are those of the kernel, buffers of `rows` elements and of 1.
    unsafe { launch.launch(launch_config((1, 1), (1024, 1))) }.w()?;
    Ok(())
}

/// Computes the gradient of the logits (rows, classes) from dloss f32 and [`forward`]'s statistics. dloss is the
/// gradient of the mean (1), or of each loss (rows).
pub(crate) fn backward(
    gpu: &CudaDevice,
    logits: View,
    targets: Targets,
    statistics: View,
    dloss: View,
    dlogits: View,
) -> Result<()> {
    let rows = targets.ids.len;
    let classes = logits.len / rows;
    let kernel = SOURCE.kernel(gpu, "cross_entropy_backward", suffix(logits.dtype))?;
    let (x, y) = block(classes, logits, 256);
    let parts = packs(classes, logits).div_ceil(4 * x);
    let config = launch_config((rows.div_ceil(y), parts), (x, y));
    let (count, ignore, width) = (rows as i64, targets.ignored(), classes as i32);
    let (divisor, of_row) = (targets.divisor as i64, i32::from(dloss.len > 1));
    let [smoothing, z_loss] = targets.terms;
    let mut launch = kernel.builder();
    launch.arg(&logits.pointer);
    launch.arg(&targets.ids.pointer).arg(&ignore);
    launch.arg(&smoothing).arg(&z_loss);
    launch.arg(&statistics.pointer).arg(&dloss.pointer);
    launch.arg(&of_row).arg(&divisor);
    launch.arg(&dlogits.pointer).arg(&count).arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Computes the losses (rows) f32 and overwrites logits (rows, classes) with their gradient. Rows are `row_stride`
/// elements apart. dloss (1) f32 is the gradient of the mean over all targets that count; these may be some of them.
pub(crate) fn in_place(
    gpu: &CudaDevice,
    logits: View,
    [classes, row_stride]: [usize; 2],
    targets: Targets,
    dloss: View,
    losses: View,
) -> Result<()> {
    let rows = targets.ids.len;
    let kernel = SOURCE.kernel(gpu, "cross_entropy_in_place", suffix(logits.dtype))?;
    // Fewer long rows run at a time, so that the level-2 cache holds them between the two reads.
    let row_bytes = classes * logits.dtype.size_in_bytes();
    let most = if row_bytes > 128 << 10 { 1024 } else { 512 };
    let (x, y) = block(classes, logits, most);
    let (count, ignore) = (rows as i64, targets.ignored());
    let [width, row_stride] = [classes, row_stride].map(|elements| elements as i32);
    let divisor = targets.divisor as i64;
    let [smoothing, z_loss] = targets.terms;
    let mut launch = kernel.builder();
    launch.arg(&logits.pointer);
    launch.arg(&targets.ids.pointer).arg(&ignore);
    launch.arg(&smoothing).arg(&z_loss);
    launch.arg(&dloss.pointer).arg(&divisor);
    launch.arg(&losses.pointer).arg(&count);
    launch.arg(&width).arg(&row_stride);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((rows.div_ceil(y), 1), (x, y))) }.w()?;
    Ok(())
}

/// Computes loss (1) f64, the sum of losses (rows) f32 divided by `divisor`, or adds to it. With `targets`, the divisor
/// is first multiplied by the number of them that count.
pub(crate) fn mean(
    gpu: &CudaDevice,
    losses: View,
    targets: Option<Targets>,
    divisor: usize,
    loss: View,
    accumulate: bool,
) -> Result<()> {
    mean_of(gpu, losses, targets, divisor, (0, loss.pointer), accumulate)
}

/// Returns the threads per row, at most `most`, and the rows per block.
fn block(classes: usize, logits: View, most: usize) -> (usize, usize) {
    let of_row = (32 * packs(classes, logits).div_ceil(128)).min(most);
    (of_row, (128 / of_row).max(1))
}

/// Writes the mean as f32, as f64, or both, to the addresses that are not null.
fn mean_of(
    gpu: &CudaDevice,
    losses: View,
    targets: Option<Targets>,
    divisor: usize,
    (mean, mean64): (u64, u64),
    accumulate: bool,
) -> Result<()> {
    let kernel = SOURCE.kernel(gpu, "cross_entropy_mean", "")?;
    let (rows, divisor) = (losses.len as i64, divisor as i64);
    let accumulate = i32::from(accumulate);
    let ids = targets.map_or(0, |targets| targets.ids.pointer);
    let ignore = targets.map_or(-1, |targets| targets.ignored());
    let mut launch = kernel.builder();
    launch.arg(&losses.pointer).arg(&ids).arg(&ignore);
    launch.arg(&rows).arg(&divisor);
    launch.arg(&mean).arg(&mean64).arg(&accumulate);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((1, 1), (1024, 1))) }.w()?;
    Ok(())
}
