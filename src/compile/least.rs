//! What a plan takes at least, by arithmetic alone. Planning takes time and memory of its own, which grow with the
//! blocks and with the rows of the loss: what cannot fit is better not planned.

use super::config::{StepConfig, StepRanks};
use crate::Result;
use crate::attention::Algorithm;
use crate::model::TransformerConfig;
use candle_core::DType;

/// A lower bound of [`Plan::total_bytes`](super::Plan::total_bytes) of a training step on tokens (B, T).
pub(super) fn of_step(
    model: &TransformerConfig,
    config: &StepConfig,
    tokens: [usize; 2],
) -> Result<u64> {
    let least = least(model, config, tokens)?;
    // Running means are in bf16 at least.
    let total = 8.0 * least.parameters + least.of_step + least.ids_and_tables;
    Ok(total as u64) // saturates
}

/// A lower bound of the same of a forward to logits alone.
#[cfg(feature = "report")]
pub(crate) fn of_forward(
    model: &TransformerConfig,
    tokens: [usize; 2],
    precision: crate::precision::Precision,
) -> Result<u64> {
    let config = StepConfig {
        precision,
        ..Default::default()
    };
    let least = least(model, &config, tokens)?;
    let total = 4.0 * least.parameters + least.of_forward + least.ids_and_tables;
    Ok(total as u64) // saturates
}

/// A lower bound of [`Plan::peak_bytes`](super::Plan::peak_bytes) of a training step on tokens (B, T).
pub(super) fn arena_of_step(
    model: &TransformerConfig,
    config: &StepConfig,
    tokens: [usize; 2],
) -> Result<u64> {
    Ok(least(model, config, tokens)?.of_step as u64) // saturates
}

/// Parts of what a plan takes at least: a number of elements, and bytes.
struct Least {
    parameters: f64,
    /// Gradients, or what blocks keep.
    of_step: f64,
    /// The residual stream and logits.
    of_forward: f64,
    ids_and_tables: f64,
}

fn least(model: &TransformerConfig, config: &StepConfig, tokens: [usize; 2]) -> Result<Least> {
    model.validate()?;
    let [b, t] = tokens.map(|size| size as f64);
    let [d, f, h] = [model.d_model, model.d_ff, model.num_heads].map(|size| size as f64);
    let [q, kv] = model.attention_widths().map(|size| size as f64);
    let parameters = match config.ranks {
        StepRanks::FullySharded(_, own) => {
            let parts = model
                .parameter_counts()
                .map(|(shape, count)| count as f64 * own.part(shape.elem_count()).len() as f64);
            parts.sum()
        }
        _ => model.num_parameters() as f64,
    };
    let rows = b * t;
    let width = config.precision.dtype().size_in_bytes() as f64;
    let ids_and_tables = 4.0 * (rows + model.angle_elements(tokens[1]) as f64);
    // q, k, v and what the output projection reads; gate and up, unless a budget has them recomputed, or what GELU reads
    // and makes.
    let gate_up = match config.memory_budget_bytes {
        None => 2.0 * f,
        Some(_) => 0.0,
    };
    let probabilities = match model.attention {
        Algorithm::Naive => b * h * t * (t + 1.0) / 2.0, // causal
        Algorithm::Flash => 0.0,
    };
    let kept_blocks = match config.memory_budget_bytes {
        None => model.num_layers - model.checkpointing.recomputed_blocks(model.num_layers),
        Some(_) => 1,
    };
    let block = width * (rows * (2.0 * (q + kv) + gate_up) + probabilities);
    let is_half = config.ranks.exchanged() == Some(DType::BF16);
    let gradients = match config.optimizer_in_backward {
        false if is_half => 2.0 * parameters,
        false => 4.0 * parameters,
        true => 0.0,
    };
    Ok(Least {
        parameters,
        // Gradients lie where activations were.
        of_step: gradients.max(kept_blocks as f64 * block) + 4.0 * rows,
        of_forward: 4.0 * rows * d + width * rows * model.vocab_size as f64,
        ids_and_tables,
    })
}
