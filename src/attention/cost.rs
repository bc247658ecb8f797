//! FLOPs and bytes of attention. The algorithms differ in what they save for backward.

use crate::ops::cost::{Cost, Formula, as_softmax, cost};
use crate::ops::info::OpInfo;
use crate::ops::lowering::Lowering;
use crate::probe::Operands;

/// Returns the description of an attention op.
pub(super) const fn info(
    op: &'static str,
    lowering: Lowering,
    bytes: &'static str,
    forward: Formula,
    backward: Formula,
) -> OpInfo {
    let flops = "B H Tq Tk (2 (Dh + Dv) + 6); backward B H Tq Tk (4 (Dh + Dv) + 5)";
    let info = OpInfo::new(op).on_gpu().planned(lowering);
    let info = info.costing(flops, bytes, forward, Some(backward));
    info.including("scores, scale, mask, softmax and values")
}

/// Returns the cost of forward, which writes the output and `kept` bytes for backward.
pub(super) fn forward(o: &Operands<'_>, kept: f64) -> Option<Cost> {
    let (scores, products) = scores_and_products(o)?;
    let written = o.output.bytes() + kept;
    cost(products, 6.0 * scores, o.input_bytes(), written).map(as_softmax)
}

/// Returns the cost of backward, which reads the output's gradient, the inputs and the `kept` bytes.
pub(super) fn backward(o: &Operands<'_>, kept: f64) -> Option<Cost> {
    let (scores, products) = scores_and_products(o)?;
    let read = o.output.bytes() + o.input_bytes() + kept;
    cost(2.0 * products, 5.0 * scores, read, o.input_bytes()).map(as_softmax)
}

/// Returns the number of scores, and the FLOPs of the matmuls q k^T and p v.
fn scores_and_products(o: &Operands<'_>) -> Option<(f64, f64)> {
    let (q, k, v) = (o.input(0)?, o.input(1)?, o.input(2)?);
    let keys = *k.dims.get(k.dims.len().checked_sub(2)?)? as f64;
    let scores = q.elements() / q.last() * keys;
    Some((scores, 2.0 * scores * (q.last() + v.last())))
}

/// Returns the bytes of the probabilities in f32 or f64. (On a GPU in half precision they have half of these.)
pub(super) fn probability_bytes(o: &Operands<'_>) -> Option<f64> {
    let (scores, _) = scores_and_products(o)?;
    Some(scores * o.output.dtype.size_in_bytes().max(4) as f64)
}
