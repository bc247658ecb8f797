//! The pairs of a query tile and a key tile that the mask leaves.

use candle_core::{Device, Result, Tensor};
use std::ops::Range;

/// Which pairs of a tile are seen, the tile being (rows, keys) with several heads' queries one after another as rows.
pub(super) struct Seen {
    /// 1 where the row sees the key, else 0, as (1 or G, rows, keys); `None` where every row sees every key.
    pairs: Option<Tensor>,
}

impl Seen {
    /// For so many matrices, `heads` times the queries `i` in each, and the keys `j`; `None` where no query sees a key.
    pub(super) fn new(
        [matrices, heads]: [usize; 2],
        i: &Range<usize>,
        j: &Range<usize>,
        sees: impl Fn(usize, usize, usize) -> bool,
        device: &Device,
    ) -> Result<Option<Self>> {
        let all_heads = (0..matrices).flat_map(|matrix| (0..heads).map(move |_| matrix));
        let rows = all_heads.flat_map(|matrix| i.clone().map(move |i| (matrix, i)));
        let pairs: Vec<u8> = rows
            .flat_map(|(matrix, i)| j.clone().map(move |j| (matrix, i, j)))
            .map(|(matrix, i, j)| u8::from(sees(matrix, i, j)))
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

    /// x (G, rows, keys) where a key is seen, `hidden` elsewhere: chosen, so that a NaN there has no say.
    pub(super) fn select(&self, x: &Tensor, hidden: f32) -> Result<Tensor> {
        let Some(pairs) = &self.pairs else {
            return Ok(x.clone());
        };
        let hidden = super::constant(hidden, x)?;
        pairs.broadcast_as(x.shape())?.where_cond(x, &hidden)
    }

    /// `a b` (G, rows, n) over the pairs that are seen: a (G, rows, keys), 0 where one is not, b (G, keys, n).
    pub(super) fn product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        match &self.pairs {
            Some(pairs) => product_of_seen(pairs, a, b),
            None => a.matmul(b),
        }
    }

    /// `a^T b` (G, keys, n) over the pairs that are seen: a (G, rows, keys), 0 where one is not, b (G, rows, n).
    pub(super) fn product_of_transposed(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let a = a.t()?;
        match &self.pairs {
            Some(pairs) => product_of_seen(&pairs.t()?, &a, b),
            None => a.matmul(b),
        }
    }
}

/// `a b`, to which an element of b that is not finite contributes only where it is seen: times the 0 of a hidden pair
/// it would be NaN. So such elements are left out, and where one is seen the sum is made NaN after.
fn product_of_seen(pairs: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let zeros = b.zeros_like()?;
    let is_finite = (b * 0.0)?.eq(0f32)?; // infinity times 0 is NaN too
    let product = a.matmul(&is_finite.where_cond(b, &zeros)?)?;
    let strange = is_finite.where_cond(&zeros, &super::constant(1.0, b)?)?;
    let pairs = pairs.to_dtype(a.dtype())?.broadcast_as(a.shape())?;
    let meets_strange = pairs.contiguous()?.matmul(&strange)?.ne(0f32)?;
    meets_strange.where_cond(&super::constant(f32::NAN, &product)?, &product)
}
