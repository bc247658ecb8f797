//! The planned execution of a run.

use super::row::LossScaling;
use super::update::Update;
use super::{EndToEnd, Execution, LapTimings, Stopwatch};
use crate::compile::{
    Batch, Plan, PlanKind, Step, StepConfig, StepRanks, Target, forward_lower_bound,
};
use crate::hardware::device_name;
use crate::memory::Mode;
use crate::model::TransformerLM;
use crate::nn::Checkpointing;
use crate::{Error, Result, graph};
use candle_core::{DType, Device, Tensor};

impl EndToEnd {
    /// Refuses runs that cannot be planned, and settings that would be ignored.
    pub(super) fn check_execution(&self, device: &Device) -> Result<()> {
        self.check_step_settings()?;
        if self.step.ranks != StepRanks::Single {
            let got = Error::config("bench::EndToEnd", "ranks", "several");
            return Err(got.must_be(
                "StepRanks::Single in a run",
                "only its plan may have several; compile::Step runs them",
            ));
        }
        if self.execution == Execution::Eager {
            return Ok(());
        }
        let (expected, got, hint) = if device.is_metal() {
            (
                "the device is neither the CPU nor a CUDA GPU",
                format!("planned on {}", device_name(device)),
                "run it eagerly, or on one of them",
            )
        } else if self.mode == Mode::ForwardKeepingGraph {
            let hint = "a planned forward has no graph to keep";
            ("the graph is kept", "planned".into(), hint)
        } else {
            return Ok(());
        };
        Err(Error::config("bench::EndToEnd", "execution", got)
            .must_be(format!("eager, where {expected}"), hint))
    }

    /// Refuses settings that only a planned training step has.
    fn check_step_settings(&self) -> Result<()> {
        let step = &self.step;
        let settings = [
            ("accumulation", step.accumulation != 1),
            ("clip_norm", step.clip_norm.is_some()),
            ("clip_value", step.clip_value.is_some()),
            ("dropout_seed", step.dropout_seed.is_some()),
            ("memory_budget_bytes", step.memory_budget_bytes.is_some()),
            ("optimizer_in_backward", step.optimizer_in_backward),
            ("retrace_every", step.retrace_every.is_some()),
            ("ranks", step.ranks != StepRanks::Single),
            (
                "loss_scaling",
                step.loss_scaling && self.mode != Mode::TrainStep,
            ),
        ];
        let given = settings.into_iter().find(|(_, is_given)| *is_given);
        match given {
            Some((field, _)) if !self.execution.is_planned_step(self.mode) => {
                let (execution, mode) = (self.execution.name(), self.mode.name());
                let got = Error::config(
                    "bench::EndToEnd",
                    field,
                    format!("set, with {execution} {mode}"),
                );
                Err(got.must_be(
                    "left at its default, but for a training step that is planned",
                    "run it with Execution::Planned and Mode::TrainStep (--compile, --mode train-step)",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Plans this run on a device, whatever its execution; [`Execution::Planned`] executes this plan. Also returns the
    /// checkpointing of the blocks, which a memory budget may have chosen.
    ///
    /// # Errors
    /// A configuration that is not valid. [`Error::OutOfMemory`] if a lower bound already exceeds the available bytes;
    /// nothing is planned then, because planning takes long at such sizes.
    pub fn plan(&self, target: impl Into<Target>) -> Result<(Plan, Checkpointing)> {
        self.config.check_attention(self.attention)?;
        let least_bytes = self.least_planned_bytes()?;
        match self.available_bytes {
            Some(available_bytes) if least_bytes > available_bytes => Err(Error::OutOfMemory {
                what: "a planned step, by a lower bound".into(),
                wanted_bytes: least_bytes,
                available_bytes,
            }),
            _ if self.is_forward() => {
                let length = self.sequence_length;
                let model = crate::compile::meta_model(&self.meta_model()?, length)?;
                let tokens = graph::input("tokens", (self.batch_size, length), DType::U32)?;
                let (kind, config) = (PlanKind::Forward, self.step_config());
                let batch = [("tokens", &tokens)];
                let plan = Step::plan_for(target, kind, &config, batch, |inputs| {
                    model.forward(&inputs.get("tokens")?)
                })?;
                Ok((plan, self.checkpointing))
            }
            _ => {
                let [rows, length] = self.step_shape();
                let batch = Batch::meta(rows, length)?;
                Step::plan_for_model(target, &self.meta_model()?, &self.step_config(), batch)
            }
        }
    }

    fn meta_model(&self) -> Result<TransformerLM> {
        self.with_variant(TransformerLM::meta(&self.config)?)
    }

    pub(super) fn least_planned_bytes(&self) -> Result<u64> {
        let (config, tokens) = (&self.config, self.tokens());
        match self.is_forward() {
            true => forward_lower_bound(config, tokens, self.step.precision),
            false => Step::memory_lower_bound(
                config,
                self.attention,
                self.checkpointing,
                &self.step_config(),
                tokens,
            ),
        }
    }

    fn tokens(&self) -> [usize; 2] {
        [self.batch_size, self.sequence_length]
    }

    fn is_forward(&self) -> bool {
        matches!(self.mode, Mode::Forward | Mode::ForwardKeepingGraph)
    }

    /// Returns the memory of a planned run on `device` in bytes, including parameters, state and batch. It is exact, or
    /// a lower bound if that exceeds the available bytes.
    pub(super) fn planned_bytes(&self, device: &Device) -> Result<u64> {
        let planned_bytes = match self.plan(device) {
            Err(Error::OutOfMemory { wanted_bytes, .. }) => wanted_bytes,
            plan => plan?.0.total_bytes(),
        };
        // Tokens, targets, and the model's rotary cosines and sines.
        let [rows, length] = self.step_shape();
        let ids = rows.saturating_mul(length);
        let angles = self.config.angle_elements(self.config.context_length);
        let beside = ids
            .saturating_mul(2)
            .saturating_add(angles)
            .saturating_mul(4) as u64;
        Ok(planned_bytes.saturating_add(beside))
    }

    /// Returns the settings of the step: a training step in f16 scales its loss.
    pub(super) fn step_config(&self) -> StepConfig {
        let in_f16 = self.mode == Mode::TrainStep && self.step.precision.dtype() == DType::F16;
        StepConfig {
            loss_scaling: self.step.loss_scaling || in_f16,
            ..self.step.clone()
        }
    }

    /// Runs the planned steps; training steps in f16 have a loss scale.
    pub(super) fn time_planned(
        &self,
        model: &TransformerLM,
        tokens: &Tensor,
        targets: &Tensor,
        mut stopwatch: Stopwatch<'_>,
    ) -> Result<(LapTimings, Option<LossScaling>)> {
        if self.is_forward() {
            let (device, parameters) = (model.device(), model.parameters());
            let config = self.step_config();
            let mut step = Step::without_optimizer(device, parameters, &config, |inputs| {
                model.forward(&inputs.get("tokens")?)
            })?;
            let timings = stopwatch.measure_phases(self.steps, |lap| {
                lap.time("forward", || step.forward([("tokens", tokens)]))
            });
            return Ok((timings?, None));
        }
        let config = self.step_config();
        let mut update = Update::new(&config, model.parameters())?;
        let mut step = Step::for_model(model, &update.optimizer, &config)?;
        step.time_phases(true);
        let batch = (tokens, targets);
        let timings = stopwatch.measure_phases(self.steps, |lap| {
            if self.mode == Mode::TrainStep {
                let Update {
                    optimizer, scaler, ..
                } = &mut update;
                let done = step.run_scaled(optimizer, scaler, batch)?;
                update.count(done.updated());
            } else {
                step.forward_backward(batch)?;
            }
            lap.add_phases(step.phase_times()?);
            Ok(())
        })?;
        Ok((timings, update.loss_scaling()))
    }
}
