//! Attention with all scores and probabilities in memory: scores, softmax, weighted sum.
//!
//! [`naive()`] is one op; [`reference()`] composes it of three, and is its specification.

pub(super) mod lowering;
mod lse;
mod op;

use super::AttentionConfig;
use super::first_keys::HostSeen;
use super::nothing::nothing;
use super::shapes::Shapes;
use crate::attention::cost;
use crate::ops::info::OpInfo;
use crate::ops::record::{by_kernels, to_dtype, wide_input};
use crate::ops::soft_cap::soft_cap_of_scaled;
use crate::ops::softmax::softmax_of_heads;
use crate::ops::{self, Path, choose, with_last_dim};
use crate::precision::without_autocast;
use crate::probe::Operand;
use crate::{Result, graph, probe};
use candle_core::Tensor;
use op::Naive;
use std::sync::{Arc, OnceLock};

pub(super) const NAME: &str = "attention::naive";

/// What is known of it.
pub(crate) const INFO: OpInfo = cost::info(
    NAME,
    lowering::LOWERING,
    "q, k, v, out, probabilities; backward those and dq, dk, dv",
    |o| cost::forward(o, cost::probability_bytes(o)?),
    |o| cost::backward(o, cost::probability_bytes(o)?),
);

/// `out = softmax(scale q k^T) v`, with the probabilities in memory: q (..., H, Tq, Dh), k (..., Hkv, Tk, Dh),
/// v (..., Hkv, Tk, Dv), out (..., H, Tq, Dv).
///
/// The dimensions before the heads are the same in all three, and as
/// many as there are; (T, Dh) alone is one head.
///
/// With Hkv heads of k and v, a divisor of H, head h of q meets head `h / (H / Hkv)` of theirs: grouped-query
/// attention, and multi-query attention where Hkv is 1. Nothing is copied for it.
///
/// Differentiable in q, k and v. Kept for backward, beside them: the probabilities p, B H Tq Tk elements. That is the
/// cost which tiled attention ([`flash`](super::flash())) removes. Backward: `dv = p^T dout`, `dp = dout v^T`,
/// `ds = scale p (dp - sum(dp p))`, `dq = ds k`, `dk = ds^T q`, dk and dv summed over the heads that share them. 4 B H
/// Tq Tk Dh FLOPs forward, twice that backward, if every key is seen. Without keys out is zeros, and so are gradients.
///
/// On the CPU 64 queries at a time go through scores, softmax and weighted sum, with the keys that one of them sees:
/// the rest of p is zeros. p is f32 for half precision, or gradients would inherit its rounding. On a GPU products are
/// cuBLAS's, with sums in f32. Scores and the gradients of p are f32 in every dtype; p and the scores' gradients are in
/// the dtype of q, k and v, as they are multiplied with those. In f32 p takes the scores' place, and backward has the
/// gradients of as many heads at once as 1 GiB holds; in half precision both have scores of as many heads as 32 MiB
/// hold in f32, one at least. Beyond 1,024 tokens blocks of queries and keys that a mask hides are left out there,
/// unless heads share keys.
///
/// With [dropout](AttentionConfig::dropout) of the probabilities or a [soft cap](AttentionConfig::soft_cap) of the
/// scores it is three ops and one for each, in f32 also for half precision ([`reference()`]): slower, and with the
/// scores in memory beside the probabilities.
///
/// Autocast: lower under both policies, as PyTorch's `scaled_dot_product_attention`; the softmax inside is part of it.
///
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
/// Shapes that do not fit each other, heads that kv heads do not divide, a head dimension of 0, mixed dtypes or
/// devices; first keys of another shape; a soft cap that is not positive and finite.
pub fn naive(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    keeping(q, k, v, config, None)
}

/// As [`naive()`], with `lse = log(sum(exp(scores)))` of every query beside it: (..., H, Tq), in f32 (f64 for f64).
///
/// -inf for a query that sees no key. `lse` carries no gradient: it is a constant to whatever is computed from it, as
/// [`flash_with_lse`](super::flash_with_lse)'s is.
///
/// On the CPU the kernel writes it beside the probabilities. On a GPU it has no kernel: candle's own ops compute it
/// from all scores at once, which [`ops::fallbacks`] lists as `attention::naive lse`. In a
/// [trace](crate::graph::trace()) it is such a composition too, which cannot be planned.
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
/// As [`naive()`].
pub fn naive_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    let has_kernel = choose(&lse::LSE, q)? == Path::Kernel && !graph::is_tracing();
    let kept = has_kernel.then(Arc::<OnceLock<Tensor>>::default);
    let out = keeping(q, k, v, config, kept.clone())?;
    let lse = match kept.and_then(|kept| kept.get().cloned()) {
        Some(lse) => lse,
        None => lse::reference(q, k, v, config)?,
    };
    Ok((out, lse))
}

/// [`naive()`], whose kernel leaves the log-sum-exps in `lse` if there is a place for them.
fn keeping(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
    lse: Option<Arc<OnceLock<Tensor>>>,
) -> Result<Tensor> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    let shapes = Shapes::of(NAME, q, k, v, config)?;
    let scores = with_last_dim(q.dims(), shapes.keys);
    ops::check_size(NAME, &scores, q.dtype(), q.device())?;
    if let Some(out) = nothing(NAME, &shapes, [q, k, v])? {
        return Ok(out);
    }
    match choose(&INFO, q)? {
        _ if config.dropout.is_some() || config.soft_cap.is_some() => by_parts(q, k, v, config),
        Path::Kernel => {
            let (sizes, reads) = (shapes.sizes(config), config.reads());
            by_kernels(&INFO, Naive { sizes, reads, lse }, [q, k, v])
        }
        Path::Reference => reference(q, k, v, config),
    }
}

/// [`reference()`], converted to what is computed in, and back, by this crate's op.
fn by_parts(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    without_autocast(|| {
        let wide = |x: &Tensor| ops::cast(x, Operand::from(x).wide_dtype());
        let out = in_three_ops(&wide(q)?, &wide(k)?, &wide(v)?, config)?;
        ops::cast(&out, q.dtype())
    })
}

/// [`naive`] as three ops, the scores a tensor of their own: `matmul_transposed`, `softmax` with scale and mask,
/// `matmul`; with [`soft_cap`](ops::soft_cap()) of the scores before the second and [`dropout`](ops::dropout()) of the
/// probabilities before the last, where there is any. Half precision is widened to f32 before the first and rounded
/// once after the last, in backward too.
///
/// Heads of q that share one of k and v are one matrix for the products, their rows one below the other: each row meets
/// the same keys and values, and their gradients sum over all rows.
///
/// # Errors
/// As [`naive`].
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    without_autocast(|| in_three_ops(q, k, v, config)) // the softmax inside is attention's, not one of its own
}

fn in_three_ops(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let shapes = Shapes::of(NAME, q, k, v, config)?;
    if let Some(out) = nothing(NAME, &shapes, [q, k, v])? {
        return Ok(out);
    }
    let matrices = shapes.batch * shapes.kv_heads;
    let matrices = |x: &Tensor, rows, cols| of_shape(x, &[matrices, rows, cols]);
    let [wide_q, k, v] = [q, k, v].map(|x| wide_input(NAME, x));
    let (wide_q, k, v) = (wide_q?, k?, v?);
    let rows = shapes.heads / shapes.kv_heads * shapes.queries;
    let q_rows = matrices(&wide_q, rows, shapes.head_dim)?; // (B Hkv, H / Hkv Tq, Dh)
    let k = matrices(&k, shapes.keys, shapes.head_dim)?; // (B Hkv, Tk, Dh)
    let v = matrices(&v, shapes.keys, shapes.value_dim)?; // (B Hkv, Tk, Dv)
    let range = probe::range("scores");
    let scores = ops::matmul_transposed(&q_rows, &k)?; // (B Hkv, H / Hkv Tq, Tk)
    drop(range);
    let heads = shapes.batch * shapes.heads;
    let scores = of_shape(&scores, &[heads, shapes.queries, shapes.keys])?; // (B H, Tq, Tk)
    let scale = config.scale_for(shapes.head_dim);
    let (scores, scale) = match config.soft_cap {
        None => (scores, scale),
        Some(cap) => (soft_cap_of_scaled(&scores, scale, cap)?, 1.0),
    };
    let p = match &config.first_keys {
        None => ops::softmax(&scores, scale, config.mask)?,
        Some(first_keys) => {
            let seen = || HostSeen::new(config, &shapes)?.tensor(q.device());
            softmax_of_heads(&scores, scale, config.mask, first_keys.tensor(), seen)?
        }
    }; // (B H, Tq, Tk)
    let p = match &config.dropout {
        None => p,
        Some(dropout) => ops::dropout(&p, dropout)?,
    };
    let _range = probe::range("values");
    let out = ops::matmul(&matrices(&p, rows, shapes.keys)?, &v)?; // (B Hkv, H / Hkv Tq, Dv)
    let out = out.reshape(with_last_dim(q.dims(), shapes.value_dim))?; // (..., H, Tq, Dv)
    Ok(to_dtype(&out, q.dtype())?)
}

/// x in a shape: itself, if it has that.
fn of_shape(x: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
    match x.dims() == shape {
        true => Ok(x.clone()),
        false => x.reshape(shape),
    }
}
