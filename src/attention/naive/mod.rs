//! Attention with all scores and probabilities in memory: scores, softmax, weighted sum.
//!
//! [`naive()`] is one op with kernels; [`reference()`] composes it of three ops.

pub(super) mod lowering;
mod lse;
mod op;

use super::host_seen::HostSeen;
use super::masks::MaskTensors;
use super::nothing::nothing;
use super::shapes::check;
use super::{AttentionConfig, FirstKeys, ScoreBias};
use crate::attention::cost;
use crate::kernels::attention::Sizes;
use crate::ops::info::OpInfo;
use crate::ops::record::{by_kernels, to_dtype, wide_input};
use crate::ops::soft_cap::soft_cap_of_scaled;
use crate::ops::softmax::{Seen, softmax_of_heads};
use crate::ops::{self, Path, choose, with_last_dim};
use crate::precision::without_autocast;
use crate::probe::Operand;
use crate::{Result, graph, probe};
use candle_core::Tensor;
use op::Naive;
use std::sync::{Arc, OnceLock};

pub(super) const NAME: &str = "attention::naive";

/// The description of the op: lowering and cost.
pub(crate) const INFO: OpInfo = cost::info(
    NAME,
    lowering::LOWERING,
    "q, k, v, out, probabilities; backward those and dq, dk, dv",
    |o| cost::forward(o, cost::probability_bytes(o)?),
    |o| cost::backward(o, cost::probability_bytes(o)?),
);

/// Computes `out = softmax(scale q k^T) v` and saves the probabilities for backward.
///
/// Shapes: q (..., H, Tq, Dh), k (..., Hkv, Tk, Dh), v (..., Hkv, Tk, Dv), out (..., H, Tq, Dv). The leading dimensions
/// are the same in all three; a tensor of two dimensions is one head. Hkv divides H: head h of q attends to head
/// `h / (H / Hkv)` of k and v, which are not copied (grouped-query attention; multi-query attention if Hkv is 1). If Tk
/// is 0, out and the gradients are zeros.
///
/// # Backward
/// Differentiable in q, k and v. Saved for backward: q, k, v and the probabilities p, B H Tq Tk elements.
/// [`flash`](super::flash()) does not save these. `dv = p^T dout`, `dp = dout v^T`, `ds = scale p (dp - sum(dp p))`,
/// `dq = ds k`, `dk = ds^T q`; dk and dv are summed over the heads that share them.
///
/// # Precision and memory
/// On the CPU, 64 queries at a time go through scores, softmax and weighted sum, with the keys that any of them attends
/// to; the rest of p is zeros. p is f32 for half precision, otherwise gradients would inherit its rounding.
///
/// On a GPU, cuBLAS computes the matmuls, with sums in f32. Scores and dp are f32 in every dtype; p and ds have the
/// dtype of q, k and v. In f32, p overwrites the scores, and backward holds dp of as many heads as fit in 1 GiB. In
/// half precision, forward and backward hold scores of as many heads as fit in 32 MiB of f32, at least one. Beyond
/// 1,024 tokens, blocks of queries and keys that the mask hides are skipped, unless heads share keys.
///
/// With [dropout](AttentionConfig::dropout), a [soft cap](AttentionConfig::soft_cap), a
/// [key mask](AttentionConfig::key_mask) or a [bias](AttentionConfig::bias) it is composed of separate ops, in f32 also
/// for half precision ([`reference()`]). This is slower. Dropout and a soft cap save the scores in addition to the
/// probabilities.
///
/// Autocast lowers the inputs under both policies, as it does for PyTorch's `scaled_dot_product_attention`; the softmax
/// inside is part of the op.
///
/// # Cost
/// 2 B H Tq Tk (Dh + Dv) FLOPs forward and twice as many backward, without a mask.
///
/// # Source
/// Vaswani et al., "Attention Is All You Need", 2017, equation 1. Ainslie et al., "GQA: Training Generalized
/// Multi-Query Transformer Models from Multi-Head Checkpoints", 2023, section 2.2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, Mask};
///
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &Device::Cpu)?;
/// let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
/// let out = attention::naive(&q, &q, &q, &config)?;
/// assert_eq!(out.dims(), [2, 3, 5, 8]);
///
/// let k = q.narrow(1, 0, 1)?; // one head for all three of q
/// let out = attention::naive(&q, &k, &k, &config)?;
/// assert_eq!(out.dims(), [2, 3, 5, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not match; an H that Hkv does not divide; a Dh of 0; mixed dtypes or devices; first keys of another
/// shape; a key mask or a bias that does not broadcast to the scores; a soft cap that is not positive and finite.
pub fn naive(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    naive_into(q, k, v, config, None)
}

/// Computes [`naive()`] and the log-sum-exp of each query's scores, `lse = log(sum(exp(scores)))`.
///
/// lse has the shape (..., H, Tq), in f32, or in f64 for f64. It is -inf for a query that attends to no key. No
/// gradient flows through it.
///
/// On the CPU the kernel writes it together with the probabilities. On a GPU there is no kernel for it: candle's own
/// ops compute it from the tensor of all scores, which [`ops::fallbacks`] lists as `attention::naive lse`. In a
/// [trace](crate::graph::trace()) it is composed so too, and cannot be planned.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::attention::{self, AttentionConfig};
///
/// let q = Tensor::zeros((1, 1, 1, 8), DType::F32, &Device::Cpu)?;
/// let k = Tensor::ones((1, 1, 4, 8), DType::F32, &Device::Cpu)?;
/// let (out, lse) = attention::naive_with_lse(&q, &k, &k, &AttentionConfig::default())?;
/// assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [1.0; 8]);
/// assert!((lse.flatten_all()?.to_vec1::<f32>()?[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`naive()`].
pub fn naive_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    let has_kernel = choose(&lse::LSE, q)? == Path::Kernel && !graph::is_tracing();
    let kept = has_kernel.then(Arc::<OnceLock<Tensor>>::default);
    let out = naive_into(q, k, v, config, kept.clone())?;
    let lse = match kept.and_then(|kept| kept.get().cloned()) {
        Some(lse) => lse,
        None => lse::reference(q, k, v, config)?,
    };
    Ok((out, lse))
}

/// Computes [`naive()`]; the kernel stores the log-sum-exps in `lse` if it is given.
fn naive_into(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
    lse: Option<Arc<OnceLock<Tensor>>>,
) -> Result<Tensor> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    let sizes = check(NAME, q, k, v, config)?;
    let scores = with_last_dim(q.dims(), sizes.keys);
    ops::check_size(NAME, &scores, q.dtype(), q.device())?;
    let masks = MaskTensors::new(NAME, config, q, &sizes)?;
    if let Some(out) = nothing(NAME, &sizes, &masks.inputs([q, k, v]))? {
        return Ok(out);
    }
    let in_parts = config.dropout.is_some() || config.soft_cap.is_some() || !masks.is_none();
    match choose(&INFO, q)? {
        _ if in_parts => by_parts(q, k, v, config),
        Path::Kernel => {
            let reads = config.reads(&masks);
            by_kernels(&INFO, Naive { sizes, reads, lse }, [q, k, v])
        }
        Path::Reference => reference(q, k, v, config),
    }
}

/// Computes [`reference()`] in f32 or f64, with [`ops::cast`] at both ends.
fn by_parts(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    without_autocast(|| {
        let wide = |x: &Tensor| ops::cast(x, Operand::from(x).wide_dtype());
        let bias = config.bias.as_ref();
        let config = &AttentionConfig {
            bias: bias
                .map(|bias| ScoreBias::new(&wide(bias.tensor())?))
                .transpose()?,
            ..config.clone()
        };
        let out = in_three_ops(&wide(q)?, &wide(k)?, &wide(v)?, config)?;
        ops::cast(&out, q.dtype())
    })
}

/// Computes [`naive`] as three ops: [`ops::matmul_transposed`], [`ops::softmax`] with scale and mask, [`ops::matmul`].
///
/// A [`soft_cap`](ops::soft_cap()) and the sum with a bias follow the first op and [`dropout`](ops::dropout()) the
/// second, if they are configured. Half precision is widened to f32 before the first op and rounded once after the
/// last, in backward too.
///
/// Heads of q that share a head of k and v are stacked into one matrix: their rows are multiplied by the same keys and
/// values, whose gradients sum over all rows.
///
/// # Errors
/// Those of [`naive`].
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    without_autocast(|| in_three_ops(q, k, v, config)) // the softmax inside is attention's, not one of its own
}

fn in_three_ops(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let sizes = check(NAME, q, k, v, config)?;
    let masks = MaskTensors::new(NAME, config, q, &sizes)?;
    if let Some(out) = nothing(NAME, &sizes, &masks.inputs([q, k, v]))? {
        return Ok(out);
    }
    let matrices = sizes.kv_matrices();
    let matrices = |x: &Tensor, rows, cols| of_shape(x, &[matrices, rows, cols]);
    let [wide_q, k, v] = [q, k, v].map(|x| wide_input(NAME, x));
    let (wide_q, k, v) = (wide_q?, k?, v?);
    let rows = sizes.group() * sizes.queries;
    let q_rows = matrices(&wide_q, rows, sizes.head_dim)?; // (B Hkv, H / Hkv Tq, Dh)
    let k = matrices(&k, sizes.keys, sizes.head_dim)?; // (B Hkv, Tk, Dh)
    let v = matrices(&v, sizes.keys, sizes.value_dim)?; // (B Hkv, Tk, Dv)
    let range = probe::range("scores");
    let scores = ops::matmul_transposed(&q_rows, &k)?; // (B Hkv, H / Hkv Tq, Tk)
    drop(range);
    let shape = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
    let scores = of_shape(&scores, &shape)?; // (B, H, Tq, Tk)
    let (scores, scale) = match (config.soft_cap, &masks.bias) {
        (None, None) => (scores, sizes.scale),
        (None, Some(bias)) => (ops::add_scaled(bias, &scores, sizes.scale)?, 1.0),
        (Some(cap), bias) => {
            let capped = soft_cap_of_scaled(&scores, sizes.scale, cap)?;
            match bias {
                None => (capped, 1.0),
                Some(bias) => (ops::add(&capped, bias)?, 1.0),
            }
        }
    };
    let p = probabilities(&scores, scale, config, &masks, &sizes)?; // (B, H, Tq, Tk)
    let p = match &config.dropout {
        None => p,
        Some(dropout) => ops::dropout(&p, dropout)?,
    };
    let _range = probe::range("values");
    let out = ops::matmul(&matrices(&p, rows, sizes.keys)?, &v)?; // (B Hkv, H / Hkv Tq, Dv)
    let out = out.reshape(with_last_dim(q.dims(), sizes.value_dim))?; // (..., H, Tq, Dv)
    Ok(to_dtype(&out, q.dtype())?)
}

/// Computes the softmax of scores (B, H, Tq, Tk) over the visible keys.
fn probabilities(
    scores: &Tensor,
    scale: f64,
    config: &AttentionConfig,
    masks: &MaskTensors,
    sizes: &Sizes,
) -> Result<Tensor> {
    if config.first_keys.is_none() && masks.is_none() {
        return ops::softmax(scores, scale, config.mask);
    }
    let seen = Seen {
        mask: config.mask,
        first_keys: config.first_keys.as_ref().map(FirstKeys::tensor),
        visible: masks.visible.as_ref(),
        masked: !masks.is_none(),
    };
    let on_host = || HostSeen::new(config, masks, sizes)?.tensor(scores.device());
    softmax_of_heads(scores, scale, seen, on_host)
}

/// x in a shape: itself, if it has that.
fn of_shape(x: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
    match x.dims() == shape {
        true => Ok(x.clone()),
        false => x.reshape(shape),
    }
}
