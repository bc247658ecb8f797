//! A step of a run: its plan and its execution.

use super::ranks::Job;
use super::{StepReport, Trainer};
use crate::compile::{Batch, Plan, Step, StepConfig};
use crate::optim::{DIVERGED, GradScaler, Optimizer, finite_loss};
use crate::{Error, Result, graph};
use candle_core::{DType, Tensor};

/// The smallest loss scale, 2^-14: f16's smallest normal number, below which the scale alone would round gradients to
/// 0. A run that overflows even here has diverged. (Not 1: a sum over many tokens may need less.)
const SMALLEST_SCALE: f64 = 1.0 / 16384.0;

impl Trainer {
    /// Returns the plan of the run's step ([`Step`]), from forward to update, in memory that is allocated once. The
    /// plan is made here, or in the first [`step`](Self::step). If ranks train together, every rank calls this.
    ///
    /// ```
    /// # use tallow::data::Tokens;
    /// # use tallow::model::{TransformerConfig, TransformerLM};
    /// # use tallow::train::{TrainConfig, Trainer};
    /// # let (train, validation) = Tokens::from_bytes("to be, or not to be. ".repeat(50))?.split(0.1)?;
    /// # let model = TransformerConfig {
    /// #     vocab_size: 256, context_length: 16, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32,
    /// #     ..Default::default()
    /// # };
    /// # let model = TransformerLM::new(&model, 0, &tallow::device("cpu")?)?;
    /// let config = TrainConfig { batch_size: 4, sequence_length: 16, ..Default::default() };
    /// let mut trainer = Trainer::new(model, config, train, validation)?;
    /// println!("a step takes {} KiB", trainer.plan()?.total_bytes() >> 10);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Step::prepare`]: a model on a device that is neither the CPU nor a CUDA GPU, weights that share
    /// storage, a memory budget that no plan can meet, an arena that does not fit.
    pub fn plan(&mut self) -> Result<&Plan> {
        let rows = self.batches().len() * self.config.batch_size;
        let shape = (rows, self.config.sequence_length);
        let ids = |name| graph::input(name, shape, DType::U32);
        let batch = self.batch_of(&ids("tokens")?, &ids("targets")?)?;
        self.planned()?.0.prepare(batch)
    }

    /// Makes the next step use weights that were set or loaded from outside, as [`Step::refresh`] does: a plan on a GPU
    /// keeps copies of them in half precision.
    pub fn refresh(&mut self) {
        if let Some(step) = &mut self.planned {
            step.refresh();
        }
    }

    /// Returns the step, planned now if necessary, and the optimizer that it updates.
    pub(super) fn planned(&mut self) -> Result<(&mut Step<'static>, &mut Optimizer)> {
        let step = match self.planned.take() {
            Some(step) => step,
            None => {
                let (model, optimizer) = (&self.model, &self.optimizer);
                let config = StepConfig {
                    accumulation: self.batches().len(),
                    ..self.config.step()
                };
                match &self.job {
                    None => Step::for_model(model, optimizer, &config)?,
                    Some(Job::Replicated(replicated)) => {
                        Step::for_model(model, optimizer, &config)?
                            .replicated(optimizer, replicated)?
                    }
                    Some(Job::FullyShard(sharded)) => {
                        Step::fully_sharded_for_model(model, optimizer, &config, sharded)?
                    }
                }
            }
        };
        Ok((self.planned.insert(step), &mut self.optimizer))
    }

    /// Executes the step. After an error weights, optimizer and scale are unchanged, unless the optimizer runs in
    /// backward.
    pub(super) fn update(&mut self) -> Result<StepReport> {
        let batches = self.batches().map(|i| self.training_batch(i));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        // (accumulation * B, T)
        let inputs: Vec<&Tensor> = batches.iter().map(|batch| &batch.inputs).collect();
        let targets: Vec<&Tensor> = batches.iter().map(|batch| &batch.targets).collect();
        let (inputs, targets) = (Tensor::cat(&inputs, 0)?, Tensor::cat(&targets, 0)?);
        let (all_tokens, number) = (self.config.tokens_per_step(), self.step + 1);
        let learning_rate = self.config.schedule.learning_rate(self.step);
        let mut scaler = self.scaler.clone();
        let loss_scale = scaler.as_ref().map(GradScaler::loss_scale);
        let batch = self.batch_of(&inputs, &targets)?;
        let (step, optimizer) = self.planned()?;
        let given = step.prepare_batch(batch, optimizer.steps())?;
        let tokens = given.counted.unwrap_or(all_tokens);
        let report = StepReport {
            step: number,
            loss: f64::NAN,
            learning_rate,
            grad_norm: f64::NAN,
            loss_scale,
            skipped: true,
            tokens,
        };
        if tokens == 0 {
            return Ok(report);
        }
        optimizer.set_learning_rate(learning_rate);
        let (loss, skipped) = match &mut scaler {
            None => {
                let loss = f64::from(step.run_given(optimizer, &given)?);
                // If the norm is computed, gradients that are not finite have returned an error already, and a loss
                // that is not finite causes such gradients.
                finite_loss(loss, || format!("the loss of step {number}"))?;
                (loss, false)
            }
            Some(scaler) => {
                let scale = scaler.loss_scale();
                let done = step.run_scaled_given(optimizer, scaler, &given)?;
                if let Some(parameter) = &done.non_finite
                    && scale <= SMALLEST_SCALE
                {
                    return Err(Error::data(
                        format!("the gradient of parameter {parameter} in step {number}"),
                        format!("infinity or NaN, down to a scale of {scale:e}"),
                    )
                    .must_be("finite numbers at some loss scale", DIVERGED));
                }
                (f64::from(done.loss), !done.updated())
            }
        };
        let grad_norm = step.gradient_norm().unwrap_or(f64::NAN);
        self.scaler = scaler;
        Ok(StepReport {
            loss,
            grad_norm,
            skipped,
            ..report
        })
    }

    /// Returns the inputs of a step for tokens and targets, without the targets that do not count.
    pub(super) fn batch_of(&self, tokens: &Tensor, targets: &Tensor) -> Result<Batch> {
        let (separator, ignore_index) = (self.config.separator, self.config.ignore_index);
        Batch::masked(tokens, targets, separator, ignore_index)
    }
}
