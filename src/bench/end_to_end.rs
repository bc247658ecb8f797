//! A whole model, timed by phase, with its memory.

use super::first_step::FirstStepCounter;
use super::row::{LossScaling, PhaseTime, Status, StepMemory, UPDATE, whole_phase};
use super::stopwatch::settled_meter;
use super::update::Update;
use super::{EndToEndRow, Lap, LapTimings, Step, Stopwatch, Timing, alternate};
use crate::memory::{self, Estimate, Kernels, Mode, Workload, system};
use crate::model::{TransformerConfig, TransformerLM, flops};
use crate::optim::AdamWConfig;
use crate::precision::Precision;
use crate::{Error, Result, backward, nn, no_grad, ops};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// One measurement of a model: which, on what batch, how much of a step, how often.
#[derive(Clone, Debug)]
pub struct EndToEnd {
    /// The model, its attention and its checkpointing. Its `context_length` is what may be run, not what is.
    pub config: TransformerConfig,
    /// B.
    pub batch_size: usize,
    /// T.
    pub sequence_length: usize,
    /// How much of a training step.
    pub mode: Mode,
    /// What forward and loss compute in, and with [`Regime::Full`](crate::precision::Regime::Full) what the parameters
    /// are. The optimizer's state is f32.
    pub precision: Precision,
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps.
    pub steps: usize,
    /// The optimizer of a training step.
    pub optimizer: AdamWConfig,
    /// Eager, or planned: on the CPU or a CUDA GPU, in f32 or under autocast.
    pub execution: Execution,
    /// Whether each parameter is updated as soon as its gradient is there
    /// ([`StepConfig::optimizer_in_backward`](crate::compile::StepConfig::optimizer_in_backward)): for planned training
    /// steps.
    pub optimizer_in_backward: bool,
    /// The most bytes that the arena may have
    /// ([`StepConfig::memory_budget_bytes`](crate::compile::StepConfig::memory_budget_bytes)): for planned training
    /// steps.
    pub memory_budget_bytes: Option<u64>,
    /// The seed of weights and tokens.
    pub seed: u64,
    /// The most FLOP/s the device can do, for the MFU; `None` where it is not known.
    pub peak_flops: Option<f64>,
    /// Bytes that may be used; a step that wants more is a row `OOM`. `None` asks nothing.
    pub available_bytes: Option<u64>,
}

/// A training step of the default model on 4 sequences of 256 tokens, eager and in f32, with 5 warm-up and 10 measured
/// steps.
impl Default for EndToEnd {
    fn default() -> Self {
        Self {
            config: TransformerConfig::default(),
            batch_size: 4,
            sequence_length: 256,
            mode: Mode::TrainStep,
            precision: Precision::F32,
            warmup_steps: 5,
            steps: 10,
            optimizer: AdamWConfig::default(),
            execution: Execution::Eager,
            optimizer_in_backward: false,
            memory_budget_bytes: None,
            seed: 0,
            peak_flops: None,
            available_bytes: None,
        }
    }
}

/// How a model is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Execution {
    /// Op by op, with candle's graph.
    #[default]
    Eager,
    /// As planned beforehand, by [`compile`](crate::compile).
    Planned,
}

impl Execution {
    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Planned => "planned",
        }
    }

    /// Whether `mode` so executed is a planned training step: only that may have its
    /// [optimizer in backward](EndToEnd::optimizer_in_backward) and a
    /// [memory budget](EndToEnd::memory_budget_bytes).
    pub fn is_planned_step(self, mode: Mode) -> bool {
        self == Self::Planned && mode == Mode::TrainStep
    }
}

/// What is alive after an eager step.
pub(super) enum Left {
    Nothing,
    Output(#[expect(dead_code, reason = "held")] Tensor),
    Gradients(#[expect(dead_code, reason = "held")] GradStore),
}

pub(super) struct Measured {
    timings: LapTimings,
    /// Of the first round.
    first_step: FirstStepCounter,
    memory: StepMemory,
    loss_scaling: Option<LossScaling>,
}

impl Measured {
    /// Adds another round of the same run.
    pub fn join(&mut self, later: Self) {
        self.timings.join(later.timings);
        // The last round's: in the first of all, kernels also take what they keep for as long as the process runs.
        self.memory = later.memory;
        if let (Some(sum), Some(scaling)) = (&mut self.loss_scaling, later.loss_scaling) {
            sum.loss_scale = scaling.loss_scale;
            sum.skipped_steps += scaling.skipped_steps;
        }
    }
}

impl EndToEnd {
    /// Measures, and returns a row for each phase: `forward`, `backward`, `optimizer` as far as the mode has them, and
    /// the step as a whole, `forward+backward` or `train step`. The phases of a planned step are its
    /// [`PhaseTimes`](crate::compile::PhaseTimes). Memory is the whole mode's:
    /// `peak_bytes` of the model and its steps, and `allocated_bytes` that are still there after the last one. So is
    /// what the first step did, warm-up or not: its time, the pages that it met for the first time, the threads that it
    /// started and, on a GPU, the kernels that it compiled and the modules of kernels that it loaded.
    ///
    /// Whether there is memory enough is decided from [`memory::estimate`], or from the plan, before anything is
    /// allocated: if not, one row says `OOM`, with the bytes wanted and the bytes there. What is too large by a lower
    /// bound is not planned, and the row says so as its `reason`. `on_step` is called after every step with the whole
    /// step's time in ms. A device that is full all the same makes such a row too, with its answer as the `reason` and
    /// what is there once the run has given back what it had.
    ///
    /// A training step in f16 scales its loss, as training in f16 must ([`GradScaler`](crate::optim::GradScaler)):
    /// scaling counts as forward, unscaling with the check for infinities as optimizer. Its rows have the `loss_scale`
    /// at the end and the `skipped_steps`, warm-up included, that overflowed and made no update.
    ///
    /// # Errors
    /// A configuration that cannot run; what is for planned training steps, with anything else; the ops' errors.
    pub fn run(
        &self,
        device: &Device,
        mut on_step: impl FnMut(Step, f64),
    ) -> Result<Vec<EndToEndRow>> {
        let runs = std::slice::from_ref(self);
        let rows = alternate(runs, 1, device, |_, step, ms| on_step(step, ms))?;
        Ok(rows.into_iter().flatten().collect())
    }

    /// Runs one such step at the smallest sizes, so that the process has what it keeps whatever the sizes: threads,
    /// their scratch for matmuls, pages of the allocator. What is [available](crate::hardware::available_bytes)
    /// afterwards is a run's own.
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
            warmup_steps: 0,
            steps: 1,
            memory_budget_bytes: None,
            available_bytes: None,
            ..self.clone()
        };
        small.measure(device, |_, _| ())?;
        Ok(())
    }

    /// The most memory it takes at once.
    pub(super) fn estimate_bytes(&self, device: &Device) -> Result<u64> {
        match self.execution {
            Execution::Eager => Ok(self.estimate(device)?.peak_bytes),
            Execution::Planned => self.planned_bytes(device),
        }
    }

    /// The breakdown of the eager run on `device`, before anything is allocated.
    ///
    /// # Errors
    /// Those of [`memory::estimate`].
    pub fn estimate(&self, device: &Device) -> Result<Estimate> {
        memory::estimate(&self.config, &self.workload(device))
    }

    pub(super) fn workload(&self, device: &Device) -> Workload {
        Workload {
            batch_size: self.batch_size,
            sequence_length: self.sequence_length,
            mode: self.mode,
            attention: self.config.attention,
            precision: self.precision,
            checkpointing: self.config.checkpointing,
            kernels: Kernels::of(device),
            moments: self.optimizer.moments,
        }
    }

    /// Returns the out-of-memory row of a run that needs more than the available bytes.
    pub(super) fn refusal(&self, estimate_bytes: u64) -> Option<EndToEndRow> {
        let available_bytes = self.available_bytes?;
        (estimate_bytes > available_bytes).then(|| {
            let least_bytes = match self.execution {
                Execution::Eager => None,
                Execution::Planned => self.least_planned_bytes().ok(),
            };
            let is_least = least_bytes.is_some_and(|bytes| bytes > available_bytes);
            let reason = "the estimate is a lower bound, beyond which nothing was planned";
            EndToEndRow {
                status: Status::OutOfMemory,
                reason: is_least.then(|| reason.into()),
                ..self.row(estimate_bytes, whole_phase(self.mode))
            }
        })
    }

    /// Returns the row of a run that was estimated to fit and did not, with the bytes available once it has freed its
    /// memory.
    pub(super) fn out_of_memory(
        &self,
        device: &Device,
        estimate_bytes: u64,
        error: &Error,
    ) -> EndToEndRow {
        let available_bytes = crate::hardware::available_bytes_on(device);
        EndToEndRow {
            status: Status::OutOfMemory,
            available_bytes: available_bytes.or(self.available_bytes),
            reason: Some(error.to_string()),
            ..self.row(estimate_bytes, whole_phase(self.mode))
        }
    }

    pub(super) fn rows(
        &self,
        estimate_bytes: u64,
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
                first_step: measured.first_step.result(),
                memory: Some(measured.memory.clone()),
                loss_scaling: measured.loss_scaling.clone(),
                ..self.row(estimate_bytes, phase)
            })
        };
        phases.into_iter().map(row).collect()
    }

    /// Statistics and rates of a phase. The optimizer multiplies no matrices.
    fn time_of(&self, phase: &str, timing: Timing) -> Result<PhaseTime> {
        let (b, t) = (self.batch_size, self.sequence_length);
        let flops = match phase {
            "forward" => Some(flops::forward(&self.config, b, t)),
            "backward" => Some(flops::backward(&self.config, b, t)),
            "optimizer" | UPDATE => None,
            _ => Some(flops::forward_backward(&self.config, b, t)),
        };
        let flops = flops.map(|flops| flops.total());
        let statistics = timing.statistics()?;
        let seconds = statistics.median_ms / 1e3;
        let flops_per_s = flops.map(|flops| flops / seconds);
        let mfu = |(rate, peak): (f64, f64)| 100.0 * rate / peak;
        Ok(PhaseTime {
            noisy: statistics.noisy(),
            tokens_per_s: (phase != UPDATE).then(|| b as f64 * t as f64 / seconds),
            flops,
            flops_per_s,
            mfu_percent: flops_per_s.zip(self.peak_flops).map(mfu),
            statistics,
            samples_ms: timing.samples_ms,
            warmup_ms: timing.warmup_ms,
        })
    }

    pub(super) fn measure(
        &self,
        device: &Device,
        mut on_step: impl FnMut(Step, f64),
    ) -> Result<Measured> {
        self.check_execution(device)?;
        let meter = settled_meter(device, self.precision.dtype() != DType::F32)?;
        let before = meter.current_bytes();
        let model = self.model(device)?;
        // Drawing the weights takes more than they do, and is no part of a step.
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
        // Where the system cannot reset the peak it is the process's, and no row's.
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
        let tokens = self.random_tokens(0, device)?; // (B, T)
        let targets = self.random_tokens(1, device)?; // (B, T)
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

    /// What a training step ends with; `None` for less than a step.
    pub(super) fn update(&self, model: &TransformerLM) -> Result<Option<Update>> {
        let is_step = self.mode == Mode::TrainStep;
        let update =
            is_step.then(|| Update::new(self.optimizer, model.parameters(), self.precision));
        update.transpose()
    }

    /// One eager step in its phases, with what it leaves alive.
    pub(super) fn step(
        &self,
        lap: &mut Lap<'_>,
        model: &TransformerLM,
        [tokens, targets]: [&Tensor; 2],
        update: Option<&mut Update>,
    ) -> Result<Left> {
        let precision = self.precision;
        let forward = || precision.run(|| model.forward(tokens));
        let loss = || precision.run(|| model.loss(tokens, targets));
        match (self.mode, update) {
            (Mode::Forward, _) => Ok(Left::Output(lap.time("forward", || no_grad(forward))?)),
            (Mode::ForwardKeepingGraph, _) => Ok(Left::Output(lap.time("forward", forward)?)),
            (_, None) => {
                let loss = lap.time("forward", loss)?;
                let gradients = lap.time("backward", move || backward(loss))?;
                Ok(Left::Gradients(gradients))
            }
            (_, Some(update)) => {
                let loss = lap.time("forward", || update.scaled(loss()?))?;
                let mut gradients = lap.time("backward", move || backward(loss))?;
                lap.time("optimizer", || update.step(&mut gradients))?;
                Ok(Left::Nothing)
            }
        }
    }

    /// The model, its parameters in the precision's dtype.
    pub(super) fn model(&self, device: &Device) -> Result<TransformerLM> {
        match self.precision.parameter_dtype() {
            DType::F32 => TransformerLM::new(&self.config, self.seed, device),
            dtype => {
                let weights = nn::seeded(self.seed, dtype, device);
                TransformerLM::from_var_builder(&self.config, weights)
            }
        }
    }

    /// Uniform ids, (B, T); `stream` sets inputs and targets apart.
    pub(super) fn random_tokens(&self, stream: u64, device: &Device) -> Result<Tensor> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream);
        let shape = (self.batch_size, self.sequence_length);
        let bytes = shape
            .0
            .saturating_mul(shape.1)
            .saturating_mul(size_of::<u32>());
        ops::check_granted("token ids", bytes as u64)?;
        let vocab = u32::try_from(self.config.vocab_size).unwrap_or(u32::MAX);
        let ids: Vec<u32> = (0..shape.0 * shape.1)
            .map(|_| rng.random_range(0..vocab))
            .collect();
        Ok(Tensor::from_vec(ids, shape, device)?.to_dtype(DType::U32)?)
    }

    /// The run's labels as a row that was not measured.
    fn row(&self, estimate_bytes: u64, phase: &str) -> EndToEndRow {
        let config = &self.config;
        EndToEndRow {
            d_model: config.d_model,
            d_ff: config.d_ff,
            num_layers: config.num_layers,
            num_heads: config.num_heads,
            vocab_size: config.vocab_size,
            parameters: config.num_parameters(),
            batch_size: self.batch_size,
            context_length: self.sequence_length,
            attention: config.attention,
            precision: self.precision,
            checkpointing: config.checkpointing,
            execution: self.execution,
            optimizer_in_backward: self.optimizer_in_backward,
            memory_budget_bytes: self.memory_budget_bytes,
            weight_cast_bytes: self.weight_cast_bytes(),
            warmup_steps: self.warmup_steps,
            mode: self.mode,
            phase: phase.into(),
            estimate_bytes,
            available_bytes: self.available_bytes,
            ..Default::default()
        }
    }

    /// What the region's copies of the weights take: 2 bytes for each element of a matrix that is multiplied by. Null
    /// where none is kept.
    fn weight_cast_bytes(&self) -> Option<u64> {
        let keeps = self.precision.policy().is_some() && !self.precision.drops_casts();
        let c = &self.config;
        let [d, f, v, layers] = [c.d_model, c.d_ff, c.vocab_size, c.num_layers].map(|n| n as f64);
        let elements = layers * (4.0 * d * d + 3.0 * d * f) + v * d;
        keeps.then_some((2.0 * elements) as u64)
    }
}
