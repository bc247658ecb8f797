//! What to plan for.

use crate::dist::{FullyShardConfig, ReplicatedConfig, Shard};
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use crate::precision::{Precision, Regime};
use crate::{Error, Result};
use candle_core::DType;

/// The ranks of a [job](crate::dist) that take a step together, and what is divided among them besides the batch.
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
    /// ([`FullyShard`](crate::dist::FullyShard); ZeRO, stage 3).
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

/// How a planned step is run, whatever the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct StepConfig {
    /// Scale the gradients so that their norm is at most this; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// Whether the plan divides gradients by a loss scale and leaves the update out where one has overflowed, for
    /// [`LossStep::run_scaled`](super::LossStep::run_scaled).
    pub loss_scaling: bool,
    /// Micro-batches in a step. Each input then has them one after another in its first dimension. The step's loss is
    /// the mean of their losses with equal weights, however many targets each of them counts: a loss of masked targets
    /// that is to weigh every target equally belongs into one micro-batch, or is a [`TrainStep`](super::TrainStep)'s
    /// ([`PlanConfig::ignore_index`]).
    pub accumulation: usize,
    /// The most bytes that the arena may have. If a plan needs more, as little is recomputed in backward as will do: in
    /// half precision on a GPU sums that norms read, then gate and up of SwiGLU.
    pub memory_budget_bytes: Option<u64>,
    /// Update each parameter in backward, as soon as its gradient is complete and nothing reads the parameter any more.
    /// Goes with neither clipping, accumulation nor loss scaling, which need all gradients first.
    pub optimizer_in_backward: bool,
    /// The ranks that take the step together. Several do not go with an optimizer in backward.
    pub ranks: StepRanks,
}

/// One micro-batch, nothing else.
impl Default for StepConfig {
    fn default() -> Self {
        Self {
            clip_norm: None,
            loss_scaling: false,
            accumulation: 1,
            memory_budget_bytes: None,
            optimizer_in_backward: false,
            ranks: StepRanks::Alone,
        }
    }
}

impl StepConfig {
    /// Whether the fields go together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: a norm that is not over 0, no micro-batches, an optimizer in backward beside
    /// clipping, accumulation or loss scaling.
    pub fn validate(&self) -> Result<()> {
        self.validate_as("StepConfig")
    }

    fn validate_as(&self, config: &'static str) -> Result<()> {
        check_count(config, "accumulation", self.accumulation)?;
        if let Some(norm) = self.clip_norm {
            check_clip_norm(config, norm)?;
        }
        self.ranks.validate()?;
        let beside = [
            (self.clip_norm.is_some(), "false with clip_norm"),
            (self.accumulation > 1, "false with accumulation"),
            (self.loss_scaling, "false with loss_scaling"),
            (self.ranks != StepRanks::Alone, "false with several ranks"),
        ];
        let beside = beside.into_iter().find(|(is_there, _)| *is_there);
        match beside {
            Some((_, expected)) if self.optimizer_in_backward => Err(Error::Config {
                config,
                field: "optimizer_in_backward",
                expected: expected.into(),
                got: "true".into(),
                hint: "clipping, accumulation, loss scaling and averages over ranks need all gradients before the \
                       first update; leave one out"
                    .into(),
            }),
            _ => Ok(()),
        }
    }
}

/// The shape of a step, and how it is to be run.
///
/// ```
/// use tallow::compile::PlanConfig;
/// use tallow::nn::Checkpointing;
///
/// let config = PlanConfig { batch_size: 8, sequence_length: 128, clip_norm: Some(1.0), ..Default::default() };
/// assert_eq!(config.checkpointing, Checkpointing::None);
/// config.validate()?;
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PlanConfig {
    /// B: sequences in a micro-batch.
    pub batch_size: usize,
    /// T: tokens in a sequence.
    pub sequence_length: usize,
    /// What products and attention are computed from, and activations kept in: f32, or bf16 or f16 as under
    /// [`autocast`](crate::autocast()), with f32 parameters. [What is in half precision](super#half-precision).
    pub precision: Precision,
    /// Whether the plan divides gradients by a loss scale and leaves the update out where one has overflowed, for
    /// [`TrainStep::run_scaled`](super::TrainStep::run_scaled). Does not go with an optimizer in backward.
    pub loss_scaling: bool,
    /// Scale the gradients so that their norm is at most this, as
    /// [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked) does; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// Micro-batches in a step: tokens and targets are then (accumulation * B, T), and the loss is the mean over all
    /// targets that count.
    pub accumulation: usize,
    /// Which blocks are recomputed in backward instead of keeping their activations.
    pub checkpointing: Checkpointing,
    /// The most bytes that the arena may have. If what `checkpointing` says needs more, as little is recomputed as will
    /// do: in half precision on a GPU the sums that the first blocks' second norms read, an addition; gate and up of
    /// the first blocks, half of what a block leaves; then whole blocks.
    pub memory_budget_bytes: Option<u64>,
    /// Update each parameter as soon as its gradient is there, whose memory is then free again: one gradient is alive
    /// at a time, on a GPU those of one block, whose matrices one launch updates. The peak falls where gradients are
    /// what it is made of: of models that are large beside their batch, or with `checkpointing` (gradients lie where
    /// activations were, so that a step with all activations peaks before there are many). Goes with neither clipping
    /// nor accumulation, which need all gradients first.
    ///
    /// In bf16 on a GPU such gradients are bf16 too, as autocast rounds them there: only the update sees them,
    /// and it has 2 bytes less of each parameter to read. (Those of embedding, norms and head stay in f32.)
    pub optimizer_in_backward: bool,
    /// The token that ends each document of a sequence into which several are packed: a document attends to itself
    /// alone, and what follows a separator is no target, as in
    /// [`TransformerLM::loss_of_documents`](crate::model::TransformerLM::loss_of_documents).
    pub separator: Option<u32>,
    /// Targets with this value do not count, as -100 in PyTorch. Targets may be i64 then.
    ///
    /// With it, or with a separator, the loss is the mean over all targets that count: of all micro-batches and ranks.
    pub ignore_index: Option<i64>,
    /// The seed of dropout, of a model whose configuration has any: a step is then that of a
    /// [key](crate::ops::DropoutKey) of this seed and the optimizer's steps so far. `None` drops nothing.
    pub dropout_seed: Option<u64>,
    /// The ranks that take the step together. Several do not go with an optimizer in backward.
    /// [`TrainStep::replicated`](super::TrainStep::replicated) and
    /// [`fully_sharded`](super::TrainStep::fully_sharded) say it themselves; for
    /// [`TrainStep::plan_for`](super::TrainStep::plan_for) it is whose plan is asked for.
    pub ranks: StepRanks,
}

/// Four sequences of 256 tokens, nothing else.
impl Default for PlanConfig {
    fn default() -> Self {
        Self {
            batch_size: 4,
            sequence_length: 256,
            precision: Precision::F32,
            loss_scaling: false,
            clip_norm: None,
            accumulation: 1,
            checkpointing: Checkpointing::None,
            memory_budget_bytes: None,
            optimizer_in_backward: false,
            separator: None,
            ignore_index: None,
            dropout_seed: None,
            ranks: StepRanks::Alone,
        }
    }
}

impl PlanConfig {
    /// Whether the fields go together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: sizes of zero, sizes that no memory holds, a norm to clip at that is not
    /// over 0, a precision without f32 parameters, an optimizer in backward beside clipping, accumulation or loss
    /// scaling.
    pub fn validate(&self) -> Result<()> {
        check_count("PlanConfig", "batch_size", self.batch_size)?;
        check_count("PlanConfig", "sequence_length", self.sequence_length)?;
        self.step().validate_as("PlanConfig")?;
        check_precision("PlanConfig", self.precision)
    }

    /// The step, but for its shape, precision and checkpointing.
    pub(super) fn step(&self) -> StepConfig {
        StepConfig {
            clip_norm: self.clip_norm,
            loss_scaling: self.loss_scaling,
            accumulation: self.accumulation,
            memory_budget_bytes: self.memory_budget_bytes,
            optimizer_in_backward: self.optimizer_in_backward,
            ranks: self.ranks,
        }
    }

    /// Whether some targets may not count.
    pub(super) fn masks_targets(&self) -> bool {
        self.separator.is_some() || self.ignore_index.is_some()
    }

    /// The seed of dropout, if the model drops anything.
    pub(super) fn dropout_seed_of(&self, model: &TransformerConfig) -> Option<u64> {
        self.dropout_seed.filter(|_| model.dropout.is_any())
    }

    /// An error unless the configuration can work, with a sequence that the model's positions reach.
    pub(super) fn check(&self, model: &TransformerConfig) -> Result<()> {
        self.validate()?;
        check_separator("PlanConfig", self.separator, model)?;
        if self.sequence_length <= model.context_length {
            return Ok(());
        }
        Err(Error::Config {
            config: "PlanConfig",
            field: "sequence_length",
            expected: format!(
                "at most the model's context_length {}",
                model.context_length
            ),
            got: self.sequence_length.to_string(),
            hint: "shorten the sequence, or build the model with a longer context_length".into(),
        })
    }
}

/// An error for a precision that no step is planned in.
pub(crate) fn check_precision(config: &'static str, precision: Precision) -> Result<()> {
    if precision.regime() != Regime::Full && !precision.drops_casts() {
        return Ok(());
    }
    Err(Error::Config {
        config,
        field: "precision",
        expected: "f32, bf16 or f16".into(),
        got: precision.to_string(),
        hint: "parameters stay in f32, and a plan keeps one copy of each weight in half precision; train in a loop of \
               your own by backward and AdamW::step"
            .into(),
    })
}

/// An error for documents that end with a token which the model has not.
pub(crate) fn check_separator(
    config: &'static str,
    separator: Option<u32>,
    model: &TransformerConfig,
) -> Result<()> {
    match separator {
        Some(id) if id as usize >= model.vocab_size => {
            let expected = format!("under the model's vocab_size {}", model.vocab_size);
            let hint = "it is the id of the token that documents end with";
            Err(Error::config(config, "separator", id).must_be(expected, hint))
        }
        _ => Ok(()),
    }
}

/// An error unless a step can have so many.
fn check_count(config: &'static str, field: &'static str, count: usize) -> Result<()> {
    if (1..=u32::MAX as usize).contains(&count) {
        return Ok(());
    }
    Err(Error::Config {
        config,
        field,
        expected: "from 1 to under 2^32".into(),
        got: count.to_string(),
        hint: "a step runs accumulation times batch_size sequences".into(),
    })
}

/// An error unless gradients can be clipped to this norm.
pub(super) fn check_clip_norm(config: &'static str, norm: f64) -> Result<()> {
    if norm > 0.0 {
        return Ok(());
    }
    Err(Error::Config {
        config,
        field: "clip_norm",
        expected: "over 0".into(),
        got: norm.to_string(),
        hint: "1.0 is usual; None does not clip, infinity measures the norm alone".into(),
    })
}
