//! Finds the values that need a gradient, and the nodes that only pass a value on.

use crate::graph::{Graph, Node, Source, ValueId, ValueRef};

/// The values on paths from the first output to the trained weights.
pub(super) struct Flow {
    /// By value: whether it depends on a trained weight.
    depends: Vec<bool>,
    /// By value: whether the output depends on it.
    matters: Vec<bool>,
}

impl Flow {
    pub fn of(
        graph: &Graph,
        nodes: &[Node],
        outputs: &[ValueRef],
        is_trained: impl Fn(ValueId) -> bool,
    ) -> Self {
        let count = graph.values.len();
        let is_made = |value: usize| graph.values[value].source == Source::Node;
        let mut depends: Vec<bool> = (0..count)
            .map(|value| !is_made(value) && is_trained(ValueId(value)))
            .collect();
        for node in nodes {
            let mut inputs = node.inputs.iter().enumerate();
            let depends_here = inputs.any(|(i, x)| depends[x.value.0] && flows(graph, node, i));
            depends[node.output.0] = depends_here;
        }
        let mut matters = vec![false; count];
        if let Some(output) = outputs.first() {
            matters[output.value.0] = true;
        }
        for node in nodes.iter().rev() {
            if matters[node.output.0] && depends[node.output.0] {
                let inputs = node.inputs.iter().enumerate();
                let inputs = inputs.filter(|(i, _)| flows(graph, node, *i));
                inputs.for_each(|(_, x)| matters[x.value.0] = true);
            }
        }
        Self { depends, matters }
    }

    /// Returns whether a value needs a gradient.
    pub fn needs_grad(&self, value: ValueId) -> bool {
        self.depends[value.0] && self.matters[value.0]
    }

    /// Returns whether an input of a node needs the gradient that the node's backward computes.
    pub fn passes_through(&self, graph: &Graph, node: &Node, input: usize) -> bool {
        self.needs_grad(node.output)
            && self.needs_grad(node.inputs[input].value)
            && flows(graph, node, input)
    }
}

/// Returns whether a node's backward computes a gradient for this input. The end of a segment does, although its input
/// is detached.
fn flows(graph: &Graph, node: &Node, input: usize) -> bool {
    let is_end = || !node.inputs.iter().any(|x| x.tracked);
    node.inputs[input].tracked || (is_end() && graph.value(node.output).tracked)
}

/// Returns a node that reads renamed values.
pub(super) fn renamed(node: &Node, names: &[ValueId]) -> Node {
    let of = |operands: &[ValueRef]| operands.iter().map(|x| renamed_operand(x, names)).collect();
    Node {
        inputs: of(&node.inputs),
        extra_inputs: of(&node.extra_inputs),
        ..node.clone()
    }
}

pub(super) fn renamed_operand(operand: &ValueRef, names: &[ValueId]) -> ValueRef {
    ValueRef {
        value: names[operand.value.0],
        ..operand.clone()
    }
}

/// Returns the input of a node that returns it unchanged: a copy made for candle's graph.
pub(super) fn pass_through_input(graph: &Graph, node: &Node) -> Option<ValueId> {
    let [x] = &node.inputs[..] else {
        return None;
    };
    let is_whole = x.view.is_none() && graph.value(x.value).shape == graph.value(node.output).shape;
    ((node.is_leaf() || node.ends_segment()) && is_whole).then_some(x.value)
}
