//! Softmax with scale and mask; see `softmax.cu`.

use super::flash_attention::PerScore;
use super::kernel::Kernel;
use super::source::{Definition, PRELUDE, Source};
use super::{View, in_vector, launch_config, packs, suffix};
use crate::kernels::Mask;
use candle_core::cuda_backend::cudarc::driver::{
    DeviceRepr, LaunchArgs, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "softmax",
    parts: &[PRELUDE, include_str!("softmax.cu")],
};

/// Scores (matrices, queries, keys), with scale and mask.
#[derive(Clone, Copy)]
pub(crate) struct Scores<'a> {
    pub scale: f64,
    pub mask: Mask,
    pub queries: usize,
    pub keys: usize,
    /// (sequences, queries) u32, contiguous: the first key of each query of a sequence.
    pub first_keys: Option<View<'a>>,
    /// The number of consecutive matrices that are heads of one sequence.
    pub heads: usize,
    /// The index of the first matrix, counted from the first head of the first sequence of `first_keys`.
    pub first_head: usize,
    /// Whether a key mask or a bias hides keys, in f32: rows whose visible scores are all -inf are 0.
    pub masked: bool,
    /// The key mask in u8; 0 hides.
    pub shown: Option<PerScore<'a>>,
}

impl Scores<'_> {
    /// Returns the shift: query q attends to the keys under q + 1 + shift.
    pub(super) fn shift(&self) -> i64 {
        self.mask.offset(self.queries, self.keys)
    }

    /// Returns the kernel `stem_dtype`. The code for first keys and windows, and for key masks, is compiled only if
    /// there are any.
    fn kernel(&self, gpu: &CudaDevice, stem: &'static str, dtype: DType) -> Result<Kernel> {
        let has_first = self.first_keys.is_some() || self.mask.window().is_some();
        let definitions: &[_] = match (has_first, self.masked) {
            (false, false) => &[],
            (true, false) => &[FIRST_KEYS],
            (false, true) => &[MASKED],
            (true, true) => &[FIRST_KEYS, MASKED],
        };
        SOURCE.kernel_with(gpu, definitions, stem, suffix(dtype))
    }

    /// Returns the launch configuration; a thread holds `in_registers` elements of a row of `result`.
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

const FIRST_KEYS: Definition = Definition::Size("FIRST_KEYS", 1);
const MASKED: Definition = Definition::Size("MASKED", 1);

/// `Masks` of `softmax.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Masks {
    shift: i64,
    first_keys: u64,
    heads: i32,
    first_head: i32,
    window: i32,
    shown: u64,
    shown_strides: [i64; 3],
    shown_key_stride: i32,
}

// SAFETY: it is plain data, laid out as the kernels declare it.
unsafe impl DeviceRepr for Masks {}

/// The arguments of the kernels that describe the scores.
struct Arguments {
    scale: f32,
    rows: i64,
    queries: i32,
    keys: i32,
    masks: Masks,
}

impl Arguments {
    fn new(scores: &Scores, rows: usize) -> Self {
        let (shown, [batch, head, query, key]) = match scores.shown {
            None => (0, [0; 4]),
            Some(shown) => (shown.view.pointer, shown.strides()),
        };
        Self {
            scale: scores.scale as f32,
            rows: rows as i64,
            queries: scores.queries as i32,
            keys: scores.keys as i32,
            masks: Masks {
                shift: scores.shift(),
                first_keys: scores.first_keys.map_or(0, |all| all.pointer),
                heads: scores.heads as i32,
                first_head: scores.first_head as i32,
                window: scores.mask.window_or_0(),
                shown,
                shown_strides: [batch, head, query],
                shown_key_stride: key as i32,
            },
        }
    }

    fn add_to<'a>(&'a self, launch: &mut LaunchArgs<'a>) {
        launch.arg(&self.scale).arg(&self.rows);
        launch.arg(&self.queries).arg(&self.keys);
        launch.arg(&self.masks);
    }
}

/// Computes `p = softmax(scale x)` over the visible keys, both (rows, keys), x in p's dtype or in f32. p may be x's
/// buffer: a thread reads only elements that it writes.
pub(crate) fn forward(gpu: &CudaDevice, scores: Scores, x: View, p: View) -> Result<()> {
    if p.len == 0 {
        return Ok(());
    }
    let stem = match x.dtype == p.dtype {
        true => "softmax_forward",
        false => "softmax_forward_from_f32",
    };
    let kernel = scores.kernel(gpu, stem, p.dtype)?;
    let rows = x.len / scores.keys;
    let arguments = Arguments::new(&scores, rows);
    let mut config = scores.config(rows, p, 32);
    if x.dtype != DType::F32 {
        // Persistent blocks, which load their next row early.
        let concurrent = kernel.concurrent_blocks(gpu, &config)?;
        config.grid_dim.0 = config.grid_dim.0.min(concurrent as u32);
    }
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&p.pointer);
    arguments.add_to(&mut launch);
    // SAFETY: the arguments are those of the kernel, and the buffers have rows * keys elements.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Computes `dx = scale p (dp - sum(dp p))`, all (rows, keys). `source` is p in f32; in half precision it is x, from
/// which p is recomputed without rounding. dx may be the buffer of dp or of `source`.
pub(crate) fn backward(
    gpu: &CudaDevice,
    scores: Scores,
    [dp, source]: [View; 2],
    dx: View,
) -> Result<()> {
    launch_backward(gpu, "softmax_backward", scores, [dp, source, dx])
}

/// Like [`backward`], but from the rounded p (rows, keys) in every dtype, for a forward that saved only p. dp is f32;
/// dx is in p's dtype and may be dp's buffer if p is f32.
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

/// Launches backward. `buffers` are dp, its source, and dx.
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
    let kernel = scores.kernel(gpu, stem, dx.dtype)?;
    let rows = dp.len / scores.keys;
    let arguments = Arguments::new(&scores, rows);
    let mut launch = kernel.builder();
    for buffer in &buffers {
        launch.arg(&buffer.pointer);
    }
    arguments.add_to(&mut launch);
    // SAFETY: the arguments are those of the kernel, and the buffers have rows * keys elements.
    unsafe { launch.launch(scores.config(rows, dx, 16)) }.w()?;
    Ok(())
}
