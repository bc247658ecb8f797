//! Causal self-attention with rotary positions, from projections as they lie to an output as the next projection reads
//! it: (B, T, H*Dh) in, (B, T, H*Dh) out.
//!
//! The mathematics of [`naive_attention`](super::naive), probabilities in memory included, with what stands
//! around it taken in: a task copies one head's q, k and v into scratch, turning q and k on the way, and nothing is
//! ever split into heads or merged from them in memory. Queries go in blocks of [`BLOCK`] rows, which meet only the
//! keys up to their last: of the scores that the mask hides, those within the last block alone are computed, and the
//! probabilities are stored in that shape ([`Sizes::probabilities_len`]).
//!
//! In half precision the rows are widened as they are copied, and what leaves scratch is rounded. In between the turned
//! q and k are, and their gradients before they are rotated back: as where [`rope`](crate::kernels::cpu::rope) and
//! [`naive_attention`](super::naive) hand them on in memory.
//!
//! What lives here: the two passes and their scratch. What does not: who decides when to run them, and how many threads
//! there is scratch for.

mod backward;
mod forward;
mod load;

pub use backward::{Gradients, backward};
pub use forward::{Outputs, forward};

use super::rotary_heads::Angles;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::heads::HeadSizes;
use std::ops::Range;

/// Queries of a block.
pub const BLOCK: usize = 64;

/// The sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// B, T, H and Dh.
    pub heads: HeadSizes,
    /// What scores are multiplied by.
    pub scale: f64,
}

/// Projections, and the angles of their positions.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T: Stored> {
    /// (B, T, H*Dh), not rotated.
    pub q: &'a [T],
    /// (B, T, H*Dh), not rotated.
    pub k: &'a [T],
    /// (B, T, H*Dh).
    pub v: &'a [T],
    /// Of T positions.
    pub angles: Angles<'a, T::Wide>,
}

impl Sizes {
    /// B H.
    fn matrices(&self) -> usize {
        self.heads.batch * self.heads.heads
    }

    /// Dh in whole registers.
    fn head_row(&self) -> usize {
        self.heads.head_dim.next_multiple_of(COLUMNS)
    }

    /// T in whole registers, and a cache line more, so that the rows of K^T do not compete for the same places in the
    /// first-level cache where T is a power of two.
    fn transposed_row(&self) -> usize {
        self.heads.length.next_multiple_of(COLUMNS) + COLUMNS
    }

    /// How long a block's rows of scores are: the keys up to its last, in whole registers.
    fn score_row(queries: &Range<usize>) -> usize {
        queries.end.next_multiple_of(COLUMNS)
    }

    /// The blocks of queries, and where in a head's probabilities each begins.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = (Range<usize>, usize)> + use<> {
        let length = self.heads.length;
        (0..length.div_ceil(BLOCK)).map(move |block| {
            // All blocks before are whole, and BLOCK is whole registers: BLOCK (1 + 2 + ..) columns, BLOCK times.
            let start = BLOCK * BLOCK * (block * (block + 1) / 2);
            (block * BLOCK..length.min((block + 1) * BLOCK), start)
        })
    }

    /// Elements of one head's probabilities.
    fn matrix_len(&self) -> usize {
        let last = self.blocks().next_back();
        last.map_or(0, |(queries, start)| {
            start + queries.len() * Self::score_row(&queries)
        })
    }

    /// Elements of the probabilities that forward writes for backward: a little more than half of B H T T.
    pub fn probabilities_len(&self) -> usize {
        self.matrices() * self.matrix_len()
    }

    /// Elements that one thread works in during [`forward()`].
    pub fn forward_scratch_len(&self) -> usize {
        let (length, head_dim) = (self.heads.length, self.heads.head_dim);
        let rows = 2 * length + BLOCK; // q, v; out of a block
        rows * self.head_row()
            + head_dim * self.transposed_row()
            + COLUMNS * head_dim
            + self.scores_len()
    }

    /// Elements that one thread works in during [`backward()`].
    pub fn backward_scratch_len(&self) -> usize {
        let (length, head_dim) = (self.heads.length, self.heads.head_dim);
        let rows = 5 * length + BLOCK; // q, k, d_out, dk, dv; dq of a block
        rows * self.head_row()
            + head_dim * self.transposed_row()
            + COLUMNS * head_dim
            + self.scores_len()
    }

    /// Elements of the longest block's scores.
    fn scores_len(&self) -> usize {
        let length = self.heads.length;
        BLOCK.min(length) * length.next_multiple_of(COLUMNS)
    }
}

/// The next `len` elements of `rest`.
fn take<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (taken, left) = std::mem::take(rest).split_at_mut(len);
    *rest = left;
    taken
}

#[cfg(test)]
mod tests;
