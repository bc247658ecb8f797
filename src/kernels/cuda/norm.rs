//! RMSNorm and LayerNorm; see `norm.cu`.
//!
//! x may be f32 while y is half precision: x is then the residual stream and y the input of a matmul.

use super::norm_rows::{ROWS, threads_for_rows};
use super::source::{PRELUDE, Source};
use super::{View, launch_config, suffixes};
use crate::kernels::norm::Norm;
use crate::kernels::workspace::NORM_BLOCKS;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::PushKernelArg;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

/// The sources of the norms.
const SOURCES: [Source; 3] = [
    Source {
        name: "rms_norm",
        parts: &[
            PRELUDE,
            ROWS,
            "const bool CENTERED = false, OFFSET = false;\n",
            include_str!("norm.cu"),
        ],
    },
    Source {
        name: "offset_rms_norm",
        parts: &[
            PRELUDE,
            ROWS,
            "const bool CENTERED = false, OFFSET = true;\n",
            include_str!("norm.cu"),
        ],
    },
    Source {
        name: "layer_norm",
        parts: &[
            PRELUDE,
            ROWS,
            "const bool CENTERED = true, OFFSET = false;\n",
            include_str!("norm.cu"),
        ],
    },
];

/// The inputs of forward and backward.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// (rows, width).
    pub x: View<'a>,
    /// Added to x before the norm: (rows, width), in y's dtype.
    pub branch: Option<View<'a>>,
    /// (width) f32.
    pub weight: View<'a>,
    /// LayerNorm's bias: (width) f32.
    pub bias: Option<View<'a>>,
}

/// The outputs of forward.
#[derive(Clone, Copy)]
pub(crate) struct Outputs<'a> {
    /// x + branch, rounded to x's dtype: (rows, width); may be x's buffer.
    pub sum: Option<View<'a>>,
    /// (rows, width), in x's dtype or in half precision.
    pub y: View<'a>,
    /// (rows, [`statistics`](Norm::statistics)) f32: the mean for LayerNorm, then rstd.
    pub statistics: View<'a>,
}

/// Computes y and the statistics of x, or of x + branch.
pub(crate) fn forward(
    gpu: &CudaDevice,
    norm: Norm,
    eps: f64,
    inputs: Inputs,
    outputs: Outputs,
) -> Result<()> {
    let Inputs {
        x,
        branch,
        weight,
        bias,
    } = inputs;
    let Outputs { sum, y, statistics } = outputs;
    let name = match branch {
        None => "norm_forward",
        Some(_) => "add_norm_forward",
    };
    let kernel = source(norm).kernel(gpu, name, suffixes(x.dtype, y.dtype))?;
    let config = threads_for_rows(y, weight.len);
    let (eps, width) = (eps as f32, weight.len as i32);
    let rows = (statistics.len / norm.statistics()) as i64;
    let [bias, sum] = [bias, sum].map(|view| view.map_or(0, |view| view.pointer));
    let mut launch = kernel.builder();
    launch.arg(&x.pointer);
    if let Some(branch) = &branch {
        launch.arg(&branch.pointer);
    }
    launch.arg(&weight.pointer).arg(&bias).arg(&eps);
    if branch.is_some() {
        launch.arg(&sum);
    }
    launch.arg(&y.pointer).arg(&statistics.pointer);
    launch.arg(&rows).arg(&width);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// The outputs of backward.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    /// (rows, width), in x's dtype. May be x's buffer, or dy's if they have one dtype and `y` is `None`.
    pub dx: View<'a>,
    /// Whether the gradient is added to dx.
    pub add_dx: bool,
    /// dx rounded to dy's dtype.
    pub copy: Option<View<'a>>,
    /// The norm's output, with the same bits as in forward. May be dy's buffer.
    pub y: Option<View<'a>>,
    /// (width) f32.
    pub dw: View<'a>,
    /// Whether the gradient is added to dw.
    pub add_dw: bool,
    /// LayerNorm's gradient of the bias: (width) f32.
    pub db: Option<View<'a>>,
    /// Whether the gradient is added to db.
    pub add_db: bool,
}

/// Computes the gradients of x, w and b from `dy` (rows, width) in y's dtype and forward's `statistics`. `partials` is
/// f32 scratch of [`norm_partials`](crate::kernels::workspace::norm_partials) elements. A branch is supported only in
/// half precision with x in f32; otherwise pass the sum as x.
pub(crate) fn backward(
    gpu: &CudaDevice,
    norm: Norm,
    [dy, statistics]: [View; 2],
    inputs: Inputs,
    gradients: Gradients,
    partials: View,
) -> Result<()> {
    let Inputs {
        x,
        branch,
        weight,
        bias,
    } = inputs;
    let types = suffixes(x.dtype, dy.dtype);
    let mut kernel = source(norm).kernel(gpu, "norm_backward", types)?;
    let mut config = threads_for_rows(dy, weight.len);
    let concurrent = kernel.concurrent_blocks(gpu, &config)?;
    config.grid_dim.0 = config.grid_dim.0.min(concurrent.min(NORM_BLOCKS) as u32);
    if branch.is_some() {
        // The number of blocks is that of the kernel without branch, because the bits of dw depend on it.
        kernel = source(norm).kernel(gpu, "add_norm_backward", types)?;
    }
    let [bias, copy, y, db] = [bias, gradients.copy, gradients.y, gradients.db]
        .map(|view| view.map_or(0, |view| view.pointer));
    let rows = (statistics.len / norm.statistics()) as i64;
    let (width, add_dx) = (weight.len as i32, i32::from(gradients.add_dx));
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&x.pointer);
    if let Some(branch) = &branch {
        launch.arg(&branch.pointer);
    }
    launch.arg(&weight.pointer).arg(&bias);
    launch.arg(&statistics.pointer);
    launch.arg(&gradients.dx.pointer).arg(&copy).arg(&y);
    launch.arg(&partials.pointer);
    launch.arg(&rows).arg(&width).arg(&add_dx);
    // SAFETY: the arguments are those of the kernel, and the buffers have the sizes that they say.
    unsafe { launch.launch(config) }.w()?;

    let kernel = source(norm).kernel(gpu, "sum_partials", "")?;
    let count = config.grid_dim.0 as i32;
    let [add_dw, add_db] = [gradients.add_dw, gradients.add_db].map(i32::from);
    let mut launch = kernel.builder();
    launch.arg(&partials.pointer).arg(&count).arg(&width);
    launch.arg(&gradients.dw.pointer).arg(&db);
    launch.arg(&add_dw).arg(&add_db);
    let config = launch_config((weight.len.div_ceil(32), norm.sums()), (32, 32));
    // SAFETY: as above.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

fn source(norm: Norm) -> &'static Source {
    match norm {
        Norm::Rms => &SOURCES[0],
        Norm::OffsetRms => &SOURCES[1],
        Norm::Layer => &SOURCES[2],
    }
}
