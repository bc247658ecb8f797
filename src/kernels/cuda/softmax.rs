//! Softmax with scale and mask; see `softmax.cu`.

use super::source::{PRELUDE, Source};
use super::{View, in_vector, launch_config, packs, suffix};
use crate::kernels::Mask;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "softmax",
    parts: &[PRELUDE, include_str!("softmax.cu")],
};

/// What a row of scores is: (batch, queries, keys), scaled and masked.
#[derive(Clone, Copy)]
pub(crate) struct Scores {
    pub scale: f64,
    pub mask: Mask,
    pub queries: usize,
    pub keys: usize,
}

impl Scores {
    /// Query q sees the keys under q + 1 + shift.
    pub(super) fn shift(&self) -> i64 {
        match self.mask {
            Mask::Full => self.keys as i64,
            Mask::Causal => 0,
            Mask::CausalEnd => self.keys as i64 - self.queries as i64,
        }
    }

    /// `in_registers`: how many elements of a row of `result` a thread holds.
    fn config(&self, rows: usize, result: View, in_registers: usize) -> LaunchConfig {
        let most = if result.dtype == DType::F32 {
            1024
        } else {
            512
        };
        let threads = (packs(self.keys, result) * in_vector(result.dtype)).div_ceil(in_registers);
        let x = threads.next_multiple_of(32).min(most);
        let y = (128 / x).max(1);
        launch_config((rows.div_ceil(y), 1), (x, y))
    }
}

/// `p = softmax(scale x)` over what the mask leaves, both (rows, keys), x in p's dtype or in f32. p may be x's buffer:
/// a thread writes what it alone reads.
pub(crate) fn forward(gpu: &CudaDevice, scores: Scores, x: View, p: View) -> Result<()> {
    if p.len == 0 {
        return Ok(());
    }
    let stem = match x.dtype == p.dtype {
        true => "softmax_forward",
        false => "softmax_forward_from_f32",
    };
    let kernel = SOURCE.kernel(gpu, stem, suffix(p.dtype))?;
    let rows = x.len / scores.keys;
    let (scale, shift, count) = (scores.scale as f32, scores.shift(), rows as i64);
    let (queries, keys) = (scores.queries as i32, scores.keys as i32);
    let mut config = scores.config(rows, p, 32);
    if x.dtype != DType::F32 {
        // Blocks that stay, and load their next row early.
        let at_once = kernel.blocks_at_once(gpu, &config)?;
        config.grid_dim.0 = config.grid_dim.0.min(at_once as u32);
    }
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&p.pointer);
    launch.arg(&scale).arg(&shift);
    launch.arg(&count).arg(&queries).arg(&keys);
    // SAFETY: the arguments are those of the kernel, and the buffers have rows * keys elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// `dx = scale p (dp - sum(dp p))`; `source` is p in f32, x in half precision, whose p is not rounded so. All (rows,
/// keys). dx may be the buffer of dp or of `source`.
pub(crate) fn backward(
    gpu: &CudaDevice,
    scores: Scores,
    [dp, source]: [View; 2],
    dx: View,
) -> Result<()> {
    launch_backward(gpu, "softmax_backward", scores, [dp, source, dx])
}

/// As [`backward`] from p (rows, keys) as it was rounded, in every dtype: for a forward that left p alone. dp is f32;
/// dx, in p's dtype, may be its buffer if that is f32 too.
pub(crate) fn backward_from_p(
    gpu: &CudaDevice,
    scores: Scores,
    [dp, p]: [View; 2],
    dx: View,
) -> Result<()> {
    let stem = match p.dtype {
        DType::F32 => "softmax_backward",
        _ => "softmax_backward_from_f32",
    };
    launch_backward(gpu, stem, scores, [dp, p, dx])
}

/// dp, its source, and dx.
fn launch_backward(
    gpu: &CudaDevice,
    stem: &'static str,
    scores: Scores,
    buffers: [View; 3],
) -> Result<()> {
    let [dp, _, dx] = buffers;
    if dx.len == 0 {
        return Ok(());
    }
    let kernel = SOURCE.kernel(gpu, stem, suffix(dx.dtype))?;
    let rows = dp.len / scores.keys;
    let (scale, shift, count) = (scores.scale as f32, scores.shift(), rows as i64);
    let (queries, keys) = (scores.queries as i32, scores.keys as i32);
    let mut launch = kernel.builder();
    for buffer in &buffers {
        launch.arg(&buffer.pointer);
    }
    launch.arg(&scale).arg(&shift);
    launch.arg(&count).arg(&queries).arg(&keys);
    // SAFETY: the arguments are those of the kernel, and the buffers have rows * keys elements.
    unsafe { launch.launch(scores.config(rows, dx, 16)) }.w()?;
    Ok(())
}
