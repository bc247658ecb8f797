//! Attention as it is written down: scores, softmax, weighted sum.

use super::AttentionConfig;
use crate::{Error, Result, ops};
use candle_core::Tensor;

/// `out = softmax(scale q k^T) v`, with the scores and the probabilities in memory: q (B, H, Tq, Dh),
/// k and v (B, H, Tk, Dh), out (B, H, Tq, Dh). Any number of leading dimensions will do, if they agree.
///
/// Differentiable in q, k and v. Kept for backward, beside them: the probabilities, B H Tq Tk elements; the scores live
/// as long (candle's graph holds an op's input), another B H Tq Tk. That is the cost which tiled attention removes.
/// 4 B H Tq Tk Dh FLOPs forward, twice that backward, whatever the mask.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, Mask};
///
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &Device::Cpu)?;
/// let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
/// let out = attention::naive(&q, &q, &q, &config)?;
/// assert_eq!(out.dims(), [2, 3, 5, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not fit each other, no keys, mixed dtypes or devices.
pub fn naive(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let fits = match (q.dims(), k.dims(), v.dims()) {
        ([q @ .., _, q_dim], [k @ .., k_len, k_dim], [v @ .., v_len, _]) => {
            q == k && k == v && q_dim == k_dim && k_len == v_len && *q_dim > 0
        }
        _ => false,
    };
    if !fits {
        return Err(Error::Shape {
            op: "attention::naive",
            expected: "q (B, H, Tq, Dh), k and v (B, H, Tk, Dh)".into(),
            got: format!("q {:?}, k {:?}, v {:?}", q.dims(), k.dims(), v.dims()),
            hint: "ops::split_heads makes heads of (B, T, D)".into(),
        });
    }
    ops::check_same("attention::naive", &[("q", q), ("k", k), ("v", v)])?;
    let scale = config.scale_for(q.dims()[q.rank() - 1]);
    let scores = ops::matmul_transposed(q, k)?; // (B, H, Tq, Tk)
    let probabilities = ops::softmax(&scores, scale, config.mask)?; // (B, H, Tq, Tk)
    ops::matmul(&probabilities, v) // (B, H, Tq, Dh)
}
