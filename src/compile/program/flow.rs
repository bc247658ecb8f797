//! Where gradients flow in a graph, and the nodes that only pass a value on.

use crate::graph::{Graph, Node, Source, ValueId, ValueRef};

/// Where gradients flow: from the first output to the weights that are trained.
pub(super) struct Flow {
    /// By value: whether it depends on such a weight.
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

    /// Whether a value's gradient is needed.
    pub fn is_wanted(&self, value: ValueId) -> bool {
        self.depends[value.0] && self.matters[value.0]
    }

    /// Whether a node hands a gradient that is needed to this input.
    pub fn passes_through(&self, graph: &Graph, node: &Node, input: usize) -> bool {
        self.is_wanted(node.output)
            && self.is_wanted(node.inputs[input].value)
            && flows(graph, node, input)
    }
}

/// Whether a node hands a gradient to this input. A segment's end does, whose input is taken out of its graph.
fn flows(graph: &Graph, node: &Node, input: usize) -> bool {
    let is_end = || !node.inputs.iter().any(|x| x.tracked);
    node.inputs[input].tracked || (is_end() && graph.value(node.output).tracked)
}

/// A node with other names of what it reads.
pub(super) fn renamed(node: &Node, names: &[ValueId]) -> Node {
    let of = |operands: &[ValueRef]| operands.iter().map(|x| named(x, names)).collect();
    Node {
        inputs: of(&node.inputs),
        reads: of(&node.reads),
        ..node.clone()
    }
}

pub(super) fn named(operand: &ValueRef, names: &[ValueId]) -> ValueRef {
    ValueRef {
        value: names[operand.value.0],
        ..operand.clone()
    }
}

/// The value that a node gives out as it is: one that is copied for the sake of candle's graph.
pub(super) fn passed_on(graph: &Graph, node: &Node) -> Option<ValueId> {
    let [x] = &node.inputs[..] else {
        return None;
    };
    let is_whole = x.view.is_none() && graph.value(x.value).shape == graph.value(node.output).shape;
    ((node.is_leaf() || node.ends_segment()) && is_whole).then_some(x.value)
}
