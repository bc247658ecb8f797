//! The nodes of a program: ops of the graph and fused nodes.

use super::flow::Flow;
use crate::attention::in_rows::InRows;
use crate::graph::{self, Attribute, Graph, Saved, ValueId, ValueRef};
use crate::op_table;
use crate::ops::cost::Cost;
use crate::ops::head_loss::HeadLoss;
use crate::ops::lowering::{Calls, Lowering, Signature};
use crate::ops::norm::ResidualNorm;
use crate::probe::Path;

/// One op, or several fused.
#[derive(Clone, Debug)]
pub(in crate::compile) struct Node {
    /// The path in the model, without the op's name.
    pub path: String,
    /// The outermost module of the path.
    pub module: Path,
    pub op: &'static str,
    /// Whether it is composed of candle's own ops.
    pub composed: bool,
    /// The kind of node, which determines how it is computed.
    pub kind: Kind,
    /// The parameters of the op.
    pub attributes: Vec<(&'static str, Attribute)>,
    pub inputs: Vec<ValueRef>,
    /// Inputs without a gradient: token ids, angles, copies of weights.
    pub extra_inputs: Vec<ValueRef>,
    pub output: ValueId,
    /// A second output of a fused node.
    pub second: Option<ValueId>,
    /// Tensors that it saves for backward.
    pub saved: Vec<Saved>,
    /// By input: whether backward has to compute its gradient.
    pub needs_grad: Vec<bool>,
    /// The checkpointed segments that contain it, the outermost first.
    pub segments: Vec<usize>,
    /// Whether backward recomputes the tensors it saves.
    pub recomputes_saved: bool,
    /// The names of the ops it replaces.
    pub ops: Vec<&'static str>,
    /// The cost of forward and backward, by the formulas of its ops. Ops that need no gradient have no backward.
    pub costs: [Cost; 2],
}

/// The kinds of nodes.
#[derive(Clone, Debug)]
pub(in crate::compile) enum Kind {
    /// An op with its lowering; `None` if it has none.
    Op(Option<Lowering>),
    /// RMSNorm or LayerNorm in f32, with the residual addition before it and the cast after it.
    Norm(ResidualNorm),
    /// Attention in the layout of the projections.
    Attention(InRows),
    /// The head and the loss of a step.
    Head(HeadLoss),
}

impl Kind {
    /// Returns the calls of forward; `None` if the op has no lowering.
    pub fn forward(&self, signature: &Signature<'_>) -> Option<Calls> {
        Some(match self {
            Self::Op(lowering) => (lowering.as_ref()?.forward)(signature),
            Self::Norm(norm) => norm.forward(signature),
            Self::Attention(attention) => attention.forward(signature),
            Self::Head(head) => head.forward(signature),
        })
    }

    /// Returns the calls of backward; `None` if the op has no lowering.
    pub fn backward(&self, signature: &Signature<'_>) -> Option<Calls> {
        Some(match self {
            Self::Op(lowering) => (lowering.as_ref()?.backward)(signature),
            Self::Norm(norm) => norm.backward(signature),
            Self::Attention(attention) => attention.backward(signature),
            Self::Head(_) => Calls::default(),
        })
    }

    /// Returns calls that recompute the output from what is saved for backward; `None` if that is not cheap.
    pub fn recompute_output(&self, signature: &Signature<'_>) -> Option<Calls> {
        match self {
            Self::Norm(norm) => Some(norm.recompute_output(signature)),
            _ => None,
        }
    }
}

impl Node {
    /// Returns the program node of a graph's node.
    pub(super) fn of(graph: &Graph, node: &graph::Node, segments: Vec<usize>, flow: &Flow) -> Self {
        let [forward, backward] = op_table::costs_of_node(graph, node);
        let backward = backward.filter(|_| flow.needs_grad(node.output));
        let needs_grad =
            (0..node.inputs.len()).map(|input| flow.passes_through(graph, node, input));
        Self {
            path: parent_path(node),
            module: node.module,
            op: node.op,
            composed: node.composed,
            kind: Kind::Op(op_table::lowering_of(node)),
            attributes: node.attributes.clone(),
            inputs: node.inputs.clone(),
            extra_inputs: node.extra_inputs.clone(),
            output: node.output,
            second: None,
            saved: node.saved.clone(),
            needs_grad: needs_grad.collect(),
            segments,
            recomputes_saved: false,
            ops: vec![node.op],
            costs: [forward, backward].map(Option::unwrap_or_default),
        }
    }

    /// Returns the values that it computes.
    pub fn computed_values(&self) -> impl Iterator<Item = ValueId> {
        let saved = self.saved.iter().map(|saved| saved.value);
        [self.output].into_iter().chain(self.second).chain(saved)
    }

    /// Returns the attribute with this name.
    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        let mut attributes = self.attributes.iter();
        attributes.find_map(|(other, value)| (*other == name).then_some(*value))
    }

    /// Adds the names and costs of the nodes that this one replaces.
    pub(super) fn replacing<'n>(self, nodes: impl IntoIterator<Item = &'n Node>) -> Self {
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

/// Returns a node's path without its op's name.
fn parent_path(node: &graph::Node) -> String {
    let place = node.path.strip_suffix(node.op).unwrap_or(&node.path);
    place.strip_suffix('/').unwrap_or(place).to_string()
}
