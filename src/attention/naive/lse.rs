//! The log-sum-exp of scores where no kernel writes it.

use super::NAME;
use crate::Result;
use crate::attention::AttentionConfig;
use crate::attention::host_seen::HostSeen;
use crate::attention::masks::MaskTensors;
use crate::attention::nothing::lse_of_nothing;
use crate::attention::shapes::{check, is_empty};
use crate::ops::info::OpInfo;
use crate::ops::record::{composed, widen};
use candle_core::{D, DType, Device, Tensor};

/// The description of the log-sum-exp as an op: it is timed and planned as a part of attention.
pub(super) const LSE: OpInfo = OpInfo::new("attention::naive lse");

/// Computes the log-sum-exp (..., H, Tq) of each query's scores with candle's own ops. No gradient flows through it.
pub(super) fn reference(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let sizes = check(NAME, q, k, v, config)?;
    if is_empty(&sizes) {
        return lse_of_nothing(q);
    }
    let masks = MaskTensors::new(NAME, config, q, &sizes)?;
    let (q, k) = (q.detach(), k.detach());
    let wide = match q.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let lse_shape = &q.dims()[..q.rank() - 1];
    let lse = composed(&LSE, &[&q, &k], (lse_shape, wide), || {
        let rows = sizes.group() * sizes.queries;
        let matrices = sizes.kv_matrices();
        let q = widen(&q)?.reshape((matrices, rows, sizes.head_dim))?; // (B Hkv, H / Hkv Tq, Dh)
        let k = widen(&k)?.reshape((matrices, sizes.keys, sizes.head_dim))?; // (B Hkv, Tk, Dh)
        let scores = (q.matmul(&k.t()?)? * sizes.scale)?;
        let scores = match config.soft_cap {
            None => scores,
            Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        };
        let scores = scores.reshape((sizes.batch, sizes.heads, sizes.queries, sizes.keys))?;
        let scores = match &masks.bias {
            None => scores,
            Some(bias) => scores.broadcast_add(&bias.detach())?,
        };
        let seen = HostSeen::new(config, &masks, &sizes)?.tensor(q.device())?;
        let seen = seen.broadcast_as(scores.shape())?;
        // Selected rather than multiplied: a hidden NaN does not spread. Finite: a row without visible keys sums to 0.
        let low = if wide == DType::F64 { -1e300 } else { -1e38 };
        let low = Tensor::full(low, scores.shape(), &Device::Cpu)?.to_dtype(wide)?;
        let scores = seen.where_cond(&scores, &low.to_device(q.device())?)?;
        let top = scores.max_keepdim(D::Minus1)?;
        let e = (scores.broadcast_sub(&top)?.exp()? * seen.to_dtype(wide)?)?;
        (top + e.sum_keepdim(D::Minus1)?.log()?)?.reshape(lse_shape)
    })?;
    Ok(lse.detach())
}
