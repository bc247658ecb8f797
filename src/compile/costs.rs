//! What the ops of a plan cost, by the same functions as eager ones.

use super::plan::{Call, Phase, Plan};
use crate::ops::cost::Cost;

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
}

impl Plan {
    /// What the ops cost that the calls compute, in the order in which they begin. What checkpointing recomputes is
    /// there twice, the second time in backward. [`Call::part`] says which calls they are.
    ///
    /// ```
    /// use tallow::compile::{PlanConfig, TrainStep};
    /// use tallow::model::TransformerConfig;
    ///
    /// let model = TransformerConfig::small();
    /// let (plan, _) = TrainStep::plan_for(&model, &PlanConfig::default())?;
    /// for part in plan.costs() {
    ///     println!("{} {}: {}: {} FLOPs", part.phase, part.path, part.ops.join(", "), part.cost.flops());
    /// }
    /// let products: f64 = plan.costs().iter().map(|part| part.cost.product_flops).sum();
    /// assert_eq!(products, plan.flops());
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn costs(&self) -> &[PartCost] {
        &self.parts
    }

    /// FLOPs of a step that are no products', by [`costs`](Self::costs): without the update's.
    pub fn other_flops(&self) -> f64 {
        let flops: f64 = self.parts.iter().map(|part| part.cost.other_flops).sum();
        self.micro_batches() as f64 * flops
    }
}

/// The parts that have calls, which get their new numbers.
pub(super) fn of_calls(parts: Vec<PartCost>, calls: &mut [Call]) -> Vec<PartCost> {
    let mut used: Vec<usize> = calls.iter().filter_map(|call| call.part).collect();
    used.sort_unstable();
    used.dedup();
    for call in calls {
        call.part = call.part.and_then(|part| used.binary_search(&part).ok());
    }
    let parts = parts.into_iter().enumerate();
    let parts = parts.filter(|(number, _)| used.binary_search(number).is_ok());
    parts.map(|(_, part)| part).collect()
}
