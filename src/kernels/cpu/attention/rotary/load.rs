//! One head's rows between the model dimension and scratch.

use super::Sizes;
use crate::kernels::cpu::attention::rotary_heads::{Angles, turn_back_stored, turn_loaded};
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::parallel::Shared;
use crate::kernels::cpu::{Real, Stored, simd};
use std::ops::Range;

/// One head among those of a (B, T, H*Dh).
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// Where its first row begins.
    pub start: usize,
    /// From one of its rows to the next: H*Dh.
    pub row: usize,
    /// T.
    pub length: usize,
    /// Dh.
    pub head_dim: usize,
}

impl Head {
    /// Head number `matrix` of B H.
    pub fn new(sizes: &Sizes, matrix: usize) -> Self {
        let heads = sizes.heads;
        let row = heads.heads * heads.head_dim;
        let (batch, head) = (matrix / heads.heads, matrix % heads.heads);
        Self {
            start: batch * heads.length * row + head * heads.head_dim,
            row,
            length: heads.length,
            head_dim: heads.head_dim,
        }
    }

    #[inline(always)]
    fn row_of<'a, T>(&self, x: &'a [T], position: usize) -> &'a [T] {
        &x[self.start + position * self.row..][..self.head_dim]
    }

    /// All rows, turned where there are angles: to (T, to_row), zeros beyond Dh.
    pub fn load<S: Stored>(
        &self,
        x: &[S],
        angles: Option<Angles<'_, S::Wide>>,
        to: &mut [S::Wide],
        to_row: usize,
    ) {
        simd::vectorized(
            #[inline(always)]
            || {
                for (position, to) in to.chunks_exact_mut(to_row).enumerate() {
                    let (to, padding) = to.split_at_mut(self.head_dim);
                    let x = self.row_of(x, position);
                    match angles {
                        Some(angles) => turn_loaded(x, angles.at(position, self.head_dim), to),
                        None => S::load(x, to),
                    }
                    padding.fill(S::Wide::ZERO);
                }
            },
        );
    }

    /// All rows, turned where there are angles, as columns: to (Dh, to_row), zeros beyond T. `block` is (COLUMNS, Dh)
    /// to work in.
    pub fn load_transposed<S: Stored>(
        &self,
        x: &[S],
        angles: Option<Angles<'_, S::Wide>>,
        to: &mut [S::Wide],
        to_row: usize,
        block: &mut [S::Wide],
    ) {
        let head_dim = self.head_dim;
        simd::vectorized(
            #[inline(always)]
            || {
                for first in (0..self.length).step_by(COLUMNS) {
                    for (row, block) in block.chunks_exact_mut(head_dim).enumerate() {
                        let position = first + row;
                        if position >= self.length {
                            block.fill(S::Wide::ZERO);
                            continue;
                        }
                        let x = self.row_of(x, position);
                        match angles {
                            Some(angles) => turn_loaded(x, angles.at(position, head_dim), block),
                            None => S::load(x, block),
                        }
                    }
                    for column in 0..head_dim {
                        let to = &mut to[column * to_row + first..][..COLUMNS];
                        for (row, to) in to.iter_mut().enumerate() {
                            *to = block[row * head_dim + column];
                        }
                    }
                }
            },
        );
    }

    /// Rows `positions` of `from` (rows, from_row) to their places in x, rotated back where there are angles.
    ///
    /// # Safety
    /// Nobody else may touch these rows of this head meanwhile.
    pub unsafe fn store<S: Stored>(
        &self,
        from: &[S::Wide],
        from_row: usize,
        positions: Range<usize>,
        angles: Option<Angles<'_, S::Wide>>,
        x: &Shared<'_, S>,
    ) {
        simd::vectorized(
            #[inline(always)]
            || {
                for (position, from) in positions.zip(from.chunks_exact(from_row)) {
                    let from = &from[..self.head_dim];
                    // SAFETY: this row of this head is the caller's.
                    let to = unsafe { x.range(self.start + position * self.row, self.head_dim) };
                    match angles {
                        Some(angles) => {
                            turn_back_stored(from, angles.at(position, self.head_dim), to);
                        }
                        None => S::store(from, to),
                    }
                }
            },
        );
    }
}
