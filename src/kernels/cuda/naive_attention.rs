//! Naive attention: matmuls and the softmax between them, on strided heads of one length.
//!
//! Under a causal mask, matmuls run over blocks of queries, each with the keys that the block attends to. The gradients
//! of k and v run over blocks of keys, each with the queries that attend to the block. Masked elements outside of these
//! blocks are neither computed nor read. The softmax writes zeros there without reading them, so their previous values
//! have no effect.
//!
//! Scores and the gradients of probabilities are f32, whatever the dtype of the heads. Rounded to bf16, a score of 100
//! would be off by up to a quarter, and its exponential by as much, relatively. In half precision, the f32 scores of
//! only some heads exist at a time, next to the probabilities and the gradients of the scores, which are rounded for
//! the matmuls.
//!
//! The caller passes the matmul: cuBLAS for eager ops ([`super::cublas`]), cuBLASLt for planned steps
//! ([`super::matmul`]).

use super::View;
use super::flash_attention::Heads;
use super::matmul::Matrix;
use super::softmax::{self, Scores};
use crate::kernels::Mask;
use crate::kernels::attention::Sizes;
use candle_core::Result;
use candle_core::cuda_backend::CudaDevice;
use std::ops::Range;

/// Blocks of a causal head. With four blocks, the matmuls cost 5/8 of those of the full matrix. Eight blocks would cost
/// 9/16, but are too small for a large GPU. (H200, 8 heads of 64, T 16,384, forward and backward: 38 ms instead of 36
/// in f32; 8.9 ms with both in bf16.)
const BLOCKS: usize = 4;

/// The least rows of a block. With half as many, the same at T 4,096 needed 4.0 ms instead of 2.8 in f32, and 0.74
/// instead of 0.67 in bf16.
const BLOCK_ROWS: usize = 1024;

/// Blocks have a multiple of this many rows, so that each begins as well aligned as its head.
const ALIGNED_ROWS: usize = 128;

/// Heads that one batched matmul covers: heads of k and v with the heads of q that share them.
#[derive(Clone, Copy)]
pub(crate) struct HeadGroups<'a> {
    /// The number of heads of k and v.
    pub kv_heads: usize,
    /// The number of heads of q per head of k and v. Their rows form one matrix, head after head. All rows use the same
    /// keys and values, whose gradients are sums over all rows.
    pub group: usize,
    /// Tq: the number of queries.
    pub queries: usize,
    /// Tk: the number of keys, at least one.
    pub keys: usize,
    pub mask: Mask,
    pub scale: f64,
    /// (B, Tq) u32: the first key of each query of a sequence, for all heads. Earlier keys are computed, with p = 0.
    pub first_keys: Option<View<'a>>,
    /// The number of heads of q in a sequence.
    pub heads: usize,
    /// The index of the first head of q, counted from the first head of the first sequence.
    pub first_head: usize,
}

impl<'a> HeadGroups<'a> {
    /// Returns all heads of a call.
    pub(crate) fn of(sizes: &Sizes, first_keys: Option<View<'a>>) -> Self {
        Self {
            kv_heads: sizes.kv_matrices(),
            group: sizes.group(),
            queries: sizes.queries,
            keys: sizes.keys,
            mask: sizes.mask,
            scale: sizes.scale,
            first_keys,
            heads: sizes.heads,
            first_head: 0,
        }
    }

    /// Returns the description of the scores for the softmax.
    pub(crate) fn scores(&self) -> Scores<'a> {
        Scores {
            scale: self.scale,
            mask: self.mask,
            queries: self.queries,
            keys: self.keys,
            first_keys: self.first_keys,
            heads: self.heads,
            first_head: self.first_head,
            masked: false,
            shown: None,
        }
    }

    /// Returns the number of rows of q per head of k and v.
    fn rows(&self) -> usize {
        self.group * self.queries
    }

    /// Returns the number of scores per head of k and v.
    fn scores_per_head(&self) -> usize {
        self.rows() * self.keys
    }

    /// Returns the number of scores of all heads.
    fn elements(&self) -> usize {
        self.kv_heads * self.scores_per_head()
    }

    /// Returns the scores of these heads as matrices.
    fn matrices<'v>(&self, view: View<'v>) -> Matrix<'v> {
        Matrix::batched(view, self.rows(), self.keys)
    }

    /// Returns whether blocks skip masked elements. Rows are queries only with one head of q per head of k and v.
    fn skips_masked(&self) -> bool {
        self.mask != Mask::Full && self.group == 1
    }

    /// Returns the ranges of the blocks of `length` positions.
    fn blocks(&self, length: usize) -> impl Iterator<Item = Range<usize>> {
        let rows = match self.skips_masked() {
            false => length,
            true => {
                let rows = length.div_ceil(BLOCKS).next_multiple_of(ALIGNED_ROWS);
                rows.max(BLOCK_ROWS)
            }
        };
        let starts = (0..length).step_by(rows.max(1));
        starts.map(move |start| start..length.min(start + rows))
    }

    /// Returns the keys that any of these rows attends to; if none, the first key, so that a matmul writes zeros.
    fn keys_of_rows(&self, rows: &Range<usize>) -> Range<usize> {
        match self.skips_masked() {
            false => 0..self.keys,
            true => {
                let end = rows.end as i64 + self.scores().shift();
                0..end.clamp(1, self.keys as i64) as usize
            }
        }
    }

    /// Returns the rows that attend to any of these keys, or the last row if there are none.
    fn rows_of_keys(&self, keys: &Range<usize>) -> Range<usize> {
        match self.skips_masked() {
            false => 0..self.rows(),
            true => {
                let start = keys.start as i64 - self.scores().shift();
                let last = self.queries as i64 - 1;
                start.clamp(0, last.max(0)) as usize..self.queries
            }
        }
    }
}

/// Computes `s = x y^T` except where masked: x (rows, Dh), y (Tk, Dh), s (rows, Tk). These are the scores, from q and
/// k, or the gradients of the probabilities, from d_out and v.
fn masked_scores(
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [x, y]: [Matrix; 2],
    s: Matrix,
) -> Result<()> {
    for rows in sizes.blocks(sizes.rows()) {
        let keys = sizes.keys_of_rows(&rows);
        let factors = [x.row_block(rows.clone()), y.row_block(keys.clone()).t()];
        multiply(factors, s.block(rows, keys), sizes.kv_heads)?;
    }
    Ok(())
}

/// Computes `y = p x`, where p (rows, Tk) is 0 for masked elements; x (Tk, Dh), y (rows, Dh). This is the output, from
/// the probabilities and v, or the gradient of q, from the gradients of the scores and k.
fn weighted_sum(
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [p, x]: [Matrix; 2],
    y: Matrix,
) -> Result<()> {
    for rows in sizes.blocks(sizes.rows()) {
        let keys = sizes.keys_of_rows(&rows);
        let factors = [p.block(rows.clone(), keys.clone()), x.row_block(keys)];
        multiply(factors, y.row_block(rows), sizes.kv_heads)?;
    }
    Ok(())
}

/// Computes `y = p^T x`, where p (rows, Tk) is 0 for masked elements; x (rows, Dh), y (Tk, Dh). This is the gradient of
/// v, from the probabilities and d_out, or that of k, from the gradients of the scores and q.
fn transposed_weighted_sum(
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [p, x]: [Matrix; 2],
    y: Matrix,
) -> Result<()> {
    for keys in sizes.blocks(sizes.keys) {
        let rows = sizes.rows_of_keys(&keys);
        let factors = [p.block(rows.clone(), keys.clone()).t(), x.row_block(rows)];
        multiply(factors, y.row_block(keys), sizes.kv_heads)?;
    }
    Ok(())
}

/// The heads whose scores are computed together: some heads of one sequence, or all heads of several sequences.
struct HeadBatch<'a> {
    sequences: Range<usize>,
    /// The index of the first head of k and v in each sequence.
    first: usize,
    /// The sizes, with the number of heads per sequence of this batch.
    sizes: HeadGroups<'a>,
    /// The number of heads of k and v in a sequence.
    heads_per_sequence: usize,
}

/// Splits all heads into batches. Each has as many heads as fit in `scores`, at least one.
fn head_batches<'a>(sizes: &HeadGroups<'a>, sequences: usize, scores: View) -> Vec<HeadBatch<'a>> {
    let heads_per_batch = (scores.len / sizes.scores_per_head().max(1)).max(1);
    let heads = sizes.kv_heads;
    let sequences_per_batch = (heads_per_batch / heads.max(1)).max(1);
    let mut batches = Vec::new();
    for start in (0..sequences).step_by(sequences_per_batch) {
        for first in (0..heads).step_by(heads_per_batch) {
            let some = HeadGroups {
                kv_heads: heads_per_batch.min(heads - first),
                first_head: sizes.first_head + (start * heads + first) * sizes.group,
                ..*sizes
            };
            batches.push(HeadBatch {
                sequences: start..sequences.min(start + sequences_per_batch),
                first,
                sizes: some,
                heads_per_sequence: heads,
            });
        }
    }
    batches
}

impl HeadBatch<'_> {
    /// Returns the part of `view`, the scores of all heads, that belongs to these heads.
    fn in_full_buffer<'v>(&self, view: View<'v>) -> View<'v> {
        let first = self.sequences.start * self.heads_per_sequence + self.first;
        view.slice(first * self.sizes.scores_per_head(), self.total_scores())
    }

    /// Returns the part of `view`, a buffer for one batch, that these heads fill.
    fn in_batch_buffer<'v>(&self, view: View<'v>) -> View<'v> {
        view.slice(0, self.total_scores())
    }

    fn total_scores(&self) -> usize {
        self.sequences.len() * self.sizes.elements()
    }

    /// Returns the scores of a sequence as matrices.
    fn scores<'v>(&self, view: View<'v>, sequence: usize) -> Matrix<'v> {
        let before = (sequence - self.sequences.start) * self.sizes.elements();
        self.sizes
            .matrices(view.slice(before, self.sizes.elements()))
    }

    /// Returns the heads of a sequence as matrices.
    fn heads<'v>(&self, x: Heads<'v>, sequence: usize) -> Matrix<'v> {
        let ([of_sequence, of_head, row_stride], [_, _, rows, cols]) = (x.strides, x.dims);
        let first = sequence * of_sequence + self.first * of_head;
        Matrix {
            row_stride,
            matrix_stride: of_head,
            ..Matrix::new(x.view.slice_from(first), rows, cols)
        }
    }
}

/// Computes `p = softmax(scale q k^T)` and `out = p v`. With N sequences of the heads of `sizes`: q and out (N, Hkv,
/// rows, ..), k and v (N, Hkv, Tk, ..) with strides, p (N, Hkv, rows, Tk). Heads are computed in batches, as many as
/// fit in `scores` (.., rows, Tk) f32, which is p itself if p is f32.
pub(crate) fn forward(
    gpu: &CudaDevice,
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [q, k, v]: [Heads; 3],
    scores: View,
    p: View,
    out: Heads,
) -> Result<()> {
    let has_own_scores = scores.pointer != p.pointer;
    for batch in head_batches(sizes, q.dims[0], scores) {
        let (some, p) = (&batch.sizes, batch.in_full_buffer(p));
        let s = if has_own_scores {
            batch.in_batch_buffer(scores)
        } else {
            p
        };
        for n in batch.sequences.clone() {
            let factors = [batch.heads(q, n), batch.heads(k, n)];
            masked_scores(multiply, some, factors, batch.scores(s, n))?;
        }
        softmax::forward(gpu, some.scores(), s, p)?;
        for n in batch.sequences.clone() {
            let factors = [batch.scores(p, n), batch.heads(v, n)];
            weighted_sum(multiply, some, factors, batch.heads(out, n))?;
        }
    }
    Ok(())
}

/// Computes `dv = p^T d_out`, `ds = scale p (dp - sum(dp p))` with `dp = d_out v^T`, `dq = ds k`, `dk = ds^T q`. Heads
/// are computed in batches, as many as fit in `dp` (.., rows, Tk) f32 and in `ds` of q's dtype, which is dp itself if
/// that is f32.
pub(crate) fn backward(
    gpu: &CudaDevice,
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [d_out, q, k, v]: [Heads; 4],
    p: View,
    [dp, ds]: [View; 2],
    [dq, dk, dv]: [Heads; 3],
) -> Result<()> {
    for batch in head_batches(sizes, q.dims[0], dp) {
        let (some, p) = (&batch.sizes, batch.in_full_buffer(p));
        let [dp, ds] = [dp, ds].map(|view| batch.in_batch_buffer(view));
        for n in batch.sequences.clone() {
            let [d_out, v, dv] = [d_out, v, dv].map(|x| batch.heads(x, n));
            masked_scores(multiply, some, [d_out, v], batch.scores(dp, n))?;
            transposed_weighted_sum(multiply, some, [batch.scores(p, n), d_out], dv)?;
        }
        softmax::backward_from_p(gpu, some.scores(), [dp, p], ds)?;
        for n in batch.sequences.clone() {
            let [q, k, dq, dk] = [q, k, dq, dk].map(|x| batch.heads(x, n));
            weighted_sum(multiply, some, [batch.scores(ds, n), k], dq)?;
            transposed_weighted_sum(multiply, some, [batch.scores(ds, n), q], dk)?;
        }
    }
    Ok(())
}
