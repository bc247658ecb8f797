//! Costs of a plan's ops and calls, by the same formulas as eager ops.

use super::op::{Call, Op, Phase};
use super::plan::Plan;
use crate::ops::cost::Cost;
use crate::ops::lowering::Kernel;
use crate::probe::{Operand, Operands};
use candle_core::DType;

impl Plan {
    /// Returns the costs of the ops that the calls compute, in the order of their first call. Ops that checkpointing
    /// recomputes are listed twice, the second time in backward.
    ///
    /// ```
    /// use tallow::compile::{Batch, Step, StepConfig, Target};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    ///
    /// let model = TransformerLM::meta(&TransformerConfig::preset("small")?)?;
    /// let batch = Batch::meta(4, 256)?;
    /// let (plan, _) = Step::plan_for_model(Target::Cpu, &model, &StepConfig::default(), batch)?;
    /// for group in plan.costs() {
    ///     println!(
    ///         "{} {}: {}: {} FLOPs",
    ///         group.phase, group.path, group.ops.join(", "), group.cost.flops()
    ///     );
    /// }
    /// let matmuls: f64 = plan.costs().iter().map(|group| group.cost.matmul_flops).sum();
    /// assert_eq!(matmuls, plan.flops());
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn costs(&self) -> &[GroupCost] {
        &self.group_costs
    }

    /// Returns the cost of a call, as profiles of planned runs report it, or `None` for a call of another plan.
    ///
    /// Bytes are those of its operands ([`bytes_moved`](Self::bytes_moved)). Matmul FLOPs are the call's own, those of
    /// Muon's iteration included. Other FLOPs are those of its group ([`costs`](Self::costs)), divided among the
    /// group's calls that are not matmuls. FLOPs of softmax are divided among the group's calls that compute attention
    /// scores, if it has any. The others are divided among its calls in proportion to their size: the number of
    /// attention scores of a call that computes scores, otherwise the number of elements that it writes.
    #[doc(hidden)]
    pub fn cost(&self, call: &Call) -> Option<Cost> {
        self.has(call).then(|| self.cost_of(call))
    }

    /// Same as [`cost`](Self::cost), for a call of this plan.
    pub(super) fn cost_of(&self, call: &Call) -> Cost {
        let [read, written] = self.bytes_read_and_written(call);
        let (other_flops, softmax_flops) =
            match call.cost_index.map(|group| &self.group_costs[group]) {
                Some(group) => group.flops_of(call),
                None => (flops_without_group(&call.op), 0.0),
            };
        Cost {
            matmul_flops: match call.op {
                Op::Orthogonalize { rule, count, shape } => {
                    count as f64 * rule.iteration(&shape).flops()
                }
                _ => call.op.flops(),
            },
            other_flops,
            softmax_flops,
            read_bytes: read as f64,
            written_bytes: written as f64,
        }
    }

    /// Returns the FLOPs of a step apart from matmuls, by [`costs`](Self::costs). The update is not included.
    pub fn other_flops(&self) -> f64 {
        let flops: f64 = self
            .group_costs
            .iter()
            .map(|group| group.cost.other_flops)
            .sum();
        self.micro_batches() as f64 * flops
    }
}

/// Returns the FLOPs of a call that belongs to no group.
fn flops_without_group(op: &Op) -> f64 {
    match op {
        Op::Update { rule, elements, .. } => {
            let flat = Operand {
                dims: &[*elements],
                dtype: DType::F32,
            };
            let operands = Operands {
                inputs: &[flat],
                output: flat,
            };
            let formula = rule.info().cost;
            let cost = formula.and_then(|formula| (formula.forward)(&operands));
            cost.map_or(0.0, |cost| cost.other_flops)
        }
        Op::SumOfSquares { elements } => 2.0 * *elements as f64,
        Op::Unscale { elements } => *elements as f64,
        Op::ClipFactor { parameters } => parameters.len() as f64,
        _ => 0.0, // copies
    }
}

/// Ops that are planned together in one phase, and their cost.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupCost {
    /// The path of the module in the model, for example `layers.3/attn`.
    pub path: String,
    /// The ops' names, as in the graph.
    pub ops: Vec<&'static str>,
    /// The phase of the step.
    pub phase: Phase,
    /// The sum of the ops' formulas ([`op_costs`](crate::profile::op_costs)) for one micro-batch: forward or backward,
    /// or both for head and loss. Backward includes the gradients of all inputs, also of those that need none. Bytes
    /// are those of the ops run one by one. What the plan's calls compute and move may therefore be less:
    /// [`Plan::flops`] and [`Plan::traffic_bytes`] are of its calls.
    pub cost: Cost,
    /// The number of elements that its calls compute, without matmuls.
    pub(super) computed: f64,
    /// The number of attention scores that its calls compute.
    pub(super) scores: f64,
}

impl GroupCost {
    /// Returns the FLOPs of one of its calls apart from matmuls, and the softmax FLOPs among them.
    fn flops_of(&self, call: &Call) -> (f64, f64) {
        let of_all = computed(call) / self.computed.max(1.0);
        let of_softmax = match self.scores > 0.0 {
            true => scores(call) / self.scores,
            false => of_all,
        };
        let softmax = self.cost.softmax_flops * of_softmax;
        let others = (self.cost.other_flops - self.cost.softmax_flops) * of_all;
        (others + softmax, softmax)
    }
}

/// Returns the number of attention scores that a call computes without writing them.
fn scores(call: &Call) -> f64 {
    call.op.kernel().map_or(0.0, Kernel::scores)
}

/// Returns a call's weight for dividing its group's FLOPs: attention scores or written elements, 0 for a matmul.
fn computed(call: &Call) -> f64 {
    if call.op.is_matmul() {
        return 0.0;
    }
    let written = call.writes.iter().map(|operand| operand.elements.len());
    scores(call).max(written.sum::<usize>() as f64)
}

/// Removes the groups without calls and renumbers the calls' indices.
pub(super) fn remove_unused_groups(
    mut groups: Vec<GroupCost>,
    calls: &mut [Call],
) -> Vec<GroupCost> {
    let mut used: Vec<usize> = calls.iter().filter_map(|call| call.cost_index).collect();
    used.sort_unstable();
    used.dedup();
    for call in calls.iter() {
        if let Some(group) = call.cost_index {
            groups[group].computed += computed(call);
            groups[group].scores += scores(call);
        }
    }
    for call in calls {
        call.cost_index = call
            .cost_index
            .and_then(|group| used.binary_search(&group).ok());
    }
    let groups = groups.into_iter().enumerate();
    let groups = groups.filter(|(number, _)| used.binary_search(number).is_ok());
    let groups = groups.map(|(_, mut group)| {
        if group.computed == 0.0 {
            group.cost.softmax_flops = 0.0;
            group.cost.other_flops = 0.0; // only matmuls are left, for example where gate and up alone are recomputed
        }
        group
    });
    groups.collect()
}
