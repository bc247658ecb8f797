//! Matmuls by the `gemm` crate: the reference, and the implementation where the crate's own kernel is not faster.

use super::matrix::{MatMut, MatRef};
use super::threads::Threads;
use crate::kernels::cpu::Real;
use crate::kernels::cpu::parallel::{self, Shared};
use std::ops::Range;

/// Computes `c = a b`, or `c += a b` if `accumulate`.
pub(super) fn matmul<T: Real>(
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
            row[..c.cols].fill(T::ZERO); // an empty sum
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

/// The FLOPs that justify a task: a millisecond of one core.
pub(super) const PANEL_FLOPS: f64 = 128e6;

/// The most panels: each packs the factor that it shares with the others again.
const MAX_PANELS: usize = 8;

/// Computes the matmul in panels of c, in parallel.
///
/// With one task per panel, threads synchronise once per matmul; the `gemm` crate's own parallelism synchronises at
/// every block of the depth. On two cores this saves a tenth of the time. The panels depend on the shape alone, and so
/// do the bits.
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
        let c = (c.as_mut_ptr(), c_row); // the panels are disjoint, and each `panel` writes only its own
        match by_rows {
            true => panel(a, b, c, part, 0..cols, accumulate, threads),
            false => panel(a, b, c, 0..rows, part, accumulate, threads),
        }
    });
}

/// The division of a matmul into panels.
pub(super) struct PanelCut {
    pub by_rows: bool,
    pub step: usize,
    pub count: usize,
}

impl PanelCut {
    fn of(rows: usize, depth: usize, cols: usize) -> Self {
        Self::with_count(Self::count_of(rows, depth, cols), rows, cols)
    }

    pub fn count_of(rows: usize, depth: usize, cols: usize) -> usize {
        let flops = 2.0 * rows as f64 * cols as f64 * depth as f64;
        ((flops / PANEL_FLOPS) as usize).clamp(1, MAX_PANELS)
    }

    /// Divides c into at most `count` panels.
    pub fn with_count(count: usize, rows: usize, cols: usize) -> Self {
        // By columns, because packing b's part is cheaper to repeat, unless c is tall.
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

/// The granularity of panels, in rows or columns: four AVX-512 registers of f32.
const REGISTER_TILE: usize = 64;

/// The narrowest panel: narrower ones spend too much time on packing the other factor.
const MIN_PANEL: usize = 2 * REGISTER_TILE;

/// Computes the given rows and columns of `c = a b`; c is a pointer to the whole matrix and its row stride.
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
    // above, and `matmul` checked that c has a.rows rows and b.cols columns.
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
