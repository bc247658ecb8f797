//! The configuration of a training run.

use crate::attention::Algorithm;
use crate::compile::{StepConfig, check_clip_value, check_precision};
use crate::nn::Checkpointing;
use crate::optim::{AdamWConfig, GradScaler, GradScalerConfig, Rule, Schedule};
use crate::precision::Precision;
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};

/// Batches, steps and hyperparameters of a run.
///
/// A step uses `accumulation` batches of `batch_size` windows of `sequence_length` tokens. Its loss is the mean over
/// all of their counted targets, like that of one batch of `accumulation * batch_size` windows, in less memory.
///
/// The default is nanoGPT's recipe for characters on a CPU: batches of 12 x 64 tokens, 2,000 steps, learning rate 1e-3
/// after 100 steps of warm-up, decaying to 1e-4 along a cosine, betas 0.9 and 0.99, weight decay 0.1, clipping at 1.
/// A serialized configuration may lack the fields that say "the default".
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
    /// B: windows in a batch, for training and evaluation.
    pub batch_size: usize,
    /// T: tokens in a window.
    pub sequence_length: usize,
    /// Batches in a step, counted over [all ranks](super::Trainer::replicate). It must be a multiple of the number of
    /// ranks; each rank computes an equal share.
    pub accumulation: usize,
    /// Steps of the whole run. A resumed run may have more or fewer than the saved one.
    pub steps: usize,
    /// The schedule of the learning rate; the first step is step 0.
    pub schedule: Schedule,
    /// The rule of the update; its `lr` is ignored. Weight decay applies to matrices only.
    pub optimizer: Rule,
    /// The largest L2 norm of all gradients; larger ones are scaled down to it. `None` disables clipping by norm.
    pub max_grad_norm: Option<f64>,
    /// The largest absolute value of a gradient's element; others are clipped to it after `max_grad_norm`. `None`
    /// disables clipping by value: the default.
    #[serde(default)]
    pub max_grad_value: Option<f64>,
    /// The algorithm of attention. `None`, the default, keeps that of the model, or of the checkpoint that is resumed.
    /// The choice changes results only by rounding.
    #[serde(default)]
    pub attention: Option<Algorithm>,
    /// The activation checkpointing of the blocks. `None`, the default, keeps that of the model, or of the checkpoint
    /// that is resumed. It changes no result, so it may differ when a run is resumed.
    #[serde(default)]
    pub checkpointing: Option<Checkpointing>,
    /// The precision of forward and loss, in training and evaluation: f32, or bf16 or f16 in autocast. The model's
    /// parameters are f32. The default is f32.
    #[serde(default)]
    pub precision: Precision,
    /// Scaling of the loss in f16; other precisions are not scaled. If it is not `enabled`, f16 runs unscaled, and
    /// gradients that overflow are an error. The default is [`GradScalerConfig`]'s.
    #[serde(default)]
    pub loss_scaling: GradScalerConfig,
    /// Updates each parameter as soon as its gradient is computed, and frees the gradient: one gradient is alive at a
    /// time. The gradients' norm is then not computed ([`StepReport::grad_norm`](super::StepReport::grad_norm) is NaN),
    /// and a loss that is not finite is an error *after* its update. `max_grad_norm` must be `None`, `accumulation` 1,
    /// and the loss not scaled. The default is false.
    #[serde(default)]
    pub optimizer_in_backward: bool,
    /// The most bytes that activations and gradients of a step may use; backward recomputes as little as [this
    /// allows](crate::compile::StepConfig::memory_budget_bytes). Not saved.
    #[serde(skip)]
    pub memory_budget_bytes: Option<u64>,
    /// Steps from one evaluation to the next ([`Trainer::evaluation_is_due`](super::Trainer::evaluation_is_due)). It
    /// may change when a run is resumed.
    pub evaluate_every: usize,
    /// Number of checkpoints that [`Trainer::save`](super::Trainer::save) keeps: the one at its path, and earlier ones
    /// as `path.1`, the latest, to `path.{keep - 1}`. The default is 1. It may change when a run is resumed.
    #[serde(default = "one")]
    pub keep: usize,
    /// The token that ends a document. Documents in one window then do not attend to each other, and the first token of
    /// a document is not predicted from the previous one. With `None`, the default, a window is one text.
    #[serde(default)]
    pub separator: Option<u32>,
    /// The value of targets that do not count in loss, gradients and evaluation, such as PyTorch's -100. Batches with
    /// masked targets come from [`Batches`](crate::data::Batches). The default is `None`.
    #[serde(default)]
    pub ignore_index: Option<i64>,
    /// Seed of the batches and of dropout. (The model has the seed of the initial weights.)
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
            }
            .into(),
            max_grad_norm: Some(1.0),
            max_grad_value: None,
            attention: None,
            checkpointing: None,
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
    /// Checks the fields.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: a size or count of 0; a `max_grad_norm` or `max_grad_value` that is not
    /// positive; a precision that cannot be planned; an optimizer in backward together with `max_grad_norm`,
    /// accumulation or loss scaling. Also the errors of the schedule, the optimizer and the loss scale.
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
        // The schedule's learning rate replaces the optimizer's own.
        self.optimizer.with_lr(self.schedule.highest()).validate()
    }

    fn is_scaled(&self) -> bool {
        self.precision.dtype() == DType::F16 && self.loss_scaling.enabled
    }

    /// Returns the configuration of the run's planned step in a job of one rank, for estimates of its memory and time.
    ///
    /// In a job of several ranks, set [`StepConfig::accumulation`] to the share of one rank,
    /// `accumulation / world_size`, and [`StepConfig::ranks`]. `attention` and `checkpointing` are not part of it: they
    /// are settings of the model ([`TransformerLM::with_attention`], [`TransformerLM::with_checkpointing`]).
    ///
    /// `clip_norm` is `max_grad_norm`. If that is `None` it is infinity, which computes the norm of all gradients and
    /// clips nothing: [`StepReport::grad_norm`](super::StepReport::grad_norm) reports the norm, and a gradient that is
    /// not finite is an error before the update. With `optimizer_in_backward` it is `None`.
    ///
    /// [`TransformerLM::with_attention`]: crate::model::TransformerLM::with_attention
    /// [`TransformerLM::with_checkpointing`]: crate::model::TransformerLM::with_checkpointing
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
            optimizer: self.optimizer,
            dropout_seed: Some(self.seed),
            ..Default::default()
        }
    }

    /// Returns the scaler of a run in f16; `None` if the loss is not scaled.
    pub(super) fn scaler(&self) -> Result<Option<GradScaler>> {
        let scaler = self.is_scaled().then(|| GradScaler::new(self.loss_scaling));
        scaler.transpose()
    }

    /// Returns `accumulation * batch_size * sequence_length`: the targets of a step, including those that do not count.
    pub fn tokens_per_step(&self) -> usize {
        self.accumulation * self.batch_size * self.sequence_length
    }
}
