//! Matrix multiplication: the `gemm` crate behind checked, strided views; and what is ours: products of tiles in cache
//! (`tile`), and of whole matrices cut into such tiles (`packed`), for half precision and for shapes that the crate is slow
//! with.

mod packed;
mod packing;
pub(crate) mod tile;
pub(crate) mod widen;

pub use packing::{ProductSizes, packing_bytes};

use super::parallel::{self, Shared};
use super::{Lanes, Real, Stored};
use candle_core::WithDType;
use std::ops::Range;

/// A read-only matrix over a slice, with strides in elements.
#[derive(Clone, Copy)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// `data` as (rows, cols), row by row.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "matrix of {rows} x {cols}");
        Self {
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
        }
    }

    /// The same view over other elements.
    fn over<U>(self, data: &[U]) -> MatRef<'_, U> {
        assert_eq!(data.len(), self.data.len());
        MatRef {
            data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        }
    }

    /// The transpose, by swapping strides.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// Whether one multiplication may use every thread, or keeps to its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// All threads of the current rayon pool.
    All,
    /// The calling thread only: for use inside a parallel loop.
    One,
}

/// As [`matmul`], in half precision too: products and sums are f32's, and c is rounded once.
pub fn matmul_stored<T: Stored>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T],
    accumulate: bool,
    threads: Threads,
) {
    if let (Some(a_wide), Some(b_wide)) = (T::as_wide(a.data), T::as_wide(b.data))
        && let Some(c) = T::as_wide_mut(c)
    {
        return matmul(a.over(a_wide), b.over(b_wide), c, accumulate, threads);
    }
    packed::product(a, b, c, accumulate, threads);
}

/// `c = a b` in the type computed in, from factors that may be in half precision.
pub fn matmul_wide<T: Stored>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T::Wide],
    threads: Threads,
) {
    match (T::as_wide(a.data), T::as_wide(b.data)) {
        (Some(a_wide), Some(b_wide)) => matmul(a.over(a_wide), b.over(b_wide), c, false, threads),
        _ => packed::product(a, b, c, false, threads),
    }
}

/// `c = a b`, or `c += a b` where `accumulate`; c is (a.rows, b.cols), row by row.
///
/// 2 * rows * cols * depth FLOPs. The bits do not depend on the number of threads.
pub fn matmul<T: Lanes + Stored<Wide = T>>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T],
    accumulate: bool,
    threads: Threads,
) {
    if is_done(a, b, c, accumulate) {
        return;
    }
    if is_aliased(a, b) {
        return packed::product(a, b, c, accumulate, threads);
    }
    match threads {
        Threads::One => panel(a, b, c.as_mut_ptr(), 0..a.rows, 0..b.cols, accumulate, 1),
        Threads::All => panels(a, b, c, accumulate),
    }
}

/// Checks the sizes; whether that was all, since there is nothing to multiply.
fn is_done<A, B, C: WithDType>(
    a: MatRef<'_, A>,
    b: MatRef<'_, B>,
    c: &mut [C],
    accumulate: bool,
) -> bool {
    assert_eq!(a.cols, b.rows, "depth");
    assert_eq!(c.len(), a.rows * b.cols, "output");
    if a.cols == 0 && !accumulate {
        c.fill(C::zero());
    }
    c.is_empty() || a.cols == 0
}

/// Whether the `gemm` crate would pack a from lines that lie whole pages apart, and so compete for a few places in the
/// cache: a weight's gradient `dy^T x` with a width like 1,024 or 3,072. There our own packing, which copies lines, is 1.2
/// to 2 times faster; elsewhere the crate is ahead by a few percent, or more in small products.
fn is_aliased<T>(a: MatRef<'_, T>, b: MatRef<'_, T>) -> bool {
    a.row_stride == 1 && is_aliased_by(a.col_stride * size_of::<T>(), b.cols)
}

/// As [`is_aliased`], for factors that lie one line after another.
fn is_aliased_shape(sizes: ProductSizes) -> bool {
    let line_bytes = sizes.rows.saturating_mul(sizes.element_bytes);
    sizes.a_transposed && is_aliased_by(line_bytes, sizes.cols)
}

fn is_aliased_by(line_bytes: usize, cols: usize) -> bool {
    const PAGE_BYTES: usize = 4096;
    const COLUMNS: usize = 256;
    line_bytes.is_multiple_of(PAGE_BYTES) && cols >= COLUMNS
}

/// FLOPs worth a task of their own: a millisecond of one core.
const PANEL_FLOPS: f64 = 128e6;

/// Panels at most: each packs the factor that it shares with the others again.
const MAX_PANELS: usize = 8;

/// The product in panels of c, side by side.
///
/// One task a panel meets the other threads once a product, where the `gemm` crate's own parallelism meets them at every
/// block of the depth; on two cores that is worth a tenth. The panels depend on the shape alone, and so do the bits.
fn panels<T: Real>(a: MatRef<'_, T>, b: MatRef<'_, T>, c: &mut [T], accumulate: bool) {
    let (rows, cols) = (a.rows, b.cols);
    let Panels {
        by_rows,
        step,
        count,
    } = Panels::of(rows, a.cols, cols);
    let length = if by_rows { rows } else { cols };
    let threads = rayon::current_num_threads().div_ceil(count);
    let c = Shared::new(c);
    parallel::for_tasks(count, |i| {
        let part = i * step..length.min((i + 1) * step);
        let c = c.as_mut_ptr(); // the panels have no element in common, and `panel` writes its own alone
        match by_rows {
            true => panel(a, b, c, part, 0..cols, accumulate, threads),
            false => panel(a, b, c, 0..rows, part, accumulate, threads),
        }
    });
}

/// How a product is cut.
struct Panels {
    by_rows: bool,
    /// Rows or columns of a panel.
    step: usize,
    count: usize,
}

impl Panels {
    fn of(rows: usize, depth: usize, cols: usize) -> Self {
        Self::so_many(Self::count_of(rows, depth, cols), rows, cols)
    }

    fn count_of(rows: usize, depth: usize, cols: usize) -> usize {
        let flops = 2.0 * rows as f64 * cols as f64 * depth as f64;
        ((flops / PANEL_FLOPS) as usize).clamp(1, MAX_PANELS)
    }

    /// In `count` panels, or fewer.
    fn so_many(count: usize, rows: usize, cols: usize) -> Self {
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

/// The rows and columns of `c = a b` that the ranges name; c is (a.rows, b.cols), row by row.
fn panel<T: Real>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: *mut T,
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
    let c_row = b.cols;
    // SAFETY: the views' constructors checked that sizes and strides stay inside their slices, the ranges were checked
    // above, and `matmul` checked that c has a.rows * b.cols elements.
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

/// One factor of a batched product: (batch, rows, cols), used as it lies or transposed.
#[derive(Clone, Copy)]
pub struct Batched<'a, T> {
    /// The elements, (batch, rows, cols).
    pub data: &'a [T],
    /// Rows as they lie in memory.
    pub rows: usize,
    /// Columns as they lie in memory.
    pub cols: usize,
    /// Use each matrix transposed.
    pub transposed: bool,
}

impl<'a, T> Batched<'a, T> {
    fn at(&self, index: usize) -> MatRef<'a, T> {
        let size = self.rows * self.cols;
        let matrix = MatRef::new(
            &self.data[index * size..(index + 1) * size],
            self.rows,
            self.cols,
        );
        if self.transposed { matrix.t() } else { matrix }
    }
}

/// `c[i] = a[i] b[i]` for every matrix of the batch; c is (batch, M, N).
///
/// Parallel over the batch where it has enough matrices for the threads, else inside each product.
pub fn matmul_batched<T: Stored>(batch: usize, a: Batched<'_, T>, b: Batched<'_, T>, c: &mut [T]) {
    if batch == 0 || c.is_empty() {
        return;
    }
    let size = c.len() / batch;
    if batch < 2 * rayon::current_num_threads() {
        for (i, c) in c.chunks_exact_mut(size).enumerate() {
            matmul_stored(a.at(i), b.at(i), c, false, Threads::All);
        }
        return;
    }
    let c = Shared::new(c);
    parallel::for_tasks(batch, |i| {
        // SAFETY: task i writes matrix i alone.
        let c = unsafe { c.range(i * size, size) };
        matmul_stored(a.at(i), b.at(i), c, false, Threads::One);
    });
}
