//! The choice between the crate's own matmul kernel and the `gemm` crate.

use super::matrix::MatRef;
use super::micro_kernel::has_avx512;

/// The sizes of a matmul: (rows, depth) times (depth, cols).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulSizes {
    /// Rows of a and c.
    pub rows: usize,
    /// Columns of a, rows of b.
    pub depth: usize,
    /// Columns of b and c.
    pub cols: usize,
    /// Whether a is stored as (depth, rows).
    pub a_transposed: bool,
    /// Whether b is stored as (cols, depth).
    pub b_transposed: bool,
    /// Bytes per element of a and b.
    pub element_bytes: usize,
}

/// Returns whether the crate's own kernel is faster than the `gemm` crate. With AVX-512 it is faster wherever packing
/// pays off; packing is most expensive for a transposed b, in the `gemm` crate most of all. Without AVX-512 it is
/// faster if the `gemm` crate would pack a from lines that are whole pages apart and so compete for a few cache sets.
pub(super) fn prefers_own_gemm<T>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> bool {
    let a_transposed = a.row_stride == 1 && a.col_stride > 1;
    let line_bytes = a.col_stride * size_of::<T>();
    let is_aliased = a_transposed && line_bytes.is_multiple_of(PAGE_BYTES);
    prefers(is_aliased, b.col_stride != 1, [a.rows, a.cols, b.cols])
}

/// Decides like [`prefers_own_gemm`], for factors without gaps between lines.
pub(super) fn prefers_own_gemm_by(sizes: MatmulSizes) -> bool {
    let line_bytes = sizes.rows.saturating_mul(sizes.element_bytes);
    let is_aliased = sizes.a_transposed && line_bytes.is_multiple_of(PAGE_BYTES);
    let lengths = [sizes.rows, sizes.depth, sizes.cols];
    prefers(is_aliased, sizes.b_transposed, lengths)
}

const PAGE_BYTES: usize = 4096;

fn prefers(is_aliased: bool, b_transposed: bool, [rows, depth, cols]: [usize; 3]) -> bool {
    let fewest_rows = if b_transposed { 64 } else { 256 };
    let is_large = rows >= fewest_rows && depth >= 128 && cols >= 128;
    (is_aliased && cols >= 256) || (is_large && has_avx512())
}
