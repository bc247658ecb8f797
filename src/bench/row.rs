//! Rows of measured steps.

use super::first_step::FirstStep;
use super::{Execution, Timing};
use crate::attention::Algorithm;
use crate::hardware::available_bytes_on;
use crate::memory::Mode;
use crate::nn::Checkpointing;
use crate::precision::Precision;
use crate::report::Statistics;
use crate::{Error, Result};
use candle_core::Device;
use serde::{Deserialize, Serialize};

/// One phase of a measured [`EndToEnd`](super::EndToEnd) run, or a run that is out of memory.
///
/// [`Fields::of`](crate::report::Fields::of) converts it to a row of a [`Report`](crate::report::Report). Nested
/// structs are flattened, and those that were not measured are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EndToEndRow {
    /// The name of the model.
    pub size: String,
    /// D, the width of the residual stream.
    pub d_model: usize,
    /// Width of the feed-forward network.
    pub d_ff: usize,
    /// L, the number of layers.
    pub num_layers: usize,
    /// H, the number of attention heads.
    pub num_heads: usize,
    /// V, the vocabulary size.
    pub vocab_size: usize,
    /// Number of parameters.
    pub parameters: usize,
    /// B, the batch size.
    pub batch_size: usize,
    /// T, the number of tokens in a sequence.
    pub context_length: usize,
    /// The number of micro-batches of B sequences in a step.
    pub accumulation: usize,
    /// The algorithm of attention.
    pub attention: Algorithm,
    /// The precision of forward, loss and parameters.
    pub precision: Precision,
    /// The checkpointing strategy.
    pub checkpointing: Checkpointing,
    /// Eager or planned.
    pub execution: Execution,
    /// Whether parameters are updated during backward.
    pub optimizer_in_backward: bool,
    /// The limit of a planned step's arena, in bytes.
    pub memory_budget_bytes: Option<u64>,
    /// Half-precision copies of the weights, in bytes, which are part of the peak; `None` if autocast keeps none.
    pub weight_cast_bytes: Option<u64>,
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// How much of a training step is run.
    pub mode: Mode,
    /// `forward`, `backward`, `optimizer`, [`UPDATE`], or the whole step of its mode: `forward` alone,
    /// `forward+backward`, `train step`.
    pub phase: String,
    /// Whether the run was measured.
    pub status: Status,
    /// Times and rates; `None` if the run is out of memory.
    #[serde(flatten)]
    pub time: Option<PhaseTime>,
    /// Costs of the first step, warm-up or not.
    #[serde(flatten)]
    pub first_step: FirstStep,
    /// The memory of the whole mode.
    #[serde(flatten)]
    pub memory: Option<StepMemory>,
    /// The predicted peak, in bytes.
    pub estimate_bytes: u64,
    /// The memory available to the run, in bytes.
    pub available_bytes: Option<u64>,
    /// The loss scale of training in f16.
    #[serde(flatten)]
    pub loss_scaling: Option<LossScaling>,
    /// Details of an out-of-memory row.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
}

/// The phase of backward and optimizer together. Its samples are the sums of theirs, step by step.
pub const UPDATE: &str = "backward+optimizer";

/// Whether a run was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// All steps ran.
    #[default]
    #[serde(rename = "ok")]
    Ok,
    /// The run needs more memory than is available.
    #[serde(rename = "OOM")]
    OutOfMemory,
}

/// Times of one phase, and rates at its median.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseTime {
    /// Statistics of the measured steps.
    #[serde(flatten)]
    pub statistics: Statistics,
    /// The measured steps, in ms.
    pub samples_ms: Vec<f64>,
    /// The warm-up steps, in ms.
    pub warmup_ms: Vec<f64>,
    /// The tokens of a step over the median; `None` for [`UPDATE`].
    pub tokens_per_s: Option<f64>,
    /// FLOPs of the phase's matmuls by [`flops`](crate::model::flops), which counts no recomputation of checkpointing;
    /// `None` for the optimizer.
    pub flops: Option<f64>,
    /// FLOP/s at the median.
    pub flops_per_s: Option<f64>,
    /// Model FLOPs utilization: `flops_per_s` in percent of a peak rate; `None` until [`set_mfu`](Self::set_mfu).
    pub mfu_percent: Option<f64>,
}

impl PhaseTime {
    /// Statistics of a timing, and rates at its median from the tokens and FLOPs that are known.
    pub(super) fn new(timing: Timing, tokens: Option<f64>, flops: Option<f64>) -> Result<Self> {
        let statistics = timing.statistics()?;
        let seconds = statistics.median_ms / 1e3;
        let flops_per_s = flops.map(|flops| flops / seconds);
        Ok(Self {
            tokens_per_s: tokens.map(|tokens| tokens / seconds),
            flops,
            flops_per_s,
            mfu_percent: None,
            statistics,
            samples_ms: timing.samples_ms,
            warmup_ms: timing.warmup_ms,
        })
    }

    /// Sets MFU relative to `peak_flops`, in FLOP/s: a data sheet's, or a [measured rate of
    /// matmuls](crate::profile::DeviceRates::matmul_rate); `None` if unknown.
    pub fn set_mfu(&mut self, peak_flops: Option<f64>) {
        let rates = self.flops_per_s.zip(peak_flops);
        self.mfu_percent = rates.map(|(own, peak)| 100.0 * own / peak);
    }
}

/// The memory of a run's steps, in bytes; `None` if the device or system does not report it. On the CPU the first two
/// need a [`Tracker`](crate::memory::tracker::Tracker) as the global allocator; only CUDA has the third.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMemory {
    /// Memory allocated after the last step, including what is kept between steps.
    pub allocated_bytes: Option<u64>,
    /// The peak of allocated memory, for the model and its steps.
    pub peak_bytes: Option<u64>,
    /// The peak size of the GPU's memory pool.
    pub reserved_peak_bytes: Option<u64>,
    /// The peak resident memory of the process.
    pub resident_peak_bytes: Option<u64>,
}

/// The loss scale of a run in f16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// The scale after the last step.
    pub loss_scale: f64,
    /// Steps with an overflow, which made no update.
    pub skipped_steps: usize,
}

impl EndToEndRow {
    /// Makes it the row of a run that ran out of memory, with the bytes available once the run has freed its memory.
    pub(super) fn set_out_of_memory(&mut self, error: &Error, device: &Device) {
        self.status = Status::OutOfMemory;
        self.available_bytes = available_bytes_on(device).or(self.available_bytes);
        self.reason = Some(error.to_string());
    }

    /// Returns whether the row is of the whole step of its mode.
    pub fn is_whole_step(&self) -> bool {
        self.phase == whole_phase(self.mode)
    }

    /// Returns the statistics of the measured steps, if there are any.
    pub fn statistics(&self) -> Option<&Statistics> {
        self.time.as_ref().map(|time| &time.statistics)
    }

    /// Returns the measured peak of the run in bytes.
    pub fn peak_bytes(&self) -> Option<u64> {
        self.memory.as_ref()?.peak_bytes
    }
}

/// Returns the name of the whole step of a mode.
pub(super) fn whole_phase(mode: Mode) -> &'static str {
    match mode {
        Mode::Forward | Mode::ForwardKeepingGraph => "forward",
        Mode::ForwardBackward => "forward+backward",
        Mode::TrainStep => "train step",
    }
}
