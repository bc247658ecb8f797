//! A training step, planned.

mod results;
mod scaled;

pub use scaled::ScaledStep;

use super::budget;
use super::build::Source;
use super::config::{PlanConfig, check_clip_norm};
use super::cpu::{Controls, Executor, Lent};
use super::op::Op;
use super::plan::Plan;
use super::source;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::optim::AdamW;
use crate::optim::inplace::{lend_all, storage_address};
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use std::collections::HashSet;

const OP: &str = "compile::TrainStep";

/// Forward, loss, backward, clipping and AdamW for one batch shape, planned once and run as often as one likes.
///
/// The same step as `model.loss(..)`, `backward()`, [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked) and
/// [`AdamW::step`], on the same variables: learning rates, groups and betas are read from the optimizer at each run. On the
/// CPU, with the attention of the model's configuration.
///
/// The arithmetic is [`PlanConfig::precision`]'s, whatever [`autocast`](crate::autocast()) region it is called in.
///
/// A run holds the parameters' and the state's storages: another thread that reads them waits until it is over.
#[derive(Debug)]
pub struct TrainStep {
    plan: Plan,
    executor: Executor,
    parameters: Vec<(String, Var)>,
    model: TransformerConfig,
    config: PlanConfig,
    checkpointing: Checkpointing,
    has_run: bool,
    norm: Option<f64>,
}

impl TrainStep {
    /// Plans a step of `model` under `optimizer`, and allocates its arena.
    ///
    /// # Errors
    /// A configuration that cannot work ([`PlanConfig::validate`], a sequence beyond the model's context); a model that is not
    /// in f32 on the CPU, or whose weights share storage; an optimizer of other parameters than the model's; a memory budget
    /// that no plan keeps to, with the smallest that one would; an arena that does not fit the machine's memory.
    pub fn new(model: &TransformerLM, optimizer: &AdamW, config: &PlanConfig) -> Result<Self> {
        source::check_length(model.config(), config)?;
        let parameters = source::check_model(OP, model)?;
        optimizer.planned_updates(OP, &parameters)?;
        let (plan, checkpointing) = Self::plan_for(model.config(), config)?;
        Ok(Self {
            executor: Executor::new(&plan)?,
            plan,
            parameters,
            model: model.config().clone(),
            config: config.clone(),
            checkpointing,
            has_run: false,
            norm: None,
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
        model.validate()?;
        source::check_length(model, config)?;
        let [cos, sin] = source::angles(model, config)?;
        let source = Source {
            model,
            config,
            angles: [&cos, &sin],
            threads: rayon::current_num_threads(),
        };
        budget::plan(source)
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
        Ok(self.loss())
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
        let parameters = self.parameters.iter().map(|(_, var)| var.as_tensor());
        let first = planned.iter().map(|planned| &planned.exp_avg);
        let second = planned.iter().map(|planned| &planned.exp_avg_sq);
        let tensors: Vec<&Tensor> = parameters.chain(first).chain(second).collect();
        check_apart(&tensors)?;
        let updates: Vec<_> = planned.iter().map(|planned| planned.update).collect();
        let controls = Controls {
            updates: &updates,
            clip_norm: self.config.clip_norm.unwrap_or(f64::INFINITY),
            loss_scale,
        };
        let (count, plan, executor) = (updates.len(), &self.plan, &mut self.executor);
        self.norm = None;
        let mut result = Ok(false);
        lend_all::<f32>(&tensors, |slices| {
            let (parameters, state) = slices.split_at(count);
            let (exp_avg, exp_avg_sq) = state.split_at(count);
            let lent = Lent {
                parameters,
                exp_avg,
                exp_avg_sq,
                tokens: &tokens,
                targets: &targets,
                ..Default::default()
            };
            result = executor.run(plan, &lent, &controls);
        })?;
        let stepped = result?;
        self.has_run = true;
        if stepped {
            optimizer.planned_step_taken();
            self.norm = self.kept(|op| matches!(op, Op::ClipFactor { .. }));
        }
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
        let tensors = self.parameters.iter().map(|(_, var)| var.as_tensor());
        let tensors: Vec<&Tensor> = tensors.collect();
        let (plan, executor) = (&self.plan, &mut self.executor);
        self.norm = None;
        let mut result = Ok(());
        lend_all::<f32>(&tensors, |parameters| {
            let lent = Lent {
                parameters,
                tokens: &tokens,
                targets: &targets,
                ..Default::default()
            };
            result = executor.run_micro_batches(plan, &lent, &Controls::default());
        })?;
        result?;
        self.has_run = true;
        Ok(self.loss())
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

    /// Which blocks are run again: what was asked for, or what the memory budget chose.
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

/// Every tensor that is lent must be alone on its storage, or lending the second would wait for the first for ever.
fn check_apart(tensors: &[&Tensor]) -> Result<()> {
    let mut storages = HashSet::new();
    if tensors
        .iter()
        .all(|tensor| storages.insert(storage_address(tensor)))
    {
        return Ok(());
    }
    Err(Error::Order {
        op: OP,
        problem: "parameters or their optimizer state share a storage".into(),
        hint: "give each a variable of its own".into(),
    })
}
