//! A traced graph prepared for planning: nodes over values. Rewrites fuse nodes.
//!
//! A [`Program`] starts as the nodes of the graph, without those that return an input unchanged. [`Program::new`] then
//! applies these rewrites in order, one file each. A rewrite replaces nodes by a fused node that computes the same:
//!
//! 1. [`head`]: head and loss of a step, some rows at a time;
//! 2. [`copies`]: casts of weights, which are removed from the micro-batches;
//! 3. [`attention`]: on a GPU, heads in the projections' layout, rotated in place; and q, k and v as one matmul;
//! 4. [`gated`]: on a GPU, the two linear layers of SwiGLU or GeGLU as one matmul;
//! 5. [`siblings`]: linear layers of one input, next to each other;
//! 6. [`norm`]: RMSNorm and LayerNorm with the addition before and the cast after them.
//!
//! A rewrite never removes a value that another node reads. The passes that follow treat all nodes alike
//! ([`lower`](super::lower)): forward, backward with recomputation and in-place writes, update, liveness, placement.

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
use crate::ops::gated_linear;
use crate::ops::info::OpInfo;
use crate::ops::lowering::{NodeOperands, PlanContext, Signature};
use flow::Flow;
use std::collections::HashMap;

/// Nodes in execution order over values, with producers and readers.
pub(super) struct Program {
    pub target: Target,
    pub kind: PlanKind,
    pub micro_batches: usize,
    /// The values of the graph, then those that rewrites added.
    pub values: Vec<Value>,
    pub nodes: Vec<Node>,
    pub outputs: Vec<ValueRef>,
    /// By value: the index of the parameter that it is.
    numbers: HashMap<ValueId, usize>,
    /// By value that rewrites added: the weights that are stacked in it.
    stacks: HashMap<ValueId, Vec<ValueId>>,
    /// By copy that matmuls read: its weight.
    copies: HashMap<ValueId, ValueId>,
    /// By value: the checkpointed segments that compute it, the outermost first.
    segments: Vec<Vec<usize>>,
    /// By value: whether it needs a gradient.
    wanted: Vec<bool>,
    /// By value: whether it is never read as a view and, if it is a parameter, is all of it.
    is_whole: Vec<bool>,
    /// By value: the node that computes it.
    makers: Vec<Option<usize>>,
    /// By value: the nodes that read it, in order.
    readers: Vec<Vec<usize>>,
}

/// Nodes and the fused node that replaces them.
struct Replacement {
    nodes: Vec<usize>,
    /// The position of the fused node.
    at: usize,
    by: Node,
}

impl Program {
    /// Returns the rewritten program of a traced function.
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

    /// Returns the program of the graph's nodes, one by one.
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
                    match flow::pass_through_input(graph, &node) {
                        Some(value) => names[node.output.0] = value,
                        None => {
                            let saved = node.saved.iter().map(|saved| saved.value);
                            for value in saved.chain([node.output]) {
                                segments[value.0].clone_from(&open);
                            }
                            nodes.push(node);
                            within.push(open.clone());
                        }
                    }
                }
                TraceEvent::AutocastEnd | TraceEvent::Drop(_) => {} // they concern memory alone
            }
        }
        let outputs = graph
            .outputs
            .iter()
            .map(|x| flow::renamed_operand(x, &names));
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
            .flat_map(|node| node.inputs.iter().chain(&node.extra_inputs))
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
                .map(|value| flow.needs_grad(ValueId(value)))
                .collect(),
            is_whole,
            makers: Vec::new(),
            readers: Vec::new(),
        };
        program.index();
        program
    }

    /// Finds the producer and the readers of each value.
    fn index(&mut self) {
        let count = self.values.len();
        self.makers = vec![None; count];
        self.readers = vec![Vec::new(); count];
        for (i, node) in self.nodes.iter().enumerate() {
            for value in node.computed_values() {
                self.makers[value.0] = Some(i);
            }
            for operand in node.inputs.iter().chain(&node.extra_inputs) {
                let readers = &mut self.readers[operand.value.0];
                if readers.last() != Some(&i) {
                    readers.push(i);
                }
            }
        }
    }

    /// Replaces nodes.
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
    }

    /// Adds a value that is computed in the same segments as `like`.
    fn add(&mut self, value: Value, like: ValueId) -> ValueId {
        self.values.push(value);
        self.segments.push(self.segments[like.0].clone());
        self.wanted.push(self.wanted[like.0]);
        self.is_whole.push(true);
        self.makers.push(None);
        self.readers.push(Vec::new());
        ValueId(self.values.len() - 1)
    }

    /// Returns the value with an id of this program.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    pub fn shape_of<'a>(&'a self, operand: &'a ValueRef) -> &'a [usize] {
        operand.shape_in(&self.values)
    }

    /// Returns the signature of a node for its lowering. `has_grad`: which outputs have gradients in backward.
    pub fn signature<'a>(&'a self, node: &'a Node, has_grad: [bool; 2]) -> Signature<'a> {
        let operands = NodeOperands {
            attributes: &node.attributes,
            inputs: &node.inputs,
            extra_inputs: &node.extra_inputs,
            output: node.output,
            saved: &node.saved,
        };
        let plan = PlanContext {
            has_grad,
            needs_grad: &node.needs_grad,
        };
        Signature::of_values(&self.values, operands, self.target, Some(plan))
    }

    /// Returns the index of the node that computes a value; `None` for weights, inputs and constants.
    pub fn maker(&self, value: ValueId) -> Option<usize> {
        self.makers[value.0]
    }

    /// Returns the indices of the nodes that read a value, ascending.
    fn readers(&self, value: ValueId) -> &[usize] {
        &self.readers[value.0]
    }

    /// Returns the index of the only node that reads a value, if the function does not return the value.
    fn only_reader(&self, value: ValueId) -> Option<usize> {
        match (self.readers(value), self.is_output(value)) {
            ([reader], false) => Some(*reader),
            _ => None,
        }
    }

    /// Returns whether the function returns the value.
    fn is_output(&self, value: ValueId) -> bool {
        self.outputs.iter().any(|output| output.value == value)
    }

    /// Returns whether a node is this op.
    fn is(&self, node: usize, op: &OpInfo) -> bool {
        let node = &self.nodes[node];
        node.op == op.op && matches!(node.kind, Kind::Op(_))
    }

    /// Returns whether a node is this op and has a kernel.
    fn is_kernel(&self, node: usize, op: &OpInfo) -> bool {
        self.is(node, op) && !self.nodes[node].composed
    }

    /// Returns whether the node is SwiGLU's or GeGLU's linear layers and gate, computed by kernels.
    fn is_gated_linear(&self, node: usize) -> bool {
        let mut ops = gated_linear::INFOS.iter();
        ops.any(|op| self.is_kernel(node, op))
    }

    /// Returns whether two nodes are in the same checkpointed segment, or in none.
    fn are_in_one_segment(&self, a: usize, b: usize) -> bool {
        self.nodes[a].segments == self.nodes[b].segments
    }

    /// Returns the checkpointed segments that compute a value, the outermost first.
    pub fn segments_of(&self, value: ValueId) -> &[usize] {
        &self.segments[value.0]
    }

    /// Returns whether a value needs a gradient.
    pub fn needs_grad(&self, value: ValueId) -> bool {
        self.wanted[value.0]
    }

    /// Returns whether an operand is a weight, an input or a constant that is never read as a view.
    pub fn is_leaf(&self, operand: &ValueRef) -> bool {
        self.is_whole[operand.value.0] && self.value(operand.value).source != Source::Node
    }

    /// Returns the weights that are stacked in a value, or the value itself.
    pub fn weights_of(&self, value: ValueId) -> Vec<ValueId> {
        self.stacks.get(&value).cloned().unwrap_or(vec![value])
    }

    /// Returns whether a weight is read as part of a stack.
    pub fn is_stacked(&self, weight: ValueId) -> bool {
        self.stacks.values().any(|stack| stack.contains(&weight))
    }

    /// Returns the weight of a copy.
    pub fn copied(&self, value: ValueId) -> Option<ValueId> {
        self.copies.get(&value).copied()
    }

    /// Returns the copies of weights in reading order, each with the first node that reads it.
    pub fn copies(&self) -> Vec<(ValueId, &Node)> {
        let mut copies: Vec<(ValueId, &Node)> = Vec::new();
        let reads = |node: &'_ Node| node.extra_inputs.clone();
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
