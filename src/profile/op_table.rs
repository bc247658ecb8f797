//! The table of costs: which op has which formulas, and how they read.

use super::cost::{Formula, OpCost};
use super::formulas::*;

const fn entry(
    op: &'static str,
    flops: &'static str,
    bytes: &'static str,
    forward: Formula,
    backward: Option<Formula>,
) -> OpCost {
    OpCost {
        op,
        flops,
        bytes,
        inside: None,
        forward,
        backward,
    }
}

const fn holding(inside: &'static str, entry: OpCost) -> OpCost {
    OpCost {
        inside: Some(inside),
        ..entry
    }
}

/// An op whose backward is candle's own.
const fn plain(op: &'static str, flops: &'static str, forward: Formula) -> OpCost {
    entry(op, flops, "inputs, output", forward, None)
}

/// Of one input, which is kept.
const fn activation(
    op: &'static str,
    flops: &'static str,
    forward: Formula,
    backward: Formula,
) -> OpCost {
    entry(
        op,
        flops,
        "x, y; backward x, dy, dx",
        forward,
        Some(backward),
    )
}

const GRADIENTS: &str = "x, W, y; backward x, W, dy, dx, dW";
const ATTENTION: &str = "4 B H Tq Tk Dh, 6 a score besides; backward 8 and 5";

pub(super) const TABLE: &[OpCost] = &[
    entry(
        "linear",
        "2 N in out, backward 4",
        GRADIENTS,
        linear,
        Some(linear_backward),
    ),
    entry(
        "matmul",
        "2 B M K N, backward 4",
        "a, b, c; backward a, b, dc, da, db",
        linear,
        Some(linear_backward),
    ),
    entry(
        "linear_bias",
        "2 N in out, 1 an element of y besides; backward 4 and 1",
        "x, W, b, y; backward x, W, dy, dx, dW, db",
        linear_bias,
        Some(linear_bias_backward),
    ),
    holding(
        "two products and the gate",
        entry(
            "swiglu_linear",
            "4 N D F, 6 an element of y besides; backward 8 and 12",
            "x, W1, W3, y, gate, up; backward those and dx, dW1, dW3",
            swiglu_linear,
            Some(swiglu_linear_backward),
        ),
    ),
    holding(
        "the head's product and the loss",
        entry(
            "linear_cross_entropy",
            "2 N D V, 4 a logit besides; backward 4 and 3",
            "x, W, logits; backward those and dx, dW",
            linear_cross_entropy,
            Some(linear_cross_entropy_backward),
        ),
    ),
    holding(
        "scores, scale, mask, softmax and values",
        entry(
            "attention::naive",
            ATTENTION,
            "q, k, v, out, probabilities; backward those and dq, dk, dv",
            naive,
            Some(naive_backward),
        ),
    ),
    holding(
        "scores, scale, mask, softmax and values",
        entry(
            "attention::flash",
            ATTENTION,
            "q, k, v, out; backward those, dout, dq, dk, dv",
            flash,
            Some(flash_backward),
        ),
    ),
    holding(
        "scale and mask",
        entry(
            "softmax",
            "6 an element, backward 5",
            "x, p; backward p, dp, dx",
            |o| elementwise(o, 6.0),
            Some(softmax_backward),
        ),
    ),
    plain("scale", "1 an element", |o| elementwise(o, 1.0)),
    plain("mask", "0", |o| elementwise(o, 0.0)),
    entry(
        "cross_entropy",
        "4 a logit, backward 3",
        "logits; backward logits, dlogits",
        |o| reduction(o, 4.0),
        Some(cross_entropy_backward),
    ),
    entry(
        "rms_norm",
        "4 an element, backward 9",
        GRADIENTS,
        |o| elementwise(o, 4.0),
        Some(|o| elementwise_backward(o, 9.0)),
    ),
    entry(
        "layer_norm",
        "7 an element, backward 12",
        GRADIENTS,
        |o| elementwise(o, 7.0),
        Some(|o| elementwise_backward(o, 12.0)),
    ),
    entry(
        "rope",
        "3 an element, backward 3",
        "x, y; backward dy, dx",
        |o| elementwise(o, 3.0),
        Some(rope_backward),
    ),
    entry(
        "embedding",
        "0, backward 1 an element",
        "rows, y; backward dy, dtable",
        embedding,
        Some(embedding_backward),
    ),
    entry(
        "split_heads",
        "0",
        "x, y; backward dy, dx",
        |o| elementwise(o, 0.0),
        Some(moved),
    ),
    entry(
        "merge_heads",
        "0",
        "x, y; backward dy, dx",
        |o| elementwise(o, 0.0),
        Some(moved),
    ),
    entry(
        "swiglu",
        "6 an element, backward 12",
        "gate, up, y; backward gate, up, dy, dgate, dup",
        |o| elementwise(o, 6.0),
        Some(|o| elementwise_backward(o, 12.0)),
    ),
    entry(
        "relu",
        "1 an element, backward 1",
        "x, y; backward y, dy, dx",
        |o| elementwise(o, 1.0),
        Some(|o| elementwise_backward(o, 1.0)),
    ),
    activation(
        "tanh",
        "6 an element, backward 8",
        |o| elementwise(o, 6.0),
        |o| elementwise_backward(o, 8.0),
    ),
    activation(
        "sigmoid",
        "4 an element, backward 6",
        |o| elementwise(o, 4.0),
        |o| elementwise_backward(o, 6.0),
    ),
    activation(
        "silu",
        "5 an element, backward 8",
        |o| elementwise(o, 5.0),
        |o| elementwise_backward(o, 8.0),
    ),
    activation(
        "gelu",
        "5 an element, backward 9",
        |o| elementwise(o, 5.0),
        |o| elementwise_backward(o, 9.0),
    ),
    activation(
        "gelu_tanh",
        "9 an element, backward 14",
        |o| elementwise(o, 9.0),
        |o| elementwise_backward(o, 14.0),
    ),
    entry(
        "repeat_heads",
        "0, backward 1 an element of y",
        "x, y; backward dy, dx",
        |o| elementwise(o, 0.0),
        Some(folded),
    ),
    plain("concat", "0", |o| elementwise(o, 0.0)),
    plain("contiguous", "0", |o| elementwise(o, 0.0)),
    entry(
        "cast",
        "0",
        "x, y; backward dy, dx",
        |o| elementwise(o, 0.0),
        Some(moved),
    ),
    entry(
        "weight_cast",
        "0",
        "x, y; backward dy, dx",
        |o| elementwise(o, 0.0),
        Some(moved),
    ),
    entry(
        "add",
        "1 an element, backward 0",
        "a, b, y; backward dy, handed on",
        |o| elementwise(o, 1.0),
        Some(handed_on),
    ),
    entry(
        "sub",
        "1 an element, backward 1",
        "a, b, y; backward dy, db",
        |o| elementwise(o, 1.0),
        Some(negated),
    ),
    entry(
        "mul",
        "1 an element, backward 2",
        "a, b, y; backward a, b, dy, da, db",
        |o| elementwise(o, 1.0),
        Some(|o| elementwise_backward(o, 2.0)),
    ),
    entry(
        "add_scaled",
        "2 an element, backward 1",
        "a, b, y; backward dy, db",
        |o| elementwise(o, 2.0),
        Some(negated),
    ),
    plain("div", "1 an element", |o| elementwise(o, 1.0)),
    plain("exp", "1 an element", |o| elementwise(o, 1.0)),
    plain("log", "1 an element", |o| elementwise(o, 1.0)),
    plain("pow", "1 an element", |o| elementwise(o, 1.0)),
    plain("rsqrt", "2 an element", |o| elementwise(o, 2.0)),
    plain("sum", "1 an element", |o| reduction(o, 1.0)),
    plain("mean", "1 an element", |o| reduction(o, 1.0)),
    plain("log_softmax", "5 an element", |o| elementwise(o, 5.0)),
    entry(
        "adamw",
        "14 a parameter",
        "gradient; weight and two moments, read and written",
        adamw,
        None,
    ),
    entry(
        "clip_grad_norm",
        "3 an element",
        "gradients, read twice and written",
        clip,
        None,
    ),
    entry(
        "GradScaler::unscale",
        "1 an element",
        "gradients, read and written",
        |o| elementwise(o, 1.0),
        None,
    ),
];
