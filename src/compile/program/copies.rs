//! Takes out the casts of weights: a weight's copy in half precision lasts as long as the weight does not change, so
//! the plan makes it where it is first read, or once for all micro-batches, and not where the function did.

use super::Program;
use crate::graph::{Source, ValueRef};
use crate::ops::WEIGHT_CAST;

pub(super) fn rewrite(program: &mut Program) {
    let casts = program.nodes.iter().enumerate().filter(|(_, node)| {
        node.op == WEIGHT_CAST
            && program.lasts(&node.inputs[0])
            && !program.is_wanted(node.output)
            && !program.is_output(node.output)
    });
    let casts = casts.map(|(i, node)| (i, node.output, node.inputs[0].value));
    let casts: Vec<_> = casts.collect();
    for (i, copy, weight) in casts.into_iter().rev() {
        program.copies.insert(copy, weight);
        program.nodes.remove(i);
    }
}

impl Program {
    /// Whether an operand is a weight, all of it, that changes by updates alone.
    fn lasts(&self, operand: &ValueRef) -> bool {
        let is_input = matches!(self.value(operand.value).source, Source::Input(_));
        self.is_leaf(operand) && operand.view.is_none() && !is_input && self.is_plain(operand)
    }

    /// Whether an operand's gradient, if one is needed, is a parameter's.
    pub(super) fn is_plain(&self, operand: &ValueRef) -> bool {
        let is_parameter = self.kind.has_backward() && self.numbers.contains_key(&operand.value);
        is_parameter || !self.is_wanted(operand.value)
    }
}
