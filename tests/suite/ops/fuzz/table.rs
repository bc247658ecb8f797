//! The table of ops, one line each.
//!
//! Operands and result are given by the letters of their dimensions. `.` stands for any leading dimensions, an
//! uppercase letter for twice the size of the lowercase one. The prefix `#v` makes ids below v, `~` an operand without
//! a gradient. A single `-` is a scalar; an empty template is any shape.

use super::draw::Draw;
use crate::settings::causal;
use candle_core::{D, DType, Tensor};
use tallow::attention;
use tallow::nn;
use tallow::ops::{BceWeights, Gelu, KlTarget, RotaryPairs};
use tallow::{Result, ops};

pub struct Op {
    pub name: &'static str,
    pub operands: &'static [&'static str],
    pub result: &'static str,
    pub apply: fn(&[Tensor], &mut Draw) -> Result<Tensor>,
}

const fn op(
    name: &'static str,
    operands: &'static [&'static str],
    result: &'static str,
    apply: fn(&[Tensor], &mut Draw) -> Result<Tensor>,
) -> Op {
    Op {
        name,
        operands,
        result,
        apply,
    }
}

#[rustfmt::skip] // one line per op
pub const OPS: &[Op] = &[
    op("add", &[".ab", "b"], ".ab", |x, _| ops::add(&x[0], &x[1])),
    op("sub", &["a", ".a"], ".a", |x, _| ops::sub(&x[0], &x[1])),
    op("mul", &[".", "."], ".", |x, _| ops::mul(&x[0], &x[1])),
    op("div", &[".", "-"], ".", |x, _| ops::div(&x[0], &x[1])),
    op("div of a scalar", &["-", ".a"], ".a", |x, _| ops::div(&x[0], &x[1])),
    op("cast", &["."], ".", |x, d| ops::cast(&x[0], d.dtype())),
    op("cast_for", &[".", "."], ".", cast_for),
    op("exp", &["."], ".", |x, _| ops::exp(&x[0])),
    op("log", &["."], ".", |x, _| ops::log(&x[0])),
    op("pow", &["."], ".", |x, d| ops::pow(&x[0], d.number())),
    op("rsqrt", &["."], ".", |x, _| ops::rsqrt(&x[0])),
    op("sqrt", &["."], ".", |x, _| ops::sqrt(&x[0])),
    op("abs", &["."], ".", |x, _| ops::abs(&x[0])),
    op("clamp", &["."], ".", |x, _| ops::clamp(&x[0], -0.5, 1.0)),
    op("clamp of any", &["."], "", |x, d| ops::clamp(&x[0], d.number(), d.number())),
    op("affine", &["."], ".", |x, d| ops::affine(&x[0], d.number(), d.number())),
    op("sum", &["."], "-", |x, _| ops::sum(&x[0])),
    op("mean", &["."], "-", |x, _| ops::mean(&x[0])),
    op("sum_over", &["abc"], "ac", |x, _| ops::sum_over(&x[0], 1)),
    op("sum_over of any", &["."], "", |x, d| ops::sum_over(&x[0], [d.size(), d.size()])),
    op("sum_keepdim", &[".ab"], ".a1", |x, _| ops::sum_keepdim(&x[0], D::Minus1)),
    op("mean_over", &["abc"], "b", |x, _| ops::mean_over(&x[0], (0, 2))),
    op("mean_keepdim of any", &["."], "", |x, d| ops::mean_keepdim(&x[0], d.size())),
    op("max_over", &["abc"], "ac", |x, _| ops::max_over(&x[0], 1)),
    op("max_keepdim of any", &["."], "", |x, d| ops::max_keepdim(&x[0], d.size())),
    op("min_over of any", &["."], "", |x, d| ops::min_over(&x[0], [d.size(), d.size()])),
    op("min_keepdim", &[".ab"], ".a1", |x, _| ops::min_keepdim(&x[0], D::Minus1)),
    op("logsumexp", &["abc"], "ac", |x, _| ops::logsumexp(&x[0], 1)),
    op("logsumexp_keepdim of any", &["."], "", |x, d| ops::logsumexp_keepdim(&x[0], d.size())),
    op("var of any", &["."], "", |x, d| ops::var(&x[0], [d.size(), d.size()], d.size())),
    op("var_keepdim", &[".ab"], ".a1", |x, _| ops::var_keepdim(&x[0], D::Minus1, 0)),
    op("eq", &[".ab", "~b"], ".ab", |x, _| ops::where_cond(&ops::eq(&x[0], &x[1])?, &x[0], &x[0])),
    op("lt of any", &[".", "~."], "", |x, _| ops::where_cond(&ops::lt(&x[0], &x[1])?, &x[0], &x[0])),
    op("where_cond", &[".ab", "b"], ".ab", |x, _| ops::where_cond(&ops::gt(&x[0], &x[1])?, &x[0], &x[1])),
    op("masked_fill", &[".ab", "~b"], ".ab", |x, d| ops::masked_fill(&x[0], &ops::ge(&x[1], &x[1])?, d.number())),
    op("topk", &[".5"], ".3", |x, _| Ok(ops::topk(&x[0], 3)?.0)),
    op("topk of any", &["."], "", |x, d| Ok(ops::topk(&x[0], d.size())?.0)),
    op("argmax of any", &["."], "", |x, d| with_indices(&x[0], ops::argmax(&x[0], d.size())?)),
    op("argmin", &[".5"], ".5", |x, _| with_indices(&x[0], ops::argmin(&x[0], D::Minus1)?)),
    op("gather", &["av", "#vab"], "ab", |x, _| ops::gather(&x[0], 1, &x[1])),
    op("gather of any", &["abc", "#vabc"], "", |x, d| ops::gather(&x[0], d.size(), &x[1])),
    op("scatter_add", &["av", "#vab", "ab"], "av", |x, _| ops::scatter_add(&x[0], 1, &x[1], &x[2])),
    op("scatter_add of any", &["abc", "#vabd", "abd"], "", |x, d| ops::scatter_add(&x[0], d.size(), &x[1], &x[2])),
    op("index_select", &["avb", "#vc"], "acb", |x, _| ops::index_select(&x[0], 1, &x[1])),
    op("index_select of any", &["abc", "#vd"], "", |x, d| ops::index_select(&x[0], d.size(), &x[1])),
    op("index_add", &["avb", "#vc", "acb"], "avb", |x, _| ops::index_add(&x[0], 1, &x[1], &x[2])),
    op("index_add of any", &["abc", "#vd", "dbc"], "", |x, d| ops::index_add(&x[0], d.size(), &x[1], &x[2])),
    op("one_hot", &["#v.", "a"], "a", |x, d| with_indices(&x[1], ops::one_hot(&x[0], d.size(), DType::F32)?)),
    op("stack", &[".", "."], "", |x, d| ops::stack(&[&x[0], &x[1]], d.size())),
    op("log_softmax", &["."], ".", |x, _| ops::log_softmax(&x[0])),
    op("softmax", &["."], ".", |x, d| ops::softmax(&x[0], d.number(), d.mask())),
    op("softmax::reference", &["."], ".", |x, d| ops::reference::softmax(&x[0], d.number(), d.mask())),
    op("relu", &["."], ".", |x, _| ops::relu(&x[0])),
    op("relu::reference", &["."], ".", |x, _| ops::reference::relu(&x[0])),
    op("dropout", &["."], ".", |x, d| ops::dropout(&x[0], &d.dropout())),
    op("dropout::reference", &["."], ".", |x, d| ops::reference::dropout(&x[0], &d.dropout())),
    op("gelu", &["."], ".", |x, d| ops::gelu(&x[0], d.gelu())),
    op("gelu::reference", &["."], ".", |x, d| ops::reference::gelu(&x[0], d.gelu())),
    op("tanh", &["."], ".", |x, _| ops::tanh(&x[0])),
    op("tanh::reference", &["."], ".", |x, _| ops::reference::tanh(&x[0])),
    op("sigmoid", &["."], ".", |x, _| ops::sigmoid(&x[0])),
    op("sigmoid::reference", &["."], ".", |x, _| ops::reference::sigmoid(&x[0])),
    op("silu", &["."], ".", |x, _| ops::silu(&x[0])),
    op("silu::reference", &["."], ".", |x, _| ops::reference::silu(&x[0])),
    op("add_scaled", &[".", "."], ".", |x, d| ops::add_scaled(&x[0], &x[1], d.number())),
    op("add_scaled of a row", &[".a", "a"], ".a", |x, d| ops::add_scaled(&x[0], &x[1], d.number())),
    op("concat", &[".a", ".a"], ".A", |x, _| ops::concat(&[&x[0], &x[1]], x[0].rank().saturating_sub(1))),
    op("concat of any", &["ab", "cb"], "", |x, d| ops::concat(&[&x[0], &x[1], &x[0]], d.size())),
    op("contiguous", &["."], ".", |x, _| ops::contiguous(&x[0])),
    op("repeat_heads", &[".htd"], ".Htd", |x, _| ops::repeat_heads(&x[0], 2)),
    op("repeat_heads of any", &[".htd"], "", |x, d| ops::repeat_heads(&x[0], d.size())),
    op("repeat_heads::reference", &[".htd"], ".Htd", |x, _| ops::reference::repeat_heads(&x[0], 2)),
    op("swiglu", &[".", "."], ".", |x, _| ops::swiglu(&x[0], &x[1])),
    op("swiglu::reference", &[".", "."], ".", |x, _| ops::reference::swiglu(&x[0], &x[1])),
    op("geglu", &[".", "."], ".", |x, _| ops::geglu(&x[0], &x[1], Gelu::Tanh)),
    op("geglu::reference", &[".", "."], ".", |x, _| ops::reference::geglu(&x[0], &x[1], Gelu::Erf)),
    op("soft_cap", &["."], ".", |x, d| ops::soft_cap(&x[0], d.number())),
    op("soft_cap::reference", &["."], ".", |x, d| ops::reference::soft_cap(&x[0], d.number())),
    op("rms_norm", &[".d", "d"], ".d", |x, d| ops::rms_norm(&x[0], &x[1], d.number())),
    op("rms_norm::reference", &[".d", "d"], ".d", |x, d| ops::reference::rms_norm(&x[0], &x[1], d.number())),
    op("offset_rms_norm", &[".d", "d"], ".d", |x, d| ops::offset_rms_norm(&x[0], &x[1], d.number())),
    op("layer_norm", &[".d", "d", "d"], ".d", |x, d| ops::layer_norm(&x[0], &x[1], &x[2], d.number())),
    op("layer_norm::reference", &[".d", "d", "d"], ".d", layer_norm_reference),
    op("rope", &[".tH", "~th", "~th"], ".tH", |x, _| ops::rope(&x[0], &x[1], &x[2])),
    op("rope_with", &[".tH", "~th", "~th"], ".tH", |x, _| ops::rope_with(&x[0], &x[1], &x[2], RotaryPairs::Halves)),
    op("rope::reference", &[".tH", "~th", "~th"], ".tH", |x, _| ops::reference::rope(&x[0], &x[1], &x[2])),
    op("split_heads", &["btD"], "b2td", |x, _| ops::split_heads(&x[0], 2)),
    op("split_heads of any", &["btd"], "", |x, d| ops::split_heads(&x[0], d.size())),
    op("merge_heads", &["b2td"], "btD", |x, _| ops::merge_heads(&x[0])),
    op("linear", &[".d", "fd"], ".f", |x, _| ops::linear(&x[0], &x[1])),
    op("linear::reference", &[".d", "fd"], ".f", |x, _| ops::reference::linear(&x[0], &x[1])),
    op("linear_bias", &[".d", "fd", "f"], ".f", |x, _| ops::linear_bias(&x[0], &x[1], &x[2])),
    op("linear_bias::reference", &[".d", "fd", "f"], ".f", |x, _| ops::reference::linear_bias(&x[0], &x[1], &x[2])),
    op("swiglu_linear", &[".d", "fd", "fd"], ".f", |x, _| ops::swiglu_linear(&x[0], &x[1], &x[2])),
    op("swiglu_linear::reference", &[".d", "fd", "fd"], ".f", swiglu_linear_reference),
    op("geglu_linear", &[".d", "fd", "fd"], ".f", |x, _| ops::geglu_linear(&x[0], &x[1], &x[2], Gelu::Erf)),
    op("geglu_linear::reference", &[".d", "fd", "fd"], ".f", geglu_linear_reference),
    op("matmul", &[".mk", ".kn"], ".mn", |x, _| ops::matmul(&x[0], &x[1])),
    op("matmul_transposed", &[".mk", ".nk"], ".mn", |x, _| ops::matmul_transposed(&x[0], &x[1])),
    op("matmul::reference", &[".mk", ".kn"], ".mn", |x, _| ops::reference::matmul(&x[0], &x[1], false)),
    op("embedding", &["#v.", "vd"], ".d", |x, _| ops::embedding(&x[0], &x[1])),
    op("embedding::reference", &["#v.", "vd"], ".d", |x, _| ops::reference::embedding(&x[0], &x[1])),
    op("cross_entropy", &[".v", "#v."], "-", |x, _| ops::cross_entropy(&x[0], &x[1])),
    op("cross_entropy_ignoring", &[".v", "#v."], "-", cross_entropy_ignoring),
    op("cross_entropy::reference", &[".v", "#v."], "-", |x, _| ops::reference::cross_entropy(&x[0], &x[1], None)),
    op("cross_entropy_with", &[".v", "#v."], "", cross_entropy_with),
    op("cross_entropy_with probabilities", &[".v", ".v"], "", cross_entropy_with),
    op("linear_cross_entropy_with", &[".d", "vd", "#v."], "", linear_cross_entropy_with),
    op("mse_loss", &[".", "."], "", |x, d| ops::mse_loss(&x[0], &x[1], d.reduction())),
    op("l1_loss", &[".", "."], "", |x, d| ops::l1_loss(&x[0], &x[1], d.reduction())),
    op("bce_with_logits", &[".a", ".a", "~a"], "", bce_with_logits),
    op("kl_div", &[".", "."], "", |x, d| ops::kl_div(&x[0], &x[1], KlTarget::Probabilities, d.reduction())),
    op("log_sigmoid", &["."], ".", |x, _| ops::log_sigmoid(&x[0])),
    op("log_sigmoid::reference", &["."], ".", |x, _| ops::reference::log_sigmoid(&x[0])),
    op("linear_cross_entropy", &[".d", "vd", "#v."], "-", |x, _| ops::linear_cross_entropy(&x[0], &x[1], &x[2])),
    op("linear_cross_entropy::reference", &[".d", "vd", "#v."], "-", linear_cross_entropy_reference),
    op("attention::naive", &[".hqd", ".hkd", ".hkw"], ".hqw", naive),
    op("attention::naive of groups", &[".Hqd", ".hkd", ".hkw"], ".Hqw", naive),
    op("attention::reference::naive", &[".hqd", ".hkd", ".hkw"], ".hqw", naive_reference),
    op("attention::flash", &[".hqd", ".hkd", ".hkd"], ".hqd", flash),
    op("attention::flash of groups", &["bHqd", "bhkd", "bhkd"], "bHqd", flash),
    op("attention::flash_with_lse", &[".hqd", ".hkd", ".hkd"], ".hqd", flash_with_lse),
    op("attention::reference::flash", &[".hqd", ".hkd", ".hkd"], ".hqd", flash_reference),
    op("nn::Linear", &[".3"], ".5", |x, d| nn::Linear::new(3, 5, d.builder())?.forward(&x[0])),
    op("nn::Linear with a bias", &[".3"], ".5", |x, d| nn::Linear::with_bias(3, 5, d.builder())?.forward(&x[0])),
    op("nn::Linear of any weights", &[".d", "fd", "f"], ".f", linear_of),
    op("nn::LayerNorm without a bias", &[".3"], ".3", norm_without_bias),
    op("nn::Embedding", &["#5."], ".3", |x, d| nn::Embedding::new(5, 3, d.builder())?.forward(&x[0])),
    op("nn::RmsNorm", &[".3"], ".3", |x, d| nn::RmsNorm::new(3, d.number(), d.builder())?.forward(&x[0])),
    op("nn::LayerNorm", &[".3"], ".3", |x, d| nn::LayerNorm::new(3, d.number(), d.builder())?.forward(&x[0])),
    op("nn::SwiGlu", &[".3"], ".3", |x, d| nn::SwiGlu::new(3, 5, d.builder())?.forward(&x[0])),
    op("nn::GeGlu", &[".3"], ".3", |x, d| nn::GeGlu::new(3, 5, d.builder())?.forward(&x[0])),
    op("nn::RotaryEmbedding", &[".t4"], ".t4", |x, d| d.rotary()?.forward(&x[0], d.size())),
    op("nn::Attention", &["bt8"], "bt8", self_attention),
    op("nn::TransformerBlock", &["bt8"], "bt8", block),
    op("nn::checkpoint", &[".d", "fd"], ".f", |x, _| nn::checkpoint(|[x, w]| ops::linear(x, w), [&x[0], &x[1]])),
];

// Functions that do not fit in a line of the table.

fn cast_for(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    let [a, b] = ops::cast_for(d.name(), [&x[0], &x[1]])?;
    ops::add(&a, &b)
}

/// Adds results without a gradient to x.
fn with_indices(x: &Tensor, indices: Tensor) -> Result<Tensor> {
    ops::add(x, &ops::sum(&ops::cast(&indices, x.dtype())?)?)
}

fn layer_norm_reference(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    ops::reference::layer_norm(&x[0], &x[1], &x[2], d.number())
}

fn linear_of(x: &[Tensor], _: &mut Draw) -> Result<Tensor> {
    nn::Linear::from_weights(x[1].clone(), Some(x[2].clone()))?.forward(&x[0])
}

fn norm_without_bias(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    nn::LayerNorm::without_bias(3, d.number(), d.builder())?.forward(&x[0])
}

fn swiglu_linear_reference(x: &[Tensor], _: &mut Draw) -> Result<Tensor> {
    ops::reference::swiglu_linear(&x[0], &x[1], &x[2])
}

fn geglu_linear_reference(x: &[Tensor], _: &mut Draw) -> Result<Tensor> {
    ops::reference::geglu_linear(&x[0], &x[1], &x[2], Gelu::Tanh)
}

fn cross_entropy_ignoring(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    ops::cross_entropy_ignoring(&x[0], &x[1], d.size() as i64)
}

fn cross_entropy_with(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    ops::cross_entropy_with(&x[0], &x[1], &d.cross_entropy())
}

fn linear_cross_entropy_with(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    ops::linear_cross_entropy_with(&x[0], &x[1], &x[2], &d.cross_entropy())
}

fn bce_with_logits(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    let weights = BceWeights {
        weight: Some(&x[2]),
        pos_weight: None,
    };
    ops::bce_with_logits(&x[0], &x[1], weights, d.reduction())
}

fn linear_cross_entropy_reference(x: &[Tensor], _: &mut Draw) -> Result<Tensor> {
    ops::reference::linear_cross_entropy(&x[0], &x[1], &x[2], None)
}

fn naive(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    attention::naive(&x[0], &x[1], &x[2], &d.attention())
}

fn naive_reference(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    attention::reference::naive(&x[0], &x[1], &x[2], &d.attention())
}

fn flash(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    attention::flash(&x[0], &x[1], &x[2], &d.attention())
}

fn flash_with_lse(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    Ok(attention::flash_with_lse(&x[0], &x[1], &x[2], &d.attention())?.0)
}

fn flash_reference(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    Ok(attention::reference::flash(&x[0], &x[1], &x[2], &d.attention())?.0)
}

fn self_attention(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    let layer = nn::Attention::new(&causal(8, 2), Some(d.rotary()?), d.builder())?;
    layer.with_attention(d.algorithm()).forward(&x[0])
}

fn block(x: &[Tensor], d: &mut Draw) -> Result<Tensor> {
    let block = nn::TransformerBlock::new(8, 2, 5, 1e-5, Some(d.rotary()?), d.builder())?;
    block.with_attention(d.algorithm()).forward(&x[0])
}
