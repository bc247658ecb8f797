//! A node of a program: an op of the graph, or what stands for several.

use super::flow::Flow;
use crate::attention::in_model::ModelAttention;
use crate::graph::{self, Attribute, Graph, Kept, ValueId, ValueRef};
use crate::op_table;
use crate::ops::cost::Cost;
use crate::ops::head_loss::HeadLoss;
use crate::ops::lowering::{Calls, Lowering, Signature};
use crate::ops::norm::ResidualNorm;
use crate::probe::Path;

/// A node.
#[derive(Clone, Debug)]
pub(in crate::compile) struct Node {
    /// Where in the model, without the op's name.
    pub path: String,
    /// The outermost module there.
    pub module: Path,
    /// The op's name.
    pub op: &'static str,
    /// Whether it is composed of candle's own ops.
    pub composed: bool,
    /// What computes it.
    pub kind: Kind,
    /// What tells this call from another on the same operands.
    pub attributes: Vec<(&'static str, Attribute)>,
    pub inputs: Vec<ValueRef>,
    /// What it reads besides, to which no gradient goes.
    pub reads: Vec<ValueRef>,
    pub output: ValueId,
    /// Another output, which has a gradient too.
    pub second: Option<ValueId>,
    /// What it makes for backward beside them.
    pub kept: Vec<Kept>,
    /// By input: whether it hands a gradient there that is needed.
    pub passes: Vec<bool>,
    /// The checkpointed segments that it is in, an outer one before those within it.
    pub segments: Vec<usize>,
    /// Whether backward computes again what it keeps.
    pub recomputes_kept: bool,
    /// The graph's ops that it stands for.
    pub ops: Vec<&'static str>,
    /// What its forward and its backward cost, by their formulas; backward of those whose gradients are needed.
    pub costs: [Cost; 2],
}

/// What computes a node.
#[derive(Clone, Debug)]
pub(in crate::compile) enum Kind {
    /// An op, by its own lowering; `None` where it has none.
    Op(Option<Lowering>),
    /// RMSNorm or LayerNorm in f32, with what is added before it, rounded.
    Norm(ResidualNorm),
    /// Attention in the projections' layout.
    Attention(ModelAttention),
    /// Head and loss of a step.
    Head(HeadLoss),
}

impl Kind {
    /// `None` for an op that has no lowering.
    pub fn forward(&self, signature: &Signature<'_>) -> Option<Calls> {
        Some(match self {
            Self::Op(lowering) => (lowering.as_ref()?.forward)(signature),
            Self::Norm(norm) => norm.forward(signature),
            Self::Attention(attention) => attention.forward(signature),
            Self::Head(head) => head.forward(signature),
        })
    }

    /// As [`forward`](Self::forward), from the outputs' gradients.
    pub fn backward(&self, signature: &Signature<'_>) -> Option<Calls> {
        Some(match self {
            Self::Op(lowering) => (lowering.as_ref()?.backward)(signature),
            Self::Norm(norm) => norm.backward(signature),
            Self::Attention(attention) => attention.backward(signature),
            Self::Head(_) => Calls::default(),
        })
    }

    /// The output once more, from what stays for backward, if that is cheap.
    pub fn again(&self, signature: &Signature<'_>) -> Option<Calls> {
        match self {
            Self::Norm(norm) => Some(norm.again(signature)),
            _ => None,
        }
    }
}

impl Node {
    /// A node of a graph, in these segments.
    pub(super) fn of(graph: &Graph, node: &graph::Node, segments: Vec<usize>, flow: &Flow) -> Self {
        let [forward, backward] = op_table::costs_of_node(graph, node);
        let backward = backward.filter(|_| flow.is_wanted(node.output));
        let passes = (0..node.inputs.len()).map(|input| flow.passes_through(graph, node, input));
        Self {
            path: place_of(node),
            module: node.module,
            op: node.op,
            composed: node.composed,
            kind: Kind::Op(op_table::lowering_of(node)),
            attributes: node.attributes.clone(),
            inputs: node.inputs.clone(),
            reads: node.reads.clone(),
            output: node.output,
            second: None,
            kept: node.kept.clone(),
            passes: passes.collect(),
            segments,
            recomputes_kept: false,
            ops: vec![node.op],
            costs: [forward, backward].map(Option::unwrap_or_default),
        }
    }

    /// What it makes.
    pub fn made(&self) -> impl Iterator<Item = ValueId> {
        let kept = self.kept.iter().map(|kept| kept.value);
        [self.output].into_iter().chain(self.second).chain(kept)
    }

    /// The attribute with this name.
    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        let mut attributes = self.attributes.iter();
        attributes.find_map(|(other, value)| (*other == name).then_some(*value))
    }

    /// As standing for these nodes, in order.
    pub(super) fn standing_for<'n>(self, nodes: impl IntoIterator<Item = &'n Node>) -> Self {
        let (mut ops, mut costs) = (Vec::new(), [Cost::default(); 2]);
        for node in nodes {
            ops.extend(&node.ops);
            for (cost, other) in costs.iter_mut().zip(node.costs) {
                *cost += other;
            }
        }
        Self { ops, costs, ..self }
    }
}

/// A node's path without its op's name: the place that calls are at.
fn place_of(node: &graph::Node) -> String {
    let place = node.path.strip_suffix(node.op).unwrap_or(&node.path);
    place.strip_suffix('/').unwrap_or(place).to_string()
}
