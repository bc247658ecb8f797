//! A graph as it is planned: without the nodes that only pass a value on, and with who reads each value.

use crate::graph::{Graph, Node, Source, TraceEvent, ValueId, ValueRef};
use std::ops::Range;

/// A graph's nodes, and what the passes ask of them.
pub(super) struct Program<'g> {
    pub graph: &'g Graph,
    pub nodes: Vec<Node>,
    /// The nodes of each checkpointed segment, an outer one before those within it.
    pub segments: Vec<Range<usize>>,
    pub outputs: Vec<ValueRef>,
    /// By value: the node that makes or keeps it.
    makers: Vec<Option<usize>>,
    /// By value: the nodes that read it, in order.
    readers: Vec<Vec<usize>>,
    /// By value: whether all that is read of it is all of it, as it lies.
    is_whole: Vec<bool>,
    flow: Flow,
}

impl<'g> Program<'g> {
    /// `elements` are those of a variable, and `is_trained` says whether its gradient is wanted.
    pub fn new(
        graph: &'g Graph,
        elements: impl Fn(ValueId) -> Option<usize>,
        is_trained: impl Fn(ValueId) -> bool,
    ) -> Self {
        let mut names: Vec<ValueId> = (0..graph.values.len()).map(ValueId).collect();
        let (mut nodes, mut segments, mut open) = (Vec::new(), Vec::new(), Vec::new());
        for event in &graph.events {
            match event {
                TraceEvent::Enter => {
                    open.push(segments.len());
                    segments.push(nodes.len()..nodes.len());
                }
                TraceEvent::Leave => {
                    if let Some(segment) = open.pop() {
                        segments[segment].end = nodes.len();
                    }
                }
                TraceEvent::Node(node) => {
                    let node = renamed(node, &names);
                    match passed_on(graph, &node) {
                        Some(value) => names[node.output.0] = value,
                        None => nodes.push(node),
                    }
                }
                TraceEvent::AutocastEnd | TraceEvent::Drop(_) => {} // memory alone
            }
        }
        let outputs = graph.outputs.iter().map(|x| named(x, &names));
        let outputs: Vec<ValueRef> = outputs.collect();
        let mut makers = vec![None; graph.values.len()];
        let mut readers = vec![Vec::new(); graph.values.len()];
        let whole = (0..graph.values.len()).map(|value| {
            let all = elements(ValueId(value));
            all.is_none_or(|all| all == graph.values[value].elements())
        });
        let mut is_whole: Vec<bool> = whole.collect();
        for (i, node) in nodes.iter().enumerate() {
            makers[node.output.0] = Some(i);
            for kept in &node.kept {
                makers[kept.value.0] = Some(i);
            }
            for operand in node.inputs.iter().chain(&node.reads) {
                is_whole[operand.value.0] &= operand.view.is_none();
                let readers: &mut Vec<usize> = &mut readers[operand.value.0];
                if readers.last() != Some(&i) {
                    readers.push(i);
                }
            }
        }
        let flow = Flow::of(graph, &nodes, &outputs, is_trained);
        Self {
            graph,
            nodes,
            segments,
            outputs,
            makers,
            readers,
            is_whole,
            flow,
        }
    }

    /// The number of the node that makes a value; `None` for what comes from outside.
    pub fn maker(&self, value: ValueId) -> Option<usize> {
        self.makers[value.0]
    }

    /// The numbers of the nodes that read a value, in order.
    pub fn readers(&self, value: ValueId) -> &[usize] {
        &self.readers[value.0]
    }

    /// The number of the one node that reads a value, which is not given out.
    pub fn only_reader(&self, value: ValueId) -> Option<usize> {
        match (self.readers(value), self.is_output(value)) {
            ([reader], false) => Some(*reader),
            _ => None,
        }
    }

    /// Whether the function returns the value.
    pub fn is_output(&self, value: ValueId) -> bool {
        self.outputs.iter().any(|output| output.value == value)
    }

    /// Whether two nodes are recomputed together, or not at all.
    pub fn are_in_one_segment(&self, a: usize, b: usize) -> bool {
        let mut segments = self.segments.iter();
        segments.all(|segment| segment.contains(&a) == segment.contains(&b))
    }

    /// Whether a value's gradient is needed.
    pub fn is_wanted(&self, value: ValueId) -> bool {
        self.flow.depends[value.0] && self.flow.matters[value.0]
    }

    /// Whether a node hands a gradient that is needed to this input.
    pub fn passes_through(&self, node: &Node, input: usize) -> bool {
        self.is_wanted(node.output)
            && self.is_wanted(node.inputs[input].value)
            && flows(self.graph, node, input)
    }

    /// Whether a value comes from outside and is read whole: a weight, an input, a constant.
    pub fn is_leaf(&self, operand: &ValueRef) -> bool {
        self.is_whole[operand.value.0] && !is_made(self.graph, operand.value)
    }
}

fn is_made(graph: &Graph, value: ValueId) -> bool {
    graph.value(value).source == Source::Node
}

fn renamed(node: &Node, names: &[ValueId]) -> Node {
    let of = |operands: &[ValueRef]| operands.iter().map(|x| named(x, names)).collect();
    Node {
        inputs: of(&node.inputs),
        reads: of(&node.reads),
        ..node.clone()
    }
}

fn named(operand: &ValueRef, names: &[ValueId]) -> ValueRef {
    ValueRef {
        value: names[operand.value.0],
        ..operand.clone()
    }
}

/// The value that a node gives out as it is: one that is copied for the sake of candle's graph.
fn passed_on(graph: &Graph, node: &Node) -> Option<ValueId> {
    let [x] = &node.inputs[..] else {
        return None;
    };
    let is_whole = x.view.is_none() && graph.value(x.value).shape == graph.value(node.output).shape;
    ((node.is_leaf() || node.ends_segment()) && is_whole).then_some(x.value)
}

/// Whether a node hands a gradient to this input. A segment's end does, whose input is taken out of its graph.
fn flows(graph: &Graph, node: &Node, input: usize) -> bool {
    let is_end = || !node.inputs.iter().any(|x| x.tracked);
    node.inputs[input].tracked || (is_end() && graph.value(node.output).tracked)
}

/// Where gradients flow: from the first output to the weights that are trained.
struct Flow {
    /// By value: whether it depends on such a weight.
    depends: Vec<bool>,
    /// By value: whether the output depends on it.
    matters: Vec<bool>,
}

impl Flow {
    fn of(
        graph: &Graph,
        nodes: &[Node],
        outputs: &[ValueRef],
        is_trained: impl Fn(ValueId) -> bool,
    ) -> Self {
        let count = graph.values.len();
        let mut depends: Vec<bool> = (0..count)
            .map(|value| !is_made(graph, ValueId(value)) && is_trained(ValueId(value)))
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
}
