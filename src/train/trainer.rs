//! The loop: one step, one evaluation.

use super::checks::{check_dtype, check_fits, scaler};
use super::ranks::Job;
use super::{DataFingerprint, History, TrainConfig};
use crate::compile::TrainStep;
use crate::data::{Batch, RandomBatches, SequentialBatches, Tokens};
use crate::files::PathLock;
use crate::model::{Documents, TransformerLM};
use crate::nn::ForwardContext;
use crate::ops::DropoutKey;
use crate::optim::guard::{finite_loss, value_of};
use crate::optim::{AdamW, GradScaler, GradientAccumulator, decay_matrices_only};
use crate::{Result, backward, no_grad, probe};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use std::sync::Mutex;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps taken, this one included.
    pub step: usize,
    /// Mean loss of the step's batches before its update, nats a token. With a loss scale it may be no number.
    pub loss: f64,
    /// The learning rate of its update.
    pub learning_rate: f64,
    /// The L2 norm of all gradients, unscaled, before clipping; infinite or NaN in a skipped step, NaN where
    /// [the optimizer runs in backward](Trainer::compile_with_optimizer_in_backward).
    pub grad_norm: f64,
    /// What the loss was multiplied by, in f16 ([`TrainConfig::loss_scaling`]).
    pub loss_scale: Option<f64>,
    /// Whether gradients overflowed at that scale: weights and optimizer are then as they were, the scale is smaller.
    pub skipped: bool,
    /// Predictions that it learned from: [`TrainConfig::tokens_per_step`].
    pub tokens: usize,
}

/// A run: a model, its optimizer, its data, and how far it has come.
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
    /// Where steps are planned.
    pub(super) planned: Option<TrainStep>,
    pub(super) training: RandomBatches,
    validation: SequentialBatches,
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
    /// The weights are trained where they are: a clone of `model` kept outside shares them.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a configuration that cannot work, windows longer than the model's
    /// context, or data of a larger vocabulary than the model's; [`Error::DType`](crate::Error::DType) for a model
    /// whose parameters are not of [`Precision::parameter_dtype`](crate::precision::Precision::parameter_dtype) (f64
    /// may train where that is f32); [`Error::Data`](crate::Error::Data) for data shorter than a window.
    pub fn new(
        model: TransformerLM,
        config: TrainConfig,
        train: Tokens,
        validation: Tokens,
    ) -> Result<Self> {
        let parameters = model.parameters();
        Self::of(model, parameters, config, train, validation)
    }

    /// A run that trains these: the model's parameters, or parts of them.
    pub(super) fn of(
        model: TransformerLM,
        parameters: Vec<(String, Var)>,
        config: TrainConfig,
        train: Tokens,
        validation: Tokens,
    ) -> Result<Self> {
        config.validate()?;
        check_dtype(&model, &config)?;
        check_fits(&model, &config, &train)?;
        check_fits(&model, &config, &validation)?;
        let (batch_size, sequence_length) = (config.batch_size, config.sequence_length);
        let training = RandomBatches::new(&train, batch_size, sequence_length, config.seed)?;
        let held_out = SequentialBatches::new(&validation, batch_size, sequence_length)?;
        let groups = decay_matrices_only(parameters.clone(), config.optimizer);
        Ok(Self {
            optimizer: AdamW::with_groups(groups)?,
            scaler: scaler(&config)?,
            training_data: DataFingerprint::new(&train)?,
            validation_data: DataFingerprint::new(&validation)?,
            job: None,
            planned: None,
            training,
            validation: held_out,
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
    /// gradients overflow nonetheless. Neither weights nor optimizer have changed then, and the run is where it was.
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        if self.is_done() {
            return Ok(None);
        }
        let _step = probe::step();
        let ranks = self.communicator().cloned();
        let _watch = ranks
            .as_ref()
            .map(|ranks| ranks.watch("a step of training"));
        let learning_rate = self.config.schedule.learning_rate(self.step);
        let (loss, update) = match self.planned_update(learning_rate)? {
            Some(planned) => planned,
            None => {
                let (loss, gradients) = self.loss_and_gradients()?;
                (loss, self.update(gradients, learning_rate)?)
            }
        };
        self.step += 1;
        self.history.stepped(loss, update.skipped);
        if self.is_done() {
            self.gather_weights()?;
        }
        Ok(Some(StepReport {
            step: self.step,
            loss,
            learning_rate,
            grad_norm: update.grad_norm,
            loss_scale: update.loss_scale,
            skipped: update.skipped,
            tokens: self.config.tokens_per_step(),
        }))
    }

    /// Mean loss over the whole of the validation data, nats a token. It is put down in the [`History`].
    ///
    /// Every token but the first is predicted once, from those before it in its window
    /// ([`SequentialBatches`]), or in its document ([`TrainConfig::separator`]), of which the first token is left out.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a loss that is not finite, and whatever data and ops refuse.
    pub fn evaluate(&mut self) -> Result<f64> {
        self.gather_weights()?;
        let (mut sum, mut predicted) = (0.0, 0);
        let (rank, world_size) = match self.communicator() {
            Some(ranks) => (ranks.rank(), ranks.world_size()),
            None => (0, 1),
        };
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
                .batch(index.min(count - 1), self.model.device())?;
            let documents = self.documents(&batch)?;
            let counted = documents
                .as_ref()
                .map_or(batch.num_targets(), |all| all.counted);
            let counted = if index < count { counted } else { 0 };
            if counted == 0 && !gathers {
                continue;
            }
            let loss = no_grad(|| self.loss(&batch, documents, None))?;
            if counted > 0 {
                sum += value_of(&loss)? * counted as f64;
                predicted += counted;
            }
        }
        let [sum, predicted] = self.mean_over_ranks([sum, predicted as f64])?;
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

    /// The model as it is now, hollow where [weights are divided](Self::fully_sharded); of a planned run whose
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

    /// Ends the run and gives its model.
    pub fn into_model(self) -> TransformerLM {
        self.model
    }

    /// Means over the step's batches; the gradients are those of the scaled loss where there is a scale.
    fn loss_and_gradients(&self) -> Result<(f64, GradStore)> {
        let mut accumulator = GradientAccumulator::new(self.parameters.iter().cloned());
        let mut sum = 0.0;
        let batches = self.batches();
        for i in batches.clone() {
            let index = self.step * self.config.accumulation + i;
            let batch = self.training.batch(index as u64, self.model.device())?;
            let loss = {
                let _range = probe::phase("forward");
                let key = self.dropout_key(i)?;
                self.loss(&batch, self.documents(&batch)?, key)?
            };
            // Whether a scaled one is a number the gradients tell.
            let [value] = self.mean_over_ranks([value_of(&loss)?])?;
            let loss = match &self.scaler {
                Some(scaler) => scaler.scale(&loss)?,
                None => {
                    finite_loss(value, || format!("the loss of step {}", self.step + 1))?;
                    loss
                }
            };
            sum += value;
            let _range = probe::phase("backward");
            let gradients = match &self.job {
                Some(Job::Replicated(replicated)) if batches.len() == 1 => {
                    return Ok((sum, replicated.backward(loss)?));
                }
                _ => backward(loss)?,
            };
            accumulator.add(gradients)?;
        }
        let mut gradients = accumulator.mean()?;
        if let Some(Job::Replicated(replicated)) = &self.job {
            replicated.average(&mut gradients)?;
        }
        Ok((sum / batches.len() as f64, gradients))
    }

    /// What a step's micro-batch drops, if the model drops anything.
    fn dropout_key(&self, micro_batch: usize) -> Result<Option<DropoutKey>> {
        if !self.model.config().dropout.is_any() {
            return Ok(None);
        }
        let (seed, steps) = (self.config.seed, self.optimizer.steps());
        let key = DropoutKey::of_micro_batch(seed, steps, micro_batch)?;
        Ok(Some(key.to_device(self.model.device())?))
    }

    /// The documents that are packed into a batch, if any are.
    fn documents(&self, batch: &Batch) -> Result<Option<Documents>> {
        let of = |separator| Documents::of(&batch.inputs, &batch.targets, separator);
        self.config.separator.map(of).transpose()
    }

    fn loss(
        &self,
        batch: &Batch,
        documents: Option<Documents>,
        dropout: Option<DropoutKey>,
    ) -> Result<Tensor> {
        let model = &self.model;
        let forward = || match documents {
            None => {
                let context = ForwardContext {
                    dropout,
                    ..Default::default()
                };
                model.loss_with(&batch.inputs, &batch.targets, &context, None)
            }
            Some(documents) => model.loss_of(&batch.inputs, documents, dropout),
        };
        self.config.precision.run(forward)
    }
}
