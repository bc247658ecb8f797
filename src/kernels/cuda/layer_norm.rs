//! Layer normalisation; see `layer_norm.cu`.
//!
//! x may be f32 where y is in half precision: the residual stream beside what goes into products.

use super::norm_rows::{ROWS, threads_for_rows};
use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffixes};
use crate::kernels::workspace::LAYER_NORM_BLOCKS;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "layer_norm",
    parts: &[PRELUDE, ROWS, include_str!("layer_norm.cu")],
};

/// `y = w (x - mean) rstd + b`, with x and y (rows, width), w and b (width) f32 (no b is zeros), and statistics (rows,
/// 2) f32: mean and rstd of each row. y may be x's buffer where they have one dtype.
pub(crate) fn forward(
    gpu: &CudaDevice,
    x: View,
    (weight, bias): (View, Option<View>),
    eps: f64,
    y: View,
    statistics: View,
) -> Result<()> {
    let types = suffixes(x.dtype, y.dtype);
    let kernel = SOURCE.kernel(gpu, "layer_norm_forward", types)?;
    let config = threads_for_rows(y, weight.len);
    let (rows, width) = ((statistics.len / 2) as i64, weight.len as i32);
    let (eps, bias) = (eps as f32, bias.map_or(0, |bias| bias.pointer));
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&weight.pointer);
    launch.arg(&bias).arg(&eps);
    launch.arg(&y.pointer).arg(&statistics.pointer);
    launch.arg(&rows).arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// What the backward reads, as the forward had it.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// (rows, width), in y's dtype.
    pub dy: View<'a>,
    /// (rows, width).
    pub x: View<'a>,
    /// (width) f32.
    pub weight: View<'a>,
    /// Mean and rstd of each row, (rows, 2) f32.
    pub statistics: View<'a>,
}

/// What the backward writes.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    /// (rows, width), in x's dtype; may be x's buffer, or dy's where they have one dtype.
    pub dx: View<'a>,
    /// Whether dx holds a gradient already, which is added to.
    pub add_dx: bool,
    /// (width) f32.
    pub dw: View<'a>,
    /// (width) f32, where anybody wants it.
    pub db: Option<View<'a>>,
    /// Whether dw and db are added to.
    pub add_sums: bool,
}

/// The gradients of x, w and b. `partials` ([`layer_norm_partials`](crate::kernels::workspace::layer_norm_partials))
/// f32 is room to work in.
pub(crate) fn backward(
    gpu: &CudaDevice,
    inputs: Inputs,
    gradients: Gradients,
    partials: View,
) -> Result<()> {
    let Inputs {
        dy,
        x,
        weight,
        statistics,
    } = inputs;
    let types = suffixes(x.dtype, dy.dtype);
    let kernel = SOURCE.kernel(gpu, "layer_norm_backward", types)?;
    let mut config = threads_for_rows(dy, weight.len);
    let at_once = kernel.blocks_at_once(gpu, &config)?;
    let most = at_once.min(LAYER_NORM_BLOCKS) as u32;
    config.grid_dim.0 = config.grid_dim.0.min(most);
    let (rows, width) = ((statistics.len / 2) as i64, weight.len as i32);
    let add_dx = i32::from(gradients.add_dx);
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&x.pointer);
    launch.arg(&weight.pointer).arg(&statistics.pointer);
    launch.arg(&gradients.dx.pointer).arg(&partials.pointer);
    launch.arg(&rows).arg(&width).arg(&add_dx);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;

    let kernel = SOURCE.kernel(gpu, "sum_partials", "")?;
    let sums = 1 + usize::from(gradients.db.is_some());
    let (count, add_sums) = (config.grid_dim.0 as i32, i32::from(gradients.add_sums));
    let db = gradients.db.map_or(0, |db| db.pointer);
    let mut launch = kernel.builder();
    launch.arg(&partials.pointer).arg(&count).arg(&width);
    launch.arg(&gradients.dw.pointer).arg(&db).arg(&add_sums);
    let config = launch_config((weight.len.div_ceil(32), sums), (32, 32));
    // SAFETY: as above; without a db the grid leaves its sums out.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
