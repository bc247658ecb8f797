//! Batched matmuls of many small matrices.

use super::matmul::matmul;
use super::matrix::MatRef;
use super::threads::Threads;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::parallel::{self, Shared};

/// One factor of a batched matmul: (batch, rows, cols), as stored or transposed.
#[derive(Clone, Copy)]
pub struct Batched<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// Rows of each stored matrix.
    pub rows: usize,
    /// Columns of each stored matrix.
    pub cols: usize,
    /// Whether each matrix is used transposed.
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

/// Computes `c[i] = a[i] b[i]` for every matrix of the batch; c is (batch, M, N).
///
/// Parallel over the batch if it has at least two matrices per thread, else inside each matmul.
pub fn matmul_batched<T: Stored>(batch: usize, a: Batched<'_, T>, b: Batched<'_, T>, c: &mut [T]) {
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
        // SAFETY: only task i writes matrix i.
        let c = unsafe { c.range(i * size, size) };
        matmul(a.at(i), b.at(i), c, false, Threads::One);
    });
}
