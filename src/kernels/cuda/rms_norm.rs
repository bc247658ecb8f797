//! Root mean square normalisation; see `rms_norm.cu`.
//!
//! x may be f32 where y is in half precision: the residual stream beside what goes into products.

use super::norm_rows::{ROWS, threads_for_rows};
use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffixes};
use crate::kernels::workspace::RMS_NORM_BLOCKS;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "rms_norm",
    parts: &[PRELUDE, ROWS, include_str!("rms_norm.cu")],
};

/// `y = w x rstd`, with x and y (rows, width), w (width) f32, and rstd (rows) f32.
pub(crate) fn forward(
    gpu: &CudaDevice,
    x: View,
    weight: View,
    eps: f64,
    y: View,
    rstd: View,
) -> Result<()> {
    let kernel = SOURCE.kernel(gpu, "rms_norm_forward", suffixes(x.dtype, y.dtype))?;
    let config = threads_for_rows(y, weight.len);
    let (eps, rows, width) = (eps as f32, rstd.len as i64, weight.len as i32);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&weight.pointer).arg(&eps);
    launch.arg(&y.pointer).arg(&rstd.pointer);
    launch.arg(&rows).arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// `sum = x + branch`, rounded to its dtype, and `y = w sum rstd`: x and sum (rows, width) in one dtype, branch and y
/// (rows, width) in another or the same, w (width) f32, rstd (rows) f32. sum may be x's buffer; none where it is not
/// wanted it.
pub(crate) fn add_forward(
    gpu: &CudaDevice,
    [x, branch, weight]: [View; 3],
    eps: f64,
    sum: Option<View>,
    [y, rstd]: [View; 2],
) -> Result<()> {
    let types = suffixes(x.dtype, y.dtype);
    let kernel = SOURCE.kernel(gpu, "add_rms_norm_forward", types)?;
    let config = threads_for_rows(y, weight.len);
    let (eps, rows, width) = (eps as f32, rstd.len as i64, weight.len as i32);
    let sum = sum.map_or(0, |sum| sum.pointer);
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&branch.pointer);
    launch.arg(&weight.pointer).arg(&eps);
    launch.arg(&sum).arg(&y.pointer).arg(&rstd.pointer);
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
    /// What was normed, (rows, width).
    pub x: View<'a>,
    /// What was added to x before the sum of both was normed, where it was: (rows, width), in half precision beside an
    /// x in f32.
    pub branch: Option<View<'a>>,
    /// (width) f32.
    pub weight: View<'a>,
    /// (rows) f32.
    pub rstd: View<'a>,
}

/// What the backward writes.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    /// (rows, width), in x's dtype; may be x's buffer.
    pub dx: View<'a>,
    /// Whether dx holds a gradient already, which is added to.
    pub add_dx: bool,
    /// dx once more, rounded to dy's dtype.
    pub copy: Option<View<'a>>,
    /// The norm's output once more, to the bit, in dy's dtype; may be dy's buffer.
    pub y: Option<View<'a>>,
    /// (width) f32.
    pub dw: View<'a>,
    /// Whether dw is added to.
    pub add_dw: bool,
}

/// The gradients of x and w. `partials` ([`rms_norm_partials`](crate::kernels::workspace::rms_norm_partials)) f32 is
/// room to work in.
pub(crate) fn backward(
    gpu: &CudaDevice,
    inputs: Inputs,
    gradients: Gradients,
    partials: View,
) -> Result<()> {
    let Inputs {
        dy,
        x,
        branch,
        weight,
        rstd,
    } = inputs;
    let types = suffixes(x.dtype, dy.dtype);
    let mut kernel = SOURCE.kernel(gpu, "rms_norm_backward", types)?;
    let mut config = threads_for_rows(dy, weight.len);
    let at_once = kernel.blocks_at_once(gpu, &config)?;
    config.grid_dim.0 = config.grid_dim.0.min(at_once.min(RMS_NORM_BLOCKS) as u32);
    if branch.is_some() {
        // With as many blocks, whatever this one takes: dw's bits depend on that.
        kernel = SOURCE.kernel(gpu, "add_rms_norm_backward", types)?;
    }
    let copy = gradients.copy.map_or(0, |copy| copy.pointer);
    let y = gradients.y.map_or(0, |y| y.pointer);
    let (rows, width) = (rstd.len as i64, weight.len as i32);
    let add_dx = i32::from(gradients.add_dx);
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&x.pointer);
    if let Some(branch) = &branch {
        launch.arg(&branch.pointer);
    }
    launch.arg(&weight.pointer).arg(&rstd.pointer);
    launch.arg(&gradients.dx.pointer).arg(&copy).arg(&y);
    launch.arg(&partials.pointer);
    launch.arg(&rows).arg(&width).arg(&add_dx);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;

    let kernel = SOURCE.kernel(gpu, "sum_partials", "")?;
    let (count, add_dw) = (config.grid_dim.0 as i32, i32::from(gradients.add_dw));
    let mut launch = kernel.builder();
    launch.arg(&partials.pointer).arg(&count).arg(&width);
    launch.arg(&gradients.dw.pointer).arg(&add_dw);
    // SAFETY: as above.
    unsafe { launch.launch(launch_config((weight.len.div_ceil(32), 1), (32, 32))) }.w()?;
    Ok(())
}
