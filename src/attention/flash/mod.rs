//! FlashAttention-2: attention tile by tile, with no tensor of size Tq Tk in memory.
//!
//! [`flash()`] and [`flash_with_lse`] are one op with kernels; [`reference()`] is the same algorithm composed of
//! candle's own ops.

#[cfg(feature = "cuda")]
mod cuda;
pub(super) mod lowering;
mod op;
mod reference;

pub use reference::reference;

use super::AttentionConfig;
use super::masks::MaskTensors;
use super::nothing::{lse_of_nothing, nothing};
use super::shapes;
use crate::attention::cost;
use crate::kernels::attention::Sizes;
use crate::ops::check_probability;
#[cfg(feature = "cuda")]
use crate::ops::choose_where;
use crate::ops::info::OpInfo;
use crate::ops::record::{Spec, by_strided_kernels};
use crate::ops::{Dropout, Path, cast_for, choose, with_last_dim};
use crate::{Error, Result, graph, hardware};
use candle_core::Tensor;
use op::Flash;
use std::sync::{Arc, OnceLock};

pub(super) const NAME: &str = "attention::flash";

/// The description of the op: lowering, cost and fallback.
pub(crate) const INFO: OpInfo = cost::info(
    NAME,
    lowering::LOWERING,
    "q, k, v, out; backward those, dout, dq, dk, dv",
    |o| cost::forward(o, 0.0),
    |o| cost::backward(o, o.output.bytes()),
)
.with_composed_backward(reference::backward_workspace);

/// The largest head dimension of [`flash()`].
pub const MAX_HEAD_DIM: usize = 256;

/// Computes `out = softmax(scale q k^T) v` without a tensor of scores or probabilities.
///
/// Shapes: q (B, H, Tq, Dh), k (B, Hkv, Tk, Dh), v (B, Hkv, Tk, Dv), out (B, H, Tq, Dv), with Dh and Dv up to
/// [`FLASH_MAX_HEAD_DIM`](super::FLASH_MAX_HEAD_DIM). (In latent attention Dh is 192 and Dv 128.) B may be any number
/// of leading dimensions, the same in all three; a tensor of two dimensions is one head. Hkv divides H: each head of k
/// and v serves H / Hkv consecutive heads of q (grouped-query attention). Any strides are accepted. A query that
/// attends to no key has an output and gradients of zero; so has every query if Tk is 0.
///
/// # Precision
/// f32, f64, f16 and bf16. Half precision is computed in f32 and rounded once; on a GPU the probabilities and their
/// gradients are rounded too, before they are multiplied. A GPU multiplies f32 on tensor cores: each f32 product is
/// computed as three TF32 products (relative error usually 2^-24, at most 2^-21), or as one with
/// [`hardware::set_tf32`]. Backward multiplies as forward did. Autocast casts q, k and v to half precision under both
/// policies, as it does for PyTorch's `scaled_dot_product_attention`; a bias keeps its dtype.
///
/// # NaN and infinity
/// A NaN in q stays in its row of the output. A NaN or an infinity never reaches an element that the mask hides from
/// it, and finite inputs give finite results. On a GPU there are two exceptions, as in PyTorch's fused attention. Tiles
/// are multiplied whole, with zeros where the mask hides: A NaN or an infinity can then spread inside its tile, to
/// pairs that the mask hides. It can reach out and dq of up to 320 rows before its row, dk and dv of up to 320 rows
/// after it, and dk and dv of keys to which no query of the tile attends. And scale and subtraction of the row's
/// maximum are one multiply-add: for scores above about 1e9 its rounding error makes the exponential overflow.
///
/// # Backward
/// Differentiable in q, k, v and a tracked bias. Saved for backward: q, k, v, out and the log-sum-exp of each query's
/// scores (4 bytes; 8 in f64). A rounding error is saved too: in f32 and f64 that of the log-sum-exp, as large as it;
/// in half precision that of out, as large as out. Backward corrects the gradients by these errors. The probabilities
/// are recomputed tile by tile: `delta = sum(dO O)`, `P = exp(scale Q K^T - lse)`, `dV = P^T dO`, `dS = P (dO V^T -
/// delta)`, `dQ = scale dS K`, `dK = scale dS^T Q`.
///
/// With a [soft cap](AttentionConfig::soft_cap) C, `C tanh(S / C)` replaces the scores S, and `dS (1 - tanh(S / C)^2)`
/// replaces dS. A tracked [bias](AttentionConfig::bias) has the gradient `P (dO V^T - delta)`, summed over the
/// dimensions in which it is repeated; a separate pass computes it.
///
/// With [dropout](AttentionConfig::dropout) nothing more is saved: backward draws the dropped elements again from the
/// key. The log-sum-exp is taken before dropout.
///
/// # Cost
/// 2 B H Tq Tk (Dh + Dv) FLOPs forward, B H Tq Tk (6 Dh + 4 Dv) backward, and 2 B H Tq Tk (Dh + Dv) for the gradient of
/// a bias. Of backward, 2 B H Tq Tk Dh recompute the scores; profiles do not count these
/// ([`Cost`](crate::probe::Cost)). Tiles that the mask, the [first keys](super::FirstKeys) or the [key
/// mask](super::KeyMask) hide are skipped. On a GPU the narrower of Dh and Dv is padded to the wider, so matmuls cost
/// as if both were the wider.
///
/// # Source
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
/// Shapes that do not match; an H that Hkv does not divide; a Dh of 0; a Dh or Dv above the limit; mixed dtypes or
/// devices; first keys of another shape; a key mask or a bias that does not broadcast to the scores; a soft cap that is
/// not positive and finite; a dropout probability outside [0, 1).
pub fn flash(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    Ok(flash_with_lse(q, k, v, config)?.0)
}

/// Computes [`flash()`] and the log-sum-exp of each query's scores, `lse = log(sum(exp(scores)))`.
///
/// lse has the shape (B, H, Tq), in f32, or in f64 for f64. It is -inf for a query that attends to no key. No gradient
/// flows through it.
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
/// Those of [`flash()`].
pub fn flash_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = &cast_for(NAME, [q, k, v])?;
    let sizes = check(q, k, v, config)?;
    let tf32 = hardware::tf32(q.device());
    #[cfg(feature = "cuda")]
    let path = match q.device().is_cuda() {
        true => choose_where(NAME, q, cuda::has_kernel(q, &sizes, tf32)),
        false => choose(&INFO, q),
    };
    #[cfg(not(feature = "cuda"))]
    let path = choose(&INFO, q);
    if path? == Path::Reference {
        return reference(q, k, v, config);
    }
    let masks = MaskTensors::of_flash(NAME, config, q, &sizes)?;
    if let Some(out) = nothing(NAME, &sizes, &masks.inputs([q, k, v]))? {
        return Ok((out, lse_of_nothing(q)?));
    }
    let (heads, kv_heads) = (sizes.heads, sizes.kv_heads);
    let lse = Arc::<OnceLock<Tensor>>::default();
    let op = Flash {
        sizes,
        dropout: config.dropout.as_ref().map(Dropout::kernel),
        reads: config.reads(&masks),
        tf32,
        lse: Arc::clone(&lse),
    };
    let of_heads = |x, heads| Result::Ok(op.readable(four_dimensions(x, heads)?)?);
    let [q_heads, k_heads, v_heads] = [
        of_heads(q, heads)?,
        of_heads(k, kv_heads)?,
        of_heads(v, kv_heads)?,
    ];
    let out = match &masks.bias {
        None => by_strided_kernels(&INFO, op, [&q_heads, &k_heads, &v_heads])?,
        Some(bias) => by_strided_kernels(&INFO, op, [&q_heads, &k_heads, &v_heads, bias])?,
    };
    let lse = match graph::is_tracing() {
        true => graph::saved_value(&out, "lse")?,
        false => lse.get().cloned(),
    };
    let Some(lse) = lse else {
        return Err(candle_core::Error::msg("attention::flash: forward left no lse").into());
    };
    let lse = lse.narrow(0, 0, 1)?.reshape(&q.dims()[..q.rank() - 1])?;
    Ok((out.reshape(with_last_dim(q.dims(), sizes.value_dim))?, lse))
}

/// Reshapes x (..., heads, T, D) to (B, heads, T, D).
fn four_dimensions(x: &Tensor, heads: usize) -> Result<Tensor> {
    match *x.dims() {
        [_, _, _, _] => Ok(x.clone()),
        [ref leading @ .., length, width] => {
            let batch = match leading {
                [rest @ .., _] => rest.iter().product(),
                [] => 1,
            };
            Ok(x.reshape((batch, heads, length, width))?)
        }
        _ => Ok(x.clone()), // refused by `check`
    }
}

/// Checks the arguments of [`flash()`].
fn check(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Sizes> {
    let sizes = shapes::check(NAME, q, k, v, config)?;
    if let Some(dropout) = &config.dropout {
        check_probability("attention::AttentionConfig", "dropout", dropout.probability)?;
    }
    if sizes.widest() > MAX_HEAD_DIM {
        return Err(Error::Shape {
            op: NAME,
            expected: format!("head dimensions of at most {MAX_HEAD_DIM}"),
            got: format!("{} for q and k, {} for v", sizes.head_dim, sizes.value_dim),
            hint: "use attention::naive, which has no such limit".into(),
        });
    }
    Ok(sizes)
}
