//! Transposes of sixteen rows to columns and back, between the layouts of the matmuls.

use super::heads::Rows;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::simd::vectorized;
use crate::kernels::cpu::{Real, Stored};
use std::ops::Range;

/// Loads up to [`COLUMNS`] rows into `block` (COLUMNS, columns); missing rows are zeroed.
pub(super) fn load_block<S: Stored>(
    rows: Rows<'_, S>,
    range: Range<usize>,
    columns: usize,
    block: &mut [S::Wide],
) {
    let (loaded, missing) = block.split_at_mut(range.len() * columns);
    for (row, to) in range.zip(loaded.chunks_exact_mut(columns)) {
        rows.load(row, to);
    }
    missing.fill(S::Wide::ZERO);
}

/// Writes `to[column][..16] = factor * block[..16][column]`: block (16, columns), to (columns, to_row).
pub(super) fn to_columns<T: Real>(
    block: &[T],
    columns: usize,
    factor: T,
    to: &mut [T],
    to_row: usize,
) {
    let block = &block[..COLUMNS * columns];
    vectorized(
        #[inline(always)]
        || {
            for column in 0..columns {
                let to = &mut to[column * to_row..][..COLUMNS];
                for (row, to) in to.iter_mut().enumerate() {
                    *to = factor * block[row * columns + column];
                }
            }
        },
    );
}

/// Writes `block[row][column] = factors[row] * from[column][row]` for 16 rows: from (columns, from_row), block (16,
/// columns).
pub(super) fn to_rows<T: Real>(
    from: &[T],
    from_row: usize,
    factors: &[T; COLUMNS],
    columns: usize,
    block: &mut [T],
) {
    let block = &mut block[..COLUMNS * columns];
    vectorized(
        #[inline(always)]
        || {
            for column in 0..columns {
                let from = &from[column * from_row..][..COLUMNS];
                for (row, value) in from.iter().enumerate() {
                    block[row * columns + column] = *value * factors[row];
                }
            }
        },
    );
}
