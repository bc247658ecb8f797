//! Memory budgets: the plan that runs the least again and still fits.

use super::build::{self, Again, Source};
use super::plan::Plan;
use crate::nn::Checkpointing;
use crate::{Error, Result};
use std::num::NonZeroUsize;

/// The plan of a training step, and its checkpointing: as configured, or what fits the budget.
pub(super) fn plan(source: Source<'_>) -> Result<(Plan, Checkpointing)> {
    let config = source.config;
    let configured = build::train_step(source, config.checkpointing.into());
    let budget_bytes = match config.memory_budget_bytes {
        Some(budget_bytes) if configured.peak_bytes() > budget_bytes => budget_bytes,
        _ => return Ok((configured, config.checkpointing)),
    };
    let mut smallest = configured.peak_bytes();
    for again in alternatives(source) {
        let plan = build::train_step(source, again);
        if plan.peak_bytes() <= budget_bytes {
            return Ok((plan, again.checkpointing));
        }
        smallest = smallest.min(plan.peak_bytes());
    }
    let hint = match config.optimizer_in_backward {
        true => "allow more, or plan a smaller batch or sequence",
        false => "allow more, plan a smaller batch or sequence, or see optimizer_in_backward",
    };
    Err(Error::Config {
        config: "PlanConfig",
        field: "memory_budget_bytes",
        expected: format!("at least {smallest}, the least that a plan for these sizes needs"),
        got: budget_bytes.to_string(),
        hint: hint.into(),
    })
}

/// What may be run again, the least first: sums of some blocks, of all; gates and up of some, of all; then half of the blocks,
/// and more.
fn alternatives(source: Source<'_>) -> impl Iterator<Item = Again> {
    let layers = source.model.num_layers;
    let sums = match source.is_half_on_card() {
        true => layers,
        false => 0,
    };
    let nothing = Again::from(Checkpointing::None);
    let of_sums = (1..=sums).map(move |sums| Again { sums, ..nothing });
    let of_gates = (1..=layers).map(move |gates| Again {
        sums,
        gates,
        ..nothing
    });
    let of_blocks = blocks(layers).into_iter().map(move |checkpointing| Again {
        checkpointing,
        sums,
        gates: 0,
    });
    of_sums.chain(of_gates).chain(of_blocks)
}

/// Which blocks may be run again, the fewest first.
fn blocks(layers: usize) -> Vec<Checkpointing> {
    let lengths = (1..=layers).rev().filter_map(NonZeroUsize::new);
    let mut alternatives: Vec<_> = lengths.map(Checkpointing::Every).collect();
    // Stable: among as many, the longer segments first, which keep fewer inputs.
    alternatives.sort_by_key(|checkpointing| checkpointing.recomputed_blocks(layers));
    alternatives
}
