//! The planned execution of a run.

use super::row::LossScaling;
use super::update::Update;
use super::{EndToEnd, Execution, LapTimings, Stopwatch};
use crate::compile::{Batch, Plan, PlanKind, Step, StepConfig, forward_lower_bound};
use crate::hardware::device_name;
use crate::memory::Mode;
use crate::model::TransformerLM;
use crate::{Error, Result, graph};
use candle_core::{DType, Device, Tensor};

impl EndToEnd {
    /// Refuses runs that cannot be planned, and settings that would be ignored.
    pub(super) fn check_execution(&self, device: &Device) -> Result<()> {
        self.check_step_settings()?;
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

    /// Refuses settings that only a planned training step uses.
    fn check_step_settings(&self) -> Result<()> {
        if self.execution.is_planned_step(self.mode) {
            return Ok(());
        }
        let (field, expected, got) = if self.optimizer_in_backward {
            ("optimizer_in_backward", "false", "true".into())
        } else if let Some(bytes) = self.memory_budget_bytes {
            ("memory_budget_bytes", "None", format!("{bytes} bytes"))
        } else if self.accumulation != 1 {
            ("accumulation", "1", self.accumulation.to_string())
        } else {
            return Ok(());
        };
        let mode = self.mode.name();
        Err(Error::Config {
            config: "bench::EndToEnd",
            field,
            expected: format!("{expected}, but for a training step that is planned"),
            got: format!("{got}, with {} {mode}", self.execution.name()),
            hint:
                "run it with Execution::Planned and Mode::TrainStep (--compile, --mode train-step)"
                    .into(),
        })
    }

    /// Plans this run on `device`, whatever its execution; [`Execution::Planned`] executes this plan.
    ///
    /// # Errors
    /// A configuration that is not valid. [`Error::OutOfMemory`] if a lower bound already exceeds the available bytes;
    /// nothing is planned then, because planning takes long at such sizes.
    pub fn plan(&self, device: &Device) -> Result<Plan> {
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
                Step::plan_for(device, kind, &config, batch, |inputs| {
                    model.forward(&inputs.get("tokens")?)
                })
            }
            _ => {
                let [rows, length] = self.step_shape();
                let batch = Batch::meta(rows, length)?;
                let (model, config) = (self.meta_model()?, self.step_config());
                let (plan, _) = Step::plan_for_model(device, &model, &config, batch)?;
                Ok(plan)
            }
        }
    }

    fn meta_model(&self) -> Result<TransformerLM> {
        self.with_variant(TransformerLM::meta(&self.config)?)
    }

    pub(super) fn least_planned_bytes(&self) -> Result<u64> {
        let (config, tokens) = (&self.config, self.tokens());
        match self.is_forward() {
            true => forward_lower_bound(config, tokens, self.precision),
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
            plan => plan?.total_bytes(),
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

    fn step_config(&self) -> StepConfig {
        StepConfig {
            precision: self.precision,
            loss_scaling: self.mode == Mode::TrainStep && self.precision.dtype() == DType::F16,
            accumulation: self.accumulation,
            optimizer_in_backward: self.optimizer_in_backward,
            memory_budget_bytes: self.memory_budget_bytes,
            optimizer: self.optimizer,
            ..Default::default()
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
        let mut update = Update::new(self.optimizer, model.parameters(), self.precision)?;
        let mut step = Step::for_model(model, &update.optimizer, &self.step_config())?;
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
        let scaling = update.loss_scaling();
        Ok((timings, scaling.filter(|_| self.mode == Mode::TrainStep)))
    }
}
