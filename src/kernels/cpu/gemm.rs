//! Matrix multiplication: the `gemm` crate behind checked, strided views.

use super::Real;
use super::parallel::{self, Shared};

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

/// `c = a b`, or `c += a b` where `accumulate`; c is (a.rows, b.cols), row by row.
///
/// 2 * rows * cols * depth FLOPs. The bits do not depend on the number of threads.
pub fn matmul<T: Real>(
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    c: &mut [T],
    accumulate: bool,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "depth");
    assert_eq!(c.len(), a.rows * b.cols, "output");
    if c.is_empty() {
        return;
    }
    if a.cols == 0 {
        if !accumulate {
            c.fill(T::ZERO);
        }
        return;
    }
    let parallelism = match threads {
        Threads::All => gemm::Parallelism::Rayon(rayon::current_num_threads()),
        Threads::One => gemm::Parallelism::None,
    };
    // SAFETY: the views' constructors checked that sizes and strides stay inside their slices, and c is exclusive.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            c.as_mut_ptr(),
            1,
            b.cols as isize,
            accumulate,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
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
pub fn matmul_batched<T: Real>(batch: usize, a: Batched<'_, T>, b: Batched<'_, T>, c: &mut [T]) {
    if batch == 0 || c.is_empty() {
        return;
    }
    let size = c.len() / batch;
    if batch < 2 * rayon::current_num_threads() {
        for (i, c) in c.chunks_exact_mut(size).enumerate() {
            matmul(a.at(i), b.at(i), c, false, Threads::All);
        }
        return;
    }
    let c = Shared::new(c);
    parallel::for_tasks(batch, |i| {
        // SAFETY: task i writes matrix i alone.
        let c = unsafe { c.range(i * size, size) };
        matmul(a.at(i), b.at(i), c, false, Threads::One);
    });
}
