//! Memory budgets: the plan that recomputes the least and still fits.

use super::config::StepConfig;
use super::planned::Planned;
use super::program::Recompute;
use crate::nn::Checkpointing;
use crate::{Error, Result};

/// The plan of a step as `configured`, or one that fits its budget, and the blocks that it recomputes. First the sums of
/// as few norms as will do are recomputed; then the sums of all norms, with gate and up of as few blocks as will do;
/// then the blocks that each of `others` says. No plan takes less than `least_bytes`.
///
/// # Errors
/// Those of `plan`; a budget that no plan keeps to.
pub(super) fn plan(
    config: &StepConfig,
    configured: Checkpointing,
    others: impl IntoIterator<Item = Checkpointing>,
    least_bytes: u64,
    plan: impl Fn(Checkpointing, Recompute) -> Result<Planned>,
) -> Result<(Planned, Checkpointing)> {
    let nothing = Checkpointing::None;
    if let Some(budget_bytes) = config.memory_budget_bytes
        && budget_bytes < least_bytes
    {
        let what =
            format!("at least {least_bytes}, a lower bound of what a plan for these sizes needs");
        return Err(refused(config, what, budget_bytes));
    }
    let first = plan(configured, Recompute::default())?;
    let budget_bytes = match config.memory_budget_bytes {
        Some(budget_bytes) if first.peak_bytes() > budget_bytes => budget_bytes,
        _ => return Ok((first, configured)),
    };
    let fits = |planned: &Planned| planned.peak_bytes() <= budget_bytes;
    let mut smallest = first.peak_bytes();
    let of_sums = |sums| plan(nothing, Recompute { sums, gates: 0 });
    let all = of_sums(usize::MAX)?;
    let sums = all.lowered.recompute.sums;
    if fits(&all) {
        return Ok((fewest(sums, all, fits, of_sums)?, nothing));
    }
    smallest = smallest.min(all.peak_bytes());
    let of_gates = |gates| plan(nothing, Recompute { sums, gates });
    let all = of_gates(usize::MAX)?;
    if fits(&all) {
        let gates = all.lowered.recompute.gates;
        return Ok((fewest(gates, all, fits, of_gates)?, nothing));
    }
    smallest = smallest.min(all.peak_bytes());
    for other in others {
        let planned = plan(other, Recompute { sums, gates: 0 })?;
        if fits(&planned) {
            return Ok((planned, other));
        }
        smallest = smallest.min(planned.peak_bytes());
    }
    let what = format!("at least {smallest}, the least that a plan for these sizes needs");
    Err(refused(config, what, budget_bytes))
}

/// A plan that recomputes `n` and fits, where one of `n - 1` does not: by bisection, from 0, which does not fit, to
/// `most`, which does by `found`.
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
    Error::Config {
        config: "StepConfig",
        field: "memory_budget_bytes",
        expected,
        got: budget_bytes.to_string(),
        hint: hint.into(),
    }
}
