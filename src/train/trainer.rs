//! The training loop's steps and evaluations.

use super::data::{check_dtype, check_fits, check_shape};
use super::ranks::Job;
use super::{Data, DataFingerprint, History, TrainConfig};
use crate::compile::Step;
use crate::data::{Batch, Batches};
use crate::files::PathLock;
use crate::inplace::to_f64;
use crate::model::TransformerLM;
use crate::ops::cross_entropy::nothing_counts;
use crate::optim::{GradScaler, Optimizer, finite_loss, usual_groups};
use crate::{Result, probe};
use candle_core::Var;
use std::sync::Mutex;

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps taken, this one included.
    pub step: usize,
    /// Mean loss in nats a token before the update, over the counted targets of all batches and ranks. NaN if no target
    /// counts; a scaled loss may be infinite or NaN.
    pub loss: f64,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// The L2 norm of all gradients, unscaled, before clipping. Infinite or NaN in a skipped step; NaN if [the
    /// optimizer runs in backward](TrainConfig::optimizer_in_backward).
    pub grad_norm: f64,
    /// The factor of the loss in f16 ([`TrainConfig::loss_scaling`]).
    pub loss_scale: Option<f64>,
    /// Whether there was no update: gradients overflowed, and the scale is now smaller, or no target counts (`tokens`
    /// is 0).
    pub skipped: bool,
    /// Counted targets of all batches and ranks: [`TrainConfig::tokens_per_step`] if none is
    /// [masked](TrainConfig::ignore_index).
    pub tokens: usize,
}

/// A training run: a model, its optimizer, its data, and its progress.
///
/// Steps are planned ([`Step`]) before the first one runs: forward, backward, clipping and AdamW in memory that is
/// allocated once. Parameters are f32 (on the CPU also f64); [`TrainConfig::precision`] computes in bf16 or f16. Steps
/// run on the CPU and on NVIDIA GPUs. Train what plans refuse, such as parameters in half precision or on Apple's GPUs,
/// in a loop of your own with `loss`, [`backward`](crate::backward()) and [`Optimizer::step`].
///
/// In f16 the loss is scaled ([`TrainConfig::loss_scaling`], [`GradScaler`]): a step whose gradients overflow is
/// skipped, which is not an error. It counts as a step for the schedule and the data, but not for the optimizer.
///
/// A model with [dropout](crate::model::TransformerConfig::dropout) in its configuration drops in training, by the
/// run's seed, and not in evaluation.
///
/// A run is a function of the model's initial weights, the configuration and the data: the same ones give the same
/// bits, with or without evaluations, and whether or not it is stopped and [resumed](Self::resume) (on one machine and
/// build).
///
/// ```no_run
/// # use tallow::train::{Trainer, TrainConfig};
/// # fn run(mut trainer: Trainer) -> tallow::Result<()> {
/// while let Some(report) = trainer.step()? {
///     if trainer.evaluation_is_due() {
///         println!("step {}: {:.4}", report.step, trainer.evaluate()?);
///         trainer.save("run.safetensors")?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Trainer {
    pub(super) model: TransformerLM,
    pub(super) parameters: Vec<(String, Var)>,
    pub(super) optimizer: Optimizer,
    /// Only in f16.
    pub(super) scaler: Option<GradScaler>,
    pub(super) config: TrainConfig,
    /// Set if several ranks train together.
    pub(super) job: Option<Job>,
    /// Set by the first step, evaluation or call of [`plan`](Self::plan).
    pub(super) planned: Option<Step<'static>>,
    pub(super) training: Box<dyn Batches>,
    validation: Box<dyn Batches>,
    pub(super) training_data: DataFingerprint,
    pub(super) validation_data: DataFingerprint,
    pub(super) step: usize,
    pub(super) history: History,
    /// Lock of the path that was last saved to.
    pub(super) lock: Mutex<Option<PathLock>>,
}

impl Trainer {
    /// Creates a run at step 0.
    ///
    /// The weights are trained in place: a clone of `model` shares them; call [`refresh`](Self::refresh) after setting
    /// them. The data are [`Tokens`](crate::data::Tokens), or [`Batches`] of ids and targets.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for an invalid configuration, heads too wide for its attention, windows
    /// longer than the model's context, or tokens of a larger vocabulary than the model's;
    /// [`Error::DType`](crate::Error::DType) for a model whose parameters are not f32 (or, with precision f32, f64);
    /// [`Error::Data`](crate::Error::Data) for data shorter than a window.
    pub fn new(
        model: TransformerLM,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        let parameters = model.parameters();
        Self::of(model, parameters, config, train, validation)
    }

    /// Creates a run that trains `parameters`: those of the model, or shards of them.
    pub(super) fn of(
        model: TransformerLM,
        parameters: Vec<(String, Var)>,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        let (train, validation) = (train.into(), validation.into());
        config.validate()?;
        let (attention, checkpointing) = (model.attention(), model.checkpointing());
        let attention = config.attention.unwrap_or(attention);
        let checkpointing = config.checkpointing.unwrap_or(checkpointing);
        let model = model.with_attention(attention)?;
        let model = model.with_checkpointing(checkpointing);
        let config = TrainConfig {
            attention: Some(attention),
            checkpointing: Some(checkpointing),
            ..config
        };
        check_dtype(&model, &config)?;
        check_fits(&model, &config, &train)?;
        check_fits(&model, &config, &validation)?;
        let vocab_size = model.config().vocab_size;
        let training_data = train.fingerprint(vocab_size)?;
        let validation_data = validation.fingerprint(vocab_size)?;
        let groups = usual_groups(parameters.clone(), config.optimizer);
        Ok(Self {
            optimizer: Optimizer::with_groups(groups)?,
            scaler: config.scaler()?,
            training_data,
            validation_data,
            job: None,
            planned: None,
            training: train.training(&config)?,
            validation: validation.validation(&config)?,
            model,
            parameters,
            config,
            step: 0,
            history: History::default(),
            lock: Mutex::default(),
        })
    }

    /// Takes a step; returns `None` once all of the configuration's steps are taken.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a loss or a gradient that is not finite; the errors of data and ops. If
    /// the loss is scaled, such a step is skipped instead, unless gradients overflow even at a scale of 2^-14. After an
    /// error, weights, optimizer and step count are unchanged, unless [the optimizer runs in
    /// backward](TrainConfig::optimizer_in_backward), which has then updated them. After
    /// [`Error::Rank`](crate::Error::Rank) weights and optimizer are [undefined](crate::distributed#failures).
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        if self.is_done() {
            return Ok(None);
        }
        let _step = probe::step();
        let ranks = self.communicator().cloned();
        let _timeout = ranks
            .as_ref()
            .map(|ranks| ranks.apply_timeout("a step of training"));
        let report = self.update()?;
        self.step += 1;
        self.history.stepped(report.loss, report.skipped);
        if self.is_done() {
            self.optimizer.gather_weights()?;
        }
        Ok(Some(report))
    }

    /// Returns the mean loss over all of the validation data, in nats a token, and records it in the [`History`].
    ///
    /// For tokens, every token but the first is predicted once, from those before it in its window
    /// ([`SequentialBatches`](crate::data::SequentialBatches)) or in its document ([`TrainConfig::separator`]); a
    /// document's first token is then not predicted. For [`Batches`] every counted target is predicted once.
    ///
    /// If ranks train together, each evaluates a part of the data, and every rank must call this; all get the same
    /// loss.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a loss that is not finite; the errors of data and ops;
    /// [`Error::Rank`](crate::Error::Rank).
    pub fn evaluate(&mut self) -> Result<f64> {
        self.optimizer.gather_weights()?;
        let was_planned = self.planned.is_some();
        let evaluated = self.evaluate_planned();
        if !was_planned {
            self.planned = None; // ranks may still join
        }
        evaluated
    }

    fn evaluate_planned(&mut self) -> Result<f64> {
        let (mut sum, mut predicted, mut all) = (0.0, 0, 0);
        let [rank, world_size] = self.rank_of();
        let count = self.validation.len();
        // If weights are gathered, all ranks run the same number of batches; extra ones do not count.
        let gathers = matches!(self.job, Some(Job::FullyShard(_)));
        let end = match gathers {
            true => count.next_multiple_of(world_size),
            false => count,
        };
        let ranks = self.communicator().cloned();
        for index in (rank..end).step_by(world_size) {
            let _timeout = ranks
                .as_ref()
                .map(|ranks| ranks.apply_timeout("a batch of evaluation"));
            let batch = self
                .validation
                .batch(index.min(count - 1) as u64, self.model.device())?;
            all += batch.num_targets();
            let given = self.batch_of(&batch.inputs, &batch.targets)?;
            let (counted, is_mean) = match given.counted_targets() {
                Some(counted) => (counted, false),
                None => (batch.num_targets(), true),
            };
            if counted == 0 && !gathers {
                continue;
            }
            let loss = to_f64(&self.planned()?.0.forward(given)?)?;
            if index < count {
                sum += if is_mean { loss * counted as f64 } else { loss };
                predicted += counted;
            }
        }
        let [sum, predicted] = self.mean_over_ranks([sum, predicted as f64])?;
        if predicted == 0.0 {
            return Err(nothing_counts("Trainer::evaluate", all));
        }
        let loss = sum / predicted;
        finite_loss(loss, || {
            format!("the validation loss after {} steps", self.step)
        })?;
        self.history.evaluated(self.step, loss);
        Ok(loss)
    }

    /// Returns whether an evaluation is due: after every `evaluate_every`-th step and after the last.
    pub fn evaluation_is_due(&self) -> bool {
        self.is_done() || self.step.is_multiple_of(self.config.evaluate_every)
    }

    /// Returns whether all steps are taken.
    pub fn is_done(&self) -> bool {
        self.step >= self.config.steps
    }

    /// Returns the number of steps taken.
    pub fn steps_taken(&self) -> usize {
        self.step
    }

    /// Returns the model. Its weights are meta tensors if [they are sharded](Self::fully_sharded). With a [sharded
    /// optimizer](Self::shard_optimizer) the parameters that other ranks own miss the last update here: the next step
    /// begins by fetching them. An evaluation, a save, [`gather_model`](Self::gather_model) and the last step fetch
    /// them too.
    pub fn model(&self) -> &TransformerLM {
        &self.model
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Returns the factor of the next step's loss, in f16.
    pub fn loss_scale(&self) -> Option<f64> {
        self.scaler.as_ref().map(GradScaler::loss_scale)
    }

    /// Returns the configuration of the run.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Returns the losses so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    pub(super) fn training_batch(&self, i: usize) -> Result<Batch> {
        let index = self.step * self.config.accumulation + i;
        let batch = self.training.batch(index as u64, self.model.device())?;
        check_shape(batch, &self.config)
    }
}
