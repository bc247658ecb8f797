//! Removes the casts of weights that matmuls read. The plan makes such a copy where it is first read, or once for all
//! micro-batches, and keeps it until the weight changes.

use super::{Node, Program};
use crate::graph::{Source, ValueRef};
use crate::ops::WEIGHT_CAST;

pub(super) fn rewrite(program: &mut Program) {
    let mut casts: Vec<usize> = Vec::new();
    for (i, node) in program.nodes.iter().enumerate() {
        // A weight has copies in one dtype; a cast to another dtype stays a node.
        let dtype = |node: usize| program.value(program.nodes[node].output).dtype;
        let is_alike = |other: &usize| {
            let weight = program.nodes[*other].inputs[0].value;
            weight != node.inputs[0].value || dtype(*other) == dtype(i)
        };
        if node.op == WEIGHT_CAST && program.is_copy(node) && casts.iter().all(is_alike) {
            casts.push(i);
        }
    }
    for i in casts.into_iter().rev() {
        let cast = program.nodes.remove(i);
        program.copies.insert(cast.output, cast.inputs[0].value);
    }
}

impl Program {
    /// Returns whether a cast of a weight is only read as the copy of that weight. If an op had it as an input, its
    /// backward could read it after the weight was updated.
    fn is_copy(&self, cast: &Node) -> bool {
        let readers = self.readers(cast.output).iter().map(|i| &self.nodes[*i]);
        let mut inputs = readers.flat_map(|node| &node.inputs);
        self.is_persistent(&cast.inputs[0])
            && !self.needs_grad(cast.output)
            && !self.is_output(cast.output)
            && !inputs.any(|input| input.value == cast.output)
    }

    /// Returns whether an operand is a full weight that only an optimizer changes.
    fn is_persistent(&self, operand: &ValueRef) -> bool {
        let is_input = matches!(self.value(operand.value).source, Source::Input(_));
        self.is_leaf(operand)
            && operand.view.is_none()
            && !is_input
            && self.has_parameter_gradient(operand)
    }

    /// Returns whether an operand is a parameter or needs no gradient.
    pub(super) fn has_parameter_gradient(&self, operand: &ValueRef) -> bool {
        let is_parameter = self.kind.has_backward() && self.numbers.contains_key(&operand.value);
        is_parameter || !self.needs_grad(operand.value)
    }
}
