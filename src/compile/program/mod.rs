//! A traced graph as it is planned: nodes over values, which rewrites make fewer of.
//!
//! A [`Program`] begins as the graph's nodes, without those that only pass a value on. [`Program::new`] then runs the
//! rewrites in this order, one file each; every one takes a program to a program that computes the same:
//!
//! 1. [`head`]: head and loss of a step, some rows at a time;
//! 2. [`copies`]: casts of weights, which are no calls of every micro-batch;
//! 3. [`attention`]: on a GPU, heads in the projections' layout, rotated in place; and q, k and v as one product;
//! 4. [`gated`]: on a GPU, the two maps of SwiGLU as one product;
//! 5. [`siblings`]: linear maps of one input, side by side;
//! 6. [`norm`]: RMSNorm with the addition before it, and rounded.
//!
//! A rewrite never takes a value away that something else reads. What follows (backward, what is recomputed, who may
//! write over what, places) is the same for all nodes: [`lower`](super::lower).

mod attention;
mod copies;
mod flow;
mod gated;
mod head;
mod node;
mod norm;
mod packed;
mod recompute;
mod siblings;
#[cfg(test)]
mod tests;

pub(super) use node::{Kind, Node};
pub(crate) use recompute::Recompute;

use super::config::PlanKind;
use super::traced::TracedFunction;
use crate::graph::{Source, Target, TraceEvent, Value, ValueId, ValueRef};
use crate::ops::info::OpInfo;
use crate::ops::lowering::Signature;
use crate::probe::Operand;
use flow::Flow;
use std::collections::HashMap;

/// Nodes in order, and what rewrites ask of them.
pub(super) struct Program {
    pub target: Target,
    pub kind: PlanKind,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Those of the graph, and those that rewrites have added.
    pub values: Vec<Value>,
    pub nodes: Vec<Node>,
    pub outputs: Vec<ValueRef>,
    /// By value: which parameter it is.
    numbers: HashMap<ValueId, usize>,
    /// By value: the weights that it is, one under the other, where it is several.
    stacks: HashMap<ValueId, Vec<ValueId>>,
    /// By value: the weight that it is the copy of, as products read it.
    copies: HashMap<ValueId, ValueId>,
    /// By value: the checkpointed segments that it is made in, an outer one before those within it.
    segments: Vec<Vec<usize>>,
    /// By value: whether its gradient is needed.
    wanted: Vec<bool>,
    /// By value: whether all that is read of it is all of it, as it lies.
    is_whole: Vec<bool>,
    /// By value: the node that makes or keeps it.
    makers: Vec<Option<usize>>,
    /// By value: the nodes that read it, in order.
    readers: Vec<Vec<usize>>,
}

/// Nodes that a rewrite replaces by one.
struct Replacement {
    nodes: Vec<usize>,
    /// The place of the one.
    at: usize,
    by: Node,
}

impl Program {
    /// Of a traced function, rewritten.
    pub fn new(function: &TracedFunction, kind: PlanKind, micro_batches: usize) -> Self {
        let mut program = Self::of(function, kind, micro_batches);
        for rewrite in [
            head::rewrite,
            copies::rewrite,
            attention::rewrite,
            gated::rewrite,
            siblings::rewrite,
            norm::rewrite,
        ] {
            rewrite(&mut program);
            program.index();
        }
        program
    }

    /// The graph's nodes.
    fn of(function: &TracedFunction, kind: PlanKind, micro_batches: usize) -> Self {
        let graph = &function.graph;
        let count = graph.values.len();
        let mut names: Vec<ValueId> = (0..count).map(ValueId).collect();
        let mut segments = vec![Vec::new(); count];
        let (mut nodes, mut within) = (Vec::new(), Vec::new());
        let (mut open, mut opened) = (Vec::new(), 0);
        for event in &graph.events {
            match event {
                TraceEvent::Enter => {
                    open.push(opened);
                    opened += 1;
                }
                TraceEvent::Leave => {
                    open.pop();
                }
                TraceEvent::Node(node) => {
                    let node = flow::renamed(node, &names);
                    match flow::passed_on(graph, &node) {
                        Some(value) => names[node.output.0] = value,
                        None => {
                            let kept = node.kept.iter().map(|kept| kept.value);
                            for value in kept.chain([node.output]) {
                                segments[value.0].clone_from(&open);
                            }
                            nodes.push(node);
                            within.push(open.clone());
                        }
                    }
                }
                TraceEvent::AutocastEnd | TraceEvent::Drop(_) => {} // memory alone
            }
        }
        let outputs = graph.outputs.iter().map(|x| flow::named(x, &names));
        let outputs: Vec<ValueRef> = outputs.collect();
        let is_trained =
            |value: ValueId| kind.has_backward() && function.numbers.contains_key(&value);
        let flow = Flow::of(graph, &nodes, &outputs, is_trained);
        let whole = (0..count).map(|value| match function.numbers.get(&ValueId(value)) {
            Some(number) => function.parameters[*number].elements == graph.values[value].elements(),
            None => true,
        });
        let mut is_whole: Vec<bool> = whole.collect();
        for operand in nodes
            .iter()
            .flat_map(|node| node.inputs.iter().chain(&node.reads))
        {
            is_whole[operand.value.0] &= operand.view.is_none();
        }
        let nodes = nodes.iter().zip(within);
        let nodes = nodes.map(|(node, segments)| Node::of(graph, node, segments, &flow));
        let mut program = Self {
            target: function.target,
            kind,
            micro_batches,
            nodes: nodes.collect(),
            values: graph.values.clone(),
            outputs,
            numbers: function.numbers.clone(),
            stacks: HashMap::new(),
            copies: HashMap::new(),
            segments,
            wanted: (0..count)
                .map(|value| flow.is_wanted(ValueId(value)))
                .collect(),
            is_whole,
            makers: Vec::new(),
            readers: Vec::new(),
        };
        program.index();
        program
    }

    /// Who makes and who reads each value.
    fn index(&mut self) {
        let count = self.values.len();
        self.makers = vec![None; count];
        self.readers = vec![Vec::new(); count];
        for (i, node) in self.nodes.iter().enumerate() {
            for value in node.made() {
                self.makers[value.0] = Some(i);
            }
            for operand in node.inputs.iter().chain(&node.reads) {
                let readers = &mut self.readers[operand.value.0];
                if readers.last() != Some(&i) {
                    readers.push(i);
                }
            }
        }
    }

    /// Puts each replacement in the place of its nodes.
    fn replace(&mut self, all: Vec<Replacement>) {
        let mut nodes: Vec<Option<Node>> = std::mem::take(&mut self.nodes)
            .into_iter()
            .map(Some)
            .collect();
        for replacement in &all {
            for node in &replacement.nodes {
                nodes[*node] = None;
            }
        }
        for replacement in all {
            nodes[replacement.at] = Some(replacement.by);
        }
        self.nodes = nodes.into_iter().flatten().collect();
        self.index();
    }

    /// A new value, made as this one is.
    fn add(&mut self, value: Value, like: ValueId) -> ValueId {
        self.values.push(value);
        self.segments.push(self.segments[like.0].clone());
        self.wanted.push(self.wanted[like.0]);
        self.is_whole.push(true);
        self.makers.push(None);
        self.readers.push(Vec::new());
        ValueId(self.values.len() - 1)
    }

    /// The value with an id of this program.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// The shape of an operand.
    pub fn shape_of<'a>(&'a self, operand: &'a ValueRef) -> &'a [usize] {
        match &operand.view {
            Some(view) => &view.shape,
            None => &self.value(operand.value).shape,
        }
    }

    /// What a node's lowering is told; of a backward, which outputs have gradients.
    pub fn signature<'a>(&'a self, node: &'a Node, gradients: Option<[bool; 2]>) -> Signature<'a> {
        let of_value = |id: ValueId| Operand {
            dims: &self.value(id).shape,
            dtype: self.value(id).dtype,
        };
        let operands = |operands: &'a [ValueRef]| {
            let operands = operands.iter().map(|operand| Operand {
                dims: self.shape_of(operand),
                dtype: self.value(operand.value).dtype,
            });
            operands.collect()
        };
        Signature {
            attributes: &node.attributes,
            inputs: operands(&node.inputs),
            reads: operands(&node.reads),
            output: of_value(node.output),
            kept: node.kept.iter().map(|kept| of_value(kept.value)).collect(),
            target: self.target,
            planned: gradients,
        }
    }

    /// The number of the node that makes a value; `None` for what comes from outside.
    pub fn maker(&self, value: ValueId) -> Option<usize> {
        self.makers[value.0]
    }

    /// The numbers of the nodes that read a value, in order.
    fn readers(&self, value: ValueId) -> &[usize] {
        &self.readers[value.0]
    }

    /// The number of the one node that reads a value, which is not given out.
    fn only_reader(&self, value: ValueId) -> Option<usize> {
        match (self.readers(value), self.is_output(value)) {
            ([reader], false) => Some(*reader),
            _ => None,
        }
    }

    /// Whether the function returns the value.
    fn is_output(&self, value: ValueId) -> bool {
        self.outputs.iter().any(|output| output.value == value)
    }

    /// Whether a node is this op.
    fn is(&self, node: usize, op: &OpInfo) -> bool {
        let node = &self.nodes[node];
        node.op == op.op && matches!(node.kind, Kind::Op(_))
    }

    /// Whether a node is this op, not composed of candle's own.
    fn is_kernel(&self, node: usize, op: &OpInfo) -> bool {
        self.is(node, op) && !self.nodes[node].composed
    }

    /// Whether two nodes are recomputed together, or not at all.
    fn are_in_one_segment(&self, a: usize, b: usize) -> bool {
        self.nodes[a].segments == self.nodes[b].segments
    }

    /// The checkpointed segments that a value is made in, an outer one before those within it.
    pub fn segments_of(&self, value: ValueId) -> &[usize] {
        &self.segments[value.0]
    }

    /// Whether a value's gradient is needed.
    pub fn is_wanted(&self, value: ValueId) -> bool {
        self.wanted[value.0]
    }

    /// Whether a value comes from outside and is read whole: a weight, an input, a constant.
    pub fn is_leaf(&self, operand: &ValueRef) -> bool {
        self.is_whole[operand.value.0] && self.value(operand.value).source != Source::Node
    }

    /// The weights that a value is, one under the other; of any other value it alone.
    pub fn weights_of(&self, value: ValueId) -> Vec<ValueId> {
        self.stacks.get(&value).cloned().unwrap_or(vec![value])
    }

    /// The weight that a value is the copy of.
    pub fn copied(&self, value: ValueId) -> Option<ValueId> {
        self.copies.get(&value).copied()
    }

    /// The copies of weights, each with the node that reads it first, in order.
    pub fn copies(&self) -> Vec<(ValueId, &Node)> {
        let mut copies: Vec<(ValueId, &Node)> = Vec::new();
        let reads = |node: &'_ Node| node.reads.clone();
        for node in &self.nodes {
            for value in reads(node).into_iter().map(|read| read.value) {
                let is_new = || !copies.iter().any(|(copy, _)| *copy == value);
                if self.copies.contains_key(&value) && is_new() {
                    copies.push((value, node));
                }
            }
        }
        copies
    }
}
