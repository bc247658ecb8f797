//! End-to-end benchmark of a model: time of each phase, and memory.

use super::first_step::FirstStepCounter;
use super::row::{LossScaling, PhaseTime, Status, StepMemory, UPDATE, whole_phase};
use super::stopwatch::settled_meter;
use super::update::Update;
use super::{EndToEndRow, Lap, LapTimings, Step, Stopwatch, Timing, alternate};
use crate::attention::Algorithm;
use crate::compile::{StepConfig, StepRanks};
use crate::memory::{self, Estimate, Mode, Target, Workload, system};
use crate::model::{TransformerConfig, TransformerLM, flops};
use crate::nn::{self, Checkpointing};
use crate::{Result, backward, no_grad, ops};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Configuration of an end-to-end measurement: model, batch, mode and number of steps.
///
/// ```
/// use tallow::bench::EndToEnd;
/// use tallow::model::TransformerConfig;
///
/// let run = EndToEnd {
///     config: TransformerConfig {
///         vocab_size: 10, context_length: 8, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
///         ..Default::default()
///     },
///     batch_size: 2, sequence_length: 8, warmup_steps: 1, steps: 2,
///     ..Default::default()
/// };
/// let rows = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// assert_eq!((rows[0].phase.as_str(), rows[1].phase.as_str()), ("forward", "backward"));
/// assert_eq!(rows.last().map(|row| row.phase.as_str()), Some("train step"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EndToEnd {
    /// The name of the model in rows, for example of its preset; it may be empty.
    pub size: String,
    /// The model. Its `context_length` is an upper bound of `sequence_length`.
    pub config: TransformerConfig,
    /// The algorithm of attention.
    pub attention: Algorithm,
    /// The activation checkpointing of the blocks.
    pub checkpointing: Checkpointing,
    /// B, the batch size.
    pub batch_size: usize,
    /// T, the number of tokens in a sequence.
    pub sequence_length: usize,
    /// How much of a training step is run.
    pub mode: Mode,
    /// Eager, or planned on the CPU or a CUDA GPU, in f32 or under autocast.
    pub execution: Execution,
    /// The settings of the step. Every run has the precision of forward and loss (with
    /// [`Regime::Full`](crate::precision::Regime::Full) also of the parameters; the optimizer's state is f32), and every
    /// training step the optimizer; in f16 its loss is scaled. Only a planned training step has the other settings. A
    /// step of several [ranks](StepConfig::ranks) can be planned here, but not run.
    pub step: StepConfig,
    /// The number of steps before the measured ones.
    pub warmup_steps: usize,
    /// The number of measured steps.
    pub steps: usize,
    /// The seed of weights and tokens.
    pub seed: u64,
    /// The available memory in bytes. A step that needs more becomes a row `OOM`. `None` skips this check.
    pub available_bytes: Option<u64>,
}

/// Eager training steps of the default model in f32 on 4 sequences of 256 tokens: 5 for warm-up and 10 measured.
impl Default for EndToEnd {
    fn default() -> Self {
        Self {
            size: String::new(),
            config: TransformerConfig::default(),
            attention: Algorithm::default(),
            checkpointing: Checkpointing::default(),
            batch_size: 4,
            sequence_length: 256,
            mode: Mode::TrainStep,
            execution: Execution::Eager,
            step: StepConfig::default(),
            warmup_steps: 5,
            steps: 10,
            seed: 0,
            available_bytes: None,
        }
    }
}

/// The execution of a model: eager or planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Execution {
    /// Op by op, recording candle's graph.
    #[default]
    Eager,
    /// By a plan that [`compile`](crate::compile) made beforehand.
    Planned,
}

impl Execution {
    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Planned => "planned",
        }
    }

    /// Returns whether `mode` in this execution is a planned training step, which has all [settings of a
    /// step](field@EndToEnd::step).
    pub fn is_planned_step(self, mode: Mode) -> bool {
        self == Self::Planned && mode == Mode::TrainStep
    }
}

/// The output or the gradients of an eager step, which stay alive after it.
pub(super) type Left = (Option<Tensor>, Option<GradStore>);

pub(super) struct Measured {
    timings: LapTimings,
    /// The counter of the first round.
    first_step: FirstStepCounter,
    memory: StepMemory,
    loss_scaling: Option<LossScaling>,
}

impl Measured {
    /// Adds another round of the same run.
    pub fn join(&mut self, later: Self) {
        self.timings.join(later.timings);
        // Memory of the last round: in the first one, kernels also allocate what they keep until the process ends.
        self.memory = later.memory;
        if let (Some(sum), Some(scaling)) = (&mut self.loss_scaling, later.loss_scaling) {
            sum.loss_scale = scaling.loss_scale;
            sum.skipped_steps += scaling.skipped_steps;
        }
    }
}

impl EndToEnd {
    /// Runs the benchmark, and returns a row for each phase of the mode (`forward`, `backward`, `optimizer`), one for
    /// backward and optimizer together ([`UPDATE`]), and one for the whole step (`forward+backward` or `train step`).
    /// The phases of a planned step are its [`PhaseTimes`](crate::compile::PhaseTimes).
    ///
    /// Two groups of figures are of the whole mode and the same in each of its rows. Memory: `peak_bytes` of the model
    /// and its steps, and `allocated_bytes` that remain after the last step. The first step, even of the warm-up: its
    /// time, its page faults, the threads that it started and, on a GPU, the kernels that it compiled and the kernel
    /// modules that it loaded.
    ///
    /// Before anything is allocated, the predicted memory ([`memory::estimate`] or the plan) is compared with the
    /// available memory. If it does not fit, the only row says `OOM`, with the needed and the available bytes. If even
    /// a lower bound does not fit, nothing is planned, and the row's `reason` reports that. A device that runs out of
    /// memory all the same also results in such a row, with its error as the `reason` and the bytes available after the
    /// run has freed its memory. `on_step` is called after every step with the time of the whole step in ms.
    ///
    /// A training step in f16 scales its loss ([`GradScaler`](crate::optim::GradScaler)). Scaling counts as forward;
    /// unscaling and the check for infinities count as optimizer. Its rows have the final `loss_scale` and the number
    /// of `skipped_steps`, warm-up included, that overflowed and made no update.
    ///
    /// # Errors
    /// A configuration that is not valid; settings for planned training steps in any other run; errors of the ops.
    pub fn run(
        &self,
        device: &Device,
        mut on_step: impl FnMut(Step, f64),
    ) -> Result<Vec<EndToEndRow>> {
        let runs = std::slice::from_ref(self);
        let rows = alternate(runs, 1, device, |_, step, ms| on_step(step, ms))?;
        Ok(rows.into_iter().flatten().collect())
    }

    /// Runs one step of this kind at the smallest sizes. Afterwards the process has allocated what it keeps at any
    /// size: threads, their scratch for matmuls, pages of the allocator. Read the [available
    /// memory](crate::hardware::available_bytes) after it: a run can use all of that.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn warm_up(&self, device: &Device) -> Result<()> {
        let small = Self {
            config: TransformerConfig {
                vocab_size: 64,
                context_length: 8,
                d_model: 64,
                num_layers: 1,
                num_heads: 2,
                num_kv_heads: None,
                head_dim: None,
                d_ff: 64,
                ..self.config.clone()
            },
            batch_size: 1,
            sequence_length: 8,
            step: StepConfig {
                accumulation: 1,
                memory_budget_bytes: None,
                ranks: StepRanks::Single,
                ..self.step.clone()
            },
            warmup_steps: 0,
            steps: 1,
            available_bytes: None,
            ..self.clone()
        };
        small.measure(device, |_, _| ())?;
        Ok(())
    }

    /// Returns the predicted memory of the run on `device` in bytes: of its [estimate](Self::estimate), or of its
    /// [plan](Self::plan) with the batch. If a lower bound already exceeds the available bytes, it is that bound.
    ///
    /// # Errors
    /// A configuration that is not valid.
    pub fn estimate_bytes(&self, device: &Device) -> Result<u64> {
        match self.execution {
            Execution::Eager => Ok(self.estimate(device)?.peak_bytes),
            Execution::Planned => self.planned_bytes(device),
        }
    }

    /// Estimates the memory of the eager run on `kernels`, without allocating anything.
    ///
    /// # Errors
    /// Those of [`memory::estimate`].
    pub fn estimate(&self, kernels: impl Into<Target>) -> Result<Estimate> {
        memory::estimate(&self.config, &self.workload(kernels))
    }

    /// Returns the workload of the eager run on `kernels`, for predictions of its memory.
    pub fn workload(&self, kernels: impl Into<Target>) -> Workload {
        Workload {
            batch_size: self.batch_size,
            sequence_length: self.sequence_length,
            mode: self.mode,
            attention: self.attention,
            precision: self.step.precision,
            checkpointing: self.checkpointing,
            kernels: kernels.into(),
            optimizer: self.step.optimizer,
        }
    }

    /// Returns the row of a run that was not measured, which is out of memory if the predicted bytes are not available.
    pub(super) fn predict(&self, device: &Device) -> Result<EndToEndRow> {
        let estimate_bytes = self.estimate_bytes(device)?;
        let is_beyond = |bytes| self.available_bytes.is_some_and(|most| bytes > most);
        let mut row = self.row(estimate_bytes);
        if is_beyond(estimate_bytes) {
            row.status = Status::OutOfMemory;
            let is_bound =
                self.execution == Execution::Planned && is_beyond(self.least_planned_bytes()?);
            let reason = "the estimate is a lower bound, beyond which nothing was planned";
            row.reason = is_bound.then(|| reason.into());
        }
        Ok(row)
    }

    /// Returns the rows of the phases; `predicted` is the row of the run.
    pub(super) fn rows(
        &self,
        predicted: &EndToEndRow,
        measured: &Measured,
    ) -> Result<Vec<EndToEndRow>> {
        let mut phases: Vec<(&str, Timing)> = measured.timings.phases.clone();
        let samples_of = |name: &str| {
            let phase = phases.iter().find(|(phase, _)| *phase == name);
            phase.map(|(_, timing)| &timing.samples_ms)
        };
        if let Some((backward, optimizer)) = samples_of("backward").zip(samples_of("optimizer")) {
            let sums = backward.iter().zip(optimizer).map(|(a, b)| a + b);
            let samples_ms = sums.collect();
            let update = Timing {
                samples_ms,
                ..Default::default()
            };
            phases.push((UPDATE, update));
        }
        // A forward alone is the whole step.
        if phases.len() > 1 {
            phases.push((whole_phase(self.mode), measured.timings.whole.clone()));
        }
        let row = |(phase, timing): (&str, Timing)| {
            Ok(EndToEndRow {
                time: Some(self.time_of(phase, timing)?),
                first_step: measured.first_step.result.clone(),
                memory: Some(measured.memory.clone()),
                loss_scaling: measured.loss_scaling.clone(),
                phase: phase.into(),
                ..predicted.clone()
            })
        };
        phases.into_iter().map(row).collect()
    }

    /// Returns statistics and rates of a phase. The optimizer has no matmuls.
    fn time_of(&self, phase: &str, timing: Timing) -> Result<PhaseTime> {
        let [b, t] = self.step_shape();
        let flops = match phase {
            "forward" => Some(flops::forward(&self.config, b, t)),
            "backward" => Some(flops::backward(&self.config, b, t)),
            "optimizer" | UPDATE => None,
            _ => Some(flops::forward_backward(&self.config, b, t)),
        };
        let flops = flops.map(|flops| flops.total());
        let tokens = (phase != UPDATE).then_some(b as f64 * t as f64);
        PhaseTime::new(timing, tokens, flops)
    }

    pub(super) fn measure(
        &self,
        device: &Device,
        mut on_step: impl FnMut(Step, f64),
    ) -> Result<Measured> {
        self.check_execution(device)?;
        let meter = settled_meter(device, self.step.precision.dtype() != DType::F32)?;
        let before = meter.current_bytes();
        let model = self.model(device)?;
        // Initializing the weights needs more memory than they do, and is not part of a step.
        meter.reset_peak();
        let resident_resets = system::reset_resident_peak();
        let mut after_step = None;
        let mut first_step = FirstStepCounter::begin();
        let (timings, loss_scaling) = self.time(model, |step, ms| {
            first_step.stepped(ms);
            after_step = meter.current_bytes();
            on_step(step, ms);
        })?;
        let own = |bytes: Option<u64>| Some(bytes?.saturating_sub(before?));
        // If the system cannot reset the peak, it belongs to the whole process and to no row.
        let resident_peak_bytes = resident_resets.then(system::resident_peak_bytes).flatten();
        Ok(Measured {
            timings,
            first_step,
            memory: StepMemory {
                allocated_bytes: own(after_step),
                peak_bytes: own(meter.peak_bytes()),
                reserved_peak_bytes: meter.reserved_peak_bytes(),
                resident_peak_bytes,
            },
            loss_scaling,
        })
    }

    fn time(
        &self,
        model: TransformerLM,
        on_step: impl FnMut(Step, f64),
    ) -> Result<(LapTimings, Option<LossScaling>)> {
        let device = model.device();
        let tokens = self.random_tokens(0, device)?;
        let targets = self.random_tokens(1, device)?;
        let mut stopwatch = Stopwatch::new(device)
            .warmup(self.warmup_steps)
            .on_step(on_step);
        if self.execution == Execution::Planned {
            return self.time_planned(&model, &tokens, &targets, stopwatch);
        }
        let mut update = self.update(&model)?;
        let timings = stopwatch.measure_phases(self.steps, |lap| {
            self.step(lap, &model, [&tokens, &targets], update.as_mut())
        })?;
        Ok((timings, update.and_then(|update| update.loss_scaling())))
    }

    /// Returns optimizer and loss scale of a training step; `None` in other modes.
    pub(super) fn update(&self, model: &TransformerLM) -> Result<Option<Update>> {
        let is_step = self.mode == Mode::TrainStep;
        let update = is_step.then(|| Update::new(&self.step_config(), model.parameters()));
        update.transpose()
    }

    /// Runs one eager step in its phases, and returns what it leaves alive.
    pub(super) fn step(
        &self,
        lap: &mut Lap<'_>,
        model: &TransformerLM,
        [tokens, targets]: [&Tensor; 2],
        update: Option<&mut Update>,
    ) -> Result<Left> {
        let precision = self.step.precision;
        let forward = || precision.run(|| model.forward(tokens));
        let loss = || precision.run(|| model.loss(tokens, targets));
        match (self.mode, update) {
            (Mode::Forward, _) => Ok((Some(lap.time("forward", || no_grad(forward))?), None)),
            (Mode::ForwardKeepingGraph, _) => Ok((Some(lap.time("forward", forward)?), None)),
            (_, None) => {
                let loss = lap.time("forward", loss)?;
                Ok((None, Some(lap.time("backward", move || backward(loss))?)))
            }
            (_, Some(update)) => {
                let loss = lap.time("forward", || update.scaled(loss()?))?;
                let mut gradients = lap.time("backward", move || backward(loss))?;
                lap.time("optimizer", || update.step(&mut gradients))?;
                Ok((None, None))
            }
        }
    }

    /// Creates the model, with parameters in the dtype of the precision.
    pub(super) fn model(&self, device: &Device) -> Result<TransformerLM> {
        let model = match self.step.precision.parameter_dtype() {
            DType::F32 => TransformerLM::new(&self.config, self.seed, device)?,
            dtype => {
                let weights = nn::seeded(self.seed, dtype, device);
                TransformerLM::from_var_builder(&self.config, weights)?
            }
        };
        self.with_variant(model)
    }

    /// Sets the attention and the checkpointing of a model.
    pub(super) fn with_variant(&self, model: TransformerLM) -> Result<TransformerLM> {
        let model = model.with_attention(self.attention)?;
        Ok(model.with_checkpointing(self.checkpointing))
    }

    /// Returns the shape of a step's tokens: (accumulation B, T).
    pub(super) fn step_shape(&self) -> [usize; 2] {
        let rows = self.batch_size.saturating_mul(self.step.accumulation);
        [rows, self.sequence_length]
    }

    /// Returns uniformly random ids, (accumulation B, T), u32. Different `stream`s give independent inputs and targets.
    pub(super) fn random_tokens(&self, stream: u64, device: &Device) -> Result<Tensor> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream);
        let [rows, length] = self.step_shape();
        let bytes = rows.saturating_mul(length).saturating_mul(size_of::<u32>());
        ops::check_granted("token ids", bytes as u64)?;
        let vocab = u32::try_from(self.config.vocab_size).unwrap_or(u32::MAX);
        let ids: Vec<u32> = (0..rows * length)
            .map(|_| rng.random_range(0..vocab))
            .collect();
        Ok(Tensor::from_vec(ids, (rows, length), device)?.to_dtype(DType::U32)?)
    }

    /// Returns a row of the whole step with the labels of this run and without measurements.
    fn row(&self, estimate_bytes: u64) -> EndToEndRow {
        let (config, step) = (&self.config, &self.step);
        EndToEndRow {
            size: self.size.clone(),
            d_model: config.d_model,
            d_ff: config.d_ff,
            num_layers: config.num_layers,
            num_heads: config.num_heads,
            vocab_size: config.vocab_size,
            parameters: config.num_parameters(),
            batch_size: self.batch_size,
            context_length: self.sequence_length,
            accumulation: step.accumulation,
            attention: self.attention,
            precision: step.precision,
            checkpointing: self.checkpointing,
            execution: self.execution,
            optimizer_in_backward: step.optimizer_in_backward,
            memory_budget_bytes: step.memory_budget_bytes,
            weight_cast_bytes: self.weight_cast_bytes(),
            warmup_steps: self.warmup_steps,
            mode: self.mode,
            phase: whole_phase(self.mode).into(),
            estimate_bytes,
            available_bytes: self.available_bytes,
            ..Default::default()
        }
    }

    /// Returns the size of the autocast region's copies of weights, which does not depend on the batch. `None` if no
    /// copies are kept.
    fn weight_cast_bytes(&self) -> Option<u64> {
        let precision = self.step.precision;
        let keeps = precision.policy().is_some() && !precision.drops_casts();
        let workload = Workload {
            batch_size: 1,
            sequence_length: 1,
            mode: Mode::ForwardKeepingGraph,
            precision,
            ..Default::default()
        };
        let estimate = keeps.then(|| memory::estimate(&self.config, &workload))?;
        Some(estimate.ok()?.weight_cast_bytes)
    }
}
