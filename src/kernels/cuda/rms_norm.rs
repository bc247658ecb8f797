//! Root mean square normalisation; see `rms_norm.cu`.

use super::source::{Kernel, PRELUDE, Source};
use super::{View, in_vector, launch_config, packs, suffix};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "rms_norm",
    parts: &[PRELUDE, include_str!("rms_norm.cu")],
};

/// The widest row that the threads of a block hold in their registers, wherever it begins.
pub(crate) const MAX_WIDTH: usize = 8176;

/// How rows are spread over the card: as many blocks as run at once, each with one row after the other.
pub(crate) struct Spread {
    config: LaunchConfig,
}

impl Spread {
    fn new(card: &CudaDevice, kernel: &Kernel, x: View, width: usize) -> Result<Self> {
        let (rows, n) = (x.len / width, in_vector(x.dtype));
        let of_row = 32 * (packs(width, x) * n).div_ceil(512);
        let of_block = (256 / of_row).max(1);
        let mut config = launch_config((rows.div_ceil(of_block), 1), (of_row, of_block));
        config.grid_dim.0 = config
            .grid_dim
            .0
            .min(kernel.blocks_at_once(card, &config)? as u32);
        Ok(Self { config })
    }

    /// How many rows of partial sums the backward leaves.
    pub(crate) fn blocks(&self) -> usize {
        self.config.grid_dim.0 as usize
    }
}

/// `y = w x rstd`, with x and y (rows, width), w (width) f32, and rstd (rows) f32.
pub(crate) fn forward(
    card: &CudaDevice,
    x: View,
    weight: View,
    eps: f64,
    y: View,
    rstd: View,
) -> Result<()> {
    let kernel = SOURCE.kernel(card, &format!("rms_norm_forward_{}", suffix(x.dtype)))?;
    let spread = Spread::new(card, &kernel, x, weight.len)?;
    let (eps, rows, width) = (eps as f32, rstd.len as i64, weight.len as i32);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&weight.pointer).arg(&eps);
    launch
        .arg(&y.pointer)
        .arg(&rstd.pointer)
        .arg(&rows)
        .arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(spread.config) }.w()?;
    Ok(())
}

/// How the backward of x (rows, width) is spread: its `partials` are (blocks, width) f32.
pub(crate) fn backward_spread(card: &CudaDevice, x: View, width: usize) -> Result<Spread> {
    let kernel = SOURCE.kernel(card, &format!("rms_norm_backward_{}", suffix(x.dtype)))?;
    Spread::new(card, &kernel, x, width)
}

/// dx (rows, width) and dw (width) f32. `partials` is room to work in.
pub(crate) fn backward(
    card: &CudaDevice,
    spread: &Spread,
    [dy, x, weight, rstd]: [View; 4],
    [dx, dw, partials]: [View; 3],
) -> Result<()> {
    let kernel = SOURCE.kernel(card, &format!("rms_norm_backward_{}", suffix(x.dtype)))?;
    let (no_copy, rows, width, add_dx) = (0u64, rstd.len as i64, weight.len as i32, 0i32);
    let mut launch = kernel.builder();
    launch
        .arg(&dy.pointer)
        .arg(&x.pointer)
        .arg(&weight.pointer)
        .arg(&rstd.pointer);
    launch.arg(&dx.pointer).arg(&no_copy).arg(&partials.pointer);
    launch.arg(&rows).arg(&width).arg(&add_dx);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(spread.config) }.w()?;

    let kernel = SOURCE.kernel(card, "sum_partials")?;
    let (count, accumulate) = (spread.blocks() as i32, 0i32);
    let mut launch = kernel.builder();
    launch
        .arg(&partials.pointer)
        .arg(&count)
        .arg(&width)
        .arg(&dw.pointer)
        .arg(&accumulate);
    // SAFETY: as above.
    unsafe { launch.launch(launch_config((weight.len.div_ceil(32), 1), (32, 32))) }.w()?;
    Ok(())
}
