//! Naive attention's products, and the softmax between them, on heads of one length wherever they lie.
//!
//! Under a causal mask products are taken a block of queries at a time, with the keys that these see between them; the
//! gradients of keys a block of keys at a time, with the queries that see some of them. What the mask hides of the rest
//! is neither computed nor read. Softmax writes zeros there, and reads nothing that is hidden: whatever lies there
//! beforehand has no say.
//!
//! Scores and the gradients of probabilities are f32, whatever is multiplied: rounded to half precision, a score of 100
//! would be off by a quarter, and its exponential by as much of itself. In half precision they are there for some heads
//! at a time, beside the probabilities and the scores' gradients, which are rounded for the products that take them.
//!
//! Who multiplies is the caller's choice: eager ops by cuBLAS ([`super::cublas`]), planned steps by cuBLASLt
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

/// Blocks of a causal head: with four of them products cost 5/8 of what they cost whole. With eight it would be 9/16,
/// but a block's results are then too few for a large GPU (H200, 8 heads of 64, T 16,384: forward and backward took 38
/// ms for 36 in f32, and in bf16 the same 8.9).
const BLOCKS: usize = 4;

/// Rows of a block at least: with half of them the same at T 4,096 took 4.0 ms for 2.8 in f32, 0.74 for 0.67 in bf16.
const BLOCK_ROWS: usize = 1024;

/// What a block's size is a multiple of, so that its rows begin as well aligned as the head's.
const ALIGNED_ROWS: usize = 128;

/// Heads that one product takes together: of k and v, and those of q that meet each of them.
#[derive(Clone, Copy)]
pub(crate) struct HeadGroups<'a> {
    /// How many heads of k and v one product takes.
    pub kv_heads: usize,
    /// How many heads of q meet each of them. Their rows are one matrix, one head's below the other's: each row meets
    /// the same keys and values, whose gradients are sums over all rows.
    pub group: usize,
    /// Tq.
    pub queries: usize,
    /// Tk, at least one.
    pub keys: usize,
    pub mask: Mask,
    pub scale: f64,
    /// (B, Tq) u32: a query of any head sees no key before the one that its sequence has there. What they hide is
    /// computed all the same, and 0 in the probabilities.
    pub first_keys: Option<View<'a>>,
    /// How many heads of q a sequence has.
    pub heads: usize,
    /// The number of the first head of q, counted from the first sequence's first.
    pub first_head: usize,
}

impl<'a> HeadGroups<'a> {
    /// All heads of a call.
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

    /// What softmax is told of the scores.
    pub(crate) fn scores(&self) -> Scores<'a> {
        Scores {
            scale: self.scale,
            mask: self.mask,
            queries: self.queries,
            keys: self.keys,
            first_keys: self.first_keys,
            heads: self.heads,
            first_head: self.first_head,
        }
    }

    /// Of a head of k and v: the rows of q that meet it.
    fn rows(&self) -> usize {
        self.group * self.queries
    }

    /// Scores of a head of k and v.
    fn of_head(&self) -> usize {
        self.rows() * self.keys
    }

    /// Scores of all.
    fn elements(&self) -> usize {
        self.kv_heads * self.of_head()
    }

    /// These heads' scores as matrices.
    fn matrices<'v>(&self, view: View<'v>) -> Matrix<'v> {
        Matrix::several(view, self.rows(), self.keys)
    }

    /// Whether blocks leave something out. Blocks of rows are blocks of queries where a head of keys has one of
    /// queries.
    fn is_cut(&self) -> bool {
        self.mask != Mask::Full && self.group == 1
    }

    /// The positions of each block.
    fn blocks(&self, length: usize) -> impl Iterator<Item = Range<usize>> {
        let rows = match self.is_cut() {
            false => length,
            true => {
                let rows = length.div_ceil(BLOCKS).next_multiple_of(ALIGNED_ROWS);
                rows.max(BLOCK_ROWS)
            }
        };
        let starts = (0..length).step_by(rows.max(1));
        starts.map(move |start| start..length.min(start + rows))
    }

    /// The keys that some of these rows see; the first where there are none, so that there is a product to write zeros.
    fn seen_by(&self, rows: &Range<usize>) -> Range<usize> {
        match self.is_cut() {
            false => 0..self.keys,
            true => {
                let end = rows.end as i64 + self.scores().shift();
                0..end.clamp(1, self.keys as i64) as usize
            }
        }
    }

    /// The rows that see some of these keys; the last where there are none.
    fn that_see(&self, keys: &Range<usize>) -> Range<usize> {
        match self.is_cut() {
            false => 0..self.rows(),
            true => {
                let start = keys.start as i64 - self.scores().shift();
                let last = self.queries as i64 - 1;
                start.clamp(0, last.max(0)) as usize..self.queries
            }
        }
    }
}

/// `s = x y^T` where the mask leaves something: x (rows, Dh), y (Tk, Dh), s (rows, Tk). The scores of q and k; of d_out
/// and v, the probabilities' gradients.
fn compare(
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [x, y]: [Matrix; 2],
    s: Matrix,
) -> Result<()> {
    for rows in sizes.blocks(sizes.rows()) {
        let keys = sizes.seen_by(&rows);
        let factors = [x.of_rows(rows.clone()), y.of_rows(keys.clone()).t()];
        multiply(factors, s.part(rows, keys), sizes.kv_heads)?;
    }
    Ok(())
}

/// `y = p x`, where p (rows, Tk) is 0 for what the mask hides; x (Tk, Dh), y (rows, Dh). The output of probabilities
/// and v; of the scores' gradients and k, those of q.
fn weighted_sum(
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [p, x]: [Matrix; 2],
    y: Matrix,
) -> Result<()> {
    for rows in sizes.blocks(sizes.rows()) {
        let keys = sizes.seen_by(&rows);
        let factors = [p.part(rows.clone(), keys.clone()), x.of_rows(keys)];
        multiply(factors, y.of_rows(rows), sizes.kv_heads)?;
    }
    Ok(())
}

/// `y = p^T x`, of the same: x (rows, Dh), y (Tk, Dh). The gradients of v, of probabilities and d_out; of k, of the
/// scores' gradients and q.
fn transposed_weighted_sum(
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [p, x]: [Matrix; 2],
    y: Matrix,
) -> Result<()> {
    for keys in sizes.blocks(sizes.keys) {
        let rows = sizes.that_see(&keys);
        let factors = [p.part(rows.clone(), keys.clone()).t(), x.of_rows(rows)];
        multiply(factors, y.of_rows(keys), sizes.kv_heads)?;
    }
    Ok(())
}

/// The heads whose scores are computed together: some of one sequence, or all of several.
struct Turn<'a> {
    sequences: Range<usize>,
    /// The first head of k and v in each sequence.
    first: usize,
    /// Their number in each sequence, and sizes.
    sizes: HeadGroups<'a>,
    /// The number of heads of k and v in a sequence.
    of_sequence: usize,
}

/// Splits all heads into turns of as many heads as fit in `scores`, at least one.
fn turns<'a>(sizes: &HeadGroups<'a>, sequences: usize, scores: View) -> Vec<Turn<'a>> {
    let at_once = (scores.len / sizes.of_head().max(1)).max(1);
    let heads = sizes.kv_heads;
    let several = (at_once / heads.max(1)).max(1);
    let mut turns = Vec::new();
    for start in (0..sequences).step_by(several) {
        for first in (0..heads).step_by(at_once) {
            let some = HeadGroups {
                kv_heads: at_once.min(heads - first),
                first_head: sizes.first_head + (start * heads + first) * sizes.group,
                ..*sizes
            };
            turns.push(Turn {
                sequences: start..sequences.min(start + several),
                first,
                sizes: some,
                of_sequence: heads,
            });
        }
    }
    turns
}

impl Turn<'_> {
    /// Returns the scores of these heads among those of all.
    fn of_all<'v>(&self, view: View<'v>) -> View<'v> {
        let first = self.sequences.start * self.of_sequence + self.first;
        view.part(first * self.sizes.of_head(), self.elements())
    }

    /// Returns the scores of these heads in a buffer of their own.
    fn alone<'v>(&self, view: View<'v>) -> View<'v> {
        view.part(0, self.elements())
    }

    fn elements(&self) -> usize {
        self.sequences.len() * self.sizes.elements()
    }

    /// Returns the scores of a sequence.
    fn scores<'v>(&self, view: View<'v>, sequence: usize) -> Matrix<'v> {
        let before = (sequence - self.sequences.start) * self.sizes.elements();
        self.sizes
            .matrices(view.part(before, self.sizes.elements()))
    }

    /// Returns the heads of a sequence as matrices.
    fn heads<'v>(&self, x: Heads<'v>, sequence: usize) -> Matrix<'v> {
        let ([of_sequence, of_head, row_stride], [_, _, rows, cols]) = (x.strides, x.dims);
        let first = sequence * of_sequence + self.first * of_head;
        Matrix {
            row_stride,
            matrix_stride: of_head,
            ..Matrix::new(x.view.part_from(first), rows, cols)
        }
    }
}

/// Computes `p = softmax(scale q k^T)` and `out = p v`. With N sequences of the heads of `sizes`: q and out (N, Hkv,
/// rows, ..), k and v (N, Hkv, Tk, ..) with strides, p (N, Hkv, rows, Tk). Heads are computed in turns, as many as fit
/// in `scores` (.., rows, Tk) f32, which is p itself if that is f32.
pub(crate) fn forward(
    gpu: &CudaDevice,
    multiply: &mut impl FnMut([Matrix; 2], Matrix, usize) -> Result<()>,
    sizes: &HeadGroups,
    [q, k, v]: [Heads; 3],
    scores: View,
    p: View,
    out: Heads,
) -> Result<()> {
    let is_apart = scores.pointer != p.pointer;
    for turn in turns(sizes, q.dims[0], scores) {
        let (some, p) = (&turn.sizes, turn.of_all(p));
        let s = if is_apart { turn.alone(scores) } else { p };
        for n in turn.sequences.clone() {
            let factors = [turn.heads(q, n), turn.heads(k, n)];
            compare(multiply, some, factors, turn.scores(s, n))?;
        }
        softmax::forward(gpu, some.scores(), s, p)?;
        for n in turn.sequences.clone() {
            let factors = [turn.scores(p, n), turn.heads(v, n)];
            weighted_sum(multiply, some, factors, turn.heads(out, n))?;
        }
    }
    Ok(())
}

/// Computes `dv = p^T d_out`, `ds = scale p (dp - sum(dp p))` with `dp = d_out v^T`, `dq = ds k`, `dk = ds^T q`. Heads
/// are computed in turns, as many as fit in `dp` (.., rows, Tk) f32 and in `ds` of q's dtype, which is dp itself if
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
    for turn in turns(sizes, q.dims[0], dp) {
        let (some, p) = (&turn.sizes, turn.of_all(p));
        let [dp, ds] = [dp, ds].map(|view| turn.alone(view));
        for n in turn.sequences.clone() {
            let [d_out, v, dv] = [d_out, v, dv].map(|x| turn.heads(x, n));
            compare(multiply, some, [d_out, v], turn.scores(dp, n))?;
            transposed_weighted_sum(multiply, some, [turn.scores(p, n), d_out], dv)?;
        }
        softmax::backward_from_p(gpu, some.scores(), [dp, p], ds)?;
        for n in turn.sequences.clone() {
            let [q, k, dq, dk] = [q, k, dq, dk].map(|x| turn.heads(x, n));
            weighted_sum(multiply, some, [turn.scores(ds, n), k], dq)?;
            transposed_weighted_sum(multiply, some, [turn.scores(ds, n), q], dk)?;
        }
    }
    Ok(())
}
