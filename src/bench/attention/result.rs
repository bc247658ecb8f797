//! The result of an attention run, and its rows.

use crate::bench::PhaseTime;
use crate::memory::MemoryBreakdown;
use crate::report::Fields;
use serde::Serialize;

/// The measurements of an [`AttentionRun`](super::AttentionRun), or the reason why there are none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AttentionResult {
    /// The name of the precision: that of a layer's autocast region, or the dtype.
    pub precision: &'static str,
    /// The algorithm's name, or `planned` and `planned-flash`.
    pub implementation: &'static str,
    /// B, the batch size.
    pub batch_size: usize,
    /// H, the number of heads.
    pub heads: usize,
    /// T, the number of tokens in a sequence.
    pub context_length: usize,
    /// Dh of attention alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// D of a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_model: Option<usize>,
    /// The mask.
    pub mask: String,
    /// The number of documents in a sequence; `None` if sequences are not packed.
    pub documents: Option<usize>,
    /// The dtype of inputs and weights.
    pub dtype: &'static str,
    /// [`AttentionWorkload::composed_bytes`](crate::memory::AttentionWorkload::composed_bytes) of attention alone.
    pub composed_bytes: Option<u64>,
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps, if the time suffices.
    pub iterations: usize,
    /// The time that all steps may take.
    pub time_budget_ms: Option<f64>,
    /// Whether the run was measured.
    pub status: AttentionStatus,
    /// Why it was not measured, or in fewer steps.
    pub reason: Option<String>,
    /// The memory available to the run, in bytes.
    pub available_bytes: Option<u64>,
    /// The predicted memory; `None` if the run is not supported.
    pub breakdown: Option<MemoryBreakdown>,
    /// Times and rates of each of the [phases](Self::PHASES); empty if nothing was measured.
    #[serde(skip)]
    pub times: Vec<PhaseTime>,
    /// The memory of a step. It is counted on a GPU, and on the CPU where a [`Tracker`](crate::memory::tracker::Tracker)
    /// is installed.
    #[serde(flatten)]
    pub memory: Option<AttentionMemory>,
}

/// Whether an [`AttentionRun`](super::AttentionRun) was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum AttentionStatus {
    /// It was.
    #[default]
    #[serde(rename = "ok")]
    Ok,
    /// It needs more memory than is available: by its breakdown before anything is allocated, or by the device's error.
    #[serde(rename = "OOM")]
    OutOfMemory,
    /// Its heads are too wide for the algorithm, or its dtype is not planned.
    #[serde(rename = "unsupported")]
    Unsupported,
    /// A single step takes longer than the time budget.
    #[serde(rename = "over time budget")]
    OverTimeBudget,
}

/// The bytes that are alive in a step, inputs and weights included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AttentionMemory {
    /// Alive before forward: inputs and weights.
    pub model_bytes: u64,
    /// Alive between forward and backward. Of a planned run, only the buffers that backward or the caller still reads.
    pub before_backward_bytes: u64,
    /// Alive after backward: the graph is freed, the gradients are allocated.
    pub model_forward_backward_bytes: u64,
    /// The peaks of the [phases](AttentionResult::PHASES). That of a planned run includes its whole arena.
    #[serde(skip)]
    pub peak_bytes: [u64; 3],
}

impl AttentionResult {
    /// The phases: forward, backward, and both.
    pub const PHASES: [&str; 3] = ["forward", "backward", "forward+backward"];

    /// Returns a row of a report for each phase; for the last alone if nothing was measured.
    ///
    /// Each has the fields of this struct, those of its [`PhaseTime`] and its `peak_bytes`. `model_forward_bytes` are
    /// alive before backward, weights and x included; `forward_bytes` and `backward_bytes` are what each phase adds. The
    /// last is negative where the graph is larger than the gradients.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) if serialization fails.
    pub fn rows(&self) -> crate::Result<Vec<Fields>> {
        let mut rows = Vec::new();
        for (i, phase) in Self::PHASES.into_iter().enumerate() {
            let time = self.times.get(i);
            if time.is_none() && phase != "forward+backward" {
                continue;
            }
            let mut row = Fields::of(self)?;
            row.insert("phase", phase);
            if let Some(breakdown) = &self.breakdown {
                let before_backward = breakdown.before_backward_bytes;
                row.insert("estimate_before_backward_bytes", before_backward);
                row.insert("estimate_bytes", breakdown.peak_bytes());
            }
            if let Some(memory) = &self.memory {
                let before = memory.before_backward_bytes;
                let added = |after: u64, before: u64| after as i64 - before as i64;
                let by_backward = added(memory.model_forward_backward_bytes, before);
                row.insert("peak_bytes", memory.peak_bytes[i])
                    .insert("model_forward_bytes", before)
                    .insert("forward_bytes", added(before, memory.model_bytes))
                    .insert("backward_bytes", by_backward);
            }
            if let Some(time) = time {
                row.merge(Fields::of(time)?);
            }
            rows.push(row);
        }
        Ok(rows)
    }
}
