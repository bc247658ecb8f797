//! A step with every memory block recorded.

use super::stopwatch::settled_meter;
use super::{EndToEnd, EndToEndRow, Execution, Lap, Status, StepMemory};
use crate::memory::{
    self, Estimate, MemoryKind, MemoryRecording, RecordConfig, SavedTensors, blocks_allocated,
};
use crate::model::TransformerLM;
use crate::{Error, Result};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;

/// The recorded memory of one step, and its estimate. The measured peak is in the row of the run.
#[derive(Clone, Debug)]
pub struct MemoryProfile {
    /// The estimate from sizes alone.
    pub estimate: Estimate,
    /// The recording of the last step. Its baseline is the memory that was allocated before the model was created.
    pub recording: MemoryRecording,
    /// The number of blocks of any size that the step allocated.
    pub allocations: u64,
    /// The tensors that forward saves for backward; empty for a forward without a graph.
    pub saved: SavedTensors,
}

impl EndToEnd {
    /// Runs the warm-up and one recorded step. Returns the row of the run, without times and with the peak of that step
    /// (as counted by the allocator or the GPU's pool, less the baseline), and the profile.
    ///
    /// Weights are zeros, because no size depends on their values and large models take long to initialize. Parameters,
    /// optimizer state and tokens are labelled; the phases are `forward`, `backward` and `optimizer`. A run that is out
    /// of memory has no profile: its row is that of [`run`](Self::run). Only one such run may be active, and nothing else
    /// should allocate during it. The packing buffers that kernels keep until the process ends are allocated
    /// before the model, so they are part of the baseline.
    ///
    /// # Errors
    /// Those of [`memory::record_on`], of [`run`](Self::run) and of the ops. [`Execution::Planned`] is refused: a
    /// recording would see its arena as one block. [`planned_breakdown`](memory::planned_breakdown) has its parts.
    pub fn profile_memory(
        &self,
        device: &Device,
        record: RecordConfig,
    ) -> Result<(EndToEndRow, Option<MemoryProfile>)> {
        if self.execution == Execution::Planned {
            let got = Error::config("bench::EndToEnd", "execution", "planned");
            return Err(got.must_be(
                "eager, where every block of memory is recorded",
                "a planned step allocates one arena: Plan::explain and Plan::memory_map show its buffers",
            ));
        }
        self.check_execution(device)?;
        let mut row = self.predict(device)?;
        if row.status == Status::OutOfMemory {
            return Ok((row, None));
        }
        match self.record_step(device, record) {
            Err(error) if error.is_out_of_memory() => {
                row.set_out_of_memory(&error, device);
                Ok((row, None))
            }
            recorded => {
                let (memory, profile) = recorded?;
                row.memory = Some(memory);
                Ok((row, Some(profile)))
            }
        }
    }

    fn record_step(
        &self,
        device: &Device,
        record: RecordConfig,
    ) -> Result<(StepMemory, MemoryProfile)> {
        let estimate = self.estimate(device)?;
        let saved = memory::saved_tensors(&self.workload(device).trace(&self.config)?);
        let meter = settled_meter(device, self.step.precision.dtype() != DType::F32)?;
        let baseline_bytes = meter.current_bytes().unwrap_or_default();
        let weights = VarBuilder::zeros(self.step.precision.parameter_dtype(), device);
        let model = self.with_variant(TransformerLM::from_var_builder(&self.config, weights)?)?;
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
        device.synchronize()?; // a GPU reaches its peak only now
        let allocations = blocks_allocated(device).saturating_sub(allocations);
        let peak_bytes = meter.peak_bytes().unwrap_or_default();
        let memory = StepMemory {
            peak_bytes: Some(peak_bytes.saturating_sub(baseline_bytes)),
            reserved_peak_bytes: meter.reserved_peak_bytes(),
            ..Default::default()
        };
        let profile = MemoryProfile {
            estimate,
            recording: recorder.finish(),
            allocations,
            saved,
        };
        Ok((memory, profile))
    }
}
