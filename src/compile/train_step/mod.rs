//! A training step, planned.

mod results;
mod scaled;

pub use scaled::ScaledStep;

use super::config::{PlanConfig, check_clip_norm};
use super::executor::Executor;
use super::least;
use super::model::{Planner, Weights};
use super::plan::{Operand, Plan};
use super::run::Tensors;
use super::source;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::optim::AdamW;
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};

const OP: &str = "compile::TrainStep";

/// Forward, loss, backward, clipping and AdamW for one batch shape, planned once and run as often as one likes.
///
/// The same step as `model.loss(..)`, `backward()`, [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked) and
/// [`AdamW::step`], on the same variables: learning rates, groups and betas are read from the optimizer at each run. On the
/// CPU or [on a card](super#on-a-card), with the attention of the model's configuration.
///
/// The arithmetic is [`PlanConfig::precision`]'s, whatever [`autocast`](crate::autocast()) region it is called in.
///
/// A run holds the parameters' and the state's storages: another thread that reads them waits until it is over.
#[derive(Debug)]
pub struct TrainStep {
    plan: Plan,
    executor: Executor,
    /// Where a run leaves its loss, the gradients' norm and each parameter's gradient.
    loss: Operand,
    norm_place: Option<Operand>,
    gradients: Vec<Option<Operand>>,
    parameters: Vec<(String, Var)>,
    model: TransformerConfig,
    config: PlanConfig,
    checkpointing: Checkpointing,
    has_run: bool,
    norm: Option<f64>,
    /// The optimizer's steps after the last run, with which the plan's copies of weights are those of the weights.
    steps_seen: Option<usize>,
}

impl TrainStep {
    /// Plans a step of `model` under `optimizer`, and allocates its arena.
    ///
    /// # Errors
    /// A configuration that cannot work ([`PlanConfig::validate`], a sequence beyond the model's context); a model that is not
    /// in f32 on one device (the CPU or a CUDA GPU); on a GPU, heads that flash attention
    /// [has no kernel for](crate::compile#on-a-card); an optimizer of other parameters than the model's; a memory budget that
    /// no plan keeps to, with the smallest that one would; an arena that does not fit the machine's memory.
    pub fn new(model: &TransformerLM, optimizer: &AdamW, config: &PlanConfig) -> Result<Self> {
        source::check_length(model.config(), config)?;
        source::check_model(OP, model)?;
        let weights = Weights::of(model);
        optimizer.planned_updates(OP, &weights.parameters)?;
        let device = model.device();
        let target = Executor::target(device);
        let planner = Planner::new(OP, model.config(), config, target, Some(&weights))?;
        let (lowered, checkpointing) = planner.train_step()?;
        Ok(Self {
            executor: Executor::new(&lowered.plan, device)?,
            plan: lowered.plan,
            loss: lowered.output,
            norm_place: lowered.norm,
            gradients: lowered.gradients,
            parameters: weights.parameters,
            model: model.config().clone(),
            config: config.clone(),
            checkpointing,
            has_run: false,
            norm: None,
            steps_seen: None,
        })
    }

    /// The plan alone, for a model that need not exist: what a step would do, and what memory it would take. And the
    /// checkpointing that it has, which a memory budget may have chosen.
    ///
    /// ```
    /// use tallow::compile::{PlanConfig, TrainStep};
    /// use tallow::model::TransformerConfig;
    ///
    /// let (plan, _) = TrainStep::plan_for(&TransformerConfig::small(), &PlanConfig::default())?;
    /// println!("{} calls, an arena of {} MiB", plan.calls().len(), plan.peak_bytes() >> 20);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Configurations that cannot work; a memory budget that no plan keeps to, with the smallest that one would.
    pub fn plan_for(
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<(Plan, Checkpointing)> {
        Self::plan_on(&Device::Cpu, model, config)
    }

    /// A lower bound of what a plan takes ([`Plan::total_bytes`]), in no time: from parameters, optimizer state and
    /// gradients, and what blocks keep. Planning takes longer the more blocks and rows there are, so ask this first
    /// where sizes may be absurd.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn least_bytes(model: &TransformerConfig, config: &PlanConfig) -> Result<u64> {
        least::bytes(model, config, true)
    }

    /// As [`plan_for`](Self::plan_for), for a model on `device`: on a card linear maps of one input are one product in half
    /// precision, and what kernels work in has other sizes.
    ///
    /// # Errors
    /// As [`plan_for`](Self::plan_for).
    pub fn plan_on(
        device: &Device,
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<(Plan, Checkpointing)> {
        let planner = Planner::new(OP, model, config, Executor::target(device), None)?;
        let (planned, checkpointing) = planner.train_step()?;
        Ok((planned.plan, checkpointing))
    }

    /// Has the copies of weights that products read in half precision made anew in the next [`run`](Self::run). Only on a card
    /// do they last from run to run, renewed by the update; an eager step of the same optimizer is noticed, and
    /// [`forward_backward`](Self::forward_backward) makes them anew each time. Call this after the weights were changed in any
    /// other way: loaded, or set.
    pub fn refresh(&mut self) {
        self.executor.refresh();
    }

    /// One step: the mean loss of the batch before the update. tokens and targets (accumulation * B, T) u32.
    ///
    /// Where the plan has loss scaling, the scale is 1 here, and nothing is left out.
    ///
    /// # Errors
    /// Another shape or dtype than planned, ids outside the vocabulary, an optimizer of other parameters, a learning rate
    /// that cannot work; with clipping, gradients that are not finite, naming the first such parameter. Whatever the error,
    /// parameters and optimizer are as they were.
    pub fn run(&mut self, optimizer: &mut AdamW, tokens: &Tensor, targets: &Tensor) -> Result<f32> {
        self.run_with(optimizer, tokens, targets, None)?;
        self.loss()
    }

    /// One step; whether there was an update.
    fn run_with(
        &mut self,
        optimizer: &mut AdamW,
        tokens: &Tensor,
        targets: &Tensor,
        loss_scale: Option<f64>,
    ) -> Result<bool> {
        let (tokens, targets) = self.ids(tokens, targets)?;
        let planned = optimizer.planned_updates(OP, &self.parameters)?;
        source::check_apart(OP, &self.parameters, &planned)?;
        if self.steps_seen != Some(optimizer.steps()) {
            self.executor.refresh(); // somebody else has stepped
        }
        let tensors = Tensors {
            parameters: &self.parameters,
            updates: &planned,
            tokens: &tokens,
            targets: &targets,
            ..Default::default()
        };
        let clip_norm = self.config.clip_norm.unwrap_or(f64::INFINITY);
        self.norm = None;
        self.steps_seen = None; // until it is over
        let stepped = self
            .executor
            .run(&self.plan, &tensors, clip_norm, loss_scale)?;
        self.has_run = true;
        if stepped {
            optimizer.planned_step_taken();
            self.norm = match &self.norm_place {
                Some(norm) => self.first(&norm.clone())?,
                None => None,
            };
        }
        self.steps_seen = Some(optimizer.steps());
        Ok(stepped)
    }

    /// As [`run`](Self::run) without the update: forward, loss and backward alone. What it finds is in
    /// [`gradients`](Self::gradients); nothing is clipped.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Order`] where the optimizer runs in backward.
    pub fn forward_backward(&mut self, tokens: &Tensor, targets: &Tensor) -> Result<f32> {
        if self.config.optimizer_in_backward {
            return Err(Error::Order {
                op: "compile::TrainStep::forward_backward",
                problem: "the plan updates each parameter in backward".into(),
                hint: "plan with optimizer_in_backward: false".into(),
            });
        }
        let (tokens, targets) = self.ids(tokens, targets)?;
        let tensors = Tensors {
            parameters: &self.parameters,
            tokens: &tokens,
            targets: &targets,
            ..Default::default()
        };
        self.norm = None;
        self.executor.refresh(); // the update is somebody else's
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        self.has_run = true;
        self.loss()
    }

    /// The ids of a batch, checked.
    fn ids(&self, tokens: &Tensor, targets: &Tensor) -> Result<(Vec<u32>, Vec<u32>)> {
        let ids = |what, tensor| {
            let sequences = self.config.accumulation * self.config.batch_size;
            let (length, vocab_size) = (self.config.sequence_length, self.model.vocab_size);
            source::ids(OP, what, tensor, sequences, length, vocab_size)
        };
        Ok((ids("tokens", tokens)?, ids("targets", targets)?))
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Which blocks are run again: what was asked for, or what the memory budget chose. (A budget that is met by running
    /// sums, or gates and up, again runs no block again: the plan's calls show it.)
    pub fn checkpointing(&self) -> Checkpointing {
        self.checkpointing
    }

    /// Clips to another norm from the next run on.
    ///
    /// # Errors
    /// [`Error::Config`] if the step was planned without clipping, or the norm is not over 0.
    pub fn set_clip_norm(&mut self, norm: f64) -> Result<()> {
        check_clip_norm(norm)?;
        if self.config.clip_norm.is_none() {
            return Err(Error::Config {
                config: "PlanConfig",
                field: "clip_norm",
                expected: "Some, for a step whose gradients are to be clipped".into(),
                got: "None".into(),
                hint: "plan with clip_norm: Some(f64::INFINITY) to begin without clipping".into(),
            });
        }
        self.config.clip_norm = Some(norm);
        Ok(())
    }
}
