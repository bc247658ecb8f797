//! FLOPs and bytes of a traced forward and its backward.

use crate::graph::{Graph, Node, ValueRef as Read};
use crate::op_table;
use crate::ops::cost::Cost;
use crate::ops::lowering::{Signature, Workspace};
use crate::report::{Column, Report};
use serde_json::json;

/// A node of a [`Graph`] with its cost by the op's formulas ([`op_costs`](super::op_costs)).
#[derive(Clone, Copy, Debug)]
pub struct NodeCost<'a> {
    /// The node.
    pub node: &'a Node,
    /// Cost of one call; `None` for an op without a formula.
    pub forward: Option<Cost>,
    /// Cost of its backward; `None` if its output is not tracked, or backward is candle's own.
    pub backward: Option<Cost>,
}

/// Returns the cost of each node of `graph`, in order: what an eager run would compute, before anything runs.
///
/// ```
/// use candle_core::DType;
/// use tallow::{graph, nn, profile};
///
/// let layer = nn::Linear::new(1 << 14, 1 << 10, graph::weights(DType::F32))?;
/// let x = graph::input("x", (64, 1 << 14), DType::F32)?;
/// let graph = graph::trace(graph::Target::Cpu, || layer.forward(&x))?;
/// let costs = profile::node_costs(&graph);
/// assert_eq!(costs[0].forward.unwrap().matmul_flops, 2.0 * 64.0 * 2f64.powi(24));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn node_costs(graph: &Graph) -> Vec<NodeCost<'_>> {
    let costs = graph.nodes().map(|node| {
        let [forward, backward] = op_table::costs_of_node(graph, node);
        let tracked = graph.value(node.output).tracked;
        NodeCost {
            node,
            forward,
            backward: backward.filter(|_| tracked),
        }
    });
    costs.collect()
}

/// Returns a traced forward as a table, one row a node, with the costs of [`node_costs`].
///
/// A row has the node's path, its op, the shapes of inputs and output, the bytes saved for backward in addition to the
/// output, and the costs forward and backward. The table prints and is saved in all of [`report`](crate::report)'s
/// formats. A note has the sums of FLOPs.
///
/// ```
/// use candle_core::DType;
/// use tallow::report::Format;
/// use tallow::{graph, nn, profile};
///
/// let layer = nn::Linear::new(512, 1024, graph::weights(DType::F32))?;
/// let x = graph::input("x", (64, 512), DType::F32)?;
/// let graph = graph::trace(graph::Target::Cpu, || layer.forward(&x))?;
/// let table = profile::node_table(&graph);
/// assert_eq!(table.rows[0].get("inputs"), Some(&"[64, 512], [1024, 512]".into()));
/// assert_eq!(table.rows[0].get("forward_flops"), Some(&(2.0 * 64.0 * 512.0 * 1024.0).into()));
/// table.write_to(Format::Csv, &mut std::io::stdout())?;
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn node_table(graph: &Graph) -> Report {
    let costs = node_costs(graph);
    let flops = |of: fn(&NodeCost<'_>) -> Option<Cost>| -> f64 {
        costs.iter().filter_map(of).map(|cost| cost.flops()).sum()
    };
    let mflop = |key, title| Column::number(key, title, "MFLOP", 2).scaled(1e6).grouped();
    let sums = [flops(|cost| cost.forward), flops(|cost| cost.backward)]
        .map(|sum| mflop("", "").cell(Some(&sum.into())));
    let rows = costs.iter().map(|cost| {
        let (node, output) = (cost.node, graph.value(cost.node.output));
        let shape = |read: &Read| format!("{:?}", graph.shape_of(read));
        let inputs: Vec<String> = node.inputs.iter().map(shape).collect();
        let (inputs, shape) = (inputs.join(", "), format!("{:?}", output.shape));
        let (dtype, kept) = (output.dtype.as_str(), kept_bytes(graph, node));
        let [forward, backward] = [cost.forward, cost.backward]
            .map(|cost| (cost.map(|cost| cost.flops()), cost.map(|cost| cost.bytes())));
        json!([
            node.path, node.op, inputs, shape, dtype, kept, forward.0, forward.1, backward.0,
            backward.1
        ])
    });
    let columns = vec![
        Column::text("path", "Path"),
        Column::text("op", "Op"), // paths end in it
        Column::text("inputs", "Inputs"),
        Column::text("output", "Output"),
        Column::text("dtype", "Dtype"),
        Column::mib("kept_bytes", "Keeps"),
        mflop("forward_flops", "Forward"),
        Column::mib("forward_bytes", "Forward"),
        mflop("backward_flops", "Backward"),
        Column::mib("backward_bytes", "Backward"),
    ];
    Report {
        notes: vec![format!(
            "{} MFLOP forward, {} backward; n/a: no formula, or no gradient.",
            sums[0], sums[1]
        )],
        ..Report::table(columns, rows)
    }
}

/// Returns the bytes that a node saves for backward in addition to its output: 0 if the output is not tracked.
fn kept_bytes(graph: &Graph, node: &Node) -> f64 {
    if !graph.value(node.output).tracked {
        return 0.0;
    }
    let kept = node
        .saved
        .iter()
        .map(|kept| graph.value(kept.value).bytes() as f64);
    let signature = Signature::of(graph, node);
    let ids = op_table::lowering_of(node)
        .and_then(|lowering| (lowering.forward)(&signature).checked_ids(&signature));
    kept.chain(ids.as_ref().map(Workspace::bytes)).sum()
}
