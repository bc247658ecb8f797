//! What the ops of a plan cost, by the same functions as eager ones.

use super::op::{Call, Op, Phase};
use super::plan::Plan;
use crate::ops::cost::Cost;
use crate::ops::lowering::Kernel;
use crate::probe::{Operand, Operands};
use candle_core::DType;

impl Plan {
    /// What the ops cost that the calls compute, in the order in which they begin. What checkpointing recomputes is
    /// there twice, the second time in backward. [`Call::part`] says which calls they are.
    ///
    /// ```
    /// use tallow::compile::{Batch, Step, StepConfig, Target};
    /// use tallow::model::TransformerConfig;
    ///
    /// let model = TransformerConfig::small();
    /// let batch = Batch::hollow(4, 256)?;
    /// let (plan, _) = Step::plan_of(Target::Cpu, &model, &StepConfig::default(), batch)?;
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

    /// What a call costs, as profiles of planned runs have it: bytes are those of its operands
    /// ([`bytes_moved`](Self::bytes_moved)); FLOPs of products are its own. The other FLOPs of its part
    /// ([`costs`](Self::costs)) are divided among the part's calls that are not products. Softmax's go to the calls that
    /// compute scores of attention, if any. The rest is divided by how many elements the calls compute: scores of
    /// attention, what others write. `None` for a call of another plan whose buffers this plan does not have.
    pub fn cost(&self, call: &Call) -> Option<Cost> {
        self.has(call).then(|| self.cost_of(call))
    }

    /// [`cost`](Self::cost) of one of this plan's calls.
    pub(super) fn cost_of(&self, call: &Call) -> Cost {
        let [read, written] = self.bytes_read_and_written(call);
        let (other_flops, softmax_flops) = match call.part.map(|part| &self.parts[part]) {
            Some(part) => part.flops_of(call),
            None => (flops_of_no_part(&call.op), 0.0),
        };
        Cost {
            product_flops: call.op.flops(),
            other_flops,
            softmax_flops,
            read_bytes: read as f64,
            written_bytes: written as f64,
        }
    }

    /// FLOPs of a step that are no products', by [`costs`](Self::costs): without the update's.
    pub fn other_flops(&self) -> f64 {
        let flops: f64 = self.parts.iter().map(|part| part.cost.other_flops).sum();
        self.micro_batches() as f64 * flops
    }
}

/// FLOPs of what a step does beside its ops.
fn flops_of_no_part(op: &Op) -> f64 {
    match op {
        Op::AdamW { elements, .. } => {
            let flat = Operand {
                dims: &[*elements],
                dtype: DType::F32,
            };
            let operands = Operands {
                inputs: &[flat],
                output: flat,
            };
            let formula = crate::optim::cost::ADAMW.cost;
            let cost = formula.and_then(|formula| (formula.forward)(&operands));
            cost.map_or(0.0, |cost| cost.other_flops)
        }
        Op::SumOfSquares { elements } => 2.0 * *elements as f64,
        Op::Unscale { elements } => *elements as f64,
        Op::ClipFactor { parameters } => parameters.len() as f64,
        _ => 0.0, // copies
    }
}

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
    /// How many scores of attention its calls compute.
    pub(super) scores: f64,
}

impl PartCost {
    /// The FLOPs of one of its calls apart from products', and softmax's among them.
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

/// How many scores of attention a call computes without writing them.
fn scores(call: &Call) -> f64 {
    call.op.kernel().map_or(0.0, Kernel::scores)
}

/// How many elements a call computes that its part's FLOPs but products' are divided by.
fn computed(call: &Call) -> f64 {
    if call.op.is_product() {
        return 0.0;
    }
    let written = call.writes.iter().map(|operand| operand.elements.len());
    scores(call).max(written.sum::<usize>() as f64)
}

/// The parts that have calls, which get their new numbers.
pub(super) fn of_calls(mut parts: Vec<PartCost>, calls: &mut [Call]) -> Vec<PartCost> {
    let mut used: Vec<usize> = calls.iter().filter_map(|call| call.part).collect();
    used.sort_unstable();
    used.dedup();
    for call in calls.iter() {
        if let Some(part) = call.part {
            parts[part].computed += computed(call);
            parts[part].scores += scores(call);
        }
    }
    for call in calls {
        call.part = call.part.and_then(|part| used.binary_search(&part).ok());
    }
    let parts = parts.into_iter().enumerate();
    let parts = parts.filter(|(number, _)| used.binary_search(number).is_ok());
    let parts = parts.map(|(_, mut part)| {
        if part.computed == 0.0 {
            part.cost.softmax_flops = 0.0;
            part.cost.other_flops = 0.0; // what only products are left of, as where gate and up alone are recomputed
        }
        part
    });
    parts.collect()
}
