//! Steps of a run, planned beforehand.

use super::Trainer;
use super::ranks::Job;
use super::update::{Done, Update, refuse_if_hopeless};
use crate::compile::{Plan, PlanConfig, TrainStep};
use crate::optim::guard::finite_loss;
use crate::{Error, Result};
use candle_core::Tensor;

impl Trainer {
    /// Plans the run's step ([`TrainStep`]): from now on [`step`](Self::step) executes the plan, forward to update, in
    /// memory that is allocated here once.
    ///
    /// The step is the same but for rounding, on the same weights and the same optimizer: evaluating and saving stay as
    /// they are, and say nothing of the plan. So a run may be resumed planned or eagerly, whatever it was; it has the
    /// bits of the run that was not stopped if it is what that one was.
    ///
    /// The model's checkpointing of activations is the plan's, and so is the run's precision: f32, or bf16 or f16 with
    /// f32 parameters, f16 with its loss scaled as the configuration says.
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
    /// let config = TrainConfig { batch_size: 4, sequence_length: 16, steps: 20, ..Default::default() };
    /// let mut trainer = Trainer::new(model, config, train, validation)?;
    /// trainer.compile()?;
    /// while let Some(step) = trainer.step()? {
    ///     println!("{}: {:.3} nats", step.step, step.loss);
    /// }
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`TrainStep::new`]: a precision without f32 parameters or whose copies of weights are dropped, a model
    /// in f64 or on a device that is neither the CPU nor a CUDA GPU, weights that share storage, an arena that does not
    /// fit. The run goes on eagerly then.
    pub fn compile(&mut self) -> Result<()> {
        // The norm is always taken: the history wants it, and it guards the update.
        let max_norm = self.config.max_grad_norm.unwrap_or(f64::INFINITY);
        self.plan_step(PlanConfig {
            clip_norm: Some(max_norm),
            ..self.plan_config()
        })
    }

    /// As [`compile`](Self::compile), each parameter updated as soon as its gradient is there, whose memory is then
    /// free again: one gradient is alive at a time.
    ///
    /// So all gradients are never there at once: their norm is not taken
    /// ([`StepReport::grad_norm`](super::StepReport::grad_norm) is NaN), and a loss that is not finite is an error
    /// *after* its update.
    ///
    /// # Errors
    /// As [`compile`](Self::compile); and [`Error::Config`](crate::Error::Config) for a run that clips (a
    /// `max_grad_norm`), accumulates or scales its loss, which need all gradients before the first update.
    pub fn compile_with_optimizer_in_backward(&mut self) -> Result<()> {
        self.plan_step(PlanConfig {
            clip_norm: self.config.max_grad_norm,
            optimizer_in_backward: true,
            ..self.plan_config()
        })
    }

    fn plan_step(&mut self, config: PlanConfig) -> Result<()> {
        let (model, optimizer) = (&self.model, &self.optimizer);
        self.planned = Some(match &self.job {
            None => TrainStep::new(model, optimizer, &config)?,
            Some(Job::Replicated(replicated)) => {
                TrainStep::replicated(model, optimizer, &config, replicated)?
            }
            Some(Job::FullyShard(sharded)) => {
                TrainStep::fully_sharded(model, optimizer, &config, sharded)?
            }
        });
        Ok(())
    }

    /// The plan that steps execute; `None` where they are eager.
    pub fn plan(&self) -> Option<&Plan> {
        self.planned.as_ref().map(TrainStep::plan)
    }

    /// A planned step.
    pub(super) fn planned_update(&mut self, learning_rate: f64) -> Result<Done> {
        let batches = self.batches().map(|i| self.training_batch(i));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        // (accumulation * B, T)
        let inputs: Vec<&Tensor> = batches.iter().map(|batch| &batch.inputs).collect();
        let targets: Vec<&Tensor> = batches.iter().map(|batch| &batch.targets).collect();
        let (inputs, targets) = (Tensor::cat(&inputs, 0)?, Tensor::cat(&targets, 0)?);
        let Some(planned) = &mut self.planned else {
            return Err(Error::Order {
                op: "Trainer::step",
                problem: "the step is not planned".into(),
                hint: "call Trainer::compile first".into(),
            });
        };
        let (optimizer, step) = (&mut self.optimizer, self.step + 1);
        let given = planned.given(&inputs, &targets, optimizer.steps())?;
        if given.counted == Some(0) {
            return Ok(Done::without_targets(self.loss_scale()));
        }
        let tokens = given.counted.unwrap_or(self.config.tokens_per_step());
        optimizer.set_learning_rate(learning_rate);
        let Some(mut scaler) = self.scaler.clone() else {
            let loss = f64::from(planned.run_given(optimizer, &given)?);
            // Where the norm is taken, gradients that are not finite have been an error, and a loss that is not gives
            // such.
            finite_loss(loss, || format!("the loss of step {step}"))?;
            let update = Update {
                grad_norm: planned.gradient_norm().unwrap_or(f64::NAN), // none with the optimizer in backward
                skipped: false,
                loss_scale: None,
            };
            return Ok(Done {
                loss,
                tokens,
                update,
            });
        };
        let loss_scale = scaler.loss_scale();
        let done = planned.run_scaled_given(optimizer, &mut scaler, &given)?;
        if let Some(parameter) = &done.non_finite {
            refuse_if_hopeless(loss_scale, Some(parameter), step)?;
        }
        self.scaler = Some(scaler);
        let update = Update {
            grad_norm: planned.gradient_norm().unwrap_or(f64::NAN), // none was taken where the step was skipped
            skipped: !done.stepped(),
            loss_scale: Some(loss_scale),
        };
        Ok(Done {
            loss: f64::from(done.loss),
            tokens,
            update,
        })
    }

    /// The run's step, as plans are told of it, but for clipping.
    fn plan_config(&self) -> PlanConfig {
        let config = &self.config;
        PlanConfig {
            batch_size: config.batch_size,
            sequence_length: config.sequence_length,
            precision: config.precision,
            loss_scaling: self.scaler.is_some(),
            accumulation: self.batches().len(),
            checkpointing: self.model.config().checkpointing,
            separator: config.separator,
            ignore_index: config.ignore_index,
            dropout_seed: Some(config.seed),
            ..Default::default()
        }
    }
}
