//! What a run is told.

use crate::compile::{StepConfig, check_clip_value, check_precision};
use crate::optim::{AdamWConfig, GradScaler, GradScalerConfig, Schedule};
use crate::precision::Precision;
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};

/// Batches, steps and hyperparameters of a run.
///
/// A step takes `accumulation` batches of `batch_size` windows of `sequence_length` tokens. Its loss is the mean over
/// all of their targets that count, as one batch of `accumulation * batch_size` windows would give, in less memory.
///
/// The default is nanoGPT's recipe for characters on a CPU: batches of 12 x 64 tokens, 2,000 steps, learning rate 1e-3
/// after 100 steps of warm-up and down to 1e-4 along a cosine, betas 0.9 and 0.99, weight decay 0.1, clipping at 1.
///
/// ```
/// use tallow::train::TrainConfig;
///
/// let config = TrainConfig { steps: 500, ..Default::default() };
/// config.validate()?;
/// assert_eq!(config.tokens_per_step(), 12 * 64);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// B: windows in a batch, to train and to evaluate.
    pub batch_size: usize,
    /// T: tokens in a window.
    pub sequence_length: usize,
    /// Batches in a step, of [all ranks](super::Trainer::replicate) where there are several.
    pub accumulation: usize,
    /// Steps in the whole run. A resumed run may be given more, or fewer, than it was saved with.
    pub steps: usize,
    /// The learning rate of every step, the first being step 0.
    pub schedule: Schedule,
    /// The optimizer's other hyperparameters: its `lr` is not used. Weight decay is for matrices only.
    pub optimizer: AdamWConfig,
    /// Gradients whose L2 norm is larger are scaled down to it; `None` leaves them as they are.
    pub max_grad_norm: Option<f64>,
    /// Each element of the gradients is clipped to be from minus this to this, after `max_grad_norm`; `None` leaves
    /// them as they are, and so does a saved run that says nothing.
    #[serde(default)]
    pub max_grad_value: Option<f64>,
    /// The precision of forward and loss, in training and evaluation: f32, or bf16 or f16 in autocast. The model's
    /// parameters are in f32. f32 where a saved run says nothing.
    #[serde(default)]
    pub precision: Precision,
    /// How the loss is scaled where the precision is f16; no other is scaled. If it is not `enabled`, f16 is trained as
    /// it is, and gradients that overflow are an error. The default where a saved run says nothing.
    #[serde(default)]
    pub loss_scaling: GradScalerConfig,
    /// Updates each parameter as soon as its gradient is there, whose memory is then free again: one
    /// gradient is alive at a time. Their norm is not taken then
    /// ([`StepReport::grad_norm`](super::StepReport::grad_norm) is NaN), a loss that is not finite is an error *after*
    /// its update, and `max_grad_norm` must be `None`, `accumulation` 1 and the loss not scaled. False where a saved
    /// run says nothing.
    #[serde(default)]
    pub optimizer_in_backward: bool,
    /// The most bytes that activations and gradients of a step may take: as little is recomputed in backward as
    /// [will do](crate::compile::StepConfig::memory_budget_bytes). Not saved.
    #[serde(skip)]
    pub memory_budget_bytes: Option<u64>,
    /// Steps from one evaluation to the next ([`Trainer::evaluation_is_due`](super::Trainer::evaluation_is_due)). A
    /// resumed run may be given another number.
    pub evaluate_every: usize,
    /// Checkpoints that [`Trainer::save`](super::Trainer::save) keeps: the one it writes at its path, and those
    /// before it as `path.1`, the latest, to `path.{keep - 1}`. 1 where a saved run says nothing; a resumed run may
    /// be given another number.
    #[serde(default = "one")]
    pub keep: usize,
    /// The token that documents end with: those that a window holds then see nothing of each other, and the first token
    /// of one is not predicted from the end of the one before. `None` where a saved run says nothing: a window is one
    /// text.
    #[serde(default)]
    pub separator: Option<u32>,
    /// Targets with this value do not count, as -100 in PyTorch: in loss, gradients and evaluation. Batches of masked
    /// targets come from [`Batches`](crate::data::Batches). `None` where a saved run says nothing.
    #[serde(default)]
    pub ignore_index: Option<i64>,
    /// Chooses the batches, and what dropout drops. (The weights' first values have their seed in the model.)
    pub seed: u64,
}

fn one() -> usize {
    1
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            batch_size: 12,
            sequence_length: 64,
            accumulation: 1,
            steps: 2000,
            schedule: Schedule::WarmupCosine {
                max_lr: 1e-3,
                min_lr: 1e-4,
                warmup_steps: 100,
                total_steps: 2000,
            },
            optimizer: AdamWConfig {
                betas: (0.9, 0.99),
                weight_decay: 0.1,
                ..Default::default()
            },
            max_grad_norm: Some(1.0),
            max_grad_value: None,
            precision: Precision::F32,
            loss_scaling: GradScalerConfig::default(),
            optimizer_in_backward: false,
            memory_budget_bytes: None,
            evaluate_every: 250,
            keep: 1,
            separator: None,
            ignore_index: None,
            seed: 0,
        }
    }
}

impl TrainConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: a zero size or count, a `max_grad_norm` or `max_grad_value` that is not over
    /// 0, a precision that is not planned, an optimizer in backward beside `max_grad_norm`, accumulation or loss
    /// scaling; and those of the schedule, the optimizer and the loss scale.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String, hint: &str| {
            Err(Error::config("TrainConfig", field, got).must_be(expected, hint))
        };
        let counts = [
            (
                "batch_size",
                self.batch_size,
                "a batch needs a window at least",
            ),
            (
                "sequence_length",
                self.sequence_length,
                "a window needs a token at least",
            ),
            (
                "accumulation",
                self.accumulation,
                "1 is one batch a step: no accumulation",
            ),
            (
                "steps",
                self.steps,
                "a run needs a step at least; Trainer::evaluate needs none",
            ),
            (
                "evaluate_every",
                self.evaluate_every,
                "give the number of steps to evaluate at the end only",
            ),
            (
                "keep",
                self.keep,
                "1 keeps the checkpoint that is written, and none before it",
            ),
        ];
        for (field, count, hint) in counts {
            if count == 0 {
                return refuse(field, "at least 1", "0".into(), hint);
            }
        }
        let sizes = [self.batch_size, self.sequence_length, self.accumulation];
        let product = sizes
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size));
        if product.is_none() {
            return refuse(
                "batch_size",
                "such that a step's tokens can be counted",
                format!("{} x {} x {}", sizes[0], sizes[1], sizes[2]),
                "a step has batch_size x sequence_length x accumulation tokens",
            );
        }
        if let Some(norm) = self.max_grad_norm
            && (norm.is_nan() || norm <= 0.0)
        {
            return refuse(
                "max_grad_norm",
                "over 0",
                norm.to_string(),
                "1.0 is usual; leave it out to clip nothing",
            );
        }
        if let Some(value) = self.max_grad_value {
            check_clip_value("TrainConfig", "max_grad_value", value)?;
        }
        check_precision("TrainConfig", self.precision)?;
        if self.optimizer_in_backward && self.max_grad_norm.is_some() {
            return refuse(
                "max_grad_norm",
                "None where the optimizer runs in backward",
                format!("{:?}", self.max_grad_norm),
                "clipping needs all gradients before the first update; leave one out",
            );
        }
        if self.optimizer_in_backward && self.is_scaled() {
            return refuse(
                "loss_scaling",
                "not enabled where the optimizer runs in backward",
                "enabled".into(),
                "a step that overflows is left out, which is known when all gradients are; leave one out",
            );
        }
        if self.optimizer_in_backward && self.accumulation > 1 {
            return refuse(
                "accumulation",
                "1 where the optimizer runs in backward",
                self.accumulation.to_string(),
                "a sum of gradients needs all of them before the first update; leave one out",
            );
        }
        self.schedule.validate()?;
        self.loss_scaling.validate()?;
        self.optimizer.validate()?;
        // The schedule's rate takes the place of the optimizer's own.
        let lr = self.schedule.highest();
        AdamWConfig {
            lr,
            ..self.optimizer
        }
        .validate()
    }

    fn is_scaled(&self) -> bool {
        self.precision.dtype() == DType::F16 && self.loss_scaling.enabled
    }

    /// The scaler of a run in f16; none where nothing is scaled. Returns the configuration of the run's planned step on
    /// one rank, for estimates of its memory and time. The norm of all gradients is computed unless the optimizer runs
    /// in backward: the history records it, and it guards the update.
    pub fn step(&self) -> StepConfig {
        let all_norms = (!self.optimizer_in_backward).then_some(f64::INFINITY);
        StepConfig {
            precision: self.precision,
            loss_scaling: self.is_scaled(),
            clip_norm: self.max_grad_norm.or(all_norms),
            clip_value: self.max_grad_value,
            accumulation: self.accumulation,
            memory_budget_bytes: self.memory_budget_bytes,
            optimizer_in_backward: self.optimizer_in_backward,
            dropout_seed: Some(self.seed),
            ..Default::default()
        }
    }

    pub(super) fn scaler(&self) -> Result<Option<GradScaler>> {
        let scaler = self.is_scaled().then(|| GradScaler::new(self.loss_scaling));
        scaler.transpose()
    }

    /// `accumulation * batch_size * sequence_length`: the targets of a step, those that do not count included.
    pub fn tokens_per_step(&self) -> usize {
        self.accumulation * self.batch_size * self.sequence_length
    }
}
