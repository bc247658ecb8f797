//! What to plan for.

use crate::distributed::{FullyShardConfig, ReplicatedConfig, Shard};
use crate::precision::{Precision, Regime};
use crate::{Error, Result};
use candle_core::DType;
use std::num::NonZeroUsize;

/// The ranks of a [job](crate::distributed) that take a step together, and what is divided among them besides the
/// batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum StepRanks {
    /// One process.
    #[default]
    Alone,
    /// Every rank has the whole model and its optimizer. Gradients and loss are averaged.
    Replicated(ReplicatedConfig),
    /// Every rank has the whole model. This rank, of so many, has the state of its share of the parameters and updates
    /// those ([`AdamW::shard`](crate::optim::AdamW::shard); ZeRO, stage 1).
    ShardedOptimizer(ReplicatedConfig, Shard),
    /// This rank, of so many, has a part of every weight, gradient and state
    /// ([`FullyShard`](crate::distributed::FullyShard); ZeRO, stage 3).
    FullySharded(FullyShardConfig, Shard),
}

impl StepRanks {
    /// The exchange of gradients, where each rank has all of them.
    pub(super) fn replicated(self) -> Option<ReplicatedConfig> {
        match self {
            Self::Replicated(config) | Self::ShardedOptimizer(config, _) => Some(config),
            Self::Alone | Self::FullySharded(..) => None,
        }
    }

    /// The exchange of weights and gradients, where each rank has a part.
    pub(super) fn fully_sharded(self) -> Option<FullyShardConfig> {
        match self {
            Self::FullySharded(config, _) => Some(config),
            _ => None,
        }
    }

    /// This rank's share, where something is divided besides the batch.
    pub(super) fn shard(self) -> Option<Shard> {
        match self {
            Self::ShardedOptimizer(_, own) | Self::FullySharded(_, own) => Some(own),
            Self::Alone | Self::Replicated(_) => None,
        }
    }

    /// The dtype that gradients are rounded to for their exchange.
    pub(super) fn exchanged(self) -> Option<DType> {
        match self {
            Self::Alone => None,
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

/// The kinds of plans, by what a run of one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    /// Forward, loss, backward, clipping and update: [`Step::run`](super::Step::run) and
    /// [`Step::forward_backward`](super::Step::forward_backward).
    TrainStep,
    /// Forward alone, without dropout: [`Step::forward`](super::Step::forward).
    Forward,
    /// Forward, and backward from a gradient of the output that a run is given:
    /// [`Step::forward_backward_from`](super::Step::forward_backward_from).
    Gradients,
}

impl PlanKind {
    pub(super) fn has_backward(self) -> bool {
        self != Self::Forward
    }
}

/// The settings of a [`Step`](super::Step), for any loss and any shapes of its inputs.
///
/// ```
/// use tallow::compile::StepConfig;
/// use tallow::precision::Precision;
///
/// let config = StepConfig { precision: Precision::BF16, clip_norm: Some(1.0), ..Default::default() };
/// config.validate()?;
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct StepConfig {
    /// The dtype that products and attention are computed from and activations kept in: f32, or bf16 or f16 as under
    /// [`autocast`](crate::autocast()), with f32 parameters. [What is in half precision](super#half-precision).
    pub precision: Precision,
    /// Scale the gradients so that their norm is at most this, as
    /// [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked) does; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// Clip each element of the gradients to be from minus this to this, after `clip_norm`, as
    /// [`clip_grad_value`](crate::optim::clip_grad_value) does, in the dtype of the update; `None` for no clipping.
    pub clip_value: Option<f64>,
    /// Whether the plan divides gradients by a loss scale and leaves the update out where one has overflowed, for
    /// [`Step::run_scaled`](super::Step::run_scaled).
    pub loss_scaling: bool,
    /// Micro-batches in a step. Each input has them one after another in its first dimension. The step's loss is the
    /// mean of their losses with equal weights, or, of a [batch that counts its targets](super::Batch::counting), the
    /// mean over all targets that count.
    pub accumulation: usize,
    /// The most bytes that the arena may have in training ([`Step::forward`](super::Step::forward) recomputes nothing,
    /// and has what it takes). If a plan needs more, as little is recomputed in backward as will do: in
    /// half precision on a GPU the sums that the first blocks' second norms read, an addition; gate and up of SwiGLU in
    /// the first blocks, half of what a block leaves; then, of a model, whole blocks.
    pub memory_budget_bytes: Option<u64>,
    /// Update each parameter as soon as its gradient is there, whose memory is then free again: one gradient is alive
    /// at a time, on a GPU those of one block, whose matrices one launch updates. The peak falls where gradients are
    /// what it is made of: of models that are large beside their batch, or with checkpointing (gradients lie where
    /// activations were, so that a step with all activations peaks before there are many). Goes with neither
    /// `clip_norm`, accumulation nor loss scaling, which need all gradients first.
    ///
    /// In bf16 on a GPU such gradients are bf16 too, as autocast rounds them there: only the update sees them,
    /// and it has 2 bytes less of each parameter to read. (Those of embedding, norms and head stay in f32.)
    pub optimizer_in_backward: bool,
    /// The seed of dropout ([`Inputs::dropout`](super::Inputs::dropout)): a step's [key](crate::ops::DropoutKey) is of
    /// this seed and the optimizer's steps so far. `None` drops nothing.
    pub dropout_seed: Option<u64>,
    /// Trace the function again in every so many-th run, and compare: where a number, a branch or a tensor that it
    /// captures is another than when it was planned, the run is an error that says so. A trace takes about as long as a
    /// plan, so this is for tests, and for finding out. `None` does not.
    pub retrace_every: Option<NonZeroUsize>,
    /// The ranks that take the step together. Several do not go with an optimizer in backward.
    /// [`Step::replicated`](super::Step::replicated) and [`fully_sharded`](super::Step::fully_sharded) say it
    /// themselves; for [`Step::plan_of`](super::Step::plan_of) it is whose plan is asked for.
    pub ranks: StepRanks,
}

/// One micro-batch in f32, nothing else.
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
            dropout_seed: None,
            retrace_every: None,
            ranks: StepRanks::Alone,
        }
    }
}

impl StepConfig {
    /// The settings, without those that a plan of this kind has no use for: a plan without an update has none of the
    /// update's, and a forward has one batch, and exchanges only weights that ranks have parts of.
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
                    _ => StepRanks::Alone,
                },
                ..Self::default()
            },
        }
    }

    /// Whether the fields go together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: a norm or value to clip to that is not over 0, no micro-batches, a precision
    /// without f32 parameters, an optimizer in backward beside `clip_norm`, accumulation or loss scaling.
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
        let beside = [
            (self.clip_norm.is_some(), "false with clip_norm"),
            (self.accumulation > 1, "false with accumulation"),
            (self.loss_scaling, "false with loss_scaling"),
            (self.ranks != StepRanks::Alone, "false with several ranks"),
        ];
        let beside = beside.into_iter().find(|(is_there, _)| *is_there);
        match beside {
            Some((_, expected)) if self.optimizer_in_backward => {
                let hint = "clipping by norm, accumulation, loss scaling and averages over ranks need all gradients \
                            before the first update; leave one out";
                let got = Error::config(CONFIG, "optimizer_in_backward", "true");
                Err(got.must_be(expected, hint))
            }
            _ => Ok(()),
        }
    }
}

/// An error for a precision that no step is planned in.
pub(crate) fn check_precision(config: &'static str, precision: Precision) -> Result<()> {
    if precision.regime() != Regime::Full && !precision.drops_casts() {
        return Ok(());
    }
    let hint = "parameters stay in f32, and a plan keeps one copy of each weight in half precision; train in a loop of \
                your own by backward and AdamW::step";
    Err(Error::config(config, "precision", precision).must_be("f32, bf16 or f16", hint))
}

/// An error unless gradients can be clipped to this value.
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

/// An error unless gradients can be clipped to this norm.
pub(super) fn check_clip_norm(norm: f64) -> Result<()> {
    if norm > 0.0 {
        return Ok(());
    }
    Err(Error::config("StepConfig", "clip_norm", norm).must_be(
        "over 0",
        "1.0 is usual; None does not clip, infinity measures the norm alone",
    ))
}
