//! What a traced forward, and the backward through it, would cost.

use super::cost;
use crate::graph::{Graph, Node};
use crate::ops::cost::Cost;
use crate::probe::{Operand, Operands};

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
        let output = graph.value(node.output);
        let inputs = node.inputs.iter().map(|operand| Operand {
            dims: graph.shape_of(operand),
            dtype: graph.value(operand.value).dtype,
        });
        let inputs: Vec<Operand<'_>> = inputs.collect();
        let operands = Operands {
            inputs: &inputs,
            output: Operand {
                dims: &output.shape,
                dtype: output.dtype,
            },
        };
        let entry = cost::entry(node.op);
        let backward = entry.filter(|_| output.tracked && !node.composed);
        NodeCost {
            node,
            forward: entry.and_then(|entry| (entry.forward)(&operands)),
            backward: backward.and_then(|entry| entry.backward?(&operands)),
        }
    });
    costs.collect()
}
