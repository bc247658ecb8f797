//! candle's own ops on meta tensors: each is an error that names the op, its place and what to call instead.

use super::*;
use tallow::ops;

type Ours = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
type Candles = fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>;

/// A call of candle's, the words that the error has for it, the counterpart that the hint names, and a call of that.
const CASES: [(Candles, &str, &str, Ours); 22] = [
    (|x, y, _| x + y, "`+`", "ops::add", |x, y, _| ops::add(x, y)),
    (
        |x, y, _| x.broadcast_sub(y),
        "`-`",
        "ops::sub",
        |x, y, _| ops::sub(x, y),
    ),
    (|x, y, _| x * y, "`*`", "ops::mul", |x, y, _| ops::mul(x, y)),
    (|x, y, _| x / y, "`/`", "ops::div", |x, y, _| ops::div(x, y)),
    (
        |x, y, _| x.matmul(&y.t()?),
        "matmul",
        "ops::matmul_transposed",
        |x, y, _| ops::matmul_transposed(x, y),
    ),
    (
        |x, _, _| x.mean_all(),
        "mean",
        "ops::mean",
        |x, _, _| ops::mean(x),
    ),
    (
        |x, _, _| candle_nn::ops::softmax(x, 1),
        "softmax",
        "ops::softmax",
        |x, _, _| ops::softmax(x, 1.0, tallow::attention::Mask::Full),
    ),
    (
        |x, _, _| candle_nn::ops::softmax_last_dim(x),
        "softmax",
        "ops::log_softmax",
        |x, _, _| ops::log_softmax(x),
    ),
    (
        |x, _, _| x.gelu(),
        "a function of each element",
        "gelu",
        |x, _, _| ops::gelu(x, ops::Gelu::Tanh),
    ),
    (
        |x, _, _| x.powf(2.0),
        "powf",
        "ops::pow",
        |x, _, _| ops::pow(x, 2.0),
    ),
    (
        |x, _, _| x.to_dtype(DType::BF16),
        "to_dtype",
        "ops::cast",
        |x, _, _| ops::cast(x, DType::BF16),
    ),
    (
        |x, _, _| x.t()?.reshape(12),
        "reshape of a view",
        "ops::contiguous",
        |x, _, _| Ok(ops::contiguous(&x.t()?)?.reshape(12)?),
    ),
    (
        |x, y, _| Tensor::cat(&[x, y], 1),
        "cat",
        "ops::concat",
        |x, y, _| ops::concat(&[x, y], 1),
    ),
    (
        |x, _, _| x * 2.0,
        "`x * 2.0`",
        "ops::affine",
        |x, _, _| ops::affine(x, 2.0, 0.0),
    ),
    (
        |x, _, _| x.clamp(0f32, 1f32),
        "clamp",
        "ops::clamp",
        |x, _, _| ops::clamp(x, 0.0, 1.0),
    ),
    (
        |x, _, _| x.max(1),
        "max",
        "ops::max_over",
        |x, _, _| ops::max_over(x, 1),
    ),
    (
        |x, _, _| x.sqrt(),
        "a function of each element",
        "sqrt",
        |x, _, _| ops::sqrt(x),
    ),
    (
        |x, _, i| x.embedding(i),
        "a lookup by index",
        "ops::embedding",
        |x, _, i| ops::embedding(i, x),
    ),
    (
        |x, y, _| x.gt(y),
        "a comparison",
        "ops::eq, ne, lt, le, gt or ge",
        |x, y, _| ops::gt(x, y),
    ),
    (
        |x, y, i| i.unsqueeze(1)?.broadcast_as((2, 6))?.where_cond(x, y),
        "where_cond",
        "ops::where_cond",
        |x, y, _| ops::where_cond(&ops::eq(x, y)?, x, y),
    ),
    (
        |x, _, i| x.gather(&i.unsqueeze(1)?, 1),
        "a lookup by index",
        "gather",
        |x, _, i| ops::gather(x, 1, &i.unsqueeze(1)?),
    ),
    (
        |x, _, _| x.arg_sort_last_dim(false),
        "a sort",
        "ops::topk",
        |x, _, _| Ok(ops::topk(x, 2)?.0),
    ),
];

#[test]
fn the_error_names_op_place_and_counterpart() {
    let x = graph::input("x", (2, 6), DType::F32).unwrap();
    let y = graph::input("y", (2, 6), DType::F32).unwrap();
    let i = graph::input("i", 2, DType::U32).unwrap();
    for (candles, words, instead, ours) in CASES {
        let first = graph::trace(Target::Cpu, || Ok(candles(&x, &y, &i)?));
        refusal(
            first,
            &["graph::trace", "before the first op", words, instead],
        );
        let inside = graph::trace(Target::Cpu, || {
            let x = probe::in_module("head", || ops::exp(&x))?;
            Ok(candles(&x, &y, &i)?)
        });
        refusal(inside, &["after head", words, "of candle", instead]);
        let graph = graph::trace(Target::Cpu, || ours(&x, &y, &i)).unwrap();
        assert!(graph.nodes().count() > 0, "{instead}");
    }
}

/// Reads of elements fail too; other errors of the traced function stay as they are, whatever their text.
#[test]
fn other_errors_are_unchanged() {
    let x = graph::input("x", (2, 6), DType::F32).unwrap();
    let read = graph::trace(Target::Cpu, || {
        x.to_vec2::<f32>()?;
        Ok(x.clone())
    });
    refusal(read, &["to_vec, to_scalar", "read it after a run"]);
    let own = graph::trace(Target::Cpu, || -> Result<Tensor> {
        Err(candle_core::Error::msg("my file F4 is missing").into())
    });
    let error = refusal(own, &["my file F4 is missing"]);
    assert!(!error.to_string().contains("meta tensor"), "{error}");
    let shapes = graph::trace(Target::Cpu, || ops::add(&x, &x.narrow(1, 0, 4)?));
    refusal(shapes, &["add", "[2, 6]", "[2, 4]"]);
}
