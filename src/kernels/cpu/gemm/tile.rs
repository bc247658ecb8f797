//! Products of tiles that are in cache: no packing, no threads, the factors used as they lie.

use crate::kernels::cpu::lanes::Lanes;
use pulp::{Arch, Simd, WithSimd};

/// Elements that the columns of a tile come in: a cache line of `f32`, whole registers on every instruction set.
pub const COLUMNS: usize = 16;

/// `c = a b` or `c += a b` for one tile: a (rows, depth) with any strides, b (depth, columns) and c (rows, columns) row by
/// row, columns a multiple of [`COLUMNS`].
///
/// Elements of a are broadcast, rows of b and c are registers: a block of c stays in registers while the depth is walked.
/// Every element of c is one chain of multiply-adds in the order of the depth.
pub(crate) struct Product<'a, T> {
    /// a.
    pub a: &'a [T],
    /// From one row of a to the next.
    pub a_row: usize,
    /// From one column of a to the next.
    pub a_col: usize,
    /// b.
    pub b: &'a [T],
    /// From one row of b to the next.
    pub b_row: usize,
    /// c.
    pub c: &'a mut [T],
    /// From one row of c to the next.
    pub c_row: usize,
    /// Rows of a and c.
    pub rows: usize,
    /// Columns of b and c.
    pub columns: usize,
    /// Columns of a, rows of b.
    pub depth: usize,
    /// Add to c.
    pub accumulate: bool,
}

impl<T: Lanes> Product<'_, T> {
    /// Computes it, on the calling thread.
    pub(crate) fn run(self) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        assert!(self.columns.is_multiple_of(COLUMNS));
        // The last element that each view reaches.
        let (rows, depth) = (self.rows - 1, self.depth.saturating_sub(1));
        assert!(self.depth == 0 || rows * self.a_row + depth * self.a_col < self.a.len());
        assert!(self.depth == 0 || depth * self.b_row + self.columns <= self.b.len());
        assert!(rows * self.c_row + self.columns <= self.c.len());
        Arch::new().dispatch(self);
    }

    /// A strip of `V` registers from column `first`, in blocks of `N` rows, then of fewer.
    ///
    /// # Safety
    /// The views reach no further than their slices, and the strip no further than the columns.
    #[inline(always)]
    unsafe fn strip<S: Simd, const N: usize, const V: usize>(&mut self, simd: S, first: usize) {
        let mut row = 0;
        // SAFETY: blocks of rows within the views.
        unsafe {
            while row + N <= self.rows {
                self.block::<S, N, V>(simd, row, first);
                row += N;
            }
            while row + 4 <= self.rows {
                self.block::<S, 4, V>(simd, row, first);
                row += 4;
            }
            while row < self.rows {
                self.block::<S, 1, V>(simd, row, first);
                row += 1;
            }
        }
    }

    /// `N` rows by `V` registers of c, in registers.
    ///
    /// # Safety
    /// As [`strip`](Self::strip), for rows from `row`.
    #[inline(always)]
    unsafe fn block<S: Simd, const N: usize, const V: usize>(
        &mut self,
        simd: S,
        row: usize,
        first: usize,
    ) {
        let lanes = T::lanes::<S>();
        // SAFETY: `run` checked how far the views reach; the block lies inside them.
        unsafe {
            let c = self.c.as_mut_ptr().add(row * self.c_row + first);
            let mut sums = [[T::vsplat(simd, T::ZERO); V]; N];
            if self.accumulate {
                for (n, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = T::vload::<S>(c.add(n * self.c_row + v * lanes));
                    }
                }
            }
            let mut a = self.a.as_ptr().wrapping_add(row * self.a_row);
            let mut b = self.b.as_ptr().wrapping_add(first);
            for _ in 0..self.depth {
                let mut values = [T::vsplat(simd, T::ZERO); V];
                for (v, value) in values.iter_mut().enumerate() {
                    *value = T::vload::<S>(b.add(v * lanes));
                }
                for (n, sums) in sums.iter_mut().enumerate() {
                    let factor = T::vsplat(simd, *a.add(n * self.a_row));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = T::vmul_add(simd, factor, value, *sum);
                    }
                }
                a = a.wrapping_add(self.a_col);
                b = b.wrapping_add(self.b_row);
            }
            for (n, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    T::vstore::<S>(c.add(n * self.c_row + v * lanes), sum);
                }
            }
        }
    }
}

impl<T: Lanes> WithSimd for Product<'_, T> {
    type Output = ();

    /// Strips as wide as the registers allow. A block of N x V wants N V sums, V values and one factor in registers; wide
    /// blocks load less for each multiply-add.
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let lanes = T::lanes::<S>();
        let mut first = 0;
        while first < self.columns {
            let left = (self.columns - first) / lanes;
            // SAFETY: `run` checked the views, and the strip has no more registers than are left.
            let width = unsafe {
                match (left, S::REGISTER_COUNT >= 32) {
                    (1, true) => {
                        self.strip::<S, 12, 1>(simd, first);
                        1
                    }
                    (2 | 4 | 5, true) => {
                        self.strip::<S, 12, 2>(simd, first);
                        2
                    }
                    (_, true) => {
                        self.strip::<S, 8, 3>(simd, first);
                        3
                    }
                    (1, false) => {
                        self.strip::<S, 8, 1>(simd, first);
                        1
                    }
                    (2 | 4, false) => {
                        self.strip::<S, 5, 2>(simd, first);
                        2
                    }
                    (_, false) => {
                        self.strip::<S, 4, 3>(simd, first);
                        3
                    }
                }
            };
            first += width * lanes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::lanes::instruction_sets;

    fn values<T: Lanes>(n: usize, step: f64) -> Vec<T> {
        (0..n).map(|i| T::real((i as f64 * step).sin())).collect()
    }

    /// Every number of rows and registers, so that every block is met, on every instruction set.
    fn every_block<T: Lanes + Into<f64>>(tolerance: f64) {
        for arch in instruction_sets() {
            for columns in (COLUMNS..=9 * COLUMNS).step_by(COLUMNS) {
                for rows in 1..=26 {
                    for transposed in [false, true] {
                        for accumulate in [false, true] {
                            one::<T>(arch, rows, columns, transposed, accumulate, tolerance);
                        }
                    }
                }
            }
        }
    }

    fn one<T: Lanes + Into<f64>>(
        arch: Arch,
        rows: usize,
        columns: usize,
        transposed: bool,
        accumulate: bool,
        tolerance: f64,
    ) {
        let (depth, padding) = (7, 3);
        let (a_row, a_col) = match transposed {
            false => (depth + padding, 1),
            true => (1, rows + padding),
        };
        let row = columns + padding;
        let a = values::<T>((rows + padding) * (depth + padding), 0.7);
        let b = values::<T>(depth * row, 1.1);
        let before = values::<T>(rows * row, 1.3);
        let mut c = before.clone();
        let product = Product {
            a: &a,
            a_row,
            a_col,
            b: &b,
            b_row: row,
            c: &mut c,
            c_row: row,
            rows,
            columns,
            depth,
            accumulate,
        };
        arch.dispatch(product);
        for (i, value) in c.iter().enumerate() {
            let (r, column) = (i / row, i % row);
            let start: f64 = before[i].into();
            let mut exact = if accumulate { start } else { 0.0 };
            for t in 0..depth {
                let (x, y) = (a[r * a_row + t * a_col], b[t * row + column]);
                exact += Into::<f64>::into(x) * Into::<f64>::into(y);
            }
            if column >= columns {
                exact = start; // untouched
            }
            let got: f64 = (*value).into();
            assert!(
                (got - exact).abs() < tolerance,
                "{rows}x{columns}: {got} for {exact} at {i}"
            );
        }
    }

    #[test]
    fn every_block_in_f32() {
        every_block::<f32>(3e-6);
    }

    #[test]
    fn every_block_in_f64() {
        every_block::<f64>(1e-14);
    }
}
