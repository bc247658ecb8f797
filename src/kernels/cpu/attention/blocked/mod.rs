//! Attention with its probabilities in memory, for who knows the shape beforehand: a block of queries at a time.
//!
//! The mathematics of [`naive_attention`](super::naive), heads as they lie, one after another. There a head's
//! scores are a matrix that each pass walks from beginning to end; here a block of [`Sizes::BLOCK_ROWS`] rows goes
//! through all passes while it is in cache, and of the keys it meets only those up to its last visible one, a strip at
//! a time.
//!
//! What is kept for backward are the exponentials `e = exp(scale q k^T - top)` and one number a row, their sum's
//! reciprocal `inv_row_sum`: the probabilities are `p = inv_row_sum e`, which are not written. They are stored as
//! the blocks meet them ([`Sizes::exponentials_len`]), which under the causal mask is little more than half, and in
//! rows a cache line longer than the keys, so that a column's elements do not compete for the same places in the cache.
//! A row's `top` is found as its strips come: where one exceeds it by much, those before are rescaled, which is
//! rare.
//!
//! In half precision tiles are widened as they are copied, products and sums are f32's, and outputs and gradients are
//! rounded once. Exponentials are stored in a type of their own: one with digits to spare, if gradients shall be no
//! less exact than their rounding makes them.
//!
//! Where there are few heads, each is cut into chunks of queries, by the shape alone: tasks enough for many threads,
//! and the same bits for any number of them. What lives here: the two passes, and the sizes of what they work in. What
//! does not: [`rotary_attention`](super::rotary), which reads heads where projections leave them.

mod backward;
mod forward;
mod load;
mod rows;

pub use backward::{Gradients, Saved, backward};
pub use forward::{Inputs, Outputs, forward};

use crate::kernels::Mask;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use std::ops::Range;

/// The sizes of an attention over heads that lie one after another: as many queries as keys, as many heads of k and v
/// as of q.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// How many matrices of (T, Dh): B H.
    pub matrices: usize,
    /// T, of queries and keys.
    pub length: usize,
    /// Dh.
    pub head_dim: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// What scores are multiplied by.
    pub scale: f64,
}

/// Tasks that there should be at least.
const TASKS: usize = 16;

/// Blocks of queries that a chunk should have at least: a task copies keys and values first.
const CHUNK_BLOCKS: usize = 4;

/// Keys that a block meets at a time: they, their values and both gradients are in the second-level cache meanwhile.
const STRIP: usize = 480;

impl Sizes {
    /// Queries of a block.
    pub const BLOCK_ROWS: usize = 64;

    /// Blocks of queries.
    fn blocks(&self) -> usize {
        self.length.div_ceil(Self::BLOCK_ROWS)
    }

    /// The queries of a block.
    fn queries(&self, block: usize) -> Range<usize> {
        let rows = Self::BLOCK_ROWS;
        block * rows..self.length.min((block + 1) * rows)
    }

    /// The queries of some blocks, one at least.
    fn queries_of(&self, blocks: &Range<usize>) -> Range<usize> {
        self.queries(blocks.start).start..self.queries(blocks.end - 1).end
    }

    /// How many keys the queries before `end` see between them.
    fn keys(&self, end: usize) -> usize {
        match self.mask {
            Mask::Full => self.length,
            Mask::Causal | Mask::CausalEnd => end, // the same for as many queries as keys
            Mask::Window(_) => unreachable!("it leaves no prefix"),
        }
    }

    /// How long the rows of the scores of queries before `end` are.
    fn score_row(&self, end: usize) -> usize {
        self.keys(end).next_multiple_of(COLUMNS) + COLUMNS
    }

    /// Where a block's exponentials begin in those of its matrix.
    fn start(&self, block: usize) -> usize {
        let rows = Self::BLOCK_ROWS;
        match self.mask {
            Mask::Full => block * rows * self.score_row(rows),
            // The blocks before are whole, and end at multiples of COLUMNS: rows (1 + 2 + ..), rows times.
            Mask::Causal | Mask::CausalEnd => {
                rows * (rows * (block * (block + 1) / 2) + block * COLUMNS)
            }
            Mask::Window(_) => unreachable!("as above"),
        }
    }

    /// Elements of one matrix's exponentials.
    fn matrix_len(&self) -> usize {
        self.exponentials_of(0..self.blocks()).end
    }

    /// Where some blocks' exponentials lie in those of their matrix.
    fn exponentials_of(&self, blocks: Range<usize>) -> Range<usize> {
        let Some(last) = blocks.end.checked_sub(1) else {
            return 0..0;
        };
        let queries = self.queries(last);
        self.start(blocks.start)..self.start(last) + queries.len() * self.score_row(queries.end)
    }

    /// Elements of the exponentials that forward keeps for backward: a little over B H T T, or half of it.
    pub fn exponentials_len(&self) -> usize {
        self.matrices * self.matrix_len()
    }

    /// Into how many chunks each matrix is cut.
    fn chunks(&self) -> usize {
        let wanted = TASKS.div_ceil(self.matrices.max(1));
        wanted.min(self.blocks() / CHUNK_BLOCKS).max(1)
    }

    fn tasks(&self) -> usize {
        self.matrices * self.chunks()
    }

    /// Matrix, chunk and blocks of a task: the chunks that see the most keys first.
    fn task(&self, task: usize) -> (usize, usize, Range<usize>) {
        let (chunks, blocks) = (self.chunks(), self.blocks());
        let (matrix, chunk) = (task % self.matrices, chunks - 1 - task / self.matrices);
        let range = blocks * chunk / chunks..blocks * (chunk + 1) / chunks;
        (matrix, chunk, range)
    }

    /// Dh in whole registers.
    fn head_row(&self) -> usize {
        self.head_dim.next_multiple_of(COLUMNS)
    }

    /// Rows of the longest chunk.
    fn chunk_rows(&self) -> usize {
        let blocks = self.blocks().div_ceil(self.chunks());
        self.length.min(blocks * Self::BLOCK_ROWS)
    }

    /// Keys of a strip: fewer where there are fewer.
    fn strip(&self) -> usize {
        STRIP.min(self.length.next_multiple_of(COLUMNS))
    }

    /// How long the rows of a strip of scores are.
    fn strip_row(&self) -> usize {
        self.strip() + COLUMNS
    }

    /// Elements that one thread works in during [`forward()`].
    pub fn forward_scratch_len(&self) -> usize {
        let rows = 2 * self.chunk_rows() + self.strip(); // q, out; v
        let k = (self.strip() + COLUMNS) * self.head_dim; // and a block of it in f32
        let scores = Self::BLOCK_ROWS * (self.strip_row() + 1); // and each row's change of scale
        let of_rows = 2 * self.chunk_rows(); // tops, sums
        (rows * self.head_row() + k + scores + of_rows).next_multiple_of(COLUMNS)
    }

    /// Elements that one thread works in during [`backward()`]; `rounds` in half precision.
    pub fn backward_scratch_len(&self, rounds: bool) -> usize {
        let rows = 3 * self.strip() + 3 * self.chunk_rows(); // k, dk, dv; q, d_out, dq
        let v = (self.strip() + COLUMNS) * self.head_dim; // and a block of it in f32
        let strips = if rounds { 2 } else { 1 } * Self::BLOCK_ROWS * self.strip_row(); // ds; e in f32
        let of_rows = self.chunk_rows(); // delta
        (rows * self.head_row() + v + strips + of_rows).next_multiple_of(COLUMNS)
    }

    /// Elements of the sums that [`backward()`] keeps of each matrix's chunks, of dk, then of dv. Those of the first
    /// chunk are the gradients themselves, but in half precision, which `rounds` in the end.
    pub fn partial_sums_len(&self, rounds: bool) -> usize {
        2 * self.partial_sums(rounds) * self.matrices * self.length * self.head_dim
    }

    /// How many such sums a matrix has.
    fn partial_sums(&self, rounds: bool) -> usize {
        match self.chunks() {
            1 => 0,
            chunks if rounds => chunks,
            chunks => chunks - 1,
        }
    }
}

/// The strips of so many keys.
fn strips(keys: usize) -> impl Iterator<Item = Range<usize>> {
    (0..keys)
        .step_by(STRIP)
        .map(move |first| first..keys.min(first + STRIP))
}

/// The next `len` elements of `rest`.
fn take<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (taken, left) = std::mem::take(rest).split_at_mut(len);
    *rest = left;
    taken
}

#[cfg(test)]
mod tests;
