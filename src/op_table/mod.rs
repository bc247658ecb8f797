//! The table of all ops by name, for code that reads nodes, costs or policies. Ops themselves do not use it.

#[cfg(test)]
mod tests;

use crate::graph::{Graph, Node};
use crate::ops::info::OpInfo;
use crate::ops::lowering::{Lowering, Signature};
use crate::probe::{Cost, Operands};
use crate::{attention, ops, optim};
use std::collections::HashMap;
use std::sync::LazyLock;

/// Returns every op, including the optimizer's.
pub(crate) fn all() -> impl Iterator<Item = &'static OpInfo> {
    let beside = [attention::INFOS, optim::rules::INFOS, optim::cost::INFOS];
    ops::table::infos().chain(beside.into_iter().flatten())
}

/// Returns the description of the op `op`.
pub(crate) fn of(op: &str) -> Option<&'static OpInfo> {
    static BY_NAME: LazyLock<HashMap<&str, &OpInfo>> =
        LazyLock::new(|| all().map(|info| (info.op, info)).collect());
    BY_NAME.get(op).copied()
}

/// Returns the lowering of a node to kernels; `None` if it is composed of candle's own ops.
pub(crate) fn lowering_of(node: &Node) -> Option<Lowering> {
    let info = of(node.op).filter(|info| !node.composed || info.lowers_composed);
    info.and_then(|info| info.lowering)
}

/// Returns the cost of a node forward, and backward if a gradient reaches its output. Each is `None` if it has no
/// formula; the second is also `None` if backward is candle's own.
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
