//! Errors of candle's own ops on meta tensors and in autocast regions: which op it was, and what to call instead.
//!
//! [`guide::names`](crate::guide::names) has the same table; a test compares them.

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
        "call ops::matmul, ops::matmul_transposed, ops::linear or an nn::Linear (nn::Linear::try_from)",
    ),
    op(
        &["map1"],
        "`x * 2.0`, sum or mean",
        "call ops::affine, ops::sum, ops::mean, ops::sum_over or ops::mean_over",
    ),
    op(
        &["map1any"],
        "max, min or softmax",
        "call ops::max_over, ops::min_over, ops::argmax, ops::softmax or ops::logsumexp",
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
        "call ops::rms_norm or ops::layer_norm, or build an nn::RmsNorm or nn::LayerNorm by try_from",
    ),
    op(
        &["argsort"],
        "a sort",
        "call ops::topk, or sort before the trace and pass the result as an input",
    ),
    op(
        &[READ],
        "to_vec, to_scalar or another read of the elements",
        "return the tensor from the function and read it after a run",
    ),
];

/// Describes the call of candle's that failed on a meta tensor (its storage has the dtype F4), and what to call
/// instead. `None` for other errors.
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

/// Explains candle's error for operands of different dtypes, which its own ops return in autocast regions; other errors
/// are unchanged.
pub(crate) fn explain_mixed_dtypes(error: Error) -> Error {
    let Error::Candle(candle) = &error else {
        return error;
    };
    let find = |is_it: &dyn Fn(&str) -> bool| {
        let mut ops = OPS.iter();
        ops.find(|op| op.in_errors.iter().any(|name| is_it(name)))
    };
    let (found, got) = match innermost(candle) {
        Candle::DTypeMismatchBinaryOp { lhs, rhs, op } if ![*lhs, *rhs].contains(&DType::F4) => (
            find(&|name| name == *op),
            format!("{} and {}", lhs.as_str(), rhs.as_str()),
        ),
        // candle's fused norms have no text of their own for weights of another dtype.
        Candle::Msg(text) if text.starts_with("unsupported dtype for rmsnorm") => {
            (find(&|name| name == "rmsnorm"), text.clone())
        }
        _ => return error,
    };
    let (calls, instead) =
        found.map_or(("op", "use this crate's ops"), |op| (op.calls, op.instead));
    Error::dtype("autocast", got).must_be(
        format!("operands of one dtype in candle's own {calls}"),
        format!("candle's ops and the layers of candle_nn ignore autocast: {instead}; ops::cast_for casts for others"),
    )
}

/// Stands for reads of elements, whose errors do not name them.
const READ: &str = "to_vec";

/// The hint for an op that is not in [`OPS`].
const ANY: &str = "views such as narrow and transpose may be candle's";

#[cfg(test)]
mod tests {
    use super::OPS;

    /// The guide has these ops in this order, and a link for each function and layer that a hint names first.
    #[test]
    fn the_guide_has_the_same_table() {
        let page = include_str!("../guide/names.rs");
        let row = |calls, instead| format!("//! | {calls} | {instead} |");
        let rows: Vec<String> = OPS.iter().map(|op| row(op.calls, op.instead)).collect();
        let head = [row("candle", "instead"), "//! |---|---|".into()];
        let table = [&head[..], &rows, &["//!".into()]].concat().join("\n");
        assert!(page.contains(&table), "src/guide/names.rs needs\n{table}");
        for word in rows.iter().flat_map(|row| row.split([' ', ','])) {
            if word.starts_with("ops::") || word.starts_with("nn::") {
                assert!(page.contains(&format!("[`{word}`]")), "{word} has no link");
            }
        }
    }
}
