//! The pairs of queries and keys in a tile that the mask leaves visible.

use candle_core::{Device, Result, Tensor};
use std::ops::Range;

/// The visible pairs of a tile (rows, keys), whose rows are the queries of several heads, head by head.
pub(super) struct Seen {
    /// 1 for a visible pair, else 0, (1 or G, rows, keys); `None` if all pairs are visible.
    pairs: Option<Tensor>,
}

impl Seen {
    /// Evaluates `sees` for each of `heads` in each of `matrices`, for the queries `i` and the keys `j`. Returns `None`
    /// if no pair is visible.
    pub(super) fn new(
        [matrices, heads]: [usize; 2],
        i: &Range<usize>,
        j: &Range<usize>,
        sees: impl Fn([usize; 2], usize, usize) -> bool,
        device: &Device,
    ) -> Result<Option<Self>> {
        let all_heads = (0..matrices).flat_map(|matrix| (0..heads).map(move |head| [matrix, head]));
        let rows = all_heads.flat_map(|head| i.clone().map(move |i| (head, i)));
        let pairs: Vec<u8> = rows
            .flat_map(|(head, i)| j.clone().map(move |j| (head, i, j)))
            .map(|(head, i, j)| u8::from(sees(head, i, j)))
            .collect();
        if pairs.iter().all(|seen| *seen == 0) {
            return Ok(None);
        }
        if pairs.iter().all(|seen| *seen == 1) {
            return Ok(Some(Self { pairs: None }));
        }
        let shape = (matrices, heads * i.len(), j.len());
        let pairs = Some(Tensor::from_vec(pairs, shape, device)?);
        Ok(Some(Self { pairs }))
    }

    /// Returns x (G, rows, keys) with `hidden` in place of hidden pairs. It selects rather than multiplies, so that a
    /// NaN in a hidden pair does not spread.
    pub(super) fn select(&self, x: &Tensor, hidden: f32) -> Result<Tensor> {
        let Some(pairs) = &self.pairs else {
            return Ok(x.clone());
        };
        let hidden = super::constant(hidden, x)?;
        pairs.broadcast_as(x.shape())?.where_cond(x, &hidden)
    }

    /// Returns `a b` (G, rows, n) for a (G, rows, keys), which is 0 in hidden pairs, and b (G, keys, n).
    pub(super) fn product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        match &self.pairs {
            Some(pairs) => product_of_seen(pairs, a, b),
            None => a.matmul(b),
        }
    }

    /// Returns `a^T b` (G, keys, n) for a (G, rows, keys), which is 0 in hidden pairs, and b (G, rows, n).
    pub(super) fn product_of_transposed(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let a = a.t()?;
        match &self.pairs {
            Some(pairs) => product_of_seen(&pairs.t()?, &a, b),
            None => a.matmul(b),
        }
    }
}

/// Returns `a b`, where NaN and infinite elements of b count in visible pairs only. (Times the 0 of a hidden pair they
/// would be NaN.) They are left out of the matmul, and each sum with a visible one is set to NaN afterwards.
fn product_of_seen(pairs: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let zeros = b.zeros_like()?;
    let is_finite = (b * 0.0)?.eq(0f32)?; // infinity times 0 is NaN too
    let product = a.matmul(&is_finite.where_cond(b, &zeros)?)?;
    let strange = is_finite.where_cond(&zeros, &super::constant(1.0, b)?)?;
    let pairs = pairs.to_dtype(a.dtype())?.broadcast_as(a.shape())?;
    let meets_strange = pairs.contiguous()?.matmul(&strange)?.ne(0f32)?;
    meets_strange.where_cond(&super::constant(f32::NAN, &product)?, &product)
}
