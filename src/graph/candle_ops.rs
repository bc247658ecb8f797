//! Errors of candle's own ops on meta tensors: which op it was, and what to call instead.

use crate::Error;
use crate::error::innermost;
use candle_core::DType;
use candle_core::Error as Candle;

/// Ops of candle that fail with the same error on a meta tensor.
struct CandleOp {
    /// The names in candle's errors.
    in_errors: &'static [&'static str],
    /// The ops, as a caller writes them.
    calls: &'static str,
    instead: &'static str,
}

const fn op(
    in_errors: &'static [&'static str],
    calls: &'static str,
    instead: &'static str,
) -> CandleOp {
    CandleOp {
        in_errors,
        calls,
        instead,
    }
}

const OPS: [CandleOp; 22] = [
    op(&["add"], "`+` or broadcast_add", "call ops::add"),
    op(&["sub"], "`-` or broadcast_sub", "call ops::sub"),
    op(&["mul"], "`*` or broadcast_mul", "call ops::mul"),
    op(&["div"], "`/` or broadcast_div", "call ops::div"),
    op(
        &["mat_mul", "matmul"],
        "matmul or a linear layer",
        "call ops::matmul, ops::matmul_transposed or ops::linear, or build an nn::Linear",
    ),
    op(
        &["map1"],
        "an op with a number (`x * 2.0`), sum or mean",
        "call ops::affine, ops::sum, ops::mean, ops::sum_over or ops::mean_over",
    ),
    op(
        &["map1any"],
        "max, min or softmax",
        "call ops::max_over, ops::min_over, ops::argmax, ops::softmax, ops::log_softmax or ops::logsumexp",
    ),
    op(
        &["softmax"],
        "softmax",
        "call ops::softmax or ops::log_softmax",
    ),
    op(
        &["unary"],
        "a function of each element",
        "call ops::exp, log, pow, sqrt, rsqrt, abs, tanh, sigmoid, relu, gelu or silu",
    ),
    op(&["sigmoid"], "sigmoid", "call ops::sigmoid"),
    op(&["powf"], "powf", "call ops::pow"),
    op(&["elu"], "elu", "call ops::gelu or ops::silu"),
    op(
        &["maximum", "minimum"],
        "maximum, minimum or clamp",
        "call ops::clamp or ops::relu",
    ),
    op(
        &["cmp"],
        "a comparison",
        "call ops::eq, ne, lt, le, gt or ge",
    ),
    op(
        &["where-cond"],
        "where_cond",
        "call ops::where_cond or ops::masked_fill",
    ),
    op(&["to_dtype"], "to_dtype", "call ops::cast"),
    op(
        &["copy_strided"],
        "contiguous, or reshape of a view",
        "call ops::contiguous before reshape",
    ),
    op(
        &["copy2d"],
        "cat, stack or pad",
        "call ops::concat or ops::stack",
    ),
    op(
        &["index-select", "gather", "index-add", "scatter-add"],
        "a lookup by index",
        "call ops::embedding, index_select, gather, index_add or scatter_add",
    ),
    op(
        &["rmsnorm"],
        "a norm",
        "call ops::rms_norm or ops::layer_norm, or build an nn::RmsNorm",
    ),
    op(
        &["argsort"],
        "a sort",
        "call ops::topk, or sort before the trace and pass the result as an input",
    ),
    op(
        &[READ],
        "to_vec, to_scalar or another read of the elements",
        "return the tensor from the traced function and read it after a run",
    ),
];

/// Describes the call of candle's that failed on a meta tensor (its storage has the dtype F4), and what to call instead.
/// `None` for other errors.
pub(super) fn failed_on_meta_tensor(error: &Error) -> Option<(&'static str, &'static str)> {
    let Error::Candle(error) = error else {
        return None;
    };
    let find = |is_it: &dyn Fn(&str) -> bool| {
        let mut ops = OPS.iter();
        ops.find(|op| op.in_errors.iter().any(|name| is_it(name)))
    };
    let found = match innermost(error) {
        Candle::DTypeMismatchBinaryOp { lhs, rhs, op } if [*lhs, *rhs].contains(&DType::F4) => {
            find(&|name| name == *op)
        }
        Candle::UnsupportedDTypeForOp(DType::F4, op) => find(&|name| name == *op),
        Candle::UnexpectedDType { got: DType::F4, .. } => find(&|name| name == READ),
        Candle::Msg(text) if text.starts_with("unsupported dtype") && text.contains("F4") => {
            find(&|name| text.contains(name))
        }
        _ => return None,
    };
    Some(found.map_or(("an op", ANY), |op| (op.calls, op.instead)))
}

/// Stands for reads of elements, whose errors do not name them.
const READ: &str = "to_vec";

/// The hint for an op that is not in [`OPS`].
const ANY: &str = "views such as narrow and transpose may be candle's";
