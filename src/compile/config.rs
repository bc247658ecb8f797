//! The configuration of a planned step.

use crate::distributed::{FullyShardConfig, ReplicatedConfig, Shard};
use crate::optim::Rule;
use crate::precision::{Precision, Regime};
use crate::{Error, Result};
use candle_core::DType;
use std::num::NonZeroUsize;

/// The ranks of a [job](crate::distributed) that run a step together, and what is sharded among them in addition to the
/// batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum StepRanks {
    /// One process.
    #[default]
    Single,
    /// Every rank has the full model and its optimizer. Gradients and loss are averaged.
    Replicated(ReplicatedConfig),
    /// Every rank has the full model. This rank has the optimizer state of its share of the parameters and updates
    /// those ([`Optimizer::shard`](crate::optim::Optimizer::shard); ZeRO stage 1).
    ShardedOptimizer(ReplicatedConfig, Shard),
    /// This rank has a shard of every weight, gradient and optimizer state
    /// ([`FullyShard`](crate::distributed::FullyShard); ZeRO stage 3).
    FullySharded(FullyShardConfig, Shard),
}

impl StepRanks {
    /// Returns the settings of the gradient exchange, if each rank has all gradients.
    pub(super) fn replicated(self) -> Option<ReplicatedConfig> {
        match self {
            Self::Replicated(config) | Self::ShardedOptimizer(config, _) => Some(config),
            Self::Single | Self::FullySharded(..) => None,
        }
    }

    /// Returns the settings of the exchange of weights and gradients, if each rank has a shard of them.
    pub(super) fn fully_sharded(self) -> Option<FullyShardConfig> {
        match self {
            Self::FullySharded(config, _) => Some(config),
            _ => None,
        }
    }

    /// Returns this rank's shard, if optimizer state or weights are sharded.
    pub(super) fn shard(self) -> Option<Shard> {
        match self {
            Self::ShardedOptimizer(_, own) | Self::FullySharded(_, own) => Some(own),
            Self::Single | Self::Replicated(_) => None,
        }
    }

    /// Returns the dtype that gradients are rounded to for the exchange, if one is set.
    pub(super) fn exchanged(self) -> Option<DType> {
        match self {
            Self::Single => None,
            Self::Replicated(config) | Self::ShardedOptimizer(config, _) => config.dtype,
            Self::FullySharded(config, _) => config.dtype,
        }
    }

    fn validate(self) -> Result<()> {
        if let Some(config) = self.replicated() {
            config.validate()?;
        }
        if let Some(config) = self.fully_sharded() {
            config.validate()?;
        }
        match self.shard() {
            Some(own) => own.validate(),
            None => Ok(()),
        }
    }
}

/// The kinds of plans, by what they compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    /// Forward, loss, backward, clipping and update: [`Step::run`](super::Step::run) and
    /// [`Step::forward_backward`](super::Step::forward_backward).
    TrainStep,
    /// Forward alone, without dropout: [`Step::forward`](super::Step::forward).
    Forward,
    /// Forward, and backward from a gradient of the output that is passed to the run:
    /// [`Step::forward_backward_from`](super::Step::forward_backward_from).
    Gradients,
}

impl PlanKind {
    pub(super) fn has_backward(self) -> bool {
        self != Self::Forward
    }
}

/// The settings of a [`Step`](super::Step), for any loss and any input shapes.
///
/// ```
/// use tallow::compile::StepConfig;
/// use tallow::precision::Precision;
///
/// let config = StepConfig {
///     precision: Precision::BF16,
///     clip_norm: Some(1.0),
///     ..Default::default()
/// };
/// config.validate()?;
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct StepConfig {
    /// The dtype of the inputs of matmuls and attention, and of what these ops save for backward: f32, or bf16 or f16
    /// as under [`autocast`](crate::autocast()), with f32 parameters. It takes the place of a call of `autocast`. See
    /// [half precision](super#half-precision).
    pub precision: Precision,
    /// The maximum norm of the gradients. Larger gradients are scaled down, as by
    /// [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked). `None` does not clip.
    pub clip_norm: Option<f64>,
    /// The maximum magnitude of each gradient element. Elements are clamped after `clip_norm`, as by
    /// [`clip_grad_value`](crate::optim::clip_grad_value), in the dtype of the update. `None` does not clip.
    pub clip_value: Option<f64>,
    /// Whether the plan divides gradients by a loss scale and skips the update if one has overflowed, for
    /// [`Step::run_scaled`](super::Step::run_scaled).
    pub loss_scaling: bool,
    /// The number of micro-batches of a step on this rank ([`TrainConfig::accumulation`][all] counts those of all
    /// ranks). Each input has them stacked in its first dimension, which this number must divide. The loss is computed
    /// for each micro-batch alone: a loss that compares the sequences of a batch compares those of a micro-batch. The
    /// step's loss is the mean of their losses with equal weights. If some targets are ignored, give the batch the
    /// number of the others ([`Batch::with_counted_targets`](super::Batch::with_counted_targets)): the loss is then the
    /// mean over all of these targets.
    ///
    /// [all]: crate::train::TrainConfig::accumulation
    pub accumulation: usize,
    /// The maximum size of the arena in training. If a plan needs more, backward recomputes as little as possible, in
    /// this order, each from the first block on:
    ///
    /// 1. in half precision on a GPU, the input of each block's second norm, by one addition;
    /// 2. the outputs gate and up of SwiGLU, half of the bytes that a block saves;
    /// 3. in a step of a [`TransformerLM`](crate::model::TransformerLM), whole blocks.
    ///
    /// [`Step::forward`](super::Step::forward) recomputes nothing and has no limit.
    pub memory_budget_bytes: Option<u64>,
    /// Whether each parameter is updated as soon as its gradient is computed, which frees the gradient's memory. One
    /// gradient is alive at a time; on a GPU those of one block, whose matrices are updated in one launch. This lowers
    /// the peak where gradients dominate it: for models that are large relative to their batch, or with checkpointing.
    /// It does not lower the peak of a step that saves all activations: that peak is at the start of backward, before
    /// there are many gradients, and later gradients take the memory of freed activations. Not supported with
    /// `clip_norm`, accumulation or loss scaling, which need all gradients first.
    ///
    /// In bf16 on a GPU these gradients are bf16 too, as autocast rounds them there. Only the update reads them, and it
    /// reads 2 bytes less per parameter. (Gradients of embedding, norms and head stay in f32.)
    pub optimizer_in_backward: bool,
    /// The rule of the update in plans that are made without an optimizer: those of
    /// [`Step::plan_for`](super::Step::plan_for) and [`Step::plan_for_model`](super::Step::plan_for_model). A step has
    /// the rules of its optimizer.
    pub optimizer: Rule,
    /// The seed of dropout ([`Inputs::dropout`](super::Inputs::dropout)). A step's [key](crate::ops::DropoutKey) is
    /// derived from this seed and the number of optimizer steps so far. `None` drops nothing.
    pub dropout_seed: Option<u64>,
    /// With `n`, every n-th run traces the function again and compares. The run is an error if a number, a branch or a
    /// captured tensor differs from the plan. A trace takes about as long as planning, so this is for tests and
    /// debugging. `None` never retraces.
    pub retrace_every: Option<NonZeroUsize>,
    /// The ranks that run the step together. Several ranks are not supported with an optimizer in backward.
    /// [`Step::replicated`](super::Step::replicated) and [`fully_sharded`](super::Step::fully_sharded) set this field.
    /// For [`Step::plan_for_model`](super::Step::plan_for_model) it selects the rank to plan for.
    pub ranks: StepRanks,
}

/// One micro-batch in f32, all options off.
impl Default for StepConfig {
    fn default() -> Self {
        Self {
            precision: Precision::F32,
            clip_norm: None,
            clip_value: None,
            loss_scaling: false,
            accumulation: 1,
            memory_budget_bytes: None,
            optimizer_in_backward: false,
            optimizer: Rule::default(),
            dropout_seed: None,
            retrace_every: None,
            ranks: StepRanks::Single,
        }
    }
}

/// One micro-batch in this precision, all options off.
impl From<Precision> for StepConfig {
    fn from(precision: Precision) -> Self {
        Self {
            precision,
            ..Self::default()
        }
    }
}

impl StepConfig {
    /// Returns the settings that apply to a kind of plan. A plan without an update drops the update's settings. A
    /// forward pass has one micro-batch and exchanges only sharded weights.
    pub(super) fn of(&self, kind: PlanKind) -> Self {
        match kind {
            PlanKind::TrainStep => self.clone(),
            PlanKind::Gradients => Self {
                clip_norm: None,
                clip_value: None,
                loss_scaling: false,
                optimizer_in_backward: false,
                ..self.clone()
            },
            PlanKind::Forward => Self {
                precision: self.precision,
                ranks: match self.ranks {
                    StepRanks::FullySharded(..) => self.ranks,
                    _ => StepRanks::Single,
                },
                ..Self::default()
            },
        }
    }

    /// Checks that the fields are valid and compatible.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: a norm or value to clip to that is not above 0; no micro-batches; a
    /// precision with half-precision parameters, or with weights that are cast at each use; an optimizer in backward
    /// with `clip_norm`, accumulation, loss scaling or several ranks; an exchange in bf16 in another precision or with
    /// accumulation or loss scaling.
    pub fn validate(&self) -> Result<()> {
        const CONFIG: &str = "StepConfig";
        if !(1..=u32::MAX as usize).contains(&self.accumulation) {
            return Err(
                Error::config(CONFIG, "accumulation", self.accumulation).must_be(
                    "from 1 to under 2^32",
                    "it is the number of micro-batches in a step; 1 does not accumulate",
                ),
            );
        }
        if let Some(norm) = self.clip_norm {
            check_clip_norm(norm)?;
        }
        if let Some(value) = self.clip_value {
            check_clip_value("StepConfig", "clip_value", value)?;
        }
        check_precision(CONFIG, self.precision)?;
        self.ranks.validate()?;
        let conflicts = [
            (self.clip_norm.is_some(), "false with clip_norm"),
            (self.accumulation > 1, "false with accumulation"),
            (self.loss_scaling, "false with loss_scaling"),
            (self.ranks != StepRanks::Single, "false with several ranks"),
        ];
        let beside = conflicts.into_iter().find(|(is_there, _)| *is_there);
        match beside {
            Some((_, expected)) if self.optimizer_in_backward => {
                let hint = "clipping by norm, accumulation, loss scaling and averages over ranks need all gradients \
                            before the first update; leave one out";
                let got = Error::config(CONFIG, "optimizer_in_backward", "true");
                Err(got.must_be(expected, hint))
            }
            _ => self.validate_exchange(),
        }
    }

    /// Checks that an exchange in bf16 has gradients that are computed in bf16.
    fn validate_exchange(&self) -> Result<()> {
        if self.ranks.exchanged() != Some(DType::BF16) {
            return Ok(());
        }
        let (precision, n) = (self.precision, self.accumulation);
        let conflicts = [
            (
                precision.dtype() != DType::BF16,
                "precision",
                precision.to_string(),
                "bf16",
            ),
            (n > 1, "accumulation", n.to_string(), "1"),
            (self.loss_scaling, "loss_scaling", "true".into(), "false"),
        ];
        match conflicts.into_iter().find(|(is_there, ..)| *is_there) {
            None => Ok(()),
            Some((_, field, got, expected)) => {
                Err(Error::config("StepConfig", field, got).must_be(
                    format!("{expected} for gradients that are exchanged in bf16"),
                    "gradients are rounded where a matmul writes them, not after they were summed or unscaled in f32: \
                     leave the dtype of the exchange None",
                ))
            }
        }
    }
}

/// Checks that steps can be planned in this precision.
pub(crate) fn check_precision(config: &'static str, precision: Precision) -> Result<()> {
    if precision.regime() != Regime::Full && !precision.drops_casts() {
        return Ok(());
    }
    let hint = "parameters stay in f32, and a plan keeps one copy of each weight in half precision; train with an eager \
                loop: backward and Optimizer::step";
    Err(Error::config(config, "precision", precision).must_be("f32, bf16 or f16", hint))
}

/// Checks that gradients can be clipped to this value.
pub(crate) fn check_clip_value(
    config: &'static str,
    field: &'static str,
    value: f64,
) -> Result<()> {
    if value > 0.0 {
        return Ok(());
    }
    Err(Error::config(config, field, value).must_be(
        "over 0",
        "each element of a gradient is clipped to it; None does not clip",
    ))
}

/// Checks that gradients can be clipped to this norm.
pub(super) fn check_clip_norm(norm: f64) -> Result<()> {
    if norm > 0.0 {
        return Ok(());
    }
    Err(Error::config("StepConfig", "clip_norm", norm).must_be(
        "over 0",
        "1.0 is usual; None does not clip, infinity measures the norm alone",
    ))
}
