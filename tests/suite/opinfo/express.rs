//! PyTorch's operators expressed by this crate's ops.

use super::fixture::{Settings, dtype};
use candle_core::{D, DType, Tensor};
use tallow::Result;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::ops::{self, BceWeights, CrossEntropyConfig, Gelu, KlTarget, Reduction};

/// A call of one of PyTorch's operators.
pub struct Call<'a> {
    pub operands: &'a [Tensor],
    pub settings: &'a Settings,
    pub out: &'a [usize],
}

pub type Implementation = fn(&Call) -> Result<Tensor>;

/// Returns the ops that compute this operator.
pub fn implementations(operator: &str) -> Vec<(&'static str, Implementation)> {
    match operator {
        "add" => vec![("add", |c| match c.settings.alpha {
            Some(alpha) => ops::add_scaled(&c.operands[0], &c.operands[1], alpha),
            None => ops::add(&c.operands[0], &c.operands[1]),
        })],
        "sub" => vec![("sub", |c| match c.settings.alpha {
            Some(alpha) => ops::add_scaled(&c.operands[0], &c.operands[1], -alpha),
            None => ops::sub(&c.operands[0], &c.operands[1]),
        })],
        "mul" => vec![("mul", |c| ops::mul(&c.operands[0], &c.operands[1]))],
        "div" => vec![("div", |c| ops::div(&c.operands[0], &c.operands[1]))],
        "exp" => vec![("exp", |c| ops::exp(&c.operands[0]))],
        "log" => vec![("log", |c| ops::log(&c.operands[0]))],
        "pow" => vec![("pow", |c| {
            ops::pow(&c.operands[0], c.settings.exponent.expect("an exponent"))
        })],
        "rsqrt" => vec![("rsqrt", |c| ops::rsqrt(&c.operands[0]))],
        "sqrt" => vec![("sqrt", |c| ops::sqrt(&c.operands[0]))],
        "abs" => vec![("abs", |c| ops::abs(&c.operands[0]))],
        "relu" => vec![("relu", |c| ops::relu(&c.operands[0]))],
        "tanh" => vec![("tanh", |c| ops::tanh(&c.operands[0]))],
        "sigmoid" => vec![("sigmoid", |c| ops::sigmoid(&c.operands[0]))],
        "silu" => vec![("silu", |c| ops::silu(&c.operands[0]))],
        "gelu" => vec![("gelu", |c| {
            let form = match c.settings.approximate.as_deref() {
                Some("tanh") => Gelu::Tanh,
                _ => Gelu::Erf,
            };
            ops::gelu(&c.operands[0], form)
        })],
        "concat" => vec![("concat", |c| {
            let dim = c.settings.dim.expect("a dimension");
            let dim = dim.rem_euclid(c.out.len() as i64) as usize;
            ops::concat(&c.operands.iter().collect::<Vec<_>>(), dim)
        })],
        "stack" => vec![("stack", |c| {
            let dim = c.settings.dim.expect("a dimension");
            let dim = dim.rem_euclid(c.out.len() as i64) as usize;
            ops::stack(&c.operands.iter().collect::<Vec<_>>(), dim)
        })],
        "where_cond" => vec![("where_cond", |c| {
            let condition = c.operands[1].to_dtype(DType::U8)?;
            ops::where_cond(&condition, &c.operands[0], &c.operands[2])
        })],
        "masked_fill" => vec![("masked_fill", |c| {
            let mask = c.operands[1].to_dtype(DType::U8)?;
            let value = c.settings.exponent.expect("a value");
            ops::masked_fill(&c.operands[0], &mask, value)
        })],
        "gather" => vec![("gather", |c| {
            ops::gather(&c.operands[0], dim(c), &c.operands[1])
        })],
        "scatter_add" => vec![("scatter_add", |c| {
            ops::scatter_add(&c.operands[0], dim(c), &c.operands[1], &c.operands[2])
        })],
        "index_select" => vec![("index_select", |c| {
            ops::index_select(&c.operands[0], dim(c), &c.operands[1])
        })],
        "index_add" => vec![("index_add", |c| {
            ops::index_add(&c.operands[0], dim(c), &c.operands[1], &c.operands[2])
        })],
        "topk" => vec![("topk", |c| Ok(ops::topk(&c.operands[0], c.settings.k)?.0))],
        "log_sigmoid" => vec![("log_sigmoid", |c| ops::log_sigmoid(&c.operands[0]))],
        "swiglu" => vec![("swiglu", |c| ops::swiglu(&c.operands[0], &c.operands[1]))],
        "softmax" | "softmax_with_dtype" => vec![("softmax", |c| {
            along(c, |x| ops::softmax(x, 1.0, Mask::Full))
        })],
        "log_softmax" | "log_softmax_with_dtype" => {
            vec![("log_softmax", |c| along(c, ops::log_softmax))]
        }
        "sum" => vec![("sum", |c| match c.settings.over.is_empty() {
            true => Ok(ops::sum(&c.operands[0])?.reshape(c.out)?),
            false => reduce(c, ops::sum_over, ops::sum_keepdim),
        })],
        "mean" => vec![("mean", |c| match c.settings.over.is_empty() {
            true => Ok(ops::mean(&c.operands[0])?.reshape(c.out)?),
            false => reduce(c, ops::mean_over, ops::mean_keepdim),
        })],
        "max" => vec![("max", |c| reduce(c, ops::max_over, ops::max_keepdim))],
        "min" => vec![("min", |c| reduce(c, ops::min_over, ops::min_keepdim))],
        "logsumexp" => vec![("logsumexp", |c| {
            reduce(c, ops::logsumexp, ops::logsumexp_keepdim)
        })],
        "var" => vec![("var", |c| {
            let correction = c.settings.correction;
            reduce(
                c,
                |x, over| ops::var(x, over, correction),
                |x, over| ops::var_keepdim(x, over, correction),
            )
        })],
        "matmul" | "bmm" | "bmm_triton_optimized" | "mm" | "mv" | "dot" => vec![
            ("matmul", |c| matmul(c, ops::matmul)),
            ("matmul_transposed", |c| {
                matmul(c, |a, b| ops::matmul_transposed(a, &b.t()?))
            }),
        ],
        "linear" => vec![("linear", linear), ("linear_bias", linear_bias)],
        "embedding" => vec![("embedding", |c| {
            ops::embedding(&c.operands[1], &c.operands[0])
        })],
        "layer_norm" | "native_layer_norm" => vec![("layer_norm", |c| {
            norm(c, |x, weight, bias, eps| {
                ops::layer_norm(x, weight, bias, eps)
            })
        })],
        "rms_norm" => vec![("rms_norm", |c| {
            norm(c, |x, weight, _, eps| ops::rms_norm(x, weight, eps))
        })],
        "cross_entropy" => vec![("cross_entropy", cross_entropy)],
        "linear_cross_entropy" => vec![("linear_cross_entropy", |c| {
            let [x, weight, targets, ..] = c.operands else {
                panic!("three operands");
            };
            ops::linear_cross_entropy_with(x, weight, targets, &loss_config(c, 3))
        })],
        "mse_loss" => vec![("mse_loss", |c| {
            ops::mse_loss(&c.operands[0], &c.operands[1], reduction(c))
        })],
        "l1_loss" => vec![("l1_loss", |c| {
            ops::l1_loss(&c.operands[0], &c.operands[1], reduction(c))
        })],
        "bce_with_logits" => vec![("bce_with_logits", |c| {
            let weights = BceWeights {
                weight: parameter(c, "weight", 2),
                pos_weight: parameter(c, "pos_weight", 2),
            };
            ops::bce_with_logits(&c.operands[0], &c.operands[1], weights, reduction(c))
        })],
        "kl_div" => vec![("kl_div", |c| {
            let form = match c.settings.log_target {
                true => KlTarget::Logarithms,
                false => KlTarget::Probabilities,
            };
            ops::kl_div(&c.operands[0], &c.operands[1], form, reduction(c))
        })],
        "scaled_dot_product_attention" => vec![
            ("naive", |c| attend(c, attention::naive)),
            ("flash", |c| attend(c, attention::flash)),
        ],
        "to" | "double" | "float" | "half" | "bfloat16" => vec![("cast", |c| {
            let to = c.settings.dtype.as_deref().expect("a dtype");
            ops::cast(&c.operands[0], dtype(to))
        })],
        other => panic!("{other} is not expressed"),
    }
}

/// Applies `f` along the dimension of the settings, to x in their dtype.
fn along(call: &Call, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let mut x = call.operands[0].clone();
    if let Some(name) = &call.settings.dtype {
        x = ops::cast(&x, dtype(name))?;
    }
    if x.rank() == 0 {
        return f(&x);
    }
    let dim = call.settings.dim.expect("a dimension");
    let dim = dim.rem_euclid(x.rank() as i64) as usize;
    Ok(f(&x.transpose(dim, D::Minus1)?)?.transpose(dim, D::Minus1)?)
}

/// Reduces the dimensions of the settings, which are removed or kept.
fn reduce(
    call: &Call,
    over: impl Fn(&Tensor, Vec<usize>) -> Result<Tensor>,
    keeping: impl Fn(&Tensor, Vec<usize>) -> Result<Tensor>,
) -> Result<Tensor> {
    let (x, dims) = (&call.operands[0], call.settings.over.clone());
    match call.settings.keepdim {
        true => keeping(x, dims),
        false => over(x, dims),
    }
}

/// Multiplies matrices or vectors whose leading dimensions broadcast.
fn matmul(call: &Call, f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let [a, b] = call.operands else {
        panic!("two operands");
    };
    let a = if a.rank() == 1 {
        a.unsqueeze(0)?
    } else {
        a.clone()
    };
    let b = if b.rank() == 1 {
        b.unsqueeze(1)?
    } else {
        b.clone()
    };
    let leading = |x: &Tensor| x.dims()[..x.rank() - 2].to_vec();
    let longest = match leading(&a).iter().product::<usize>() > leading(&b).iter().product() {
        _ if a.rank() > b.rank() => leading(&a),
        _ if a.rank() < b.rank() => leading(&b),
        true => leading(&a),
        false => leading(&b),
    };
    let spread = |x: &Tensor| -> Result<Tensor> {
        let matrix = &x.dims()[x.rank() - 2..];
        Ok(x.broadcast_as([&longest, matrix].concat())?)
    };
    Ok(f(&spread(&a)?, &spread(&b)?)?.reshape(call.out)?)
}

/// Applies a linear layer with an optional bias. A one-dimensional weight is a matrix of one row, whose dimension the
/// output lacks.
fn linear(call: &Call) -> Result<Tensor> {
    let (x, weight) = (&call.operands[0], &call.operands[1]);
    let y = match weight.rank() {
        1 => ops::linear(x, &weight.unsqueeze(0)?)?.squeeze(D::Minus1)?,
        _ => ops::linear(x, weight)?,
    };
    match call.operands.get(2) {
        Some(bias) => ops::add(&y, bias),
        None => Ok(y),
    }
}

/// Does the same with one op, with a bias of zeros if there is none.
fn linear_bias(call: &Call) -> Result<Tensor> {
    let (x, weight) = (&call.operands[0], &call.operands[1]);
    let matrix = match weight.rank() {
        1 => weight.unsqueeze(0)?,
        _ => weight.clone(),
    };
    let out = matrix.dims()[0];
    let bias = match call.operands.get(2) {
        Some(bias) => bias.reshape(out)?,
        None => Tensor::zeros(out, x.dtype(), x.device())?,
    };
    let y = ops::linear_bias(x, &matrix, &bias)?;
    match weight.rank() {
        1 => Ok(y.squeeze(D::Minus1)?),
        _ => Ok(y),
    }
}

/// Applies a norm over the last dimensions of the settings. `f` takes x, weight, bias and eps.
fn norm(
    call: &Call,
    f: impl Fn(&Tensor, &Tensor, &Tensor, f64) -> Result<Tensor>,
) -> Result<Tensor> {
    let (x, settings) = (&call.operands[0], call.settings);
    let first = x.rank() - settings.dims.expect("dimensions");
    let width: usize = x.dims()[first..].iter().product();
    let parameter = |name: &str| -> Result<Option<Tensor>> {
        let at = settings.parameters.iter().position(|given| given == name);
        Ok(match at {
            Some(at) => Some(call.operands[1 + at].flatten_all()?),
            None => None,
        })
    };
    let (like, device) = (x.dtype(), x.device());
    let weight = match parameter("weight")? {
        Some(weight) => weight,
        None => Tensor::ones(width, like, device)?,
    };
    let bias = match parameter("bias")? {
        Some(bias) => bias,
        None => Tensor::zeros(width, like, device)?,
    };
    let rows = x.reshape([&x.dims()[..first], &[width]].concat())?;
    let y = f(&rows, &weight, &bias, settings.eps.expect("eps"))?;
    Ok(y.reshape(call.out)?)
}

/// Computes PyTorch's cross-entropy, whose classes are the second dimension (or the only one).
fn cross_entropy(call: &Call) -> Result<Tensor> {
    let (logits, targets) = (&call.operands[0], &call.operands[1]);
    let mut order: Vec<usize> = (0..logits.rank()).collect();
    let classes = order.remove(usize::from(logits.rank() > 1));
    order.push(classes);
    let targets = match targets.dtype().is_float() {
        true => targets.permute(order.as_slice())?,
        false => targets.clone(),
    };
    ops::cross_entropy_with(&logits.permute(order)?, &targets, &loss_config(call, 2))
}

/// Returns the options of a cross-entropy; the operands from `first` on are the settings' parameters.
fn loss_config(call: &Call, first: usize) -> CrossEntropyConfig {
    CrossEntropyConfig {
        reduction: reduction(call),
        ignore_index: call.settings.ignore_index,
        label_smoothing: call.settings.label_smoothing,
        class_weights: parameter(call, "weight", first).cloned(),
        ..Default::default()
    }
}

fn reduction(call: &Call) -> Reduction {
    match call.settings.reduction.as_deref() {
        Some("none") => Reduction::None,
        Some("sum") => Reduction::Sum,
        _ => Reduction::Mean,
    }
}

/// Returns a parameter of the settings; the operands from `first` on are these parameters.
fn parameter<'a>(call: &'a Call, name: &str, first: usize) -> Option<&'a Tensor> {
    let mut names = call.settings.parameters.iter();
    let at = names.position(|other| other == name)?;
    call.operands.get(first + at)
}

fn dim(call: &Call) -> usize {
    call.settings.dim.expect("a dimension") as usize
}

type Attend = fn(&Tensor, &Tensor, &Tensor, &AttentionConfig) -> Result<Tensor>;

/// Applies attention, with broadcast leading dimensions.
fn attend(call: &Call, f: Attend) -> Result<Tensor> {
    let rank = call.operands.iter().map(Tensor::rank).max();
    let rank = rank.expect("operands");
    let batch: Vec<usize> = (0..rank.saturating_sub(3))
        .map(|dim| {
            let sizes = call.operands.iter().map(|x| {
                let missing = rank - x.rank();
                if dim < missing {
                    1
                } else {
                    x.dims()[dim - missing]
                }
            });
            sizes.max().expect("operands")
        })
        .collect();
    let spread = |x: &Tensor| -> Result<Tensor> {
        let heads = &x.dims()[x.rank().saturating_sub(3)..];
        Ok(x.broadcast_as([&batch, heads].concat())?)
    };
    let [q, k, v] = call.operands else {
        panic!("q, k and v");
    };
    let config = AttentionConfig {
        mask: if call.settings.is_causal {
            Mask::Causal
        } else {
            Mask::Full
        },
        scale: call.settings.scale,
        ..Default::default()
    };
    f(&spread(q)?, &spread(k)?, &spread(v)?, &config)
}
