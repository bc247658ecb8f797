//! What to plan for.

use crate::nn::Checkpointing;
use crate::precision::{Precision, Regime};
use crate::{Error, Result};

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
    /// Micro-batches in a step: tokens and targets are then (accumulation * B, T), and the loss is the mean over all.
    pub accumulation: usize,
    /// Which blocks are run again in backward instead of keeping their activations. (A plan always releases what a block
    /// kept once backward has come through it: [`Checkpointing::Release`] is [`Checkpointing::None`] here.)
    pub checkpointing: Checkpointing,
    /// The most bytes that the arena may have. If what `checkpointing` says needs more, as little is run again as will do: in
    /// half precision on a GPU the sums that the first blocks' second norms read, an addition; gate and up of the first blocks,
    /// half of what a block leaves; then whole blocks.
    pub memory_budget_bytes: Option<u64>,
    /// Update each parameter as soon as its gradient is there, whose memory is then free again: one gradient is alive at a
    /// time, on a GPU those of one block, whose matrices one launch updates. The peak falls where gradients are what it is made
    /// of: of models that are large beside their batch, or with `checkpointing` (gradients lie where activations were, so that a
    /// step with all activations peaks before there are many). Goes with neither clipping nor accumulation, which need all
    /// gradients first.
    ///
    /// In bf16 on a GPU such gradients are bf16 too, as autocast rounds them there: nobody but the update sees them, and it has
    /// 2 bytes less of each parameter to read. (Those of embedding, norms and head stay in f32.)
    pub optimizer_in_backward: bool,
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
        }
    }
}

impl PlanConfig {
    /// Whether the fields go together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: sizes of zero, sizes that no memory holds, a norm to clip at that is not over 0,
    /// a precision without f32 parameters, an optimizer in backward beside clipping, accumulation or loss scaling.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String, hint: &str| {
            Err(Error::Config {
                config: "PlanConfig",
                field,
                expected: expected.into(),
                got,
                hint: hint.into(),
            })
        };
        for (field, size) in [
            ("batch_size", self.batch_size),
            ("sequence_length", self.sequence_length),
            ("accumulation", self.accumulation),
        ] {
            if size == 0 || size > u32::MAX as usize {
                let hint = "a step runs accumulation times batch_size sequences";
                return refuse(field, "from 1 to under 2^32", size.to_string(), hint);
            }
        }
        if let Some(norm) = self.clip_norm {
            check_clip_norm(norm)?;
        }
        let precision = self.precision;
        if precision.regime() == Regime::Full || precision.drops_casts() {
            let hint = "parameters stay in f32, and the plan keeps one copy of each weight in half precision";
            let expected = "f32, bf16 or f16";
            return refuse("precision", expected, precision.to_string(), hint);
        }
        if self.optimizer_in_backward {
            let hint = "clipping, accumulation and loss scaling need all gradients before the first update; leave one out";
            if self.clip_norm.is_some() {
                return refuse(
                    "optimizer_in_backward",
                    "false with clip_norm",
                    "true".into(),
                    hint,
                );
            }
            if self.accumulation > 1 {
                let expected = "false with accumulation";
                return refuse("optimizer_in_backward", expected, "true".into(), hint);
            }
            if self.loss_scaling {
                let expected = "false with loss_scaling";
                return refuse("optimizer_in_backward", expected, "true".into(), hint);
            }
        }
        Ok(())
    }
}

/// An error unless gradients can be clipped to this norm.
pub(super) fn check_clip_norm(norm: f64) -> Result<()> {
    if norm > 0.0 {
        return Ok(());
    }
    Err(Error::Config {
        config: "PlanConfig",
        field: "clip_norm",
        expected: "over 0".into(),
        got: norm.to_string(),
        hint: "1.0 is usual; None does not clip, infinity measures the norm alone".into(),
    })
}
