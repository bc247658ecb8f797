//! FlashAttention-2: attention tile by tile, with no tensor of size Tq Tk in memory.
//!
//! [`flash()`] and [`flash_with_lse`] are one op with a kernel; [`reference()`] is the same algorithm in plain candle
//! ops, and its specification.

#[cfg(feature = "cuda")]
mod cuda;
pub(super) mod lowering;
mod op;
mod reference;

pub use reference::reference;

use super::AttentionConfig;
use super::nothing::{lse_of_nothing, nothing};
use super::shapes::Shapes;
use crate::attention::cost;
use crate::ops::check_probability;
#[cfg(feature = "cuda")]
use crate::ops::choose_where;
use crate::ops::info::OpInfo;
use crate::ops::record::{Spec, as_they_lie};
use crate::ops::{Path, cast_for, choose};
use crate::{Error, Result, graph, hardware};
use candle_core::Tensor;
use op::Flash;
use std::sync::{Arc, OnceLock};

pub(super) const NAME: &str = "attention::flash";

/// What is known of it.
pub(crate) const INFO: OpInfo = cost::info(
    NAME,
    lowering::LOWERING,
    "q, k, v, out; backward those, dout, dq, dk, dv",
    |o| cost::forward(o, 0.0),
    |o| cost::backward(o, o.output.bytes()),
)
.with_composed_backward(reference::backward_workspace);

/// The largest head dimension that [`flash()`] takes.
pub const MAX_HEAD_DIM: usize = 256;

/// `out = softmax(scale q k^T) v` without scores or probabilities in memory: q (B, H, Tq, Dh), k and v (B, Hkv, Tk,
/// Dh), out (B, H, Tq, Dh), Dh up to [`FLASH_MAX_HEAD_DIM`](super::FLASH_MAX_HEAD_DIM).
///
/// Hkv divides H: each head of k and v serves H / Hkv heads of q in a row (grouped queries). Any number of leading
/// dimensions will do in B's place, if they agree; two dimensions are one head. Strides are taken as they come.
///
/// f32, f64, f16 and bf16; half precision is computed in f32 and rounded once, on a GPU with probabilities and score
/// gradients rounded before they are multiplied. A GPU multiplies f32 on tensor cores: each product as three of TF32,
/// which are off by 2^-24 of it as a rule and by 2^-21 at most, or as one where [`hardware::set_tf32`] says so.
/// Backward multiplies as forward did. A query that sees no key gets zeros, and passes no gradient; so do all where Tk
/// is 0. A NaN in q stays in its row of the output. Autocast: lower under both policies, as PyTorch's
/// `scaled_dot_product_attention`.
///
/// What is not finite reaches nothing that the mask hides from it, and finite inputs give finite results; on a GPU
/// within limits, as in PyTorch's fused attention. Its products are of whole tiles, with zeros where the mask hides: an
/// infinity or a NaN may show in the up to 320 rows before it (out, dq) or after it (dk, dv) that share a tile with it,
/// and in gradients of keys in a tile of queries that see none. Scores are scaled and subtracted in one multiply-add:
/// from some 1e9 its rounding is an exponent that overflows.
///
/// Differentiable in q, k and v. Kept for backward: q, k, v, out and, of every query, the log-sum-exp of its scores (4
/// bytes; 8 in f64), and what rounding took from it (as much again), or in half precision what rounding took from out:
/// the gradients would inherit either error. Backward recomputes the probabilities, tile by tile: `delta = sum(dO O)`,
/// `P = exp(scale Q K^T - lse)`, `dV = P^T dO`, `dS = P (dO V^T - delta)`, `dQ = scale dS K`, `dK = scale dS^T Q`. 4 B
/// H Tq Tk Dh FLOPs forward, two and a half times that backward; tiles that the mask or [first keys](super::FirstKeys)
/// hide are not computed.
///
/// With a [soft cap](AttentionConfig::soft_cap) C of the scores S, `C tanh(S / C)` takes their place, and backward has
/// `dS (1 - tanh(S / C)^2)` in that of dS.
///
/// With [dropout](AttentionConfig::dropout) of the probabilities nothing more is kept: which ones are dropped is drawn
/// again in backward, from the key. `lse` is that of all.
///
/// Tri Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and
/// 2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, Mask};
///
/// let q = Tensor::randn(0f32, 1.0, (2, 6, 50, 24), &Device::Cpu)?; // (B, H, Tq, Dh)
/// let k = Tensor::randn(0f32, 1.0, (2, 3, 70, 24), &Device::Cpu)?; // (B, Hkv, Tk, Dh)
/// let config = AttentionConfig { mask: Mask::CausalEnd, ..Default::default() };
/// let out = attention::flash(&q, &k, &k, &config)?;
/// assert_eq!(out.dims(), [2, 6, 50, 24]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not fit each other, heads that kv heads do not divide, a head dimension of 0 or over the limit, mixed
/// dtypes or devices; first keys of another shape; a soft cap that is not positive and finite; a dropout that is no
/// probability.
pub fn flash(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    Ok(flash_with_lse(q, k, v, config)?.0)
}

/// As [`flash()`], with `lse = log(sum(exp(scores)))` of every query beside it: (B, H, Tq), in f32 (f64 for f64).
///
/// -inf for a query that sees no key. `lse` carries no gradient: it is a constant to whatever is computed from it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig};
///
/// let q = Tensor::zeros((1, 1, 1, 8), candle_core::DType::F32, &Device::Cpu)?;
/// let k = Tensor::ones((1, 1, 4, 8), candle_core::DType::F32, &Device::Cpu)?;
/// let (out, lse) = attention::flash_with_lse(&q, &k, &k, &AttentionConfig::default())?;
/// assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [1.0; 8]);
/// assert!((lse.flatten_all()?.to_vec1::<f32>()?[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`flash()`].
pub fn flash_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = &cast_for(NAME, [q, k, v])?;
    let shapes = check(q, k, v, config)?;
    let tf32 = hardware::tf32(q.device());
    #[cfg(feature = "cuda")]
    let path = match q.device().is_cuda() {
        true => choose_where(NAME, q, cuda::has_kernel(q, &shapes, config, tf32)),
        false => choose(&INFO, q),
    };
    #[cfg(not(feature = "cuda"))]
    let path = choose(&INFO, q);
    if path? == Path::Reference {
        return reference(q, k, v, config);
    }
    if let Some(out) = nothing(NAME, &shapes, [q, k, v])? {
        return Ok((out, lse_of_nothing(q)?));
    }
    let (heads, kv_heads) = (shapes.heads, shapes.kv_heads);
    let lse = Arc::<OnceLock<Tensor>>::default();
    let op = Flash {
        sizes: shapes.sizes(config),
        config: config.clone(),
        tf32,
        lse: Arc::clone(&lse),
    };
    let of_heads = |x, heads| Result::Ok(op.readable(four_dimensions(x, heads)?)?);
    let inputs = [
        of_heads(q, heads)?,
        of_heads(k, kv_heads)?,
        of_heads(v, kv_heads)?,
    ];
    let out = as_they_lie(&INFO, op, inputs.each_ref())?;
    let lse = match graph::is_tracing() {
        true => graph::kept_value(&out, "lse")?,
        false => lse.get().cloned(),
    };
    let Some(lse) = lse else {
        return Err(candle_core::Error::msg("attention::flash: forward left no lse").into());
    };
    let lse = lse.narrow(0, 0, 1)?.reshape(&q.dims()[..q.rank() - 1])?;
    Ok((out.reshape(q.shape())?, lse))
}

/// x (..., heads, T, Dh) as (B, heads, T, Dh).
fn four_dimensions(x: &Tensor, heads: usize) -> Result<Tensor> {
    match *x.dims() {
        [_, _, _, _] => Ok(x.clone()),
        [ref leading @ .., length, head_dim] => {
            let batch = match leading {
                [rest @ .., _] => rest.iter().product(),
                [] => 1,
            };
            Ok(x.reshape((batch, heads, length, head_dim))?)
        }
        _ => Ok(x.clone()), // refused by `check`
    }
}

/// Checks what [`flash()`] takes.
fn check(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Shapes> {
    let shapes = Shapes::of(NAME, q, k, v, config)?;
    if let Some(dropout) = &config.dropout {
        check_probability("attention::AttentionConfig", "dropout", dropout.probability)?;
    }
    if shapes.head_dim > MAX_HEAD_DIM || shapes.head_dim != shapes.value_dim {
        return Err(Error::Shape {
            op: NAME,
            expected: format!("one head dimension for q, k and v, at most {MAX_HEAD_DIM}"),
            got: format!(
                "{} for q and k, {} for v",
                shapes.head_dim, shapes.value_dim
            ),
            hint: "attention::naive takes any".into(),
        });
    }
    Ok(shapes)
}
