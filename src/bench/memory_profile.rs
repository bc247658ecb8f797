//! One step of a model with every block of memory recorded.

use super::stopwatch::settled_meter;
use super::{EndToEnd, Execution, Lap};
use crate::memory::{
    self, Estimate, MemoryKind, MemoryRecording, RecordConfig, SavedTensors, blocks_allocated,
};
use crate::model::TransformerLM;
use crate::report::Fields;
use crate::{Error, Result};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;

/// Where the bytes of one step went, and where they were expected.
#[derive(Clone, Debug)]
pub struct MemoryProfile {
    /// The breakdown from the sizes alone.
    pub estimate: Estimate,
    /// The last step. The baseline is what was alive before the model was made.
    pub recording: MemoryRecording,
    /// The most that was alive in that step, exactly, as the allocator or the GPU's pool counted; the baseline
    /// subtracted.
    pub peak_bytes: u64,
    /// The most that the GPU's pool held in that step, used or not.
    pub reserved_peak_bytes: Option<u64>,
    /// How many blocks, of whatever size, the step asked for.
    pub allocations: u64,
    /// What forward saves for backward; empty for a forward without a graph.
    pub saved: SavedTensors,
}

impl MemoryProfile {
    /// The prediction beside the measurement, by what bytes were there for at the worst moment: a row each, the sum
    /// last.
    pub fn comparison(&self) -> Vec<Fields> {
        let measured = self.recording.bytes_by_kind_at(self.recording.peak_event());
        let mut rows = Vec::new();
        for holds in MemoryKind::ALL {
            let predicted = self.estimate.breakdown.bytes_of(holds);
            let bytes = measured.bytes_of(holds);
            if predicted > 0 || bytes > 0 {
                rows.push(compared(holds.name(), predicted, bytes));
            }
        }
        rows.push(compared("peak", self.estimate.peak_bytes, self.peak_bytes));
        rows
    }
}

fn compared(holds: &str, predicted_bytes: u64, measured_bytes: u64) -> Fields {
    let mut row = Fields::new();
    row.insert("holds", holds);
    row.insert("estimate_bytes", predicted_bytes);
    row.insert("measured_bytes", measured_bytes);
    let difference = predicted_bytes as f64 - measured_bytes as f64;
    row.insert("difference_bytes", difference);
    row
}

impl EndToEnd {
    /// Runs the warm-up and then one step that is recorded, and compares it with the breakdown.
    ///
    /// Weights are zeros: no size depends on them, and large models take long to draw. Parameters, the optimizer's
    /// state and the tokens are labelled, the phases are `forward`, `backward` and `optimizer`. Nothing is asked about
    /// the memory that is there: [`estimate`](Self::estimate) first. Only one such run may be under way, and nothing
    /// else that takes memory should be. What kernels keep for as long as the process runs, their packing buffers, is
    /// there before the model, and in the baseline.
    ///
    /// # Errors
    /// A planned execution; those of [`memory::record_on`], of [`run`](Self::run), and of the ops; a GPU that is full
    /// ([`Error::is_out_of_memory`]).
    pub fn profile_memory(&self, device: &Device, record: RecordConfig) -> Result<MemoryProfile> {
        if self.execution == Execution::Planned {
            let got = Error::config("end-to-end benchmark", "execution", "planned");
            return Err(got.must_be(
                "eager, where every block of memory is recorded",
                "a planned step is one block, which compile::Plan::explain and memory_map cut up",
            ));
        }
        self.check_execution(device)?;
        let estimate = self.estimate(device)?;
        let saved = memory::saved_tensors(&self.workload(device).trace(&self.config)?);
        let meter = settled_meter(device, self.precision.dtype() != DType::F32)?;
        let baseline_bytes = meter.current_bytes().unwrap_or_default();
        let weights = VarBuilder::zeros(self.precision.parameter_dtype(), device);
        let model = TransformerLM::from_var_builder(&self.config, weights)?;
        let tokens = self.random_tokens(0, device)?; // (B, T)
        let targets = self.random_tokens(1, device)?; // (B, T)
        let mut update = self.update(&model)?;
        let mut lap = Lap::new(device);
        for _ in 0..self.warmup_steps {
            self.step(&mut lap, &model, [&tokens, &targets], update.as_mut())?;
        }
        let record = RecordConfig {
            baseline_bytes,
            ..record
        };
        let mut recorder = memory::record_on(device, record)?;
        for (name, parameter) in model.parameters() {
            recorder.label(MemoryKind::Weights, name, &parameter);
        }
        for (name, state) in update.iter().flat_map(|update| update.optimizer.state()) {
            recorder.label(MemoryKind::Optimizer, name, &state);
        }
        recorder.label(MemoryKind::Inputs, "tokens", &tokens);
        recorder.label(MemoryKind::Inputs, "targets", &targets);
        meter.reset_peak();
        let allocations = blocks_allocated(device);
        self.step(&mut lap, &model, [&tokens, &targets], update.as_mut())?;
        device.synchronize()?; // a GPU's peak is not reached before
        let allocations = blocks_allocated(device).saturating_sub(allocations);
        let peak_bytes = meter.peak_bytes().unwrap_or_default();
        let recording = recorder.finish();
        Ok(MemoryProfile {
            estimate,
            recording,
            peak_bytes: peak_bytes.saturating_sub(baseline_bytes),
            reserved_peak_bytes: meter.reserved_peak_bytes(),
            allocations,
            saved,
        })
    }
}
