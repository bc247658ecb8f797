//! Rewrites head and loss where the loss is what is differentiated: some rows at a time, with their gradients.

use super::{Kind, Program};
use crate::compile::config::PlanKind;
use crate::graph::Attribute;
use crate::ops::cost::Cost;
use crate::ops::cross_entropy::Reduction;
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
    // Read by anything else, its gradient would not be 1.
    let is_head = program.is_kernel(i, &linear_cross_entropy::INFO);
    if !is_head || !program.is_wanted(loss) || !program.readers(loss).is_empty() {
        return;
    }
    let node = &program.nodes[i];
    let targets = &node.reads[node.reads.len() - 1];
    let is_empty = |input: usize| program.shape_of(&node.inputs[input]).contains(&0);
    if program.value(targets.value).dtype != DType::U32 || is_empty(0) || is_empty(1) {
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
        micro_batches: program.micro_batches,
        wanted: [node.passes[0], node.passes[1]],
    };
    let node = &mut program.nodes[i];
    node.kind = Kind::Head(head);
    node.kept.clear();
    let [mut both, backward] = node.costs;
    both += backward;
    node.costs = [both, Cost::default()];
}
