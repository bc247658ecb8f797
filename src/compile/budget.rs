//! Memory budgets: the plan that runs the least again and still fits.

use super::config::PlanConfig;
use super::lower::{Again, Lowered, Target};
use crate::nn::Checkpointing;
use crate::precision::Precision;
use crate::{Error, Result};
use std::num::NonZeroUsize;

/// The plan of a training step of so many blocks, and its checkpointing: as configured, or what fits the budget.
///
/// # Errors
/// Those of `plan`; a budget that no plan keeps to.
pub(super) fn plan(
    layers: usize,
    target: Target,
    config: &PlanConfig,
    plan: impl Fn(Checkpointing, Again) -> Result<Lowered>,
) -> Result<(Lowered, Checkpointing)> {
    let configured = plan(config.checkpointing, Again::default())?;
    let peak_bytes = |planned: &Lowered| planned.plan.peak_bytes();
    let budget_bytes = match config.memory_budget_bytes {
        Some(budget_bytes) if peak_bytes(&configured) > budget_bytes => budget_bytes,
        _ => return Ok((configured, config.checkpointing)),
    };
    let mut smallest = peak_bytes(&configured);
    let halves = target == Target::Cuda && config.precision != Precision::F32;
    for (checkpointing, again) in alternatives(layers, halves) {
        let planned = plan(checkpointing, again)?;
        if peak_bytes(&planned) <= budget_bytes {
            return Ok((planned, checkpointing));
        }
        smallest = smallest.min(peak_bytes(&planned));
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

/// What may be run again, the least first: sums of some blocks, of all, where branches take `halves` of a sum; gates and up of
/// some, of all; then half of the blocks, and more.
fn alternatives(layers: usize, halves: bool) -> impl Iterator<Item = (Checkpointing, Again)> {
    let sums = if halves { layers } else { 0 };
    let nothing = Checkpointing::None;
    let of_sums = (1..=sums).map(move |sums| (nothing, Again { sums, gates: 0 }));
    let of_gates = (1..=layers).map(move |gates| (nothing, Again { sums, gates }));
    let of_blocks = blocks(layers).into_iter();
    let of_blocks = of_blocks.map(move |checkpointing| (checkpointing, Again { sums, gates: 0 }));
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
