//! Costs from operands, op by op.

use super::cost::{Cost, Operands};

/// Products, other FLOPs, bytes read, bytes written.
fn cost(product_flops: f64, other_flops: f64, read_bytes: f64, written_bytes: f64) -> Option<Cost> {
    Some(Cost {
        product_flops,
        other_flops,
        read_bytes,
        written_bytes,
    })
}

/// Reads its inputs, writes its output, `per_element` FLOPs an element of that.
pub(super) fn elementwise(o: &Operands<'_>, per_element: f64) -> Option<Cost> {
    let flops = per_element * o.output.elements();
    cost(0.0, flops, o.input_bytes(), o.output.bytes())
}

/// As [`elementwise`], by the first input's elements: for sums.
pub(super) fn reduction(o: &Operands<'_>, per_element: f64) -> Option<Cost> {
    let flops = per_element * o.input(0)?.elements();
    cost(0.0, flops, o.input_bytes(), o.output.bytes())
}

/// Reads the output's gradient and the inputs, writes the inputs' gradients.
pub(super) fn elementwise_backward(o: &Operands<'_>, per_element: f64) -> Option<Cost> {
    let flops = per_element * o.output.elements();
    cost(
        0.0,
        flops,
        o.output.bytes() + o.input_bytes(),
        o.input_bytes(),
    )
}

/// The output's gradient for the input's, elsewhere.
pub(super) fn moved(o: &Operands<'_>) -> Option<Cost> {
    cost(0.0, 0.0, o.output.bytes(), o.input_bytes())
}

/// Bytes of x and of the weights as products read them: in x's dtype, though a weight under autocast is an f32 with a copy.
fn product_bytes(o: &Operands<'_>) -> Option<f64> {
    let width = o.input(0)?.dtype.size_in_bytes() as f64;
    Some(o.inputs.iter().map(|input| input.elements() * width).sum())
}

/// The output's gradient is both inputs'.
pub(super) fn handed_on(o: &Operands<'_>) -> Option<Cost> {
    cost(0.0, 0.0, o.output.bytes(), 0.0)
}

/// As [`moved`], adding up to one element what several were given.
pub(super) fn folded(o: &Operands<'_>) -> Option<Cost> {
    cost(0.0, o.output.elements(), o.output.bytes(), o.input_bytes())
}

/// As [`handed_on`], to the second with another sign, or another factor.
pub(super) fn negated(o: &Operands<'_>) -> Option<Cost> {
    let flops = o.output.elements();
    cost(0.0, flops, o.output.bytes(), o.output.bytes())
}

pub(super) fn linear(o: &Operands<'_>) -> Option<Cost> {
    let flops = 2.0 * o.output.elements() * o.input(0)?.last();
    cost(flops, 0.0, product_bytes(o)?, o.output.bytes())
}

pub(super) fn linear_backward(o: &Operands<'_>) -> Option<Cost> {
    let flops = 4.0 * o.output.elements() * o.input(0)?.last();
    let read = o.output.bytes() + product_bytes(o)?;
    cost(flops, 0.0, read, o.input_bytes())
}

pub(super) fn linear_bias(o: &Operands<'_>) -> Option<Cost> {
    let flops = 2.0 * o.output.elements() * o.input(0)?.last();
    cost(
        flops,
        o.output.elements(),
        product_bytes(o)?,
        o.output.bytes(),
    )
}

pub(super) fn linear_bias_backward(o: &Operands<'_>) -> Option<Cost> {
    let flops = 4.0 * o.output.elements() * o.input(0)?.last();
    let read = o.output.bytes() + product_bytes(o)?;
    cost(flops, o.output.elements(), read, o.input_bytes())
}

/// y (..., F), as are gate and up, which are kept.
pub(super) fn swiglu_linear(o: &Operands<'_>) -> Option<Cost> {
    let (elements, depth) = (o.output.elements(), o.input(0)?.last());
    let written = 3.0 * o.output.bytes();
    cost(
        4.0 * elements * depth,
        6.0 * elements,
        product_bytes(o)?,
        written,
    )
}

pub(super) fn swiglu_linear_backward(o: &Operands<'_>) -> Option<Cost> {
    let (elements, depth) = (o.output.elements(), o.input(0)?.last());
    let read = 3.0 * o.output.bytes() + product_bytes(o)?;
    cost(
        8.0 * elements * depth,
        12.0 * elements,
        read,
        o.input_bytes(),
    )
}

/// Elements and bytes of the logits (N, V) of x (N, D) and W (V, D).
pub(super) fn logits(o: &Operands<'_>) -> Option<(f64, f64)> {
    let (x, weight) = (o.input(0)?, o.input(1)?);
    let elements = x.elements() / x.last() * *weight.dims.first()? as f64;
    Some((elements, elements * x.dtype.size_in_bytes() as f64))
}

pub(super) fn linear_cross_entropy(o: &Operands<'_>) -> Option<Cost> {
    let (elements, bytes) = logits(o)?;
    let depth = o.input(0)?.last();
    cost(
        2.0 * elements * depth,
        4.0 * elements,
        product_bytes(o)?,
        bytes,
    )
}

pub(super) fn linear_cross_entropy_backward(o: &Operands<'_>) -> Option<Cost> {
    let (elements, bytes) = logits(o)?;
    let depth = o.input(0)?.last();
    let read = bytes + product_bytes(o)?;
    cost(
        4.0 * elements * depth,
        3.0 * elements,
        read,
        o.input_bytes(),
    )
}

/// Scores, and what a multiply-add with each of q k^T and p v comes to: `scores = rows Tk`.
pub(super) fn attention(o: &Operands<'_>) -> Option<(f64, f64)> {
    let (q, k, v) = (o.input(0)?, o.input(1)?, o.input(2)?);
    let keys = *k.dims.get(k.dims.len().checked_sub(2)?)? as f64;
    let scores = q.elements() / q.last() * keys;
    Some((scores, 2.0 * scores * (q.last() + v.last())))
}

/// The probabilities are in f32 at least. (On a card in half precision they are in half, and this is twice as much.)
pub(super) fn probability_bytes(o: &Operands<'_>, scores: f64) -> f64 {
    scores * o.output.dtype.size_in_bytes().max(4) as f64
}

pub(super) fn naive(o: &Operands<'_>) -> Option<Cost> {
    let (scores, products) = attention(o)?;
    let written = o.output.bytes() + probability_bytes(o, scores);
    cost(products, 6.0 * scores, o.input_bytes(), written)
}

pub(super) fn naive_backward(o: &Operands<'_>) -> Option<Cost> {
    let (scores, products) = attention(o)?;
    let read = o.output.bytes() + o.input_bytes() + probability_bytes(o, scores);
    cost(2.0 * products, 5.0 * scores, read, o.input_bytes())
}

pub(super) fn flash(o: &Operands<'_>) -> Option<Cost> {
    let (scores, products) = attention(o)?;
    cost(products, 6.0 * scores, o.input_bytes(), o.output.bytes())
}

pub(super) fn flash_backward(o: &Operands<'_>) -> Option<Cost> {
    let (scores, products) = attention(o)?;
    let read = 2.0 * o.output.bytes() + o.input_bytes();
    cost(2.0 * products, 5.0 * scores, read, o.input_bytes())
}

pub(super) fn softmax_backward(o: &Operands<'_>) -> Option<Cost> {
    let (elements, bytes) = (o.output.elements(), o.output.bytes());
    cost(0.0, 5.0 * elements, 2.0 * bytes, o.input_bytes())
}

pub(super) fn embedding(o: &Operands<'_>) -> Option<Cost> {
    cost(0.0, 0.0, o.output.bytes(), o.output.bytes())
}

pub(super) fn embedding_backward(o: &Operands<'_>) -> Option<Cost> {
    cost(0.0, o.output.elements(), o.output.bytes(), o.input_bytes())
}

pub(super) fn cross_entropy_backward(o: &Operands<'_>) -> Option<Cost> {
    let x = o.input(0)?;
    cost(0.0, 3.0 * x.elements(), x.bytes(), x.bytes())
}

/// Weights and moments are kept in f32 at least; half precision has its rounded weights beside them.
pub(super) fn adamw(o: &Operands<'_>) -> Option<Cost> {
    let (elements, own) = (o.output.elements(), o.output.dtype.size_in_bytes() as f64);
    let wide = own.max(4.0);
    let rounded = if own < wide { own } else { 0.0 };
    let read = elements * (own + 3.0 * wide);
    cost(
        0.0,
        14.0 * elements,
        read,
        elements * (3.0 * wide + rounded),
    )
}

pub(super) fn clip(o: &Operands<'_>) -> Option<Cost> {
    let bytes = o.output.bytes();
    cost(0.0, 3.0 * o.output.elements(), 2.0 * bytes, bytes)
}

pub(super) fn rope_backward(o: &Operands<'_>) -> Option<Cost> {
    let bytes = o.output.bytes();
    cost(0.0, 3.0 * o.output.elements(), bytes, bytes)
}
