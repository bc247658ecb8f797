//! Memory budgets: the search for the plan that fits and recomputes the least, and lower bounds of a plan's memory. The
//! bounds are computed without planning. Planning costs time and memory that grow with the number of blocks and the
//! rows of the loss, so a plan that cannot fit is not attempted.

use super::config::{StepConfig, StepRanks};
use super::program::Recompute;
use super::traced::Planned;
use crate::attention::Algorithm;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::{Error, Result};
use candle_core::DType;

/// Plans a step as `configured`, or so that it fits its budget. Returns the plan and the blocks that it recomputes.
///
/// If the configured plan does not fit, these are tried in order: recompute the sums of as few norms as possible;
/// recompute the sums of all norms, and gate and up of as few blocks as possible; recompute the blocks of each of
/// `others`. `lower_bound` is a lower bound of every plan.
///
/// # Errors
/// Errors of `plan`; a budget that no plan fits.
pub(super) fn plan(
    config: &StepConfig,
    configured: Checkpointing,
    others: impl IntoIterator<Item = Checkpointing>,
    lower_bound: u64,
    plan: impl Fn(Checkpointing, Recompute) -> Result<Planned>,
) -> Result<(Planned, Checkpointing)> {
    let nothing = Checkpointing::None;
    if let Some(budget_bytes) = config.memory_budget_bytes
        && budget_bytes < lower_bound
    {
        let what =
            format!("at least {lower_bound}, a lower bound of what a plan for these sizes needs");
        return Err(refused(config, what, budget_bytes));
    }
    let first = plan(configured, Recompute::default())?;
    let budget_bytes = match config.memory_budget_bytes {
        Some(budget_bytes) if first.arena_bytes() > budget_bytes => budget_bytes,
        _ => return Ok((first, configured)),
    };
    let fits = |planned: &Planned| planned.arena_bytes() <= budget_bytes;
    let mut smallest = first.arena_bytes();
    let of_sums = |sums| plan(nothing, Recompute { sums, gates: 0 });
    let all = of_sums(usize::MAX)?;
    let sums = all.lowered.recompute.sums;
    if fits(&all) {
        return Ok((fewest(sums, all, fits, of_sums)?, nothing));
    }
    smallest = smallest.min(all.arena_bytes());
    let of_gates = |gates| plan(nothing, Recompute { sums, gates });
    let all = of_gates(usize::MAX)?;
    if fits(&all) {
        let gates = all.lowered.recompute.gates;
        return Ok((fewest(gates, all, fits, of_gates)?, nothing));
    }
    smallest = smallest.min(all.arena_bytes());
    for other in others {
        let planned = plan(other, Recompute { sums, gates: 0 })?;
        if fits(&planned) {
            return Ok((planned, other));
        }
        smallest = smallest.min(planned.arena_bytes());
    }
    let what = format!("at least {smallest}, the least that a plan for these sizes needs");
    Err(refused(config, what, budget_bytes))
}

/// Returns the plan with the smallest `n` that fits, by bisection between 0, which does not fit, and `most`, whose plan
/// `found` fits.
fn fewest(
    mut most: usize,
    mut found: Planned,
    fits: impl Fn(&Planned) -> bool,
    plan: impl Fn(usize) -> Result<Planned>,
) -> Result<Planned> {
    let mut too_few = 0;
    while most.saturating_sub(too_few) > 1 {
        let middle = usize::midpoint(too_few, most);
        let planned = plan(middle)?;
        match fits(&planned) {
            true => (most, found) = (middle, planned),
            false => too_few = middle,
        }
    }
    Ok(found)
}

fn refused(config: &StepConfig, expected: String, budget_bytes: u64) -> Error {
    let hint = match config.optimizer_in_backward {
        true => "allow more, or plan a smaller batch or sequence",
        false => "allow more, plan a smaller batch or sequence, or see optimizer_in_backward",
    };
    Error::config("StepConfig", "memory_budget_bytes", budget_bytes).must_be(expected, hint)
}

/// Returns a lower bound of [`Plan::total_bytes`](super::Plan::total_bytes) of a training step on tokens (B, T).
pub(super) fn step_lower_bound(
    model: &TransformerConfig,
    attention: Algorithm,
    checkpointing: Checkpointing,
    config: &StepConfig,
    tokens: [usize; 2],
) -> Result<u64> {
    let step_bytes = step_bytes(model, attention, checkpointing, config, tokens)?;
    let bytes = DType::F32.size_in_bytes() + config.optimizer.state_bytes(DType::F32);
    let total =
        bytes as f64 * parameters(model, config) + step_bytes + ids_and_tables(model, tokens);
    Ok(total as u64) // saturates
}

/// Returns a lower bound of [`Plan::total_bytes`](super::Plan::total_bytes) of a forward pass to logits alone.
#[cfg(feature = "report")]
pub(crate) fn forward_lower_bound(
    model: &TransformerConfig,
    tokens: [usize; 2],
    precision: crate::precision::Precision,
) -> Result<u64> {
    model.validate()?;
    let width = precision.dtype().size_in_bytes() as f64;
    let rows = tokens.map(|size| size as f64).iter().product::<f64>();
    // The residual stream and logits.
    let forward_bytes = 4.0 * rows * model.d_model as f64 + width * rows * model.vocab_size as f64;
    let parameters = model.num_parameters() as f64;
    let total = 4.0 * parameters + forward_bytes + ids_and_tables(model, tokens);
    Ok(total as u64) // saturates
}

/// Returns a lower bound of [`Plan::arena_bytes`](super::Plan::arena_bytes) of a training step on tokens (B, T).
pub(super) fn step_arena_lower_bound(
    model: &TransformerLM,
    config: &StepConfig,
    tokens: [usize; 2],
) -> Result<u64> {
    let (attention, checkpointing) = (model.attention(), model.checkpointing());
    let bytes = step_bytes(model.config(), attention, checkpointing, config, tokens)?;
    Ok(bytes as u64) // saturates
}

/// Returns the number of parameter elements of a rank.
fn parameters(model: &TransformerConfig, config: &StepConfig) -> f64 {
    match config.ranks {
        StepRanks::FullySharded(_, own) => {
            let parts = model
                .parameter_counts()
                .map(|(shape, count)| count as f64 * own.part(shape.elem_count()).len() as f64);
            parts.sum()
        }
        _ => model.num_parameters() as f64,
    }
}

/// Returns the bytes of token ids and of rotary tables.
fn ids_and_tables(model: &TransformerConfig, [b, t]: [usize; 2]) -> f64 {
    4.0 * (b as f64 * t as f64 + model.angle_elements(t) as f64)
}

/// Returns a lower bound of the arena, in bytes: the larger of gradients and of activations of the blocks that are not
/// recomputed.
fn step_bytes(
    model: &TransformerConfig,
    attention: Algorithm,
    checkpointing: Checkpointing,
    config: &StepConfig,
    tokens: [usize; 2],
) -> Result<f64> {
    model.validate()?;
    model.check_attention(attention)?;
    let [b, t] = tokens.map(|size| size as f64);
    let [f, h] = [model.d_ff, model.num_heads].map(|size| size as f64);
    let [q, kv] = model.attention_widths().map(|size| size as f64);
    let rows = b * t;
    let width = config.precision.dtype().size_in_bytes() as f64;
    // A block saves q, k, v and the output projection's input. It also saves gate and up, or GELU's input and output,
    // unless a budget has them recomputed.
    let gate_up = match config.memory_budget_bytes {
        None => 2.0 * f,
        Some(_) => 0.0,
    };
    let probabilities = match attention {
        Algorithm::Naive => b * h * t * (t + 1.0) / 2.0, // causal
        Algorithm::Flash => 0.0,
    };
    let kept_blocks = match config.memory_budget_bytes {
        None => model.num_layers - checkpointing.recomputed_blocks(model.num_layers),
        Some(_) => 1,
    };
    let block = width * (rows * (2.0 * (q + kv) + gate_up) + probabilities);
    let parameters = parameters(model, config);
    let is_half = config.ranks.exchanged() == Some(DType::BF16);
    let gradients = match config.optimizer_in_backward {
        false if is_half => 2.0 * parameters,
        false => 4.0 * parameters,
        true => 0.0,
    };
    // Gradients reuse the memory of activations.
    Ok(gradients.max(kept_blocks as f64 * block) + 4.0 * rows)
}
