//! Plans of the language model: of its trace, in a plan's shape and precision.

use super::budget;
use super::config::PlanConfig;
use super::lower::{Lowered, Recompute};
use super::planned::Planned;
use super::traced::{Target, TracedFunction};
use crate::attention::FirstKeys;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::{Architecture, Checkpointing, ForwardContext};
use crate::ops::cross_entropy::Reduction;
use crate::ops::{DropoutKey, KernelPolicy, with_kernel_policy};
use crate::precision::Autocast;
use crate::{Result, autocast, graph};
use candle_core::{DType, Tensor};
use std::num::NonZeroUsize;
use std::rc::Rc;

/// What is planned of a model, real or hollow.
pub(super) struct Planner<'a> {
    op: &'static str,
    model: TransformerLM,
    config: &'a PlanConfig,
    target: Target,
}

impl<'a> Planner<'a> {
    /// # Errors
    /// Configurations that cannot work.
    pub fn new(
        op: &'static str,
        model: &TransformerLM,
        config: &'a PlanConfig,
        target: Target,
    ) -> Result<Self> {
        config.check(model.config())?;
        Ok(Self {
            op,
            model: model.clone(),
            config,
            target,
        })
    }

    /// Of a model that need not exist.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn hollow(
        op: &'static str,
        model: &TransformerConfig,
        config: &'a PlanConfig,
        target: Target,
    ) -> Result<Self> {
        model.validate()?;
        config.check(model)?;
        let twin = match model.architecture {
            // Tables of angles, no longer than they are read.
            Architecture::Llama => TransformerConfig {
                context_length: config.sequence_length,
                ..model.clone()
            },
            _ => model.clone(),
        };
        let model = TransformerLM::of_any_length(&twin, graph::weights(DType::F32))?;
        Self::new(op, &model, config, target)
    }

    /// The plan of a training step, and its checkpointing: as configured, or what fits the budget.
    ///
    /// # Errors
    /// A memory budget that no plan keeps to.
    pub fn train_step(&self) -> Result<(Planned, Checkpointing)> {
        let configured = [self.config.checkpointing, Checkpointing::None];
        let blocks = fewest_first(self.model.config().num_layers);
        let step = self.config.step();
        budget::plan(&step, "PlanConfig", configured, blocks, |c, recompute| {
            self.train_step_with(c, recompute)
        })
    }

    /// The plan of a training step that recomputes so much.
    ///
    /// # Errors
    /// Those of the trace.
    pub fn train_step_with(
        &self,
        checkpointing: Checkpointing,
        recompute: Recompute,
    ) -> Result<Planned> {
        let mut function = self.trace(checkpointing, |model, tokens| {
            let targets = graph::input("targets", tokens.shape(), DType::U32)?;
            let first_keys = self
                .config
                .separator
                .map(|_| FirstKeys::input("first_keys", tokens.shape()));
            let seed = self.config.dropout_seed_of(model.config());
            let context = ForwardContext {
                first_keys: first_keys.transpose()?,
                dropout: seed.map(|_| DropoutKey::input("dropout")).transpose()?,
            };
            match self.config.masks_targets() {
                true => model.sum_of_losses(tokens, &targets, &context),
                false => model.loss_with(tokens, &targets, &context, None),
            }
        })?;
        if self.config.masks_targets() {
            function.reduction = Reduction::Sum;
        }
        Rc::new(function).step(&self.config.step(), recompute)
    }

    /// The plan of a forward alone, to logits.
    ///
    /// # Errors
    /// Those of the trace.
    pub fn forward(&self) -> Result<(TracedFunction, Lowered)> {
        let function = self.trace(Checkpointing::None, TransformerLM::forward)?;
        let lowered = function.forward()?;
        Ok((function, lowered))
    }

    /// Traces a forward of the model, in the precision that is planned, whatever region this is in.
    fn trace(
        &self,
        checkpointing: Checkpointing,
        forward: impl FnOnce(&TransformerLM, &Tensor) -> Result<Tensor>,
    ) -> Result<TracedFunction> {
        let model = self.model.clone().with_checkpointing(checkpointing);
        let shape = (self.config.batch_size, self.config.sequence_length);
        let tokens = graph::input("tokens", shape, DType::U32)?;
        let policy = self.config.precision.policy();
        let policy = policy.unwrap_or_else(Autocast::disabled);
        let forward = || autocast(policy, || forward(&model, &tokens));
        let parameters = model.parameters();
        let parameters = parameters.iter();
        let parameters = parameters.map(|(name, var)| (name.as_str(), var.as_tensor()));
        with_kernel_policy(KernelPolicy::Prefer, || {
            TracedFunction::new(self.op, self.target, parameters, forward)
        })
    }
}

/// Which of so many blocks may be recomputed, the fewest first.
fn fewest_first(layers: usize) -> Vec<Checkpointing> {
    let lengths = (1..=layers).rev().filter_map(NonZeroUsize::new);
    let mut alternatives: Vec<_> = lengths.map(Checkpointing::Every).collect();
    // Stable: among as many, the longer segments first, which keep fewer inputs.
    alternatives.sort_by_key(|checkpointing| checkpointing.recomputed_blocks(layers));
    alternatives
}
