//! The list of all ops, by name: for what reads nodes and tables. Ops do not read it.

#[cfg(test)]
mod tests;

use crate::graph::{Graph, Node};
use crate::ops::info::OpInfo;
use crate::ops::lowering::{Lowering, Signature};
use crate::probe::{Cost, Operands};
use crate::{attention, ops, optim};
use std::collections::HashMap;
use std::sync::LazyLock;

/// Every op, and what an optimizer does.
pub(crate) fn all() -> impl Iterator<Item = &'static OpInfo> {
    let beside = [attention::INFOS, optim::cost::INFOS];
    ops::table::infos().chain(beside.into_iter().flatten())
}

/// What is known of the op with this name.
pub(crate) fn of(op: &str) -> Option<&'static OpInfo> {
    static BY_NAME: LazyLock<HashMap<&str, &OpInfo>> =
        LazyLock::new(|| all().map(|info| (info.op, info)).collect());
    BY_NAME.get(op).copied()
}

/// The kernels that a node is; `None` where it is composed of candle's own ops.
pub(crate) fn lowering_of(node: &Node) -> Option<Lowering> {
    let info = of(node.op).filter(|info| !node.composed || info.lowers_composed);
    info.and_then(|info| info.lowering)
}

/// What a node costs forward, and backward if a gradient reaches its output: each `None` where it has no formula, the
/// second too where backward is candle's own.
pub(crate) fn costs_of_node(graph: &Graph, node: &Node) -> [Option<Cost>; 2] {
    let signature = Signature::of(graph, node);
    let operands = Operands {
        inputs: &signature.inputs,
        output: signature.output,
    };
    let entry = of(node.op).and_then(|info| info.cost);
    let backward = entry.filter(|_| !node.composed);
    [
        entry.and_then(|entry| (entry.forward)(&operands)),
        backward.and_then(|entry| entry.backward?(&operands)),
    ]
}
