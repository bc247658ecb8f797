//! What a traced forward, and the backward through it, would cost.

use crate::graph::{Graph, Node, ValueRef as Read};
use crate::op_table;
use crate::ops::cost::Cost;
use crate::ops::lowering::{Signature, Workspace};
use crate::report::{Column, Fields, Report};

/// A node of a [`Graph`] with its cost by the op's formulas ([`op_costs`](super::op_costs)).
#[derive(Clone, Copy, Debug)]
pub struct NodeCost<'a> {
    /// Which node.
    pub node: &'a Node,
    /// One call; `None` for an op without a formula.
    pub forward: Option<Cost>,
    /// Its backward; `None` where no gradient reaches its output, and where backward is candle's own.
    pub backward: Option<Cost>,
}

/// The cost of each node of `graph`: what an eager run would do, op by op, before anything runs.
///
/// ```
/// use candle_core::DType;
/// use tallow::{graph, nn, profile};
///
/// let layer = nn::Linear::new(1 << 14, 1 << 10, graph::weights(DType::F32))?;
/// let x = graph::input("x", (64, 1 << 14), DType::F32)?;
/// let graph = graph::trace(graph::Target::Cpu, || layer.forward(&x))?;
/// let costs = profile::node_costs(&graph);
/// assert_eq!(costs[0].forward.unwrap().product_flops, 2.0 * 64.0 * 2f64.powi(24));
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

/// A traced forward as a table, a row a node, with what each costs by [`node_costs`].
///
/// A row has the node's path, its op, the shapes that it reads and makes, what it keeps for backward beside its output,
/// and what it costs forward and backward. The table prints and is saved in all of [`report`](crate::report)'s formats.
/// The sums of FLOPs are in a note.
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
    Report {
        columns: vec![
            Column::text("path", "Path"),
            Column::text("op", "Op"),
            Column::text("inputs", "Inputs"),
            Column::text("output", "Output"),
            Column::text("dtype", "Dtype"),
            Column::mib("kept_bytes", "Keeps"),
            mflop("forward_flops", "Forward"),
            Column::mib("forward_bytes", "Forward"),
            mflop("backward_flops", "Backward"),
            Column::mib("backward_bytes", "Backward"),
        ],
        rows: costs.iter().map(|cost| cost.fields(graph)).collect(),
        notes: vec![format!(
            "{} MFLOP forward, {} backward; n/a: no formula, or no gradient.",
            sums[0], sums[1]
        )],
        ..Default::default()
    }
}

impl NodeCost<'_> {
    fn fields(&self, graph: &Graph) -> Fields {
        let (node, output) = (self.node, graph.value(self.node.output));
        let shape = |read: &Read| format!("{:?}", graph.shape_of(read));
        let inputs: Vec<String> = node.inputs.iter().map(shape).collect();
        let mut fields = Fields::new();
        fields.insert("path", node.path.as_str());
        fields.insert("op", node.op);
        fields.insert("inputs", inputs.join(", "));
        fields.insert("output", format!("{:?}", output.shape));
        fields.insert("dtype", output.dtype.as_str());
        fields.insert("kept_bytes", kept_bytes(graph, node));
        fields.insert("forward_flops", self.forward.map(|cost| cost.flops()));
        fields.insert("forward_bytes", self.forward.map(|cost| cost.bytes()));
        fields.insert("backward_flops", self.backward.map(|cost| cost.flops()));
        fields.insert("backward_bytes", self.backward.map(|cost| cost.bytes()));
        fields
    }
}

/// What a node keeps for backward beside its output: nothing, if no gradient reaches that.
fn kept_bytes(graph: &Graph, node: &Node) -> f64 {
    if !graph.value(node.output).tracked {
        return 0.0;
    }
    let kept = node
        .kept
        .iter()
        .map(|kept| graph.value(kept.value).bytes() as f64);
    let signature = Signature::of(graph, node);
    let ids = op_table::lowering_of(node)
        .and_then(|lowering| (lowering.forward)(&signature).checked_ids(&signature));
    kept.chain(ids.as_ref().map(Workspace::bytes)).sum()
}
