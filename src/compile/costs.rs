//! What the ops of a plan cost, by the same functions as eager ones.

use super::op::Op;
use super::parts::{PartCost, computed};
use super::plan::{Call, Plan};
use crate::ops::cost::Cost;
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
    /// ([`costs`](Self::costs)) are divided among the part's calls that are not products, by how many elements they
    /// compute: scores of attention, what others write. `None` for a call of another plan whose buffers this plan does
    /// not have.
    pub fn cost(&self, call: &Call) -> Option<Cost> {
        self.has(call).then(|| self.cost_of(call))
    }

    /// [`cost`](Self::cost) of one of this plan's calls.
    pub(super) fn cost_of(&self, call: &Call) -> Cost {
        let [read, written] = self.bytes_read_and_written(call);
        Cost {
            product_flops: call.op.flops(),
            other_flops: match call.part.map(|part| &self.parts[part]) {
                Some(part) => part.cost.other_flops * computed(call) / part.computed.max(1.0),
                None => flops_of_no_part(&call.op),
            },
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
