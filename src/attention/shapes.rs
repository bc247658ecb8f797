//! Validation of the shapes of q, k and v.

use super::{AttentionConfig, masks};
use crate::kernels::attention::Sizes;
use crate::ops::soft_cap::check_cap;
use crate::{Error, Result, ops};
use candle_core::Tensor;

/// Returns a tensor's dimensions as (leading, heads, length, head dimension); two dimensions are one head.
fn split(x: &Tensor) -> Option<(&[usize], usize, usize, usize)> {
    match x.dims() {
        [leading @ .., heads, length, dim] => Some((leading, *heads, *length, *dim)),
        [length, dim] => Some((&[], 1, *length, *dim)),
        _ => None,
    }
}

/// Checks q (..., H, Tq, Dh), k (..., Hkv, Tk, Dh), v (..., Hkv, Tk, Dv) and the configuration for `op`; returns the
/// sizes.
///
/// # Errors
/// Shapes that do not match, heads that kv heads do not divide, a Dh of 0, mixed dtypes or devices; first keys of
/// another shape; a mask or bias that does not broadcast to the scores; a soft cap that is not positive and finite.
pub(super) fn check(
    op: &'static str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<Sizes> {
    let refuse = |hint: String| {
        Err(Error::shape(
            op,
            format!("q {:?}, k {:?}, v {:?}", q.dims(), k.dims(), v.dims()),
        )
        .must_be(
            "q (..., H, Tq, Dh), k (..., Hkv, Tk, Dh), v (..., Hkv, Tk, Dv)",
            hint,
        ))
    };
    let (Some(q_dims), Some(k_dims), Some(v_dims)) = (split(q), split(k), split(v)) else {
        return refuse("two dimensions at least: length and head dimension".into());
    };
    let (leading, heads, queries, head_dim) = q_dims;
    let (k_leading, kv_heads, keys, k_dim) = k_dims;
    let (v_leading, v_heads, v_keys, value_dim) = v_dims;
    if [k.rank(), v.rank()] != [q.rank(); 2] || [k_leading, v_leading] != [leading; 2] {
        return refuse("the dimensions before the heads must be the same".into());
    }
    if (kv_heads, keys) != (v_heads, v_keys) {
        return refuse("k and v come in pairs: same heads, same length".into());
    }
    if head_dim != k_dim {
        return refuse("q and k meet in inner products: same head dimension".into());
    }
    if !heads.is_multiple_of(kv_heads) {
        return refuse(format!(
            "the heads of k and v, one at least, must divide the {heads} heads of q"
        ));
    }
    if head_dim == 0 {
        return refuse("q and k have no elements to compare".into());
    }
    ops::check_same(op, &[("q", q), ("k", k), ("v", v)])?;
    if let Some(cap) = config.soft_cap {
        check_cap("attention::AttentionConfig", "soft_cap", cap)?;
    }
    if let Some(first_keys) = &config.first_keys {
        first_keys.check_shape(op, q)?;
    }
    masks::check(op, config, q, keys)?;
    let shape = [leading, &[heads, queries, value_dim]].concat();
    ops::check_size(op, &shape, q.dtype(), q.device())?;
    Ok(Sizes {
        batch: leading.iter().product(),
        heads,
        kv_heads,
        queries,
        keys,
        head_dim,
        value_dim,
        mask: config.mask,
        scale: config.scale_for(head_dim),
        soft_cap: config.soft_cap,
    })
}

/// Whether the output is empty, or there are no keys.
pub(super) fn is_empty(sizes: &Sizes) -> bool {
    let Sizes {
        batch,
        heads,
        queries,
        keys,
        value_dim,
        ..
    } = *sizes;
    [batch, heads, queries, keys, value_dim].contains(&0)
}
