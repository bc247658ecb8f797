//! The loss of a step, and its plan for the shapes of a batch.

use super::batch::{Batch, D_OUTPUT, Inputs};
use super::budget;
use super::config::{PlanKind, StepConfig};
use super::traced::{Planned, TracedFunction};
use crate::attention::FirstKeys;
use crate::graph::{self, Target};
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::{Architecture, Checkpointing, ForwardContext};
use crate::ops::Reduction;
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::Autocast;
use crate::{Error, Result, autocast, nn};
use candle_core::{DType, Tensor, Var};
use std::cell::RefCell;
use std::fmt;
use std::num::NonZeroUsize;
use std::rc::Rc;

/// A loss function of a caller.
pub(super) type AnyLoss<'l> = Box<dyn Fn(&Inputs) -> Result<Tensor> + Send + 'l>;

pub(super) enum Loss<'l> {
    Any(AnyLoss<'l>),
    Model(Box<TransformerLM>),
}

impl Loss<'_> {
    fn trace(&self, inputs: &Inputs, checkpointing: Checkpointing) -> Result<Tensor> {
        let model = match self {
            Self::Any(loss) => return loss(inputs),
            Self::Model(model) => TransformerLM::clone(model).with_checkpointing(checkpointing),
        };
        let (tokens, targets) = (inputs.get("tokens")?, inputs.get("targets")?);
        let first_keys = inputs.find("first_keys");
        let context = ForwardContext {
            first_keys: first_keys.map(|keys| FirstKeys::new(&keys)).transpose()?,
            dropout: match model.config().dropout.is_active() {
                true => inputs.dropout()?,
                false => None,
            },
            ..Default::default()
        };
        match inputs.sums_targets() {
            true => model.sum_of_losses(&tokens, &targets, &context),
            false => model.loss_with(&tokens, &targets, &context, None),
        }
    }

    /// Returns the blocks that are recomputed without a budget.
    fn checkpointing(&self) -> Checkpointing {
        match self {
            Self::Any(_) => Checkpointing::None,
            Self::Model(model) => model.checkpointing(),
        }
    }

    /// Returns the choices of recomputed blocks for a memory budget, fewest blocks first.
    fn alternatives(&self) -> Vec<Checkpointing> {
        let Self::Model(model) = self else {
            return Vec::new();
        };
        let layers = model.config().num_layers;
        let lengths = (1..=layers).rev().filter_map(NonZeroUsize::new);
        let mut alternatives: Vec<_> = lengths.map(Checkpointing::Every).collect();
        // The sort is stable: with equal counts, longer segments come first, because they save fewer inputs.
        alternatives.sort_by_key(|checkpointing| checkpointing.recomputed_blocks(layers));
        alternatives
    }
}

impl fmt::Debug for Loss<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any(_) => "Any",
            Self::Model(_) => "Model",
        })
    }
}

pub(super) struct PlanRequest<'j> {
    pub op: &'static str,
    pub kind: PlanKind,
    pub target: Target,
    pub loss: &'j Loss<'j>,
    /// The variables that the loss reads; `None` if all are meta tensors.
    pub weights: Option<&'j [(String, Var)]>,
    /// The configuration for this [kind](StepConfig::of) of plan.
    pub config: &'j StepConfig,
}

impl PlanRequest<'_> {
    /// Returns the plan for a batch of these shapes, and the blocks that it recomputes: those that the model
    /// configures, or others to fit the budget.
    ///
    /// # Errors
    /// Errors of the loss and of its trace; ops that cannot be planned; a memory budget that no plan fits.
    pub fn plan(
        &self,
        batch: &Batch,
        prepare: impl Fn(&mut TracedFunction),
    ) -> Result<(Planned, Checkpointing)> {
        let inputs = self.inputs(batch)?;
        // Plans that differ only in recomputed sums and gates share one trace.
        let last = RefCell::new(None::<(Checkpointing, Rc<TracedFunction>)>);
        let traced = |checkpointing| {
            if let Some((of, function)) = &*last.borrow()
                && *of == checkpointing
            {
                return Ok(function.clone());
            }
            let mut function = self.trace(&inputs, checkpointing)?;
            for parameter in &mut function.parameters {
                let rule = self.config.optimizer;
                parameter.rule = rule.of_parameter(&parameter.name, &parameter.shape);
            }
            prepare(&mut function);
            let function = Rc::new(function);
            last.replace(Some((checkpointing, function.clone())));
            Ok::<_, Error>(function)
        };
        let others = self.loss.alternatives();
        let configured = self.loss.checkpointing();
        budget::plan(
            self.config,
            configured,
            others,
            self.memory_lower_bound(batch)?,
            |checkpointing, recompute| {
                traced(checkpointing)?.plan(self.kind, self.config, recompute)
            },
        )
    }

    /// Returns the inputs that the loss is traced with for a batch.
    ///
    /// # Errors
    /// Inputs that cannot be split into micro-batches.
    pub fn inputs(&self, batch: &Batch) -> Result<Inputs> {
        let drops = self.config.dropout_seed.is_some();
        Inputs::of(self.op, batch, self.config.accumulation, drops)
    }

    /// Returns a lower bound of the arena, in bytes, or 0 if the loss is not that of a known model without frozen
    /// weights.
    fn memory_lower_bound(&self, batch: &Batch) -> Result<u64> {
        let tokens = batch.inputs().find(|(name, _)| *name == "tokens");
        match (
            self.loss,
            self.kind,
            tokens.map(|(_, tokens)| tokens.dims()),
        ) {
            (Loss::Model(model), PlanKind::TrainStep, Some([rows, length]))
                if model.frozen_weights().is_empty() =>
            {
                let sizes = [rows / self.config.accumulation, *length];
                budget::step_arena_lower_bound(model, self.config, sizes)
            }
            _ => Ok(0),
        }
    }

    /// Traces the loss in the configured precision, whatever autocast region the caller is in. If the run is passed the
    /// output's gradient, that is an additional input and the second output.
    pub fn trace(&self, inputs: &Inputs, checkpointing: Checkpointing) -> Result<TracedFunction> {
        let policy = self.config.precision.policy();
        let policy = policy.unwrap_or_else(Autocast::disabled);
        let loss = || {
            let output = autocast(policy, || self.loss.trace(inputs, checkpointing))?;
            let d_output = match self.kind {
                PlanKind::Gradients => {
                    Some(graph::input(D_OUTPUT, output.shape(), output.dtype())?)
                }
                PlanKind::TrainStep | PlanKind::Forward => None,
            };
            Ok([output].into_iter().chain(d_output).collect::<Vec<_>>())
        };
        let mut function = with_kernel_policy(KernelPolicy::Prefer, || match self.weights {
            Some(weights) => {
                let weights = weights.iter();
                let weights = weights.map(|(name, var)| (name.as_str(), var.as_tensor()));
                TracedFunction::new(self.op, self.target, weights, loss)
            }
            None => TracedFunction::with_meta_weights(self.op, self.target, loss),
        })?;
        if inputs.sums_targets() {
            function.reduction = Reduction::Sum;
        }
        Ok(function)
    }
}

/// Returns the model with meta weights, for sequences of this length.
///
/// # Errors
/// A sequence that is longer than the model's context.
pub(crate) fn meta_model(model: &TransformerLM, sequence_length: usize) -> Result<TransformerLM> {
    let config = model.config();
    if sequence_length > config.context_length {
        return Err(
            Error::config("TransformerConfig", "context_length", config.context_length).must_be(
                format!("at least {sequence_length}, the length of a sequence"),
                "shorten the sequence, or give the model a longer context_length",
            ),
        );
    }
    let twin = match config.architecture {
        // The rotary tables are only as long as the sequence.
        Architecture::Llama | Architecture::Gemma2 => TransformerConfig {
            context_length: sequence_length,
            ..config.clone()
        },
        Architecture::Gpt2 => config.clone(),
    };
    let frozen = model.frozen_weights();
    let is_frozen = |name: &str| frozen.iter().any(|frozen| frozen == name);
    let weights = nn::freeze(graph::weights(DType::F32), is_frozen);
    let meta = TransformerLM::for_trace(&twin, weights)?;
    let meta = meta.with_attention(model.attention())?;
    Ok(meta.with_checkpointing(model.checkpointing()))
}
