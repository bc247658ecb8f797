//! The products of naive attention, on heads of one length wherever they lie.
//!
//! Under a causal mask they are taken a block of queries at a time, with the keys that these see between them; the gradients of
//! keys a block of keys at a time, with the queries that see some of them. What the mask hides of the rest is neither computed
//! nor read. Softmax writes zeros there, and reads nothing that is hidden: whatever lies there beforehand has no say.

use super::super::attention::HeadAttentionSizes;
use super::super::op::AttentionSizes;
use super::call::Launcher;
use crate::Result;
use crate::kernels::Mask;
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::softmax::Scores;
use std::ops::Range;

/// Blocks of a causal head: with four of them products cost 5/8 of what they cost whole. With eight it would be 9/16, but a
/// block's results are then too few for a large card (H200, 8 heads of 64, T 16,384: forward and backward took 38 ms for 36 in
/// f32, and in bf16 the same 8.9).
const BLOCKS: usize = 4;

/// Rows of a block at least: with half of them the same at T 4,096 took 4.0 ms for 2.8 in f32, 0.74 for 0.67 in bf16.
const BLOCK_ROWS: usize = 1024;

/// What a block's size is a multiple of, so that its rows begin as well aligned as the head's.
const ALIGNED_ROWS: usize = 128;

/// Heads alike, as many queries as keys.
#[derive(Clone, Copy)]
pub(super) struct Naive {
    /// How many one product takes.
    pub heads: usize,
    /// T.
    pub length: usize,
    pub mask: Mask,
    pub scale: f64,
}

impl Naive {
    /// The heads of one sequence of a model.
    pub(super) fn of_sequence(sizes: &AttentionSizes) -> Self {
        Self {
            heads: sizes.heads,
            length: sizes.length,
            mask: Mask::Causal,
            scale: sizes.scale,
        }
    }

    /// Some heads of those that lie one after another.
    pub(super) fn of_heads(sizes: &HeadAttentionSizes, heads: usize) -> Self {
        Self {
            heads,
            length: sizes.length,
            mask: sizes.mask,
            scale: sizes.scale,
        }
    }

    /// What softmax is told of the scores.
    pub(super) fn scores(&self) -> Scores {
        Scores {
            scale: self.scale,
            mask: self.mask,
            queries: self.length,
            keys: self.length,
        }
    }

    /// The positions of each block.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let length = self.length;
        let rows = match self.mask {
            Mask::Full => length,
            Mask::Causal | Mask::CausalEnd => {
                let rows = length.div_ceil(BLOCKS).next_multiple_of(ALIGNED_ROWS);
                rows.max(BLOCK_ROWS)
            }
        };
        let starts = (0..length).step_by(rows);
        starts.map(move |start| start..length.min(start + rows))
    }

    /// The keys that some of these queries see.
    fn seen_by(&self, queries: &Range<usize>) -> Range<usize> {
        match self.mask {
            Mask::Full => 0..self.length,
            Mask::Causal | Mask::CausalEnd => 0..queries.end, // the same for as many queries as keys
        }
    }

    /// The queries that see some of these keys.
    fn that_see(&self, keys: &Range<usize>) -> Range<usize> {
        match self.mask {
            Mask::Full => 0..self.length,
            Mask::Causal | Mask::CausalEnd => keys.start..self.length,
        }
    }
}

/// `s = x y^T` where the mask leaves something: x, y (T, Dh), s (T, T). The scores of q and k; of d_out and v, the
/// probabilities' gradients.
pub(super) fn compare(
    launcher: &mut Launcher<'_>,
    naive: &Naive,
    [x, y]: [Matrix<'_>; 2],
    s: Matrix<'_>,
) -> Result<()> {
    for queries in naive.blocks() {
        let keys = naive.seen_by(&queries);
        let factors = [x.of_rows(queries.clone()), y.of_rows(keys.clone()).t()];
        launcher.multiply(factors, s.part(queries, keys), naive.heads)?;
    }
    Ok(())
}

/// `y = p x`, where p (T, T) is 0 for what the mask hides; x, y (T, Dh). The output of probabilities and v; of the scores'
/// gradients and k, those of q.
pub(super) fn gather(
    launcher: &mut Launcher<'_>,
    naive: &Naive,
    [p, x]: [Matrix<'_>; 2],
    y: Matrix<'_>,
) -> Result<()> {
    for queries in naive.blocks() {
        let keys = naive.seen_by(&queries);
        let factors = [p.part(queries.clone(), keys.clone()), x.of_rows(keys)];
        launcher.multiply(factors, y.of_rows(queries), naive.heads)?;
    }
    Ok(())
}

/// `y = p^T x`, of the same. The gradients of v, of probabilities and d_out; of k, of the scores' gradients and q.
pub(super) fn scatter(
    launcher: &mut Launcher<'_>,
    naive: &Naive,
    [p, x]: [Matrix<'_>; 2],
    y: Matrix<'_>,
) -> Result<()> {
    for keys in naive.blocks() {
        let queries = naive.that_see(&keys);
        let factors = [
            p.part(queries.clone(), keys.clone()).t(),
            x.of_rows(queries),
        ];
        launcher.multiply(factors, y.of_rows(keys), naive.heads)?;
    }
    Ok(())
}
