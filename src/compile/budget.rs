//! Memory budgets: the plan that recomputes the least and still fits.

use super::config::StepConfig;
use super::lower::Recompute;
use super::planned::Planned;
use crate::nn::Checkpointing;
use crate::{Error, Result};

/// The plan of a step as `configured`, or what fits its budget: first sums are recomputed, of one norm, of all; then
/// gates and up beside them, of one, of all; then the blocks that each of `others` says. And which of these it was.
///
/// # Errors
/// Those of `plan`; a budget that no plan keeps to.
pub(super) fn plan(
    config: &StepConfig,
    configured: Checkpointing,
    others: impl IntoIterator<Item = Checkpointing>,
    plan: impl Fn(Checkpointing, Recompute) -> Result<Planned>,
) -> Result<(Planned, Checkpointing)> {
    let nothing = Checkpointing::None;
    let first = plan(configured, Recompute::default())?;
    let budget_bytes = match config.memory_budget_bytes {
        Some(budget_bytes) if first.peak_bytes() > budget_bytes => budget_bytes,
        _ => return Ok((first, configured)),
    };
    let mut smallest = first.peak_bytes();
    let mut fits = |planned: &Planned| {
        smallest = smallest.min(planned.peak_bytes());
        planned.peak_bytes() <= budget_bytes
    };
    // One more of each, until there are no more.
    let mut recompute = Recompute::default();
    let mut sums = 0;
    for more in [
        Recompute { sums: 1, gates: 0 },
        Recompute { sums: 0, gates: 1 },
    ] {
        loop {
            let next = recompute.plus(more);
            let planned = plan(nothing, next)?;
            if planned.lowered.recompute != next {
                break;
            }
            if fits(&planned) {
                return Ok((planned, nothing));
            }
            recompute = next;
        }
        sums = recompute.sums;
    }
    for other in others {
        let planned = plan(other, Recompute { sums, gates: 0 })?;
        if fits(&planned) {
            return Ok((planned, other));
        }
    }
    let hint = match config.optimizer_in_backward {
        true => "allow more, or plan a smaller batch or sequence",
        false => "allow more, plan a smaller batch or sequence, or see optimizer_in_backward",
    };
    Err(Error::Config {
        config: "StepConfig",
        field: "memory_budget_bytes",
        expected: format!("at least {smallest}, the least that a plan for these sizes needs"),
        got: budget_bytes.to_string(),
        hint: hint.into(),
    })
}
