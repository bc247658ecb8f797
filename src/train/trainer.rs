//! The loop: one step, one evaluation.

use super::data::{check_dtype, check_fits, check_shape};
use super::ranks::Job;
use super::{Data, DataFingerprint, History, TrainConfig};
use crate::compile::Step;
use crate::data::{Batch, Batches};
use crate::files::PathLock;
use crate::inplace::to_f64;
use crate::model::TransformerLM;
use crate::ops::cross_entropy::nothing_counts;
use crate::optim::{AdamW, GradScaler, decay_matrices_only, finite_loss};
use crate::{Result, probe};
use candle_core::Var;
use std::sync::Mutex;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps taken, this one included.
    pub step: usize,
    /// Mean loss over the step's targets before its update, in nats a token: over all that count, of all batches and
    /// ranks. NaN where none counts; with a loss scale it may be infinite or NaN.
    pub loss: f64,
    /// The learning rate of its update.
    pub learning_rate: f64,
    /// The L2 norm of all gradients, unscaled, before clipping; infinite or NaN in a skipped step, NaN where
    /// [the optimizer runs in backward](TrainConfig::optimizer_in_backward).
    pub grad_norm: f64,
    /// What the loss was multiplied by, in f16 ([`TrainConfig::loss_scaling`]).
    pub loss_scale: Option<f64>,
    /// Whether there was no update: gradients overflowed at that scale, which is smaller then, or no target counts
    /// (`tokens` is 0).
    pub skipped: bool,
    /// The targets that count, of all batches and ranks: [`TrainConfig::tokens_per_step`] where none is
    /// [masked](TrainConfig::ignore_index).
    pub tokens: usize,
}

/// A run: a model, its optimizer, its data, and how far it has come.
///
/// Steps are planned ([`Step`]) before the first one runs: forward, backward, clipping and AdamW in memory that is
/// allocated once. They train models in f32 (f64 on the CPU) on the CPU and on NVIDIA GPUs. What plans refuse, as
/// parameters in half precision or Apple's GPUs, a loop of one's own trains: `loss`, [`backward`](crate::backward()),
/// [`AdamW::step`].
///
/// In f16 the loss is scaled ([`TrainConfig::loss_scaling`], [`GradScaler`]): a step whose gradients overflow is
/// skipped, which is no error. It counts as a step, for the schedule and the data too, but not for the optimizer.
///
/// A model whose configuration has [dropout](crate::model::TransformerConfig::dropout) drops in training, by the run's
/// seed, and not in evaluation.
///
/// A run is a function of the model's first weights, the configuration and the data: the same ones give the same bits,
/// with or without evaluations, and whether it is stopped and [resumed](Self::resume) or not (on one machine and
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
    pub(super) optimizer: AdamW,
    /// In f16 only.
    pub(super) scaler: Option<GradScaler>,
    pub(super) config: TrainConfig,
    /// Where several ranks train together.
    pub(super) job: Option<Job>,
    /// From the first step or evaluation on, or the first call of [`plan`](Self::plan).
    pub(super) planned: Option<Step<'static>>,
    pub(super) training: Box<dyn Batches>,
    validation: Box<dyn Batches>,
    pub(super) training_data: DataFingerprint,
    pub(super) validation_data: DataFingerprint,
    pub(super) step: usize,
    pub(super) history: History,
    /// On the path that it last saved to.
    pub(super) lock: Mutex<Option<PathLock>>,
}

impl Trainer {
    /// A run at its beginning.
    ///
    /// The weights are trained where they are: a clone of `model` kept outside shares them; call
    /// [`refresh`](Self::refresh) after setting them. The data are
    /// [`Tokens`](crate::data::Tokens), or [`Batches`] of ids and targets.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a configuration that cannot work, windows longer than the model's
    /// context, or tokens of a larger vocabulary than the model's; [`Error::DType`](crate::Error::DType) for a model
    /// whose parameters are not in f32 (or, in a run in f32, in f64); [`Error::Data`](crate::Error::Data) for data
    /// shorter than a window.
    pub fn new(
        model: TransformerLM,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        let parameters = model.parameters();
        Self::of(model, parameters, config, train, validation)
    }

    /// A run that trains these: the model's parameters, or parts of them.
    pub(super) fn of(
        model: TransformerLM,
        parameters: Vec<(String, Var)>,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        let (train, validation) = (train.into(), validation.into());
        config.validate()?;
        check_dtype(&model, &config)?;
        check_fits(&model, &config, &train)?;
        check_fits(&model, &config, &validation)?;
        let vocab_size = model.config().vocab_size;
        let training_data = train.fingerprint(vocab_size)?;
        let validation_data = validation.fingerprint(vocab_size)?;
        let groups = decay_matrices_only(parameters.clone(), config.optimizer);
        Ok(Self {
            optimizer: AdamW::with_groups(groups)?,
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

    /// Takes a step; `None` once all of the configuration's steps are taken.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a loss or a gradient that is not finite, and whatever data and ops
    /// refuse. Where the loss is scaled such a step is skipped instead, until the scale has fallen to 2^-14 and
    /// gradients overflow nonetheless. Neither weights nor optimizer have changed then, and the run is where it was
    /// (but with [the optimizer in backward](TrainConfig::optimizer_in_backward), which has updated them).
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        if self.is_done() {
            return Ok(None);
        }
        let _step = probe::step();
        let ranks = self.communicator().cloned();
        let _watch = ranks
            .as_ref()
            .map(|ranks| ranks.watch("a step of training"));
        let report = self.update()?;
        self.step += 1;
        self.history.stepped(report.loss, report.skipped);
        if self.is_done() {
            self.optimizer.gather_weights()?;
        }
        Ok(Some(report))
    }

    /// Mean loss over the whole of the validation data, nats a token. It is put down in the [`History`].
    ///
    /// Of tokens every one but the first is predicted once, from those before it in its window
    /// ([`SequentialBatches`](crate::data::SequentialBatches)) or in its document ([`TrainConfig::separator`]), whose
    /// first token is left out. Of [`Batches`] every target that counts is predicted once.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a loss that is not finite, and whatever data and ops refuse.
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
        // Where ranks gather weights together, all run as many batches: those that are too many do not count.
        let gathers = matches!(self.job, Some(Job::FullyShard(_)));
        let end = match gathers {
            true => count.next_multiple_of(world_size),
            false => count,
        };
        for index in (rank..end).step_by(world_size) {
            let batch = self
                .validation
                .batch(index.min(count - 1) as u64, self.model.device())?;
            all += batch.num_targets();
            let given = self.batch_of(&batch.inputs, &batch.targets)?;
            let (counted, is_mean) = match given.counted() {
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

    /// Whether the configuration wants an evaluation here: after every `evaluate_every`-th step and after the last.
    pub fn evaluation_is_due(&self) -> bool {
        self.is_done() || self.step.is_multiple_of(self.config.evaluate_every)
    }

    /// Whether all steps are taken.
    pub fn is_done(&self) -> bool {
        self.step >= self.config.steps
    }

    /// How many steps are taken.
    pub fn steps_taken(&self) -> usize {
        self.step
    }

    /// The model as it is now, hollow where [weights are divided](Self::fully_sharded); of a run whose
    /// [optimizer is divided](Self::shard_optimizer), as it was at the last evaluation, the last save, or the end of
    /// the run.
    pub fn model(&self) -> &TransformerLM {
        &self.model
    }

    /// The optimizer as it is now.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// What the next step's loss is multiplied by, in f16.
    pub fn loss_scale(&self) -> Option<f64> {
        self.scaler.as_ref().map(GradScaler::loss_scale)
    }

    /// What the run was told.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The losses so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    pub(super) fn training_batch(&self, i: usize) -> Result<Batch> {
        let index = self.step * self.config.accumulation + i;
        let batch = self.training.batch(index as u64, self.model.device())?;
        check_shape(batch, &self.config)
    }
}
