//! A whole model, timed by phase, with its memory.

use super::{LapTimings, Laps, Step, Timing};
use crate::memory::{self, Mode, Workload, system, tracker};
use crate::model::{TransformerConfig, TransformerLM, flops};
use crate::optim::{AdamW, AdamWConfig};
use crate::precision::Precision;
use crate::report::Fields;
use crate::{Result, no_grad};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One measurement of a model: which, on what batch, how much of a step, how often.
#[derive(Clone, Debug)]
pub struct EndToEnd {
    /// The model, and its attention. Its `context_length` is what may be run, not what is.
    pub config: TransformerConfig,
    /// B.
    pub batch_size: usize,
    /// T.
    pub sequence_length: usize,
    /// How much of a training step.
    pub mode: Mode,
    /// What forward and loss compute in. Parameters and optimizer are f32.
    pub precision: Precision,
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps.
    pub steps: usize,
    /// The optimizer of a training step.
    pub optimizer: OptimizerChoice,
    /// The seed of weights and tokens.
    pub seed: u64,
    /// The most FLOP/s the device can do, for the MFU; `None` where nobody knows.
    pub peak_flops: Option<f64>,
    /// Bytes that may be used; a step that wants more is a row `OOM`. `None` asks nothing.
    pub available_bytes: Option<u64>,
}

/// The optimizer that a training step is measured with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerChoice {
    /// This crate's.
    AdamW(AdamWConfig),
    /// candle_nn's, to compare; its temporaries are not in the memory estimate.
    CandleAdamW(AdamWConfig),
}

type StepFn = Box<dyn FnMut(&GradStore) -> Result<()>>;

impl OptimizerChoice {
    /// As reports name it.
    pub fn name(&self) -> &'static str {
        match self {
            OptimizerChoice::AdamW(_) => "adamw",
            OptimizerChoice::CandleAdamW(_) => "candle-adamw",
        }
    }

    /// A function that makes one step.
    fn stepper(&self, parameters: Vec<(String, Var)>) -> Result<StepFn> {
        match *self {
            OptimizerChoice::AdamW(config) => {
                let mut optimizer = AdamW::new(parameters, config)?;
                Ok(Box::new(move |gradients| optimizer.step(gradients)))
            }
            OptimizerChoice::CandleAdamW(config) => {
                let vars = parameters.into_iter().map(|(_, var)| var).collect();
                let params = candle_nn::ParamsAdamW {
                    lr: config.lr,
                    beta1: config.betas.0,
                    beta2: config.betas.1,
                    eps: config.eps,
                    weight_decay: config.weight_decay,
                };
                let mut optimizer = candle_nn::AdamW::new(vars, params)?;
                Ok(Box::new(move |gradients| {
                    Ok(candle_nn::Optimizer::step(&mut optimizer, gradients)?)
                }))
            }
        }
    }
}

impl EndToEnd {
    /// Measures, and returns a row for each phase: `forward`, `backward`, `optimizer` as far as the mode has them, and
    /// the step as a whole, `forward+backward` or `train step`.
    ///
    /// Whether there is memory enough is decided from [`memory::estimate`], before anything is allocated: if not, one
    /// row says `OOM`, with the bytes wanted and the bytes there. `on_step` is called after every step with the whole
    /// step's time in ms.
    ///
    /// # Errors
    /// A configuration that cannot run; the ops' errors.
    pub fn run(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<Vec<Fields>> {
        let workload = Workload {
            batch_size: self.batch_size,
            sequence_length: self.sequence_length,
            mode: self.mode,
            attention: self.config.attention,
            precision: self.precision,
        };
        let estimate_bytes = memory::estimate(&self.config, &workload)?.peak_bytes;
        if let Some(available_bytes) = self.available_bytes
            && estimate_bytes > available_bytes
        {
            let mut row = self.labels(self.whole_phase(), "OOM");
            row.insert("estimate_bytes", estimate_bytes);
            row.insert("wanted_bytes", estimate_bytes);
            row.insert("available_bytes", available_bytes);
            return Ok(vec![row]);
        }
        let before = tracker::current_bytes();
        tracker::reset_peak();
        let resident_resets = system::reset_resident_peak();
        let timings = self.time(device, on_step)?;
        let peak_bytes = tracker::peak_bytes()
            .zip(before)
            .map(|(peak, before)| peak - before);
        // Where the system cannot begin the peak anew it is the process's, and no row's.
        let resident_bytes = resident_resets.then(system::resident_peak_bytes).flatten();

        let mut rows = Vec::new();
        for (phase, timing) in self.phases(&timings) {
            let mut row = self.labels(phase, "ok");
            row.merge(timing.fields()?);
            row.insert("noisy", timing.statistics()?.noisy());
            row.merge(self.rates(phase, timing.statistics()?.median_ms));
            row.insert("peak_bytes", peak_bytes);
            row.insert("resident_peak_bytes", resident_bytes);
            row.insert("estimate_bytes", estimate_bytes);
            row.insert("available_bytes", self.available_bytes);
            rows.push(row);
        }
        Ok(rows)
    }

    /// Runs the steps.
    fn time(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<LapTimings> {
        let model = TransformerLM::new(&self.config, self.seed, device)?;
        let tokens = self.random_tokens(0, device)?; // (B, T)
        let targets = self.random_tokens(1, device)?; // (B, T)
        tracker::reset_peak(); // drawing the weights has one of its own
        let laps = Laps::new(device).warmup(self.warmup_steps).on_step(on_step);
        let precision = self.precision;
        let forward = || precision.run(|| model.forward(&tokens));
        let forward_backward = |lap: &mut super::Lap<'_>| {
            let loss = lap.time("forward", || {
                precision.run(|| model.loss(&tokens, &targets))
            })?;
            // The graph goes with the loss, before anything else asks for memory.
            lap.time("backward", move || loss.backward())
        };
        match self.mode {
            Mode::Forward => {
                laps.measure(self.steps, |lap| lap.time("forward", || no_grad(forward)))
            }
            Mode::ForwardKeepingGraph => {
                laps.measure(self.steps, |lap| lap.time("forward", forward))
            }
            Mode::ForwardBackward => laps.measure(self.steps, forward_backward),
            Mode::TrainStep => {
                let mut step = self.optimizer.stepper(model.parameters())?;
                laps.measure(self.steps, |lap| {
                    let gradients = forward_backward(lap)?;
                    lap.time("optimizer", || step(&gradients))
                })
            }
        }
    }

    /// Uniform ids, (B, T); `stream` sets inputs and targets apart.
    fn random_tokens(&self, stream: u64, device: &Device) -> Result<Tensor> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream);
        let shape = (self.batch_size, self.sequence_length);
        let vocab = u32::try_from(self.config.vocab_size).unwrap_or(u32::MAX);
        let ids: Vec<u32> = (0..shape.0 * shape.1)
            .map(|_| rng.random_range(0..vocab))
            .collect();
        Ok(Tensor::from_vec(ids, shape, device)?.to_dtype(DType::U32)?)
    }

    /// The name of the step as a whole.
    fn whole_phase(&self) -> &'static str {
        match self.mode {
            Mode::Forward | Mode::ForwardKeepingGraph => "forward",
            Mode::ForwardBackward => "forward+backward",
            Mode::TrainStep => "train step",
        }
    }

    /// The phases that get a row; a forward alone is the whole step, and gets one.
    fn phases<'t>(&self, timings: &'t LapTimings) -> Vec<(&'static str, &'t Timing)> {
        let mut phases: Vec<_> = timings.phases.iter().map(|(name, t)| (*name, t)).collect();
        if phases.len() > 1 {
            phases.push((self.whole_phase(), &timings.whole));
        }
        phases
    }

    /// What a row was measured on.
    fn labels(&self, phase: &str, status: &str) -> Fields {
        let mut row = Fields::new();
        row.insert("d_model", self.config.d_model);
        row.insert("num_layers", self.config.num_layers);
        row.insert("parameters", self.config.num_parameters());
        row.insert("batch_size", self.batch_size);
        row.insert("context_length", self.sequence_length);
        row.insert("attention", self.config.attention.name());
        row.insert("precision", self.precision.name());
        row.insert("warmup_steps", self.warmup_steps);
        row.insert("mode", serde_json::to_value(self.mode).unwrap_or_default());
        row.insert("phase", phase);
        row.insert(
            "graph",
            match self.mode {
                Mode::Forward => "dropped",
                _ => "kept",
            },
        );
        row.insert("status", status);
        row
    }

    /// Tokens, FLOPs and their rates at the median time.
    fn rates(&self, phase: &str, median_ms: f64) -> Fields {
        let (b, t) = (self.batch_size, self.sequence_length);
        let work = match phase {
            "forward" => Some(flops::forward(&self.config, b, t)),
            "backward" => Some(flops::backward(&self.config, b, t)),
            "optimizer" => None, // no matrix product
            _ => Some(flops::forward_backward(&self.config, b, t)),
        };
        let seconds = median_ms / 1e3;
        let rate = work.map(|work| work.total() / seconds);
        let mut fields = Fields::new();
        fields.insert("tokens_per_s", (b * t) as f64 / seconds);
        fields.insert("flops", work.map(|work| work.total()));
        fields.insert(
            "flops_by_part",
            work.and_then(|work| serde_json::to_value(work).ok()),
        );
        fields.insert("flops_per_s", rate);
        let mfu = rate
            .zip(self.peak_flops)
            .map(|(rate, peak)| 100.0 * rate / peak);
        fields.insert("mfu_percent", mfu);
        fields
    }
}
