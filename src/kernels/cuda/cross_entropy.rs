//! Cross-entropy; see `cross_entropy.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, packs, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "cross_entropy",
    parts: &[PRELUDE, include_str!("cross_entropy.cu")],
};

/// The most classes that the backward's grid reaches, in f32.
pub(crate) const MAX_CLASSES: usize = 65_535 * 4 * 256 * 4;

/// The targets of (rows) logits, checked.
#[derive(Clone, Copy)]
pub(crate) struct Targets<'a> {
    /// (rows) u32.
    pub ids: View<'a>,
    /// The id that does not count.
    pub ignore: Option<u32>,
    /// How many count.
    pub counted: usize,
}

impl Targets<'_> {
    fn ignored(&self) -> i64 {
        self.ignore.map_or(-1, i64::from)
    }
}

/// The mean loss, (1) f32, of logits (rows, classes); keeps lse (rows) f32. `losses` (rows) f32 is room to work in.
pub(crate) fn forward(
    card: &CudaDevice,
    logits: View,
    targets: Targets,
    losses: View,
    lse: View,
    mean: View,
) -> Result<()> {
    let rows = targets.ids.len;
    let classes = logits.len / rows;
    let kernel = SOURCE.kernel(
        card,
        &format!("cross_entropy_forward_{}", suffix(logits.dtype)),
    )?;
    let x = (32 * packs(classes, logits).div_ceil(128)).min(512);
    let y = (128 / x).max(1);
    let (count, ignore, width) = (rows as i64, targets.ignored(), classes as i32);
    let mut launch = kernel.builder();
    launch
        .arg(&logits.pointer)
        .arg(&targets.ids.pointer)
        .arg(&ignore);
    launch
        .arg(&losses.pointer)
        .arg(&lse.pointer)
        .arg(&count)
        .arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(launch_config((rows.div_ceil(y), 1), (x, y))) }.w()?;

    let kernel = SOURCE.kernel(card, "cross_entropy_mean")?;
    let (counted, no_mean64, accumulate) = (targets.counted as i64, 0u64, 0i32);
    let mut launch = kernel.builder();
    launch.arg(&losses.pointer).arg(&count).arg(&counted);
    launch.arg(&mean.pointer).arg(&no_mean64).arg(&accumulate);
    // SAFETY: as above.
    unsafe { launch.launch(launch_config((1, 1), (1024, 1))) }.w()?;
    Ok(())
}

/// The logits' gradient, (rows, classes), from that of the mean, dloss (1) f32.
pub(crate) fn backward(
    card: &CudaDevice,
    logits: View,
    targets: Targets,
    lse: View,
    dloss: View,
    dlogits: View,
) -> Result<()> {
    let rows = targets.ids.len;
    let classes = logits.len / rows;
    let kernel = SOURCE.kernel(
        card,
        &format!("cross_entropy_backward_{}", suffix(logits.dtype)),
    )?;
    let packs = packs(classes, logits);
    let x = (32 * packs.div_ceil(128)).min(256);
    let y = (128 / x).max(1);
    let config = launch_config((rows.div_ceil(y), packs.div_ceil(4 * x)), (x, y));
    let (count, ignore, width) = (rows as i64, targets.ignored(), classes as i32);
    let counted = targets.counted as i64;
    let mut launch = kernel.builder();
    launch
        .arg(&logits.pointer)
        .arg(&targets.ids.pointer)
        .arg(&ignore);
    launch.arg(&lse.pointer).arg(&dloss.pointer).arg(&counted);
    launch.arg(&dlogits.pointer).arg(&count).arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
