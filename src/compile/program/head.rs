//! Fuses the head and the loss of a training step: logits and gradients are computed for some rows at a time.

use super::{Kind, Program};
use crate::compile::config::PlanKind;
use crate::graph::Attribute;
use crate::ops::Reduction;
use crate::ops::cost::Cost;
use crate::ops::cross_entropy::{LossTerms, PER_ROW};
use crate::ops::head_loss::HeadLoss;
use crate::ops::linear_cross_entropy;
use candle_core::DType;

pub(super) fn rewrite(program: &mut Program) {
    if program.kind != PlanKind::TrainStep {
        return; // its gradient is not known beforehand
    }
    let Some(loss) = program.outputs.first().map(|output| output.value) else {
        return;
    };
    let Some(i) = program.maker(loss) else {
        return;
    };
    // If anything else read the loss, its gradient would not be 1.
    let is_head = program.is_kernel(i, &linear_cross_entropy::INFO);
    if !is_head || !program.needs_grad(loss) || !program.readers(loss).is_empty() {
        return;
    }
    let node = &program.nodes[i];
    let (x, weight) = (&node.inputs[0], &node.inputs[1]);
    let targets = &node.extra_inputs[node.extra_inputs.len() - 1];
    let is_empty = |operand| program.shape_of(operand).contains(&0);
    // The chunks' gradients of the weight are summed in a parameter's gradient. A recomputed segment would add them
    // twice.
    let sums = !node.needs_grad[1] || program.is_leaf(weight) && x.value != weight.value;
    if program.value(targets.value).dtype != DType::U32
        || is_empty(x)
        || is_empty(weight)
        || !sums
        || !node.segments.is_empty()
        || node.attribute(PER_ROW).is_some()
    {
        return;
    }
    let head = HeadLoss {
        ignore: match node.attribute("ignore") {
            Some(Attribute::Integer(id)) => Some(id),
            _ => None,
        },
        reduction: match node.attribute("divisor") {
            Some(_) => Reduction::Sum,
            None => Reduction::Mean,
        },
        terms: LossTerms::of(|name| node.attribute(name)),
        micro_batches: program.micro_batches,
    };
    let node = &mut program.nodes[i];
    node.kind = Kind::Head(head);
    node.saved.clear();
    let [mut both, backward] = node.costs;
    both += backward;
    node.costs = [both, Cost::default()];
}
