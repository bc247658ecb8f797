//! The parts of a step that are planned together, and what they cost.

use super::call::{Call, Phase};
use crate::ops::cost::Cost;
use crate::ops::lowering::Kernel;

/// Ops that are planned together, in one phase, and what they cost.
#[derive(Clone, Debug, PartialEq)]
pub struct PartCost {
    /// Where in the model, as calls have it.
    pub path: String,
    /// The ops' names, as the graph has them.
    pub ops: Vec<&'static str>,
    /// The part of the step.
    pub phase: Phase,
    /// The sum of the ops' own formulas ([`op_costs`](crate::profile::op_costs)), forward or backward (of head and loss
    /// both), for one micro-batch. Backward's have the gradients of all inputs, also where one is not needed. Bytes are
    /// those of the ops one by one: together they move fewer.
    pub cost: Cost,
    /// How many elements its calls compute, products left out.
    pub(super) computed: f64,
}

/// How many elements a call computes that its part's FLOPs but products' are divided by.
pub(super) fn computed(call: &Call) -> f64 {
    let scores = call.op.kernel().map_or(0.0, Kernel::scores);
    if call.op.is_product() {
        return 0.0;
    }
    let written = call.writes.iter().map(|operand| operand.elements.len());
    scores.max(written.sum::<usize>() as f64)
}

/// The parts that have calls, which get their new numbers.
pub(super) fn of_calls(mut parts: Vec<PartCost>, calls: &mut [Call]) -> Vec<PartCost> {
    let mut used: Vec<usize> = calls.iter().filter_map(|call| call.part).collect();
    used.sort_unstable();
    used.dedup();
    for call in calls.iter() {
        if let Some(part) = call.part {
            parts[part].computed += computed(call);
        }
    }
    for call in calls {
        call.part = call.part.and_then(|part| used.binary_search(&part).ok());
    }
    let parts = parts.into_iter().enumerate();
    let parts = parts.filter(|(number, _)| used.binary_search(number).is_ok());
    let parts = parts.map(|(_, mut part)| {
        if part.computed == 0.0 {
            part.cost.other_flops = 0.0; // what only products are left of, as where gate and up alone are recomputed
        }
        part
    });
    parts.collect()
}
