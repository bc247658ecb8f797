//! Products by the `gemm` crate: the reference, and what runs where ours is not faster.

use super::matrix::{MatMut, MatRef};
use super::threads::Threads;
use crate::kernels::cpu::Real;
use crate::kernels::cpu::parallel::{self, Shared};
use std::ops::Range;

/// `c = a b`, or `c += a b` where `accumulate`.
pub(super) fn product<T: Real>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: MatMut<'_, T>,
    accumulate: bool,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "depth");
    assert_eq!([a.rows, b.cols], [c.rows, c.cols], "output");
    if a.cols == 0 && !accumulate {
        for row in c.data.chunks_mut(c.row_stride.max(1)).take(c.rows) {
            row[..c.cols].fill(T::ZERO); // a sum over nothing
        }
    }
    if c.rows == 0 || c.cols == 0 || a.cols == 0 {
        return;
    }
    match threads {
        Threads::One => {
            let place = (c.data.as_mut_ptr(), c.row_stride);
            panel(a, b, place, 0..a.rows, 0..b.cols, accumulate, 1);
        }
        Threads::All => panels(a, b, c, accumulate),
    }
}

/// FLOPs worth a task of their own: a millisecond of one core.
pub(super) const PANEL_FLOPS: f64 = 128e6;

/// Panels at most: each packs the factor that it shares with the others again.
const MAX_PANELS: usize = 8;

/// The product in panels of c, side by side.
///
/// One task a panel meets the other threads once a product, where the `gemm` crate's own parallelism meets them at
/// every block of the depth; on two cores that is worth a tenth. The panels depend on the shape alone, and so do the
/// bits.
fn panels<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>, accumulate: bool) {
    let (rows, cols) = (a.rows, b.cols);
    let PanelCut {
        by_rows,
        step,
        count,
    } = PanelCut::of(rows, a.cols, cols);
    let length = if by_rows { rows } else { cols };
    let threads = rayon::current_num_threads().div_ceil(count);
    let c_row = c.row_stride;
    let c = Shared::new(c.data);
    parallel::for_tasks(count, |i| {
        let part = i * step..length.min((i + 1) * step);
        let c = (c.as_mut_ptr(), c_row); // the panels have no element in common, and `panel` writes its own alone
        match by_rows {
            true => panel(a, b, c, part, 0..cols, accumulate, threads),
            false => panel(a, b, c, 0..rows, part, accumulate, threads),
        }
    });
}

/// How a product is cut.
pub(super) struct PanelCut {
    pub by_rows: bool,
    /// Rows or columns of a panel.
    pub step: usize,
    pub count: usize,
}

impl PanelCut {
    fn of(rows: usize, depth: usize, cols: usize) -> Self {
        Self::so_many(Self::count_of(rows, depth, cols), rows, cols)
    }

    pub fn count_of(rows: usize, depth: usize, cols: usize) -> usize {
        let flops = 2.0 * rows as f64 * cols as f64 * depth as f64;
        ((flops / PANEL_FLOPS) as usize).clamp(1, MAX_PANELS)
    }

    /// In `count` panels, or fewer.
    pub fn so_many(count: usize, rows: usize, cols: usize) -> Self {
        // By columns, where packing is cheaper to repeat, unless c is a tall strip.
        let by_rows = rows > cols.saturating_mul(4);
        let length = if by_rows { rows } else { cols };
        let step = length.div_ceil(count).div_ceil(REGISTER_TILE);
        let step = step.saturating_mul(REGISTER_TILE).max(MIN_PANEL);
        Self {
            by_rows,
            step,
            count: length.div_ceil(step),
        }
    }
}

/// Rows or columns of a register tile, in elements: four AVX-512 registers of f32.
const REGISTER_TILE: usize = 64;

/// A narrower panel spends too much on packing the other factor.
const MIN_PANEL: usize = 2 * REGISTER_TILE;

/// The rows and columns of `c = a b` that the ranges name; c begins at the pointer, in rows that far apart.
fn panel<T: Real>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    (c, c_row): (*mut T, usize),
    rows: Range<usize>,
    cols: Range<usize>,
    accumulate: bool,
    threads: usize,
) {
    assert!(rows.end <= a.rows && cols.end <= b.cols);
    let parallelism = match threads {
        1 => gemm::Parallelism::None,
        threads => gemm::Parallelism::Rayon(threads),
    };
    // SAFETY: the views' constructors checked that sizes and strides stay inside their slices, the ranges were checked
    // above, and `product` that c has a.rows rows and b.cols columns.
    unsafe {
        gemm::gemm(
            rows.len(),
            cols.len(),
            a.cols,
            c.add(rows.start * c_row + cols.start),
            1,
            c_row as isize,
            accumulate,
            a.data.as_ptr().add(rows.start * a.row_stride),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr().add(cols.start * b.col_stride),
            b.col_stride as isize,
            b.row_stride as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            parallelism,
        );
    }
}
