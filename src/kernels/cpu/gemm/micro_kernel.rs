//! The micro-kernel: blocks of c stay in registers during the loop over the depth. No packing, no threads.

use crate::kernels::cpu::Lanes;
use pulp::{Arch, Simd, WithSimd};

/// Returns whether the processor has 32 registers of 64 bytes.
pub(super) fn has_avx512() -> bool {
    struct Registers;
    impl WithSimd for Registers {
        type Output = usize;

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::REGISTER_COUNT * size_of::<S::f32s>()
        }
    }
    Arch::new().dispatch(Registers) >= 32 * 64
}

/// The granularity of a tile's columns: a cache line of `f32`, a whole number of registers on every instruction set.
pub const COLUMNS: usize = 16;

/// The rows of a packed panel of a; the most rows of a register block.
pub(super) const PANEL: usize = 8;

/// Computes `c = a b` or `c += a b` on raw memory, so that several threads can write one c: a (rows, depth) in panels
/// of [`PANEL`] rows, b (depth, columns) in units of [`COLUMNS`] columns.
#[derive(Clone, Copy)]
pub(super) struct Tiles<T> {
    pub a: *const T,
    /// The stride from one row of a to the next in a panel.
    pub a_row: usize,
    /// The stride from one column of a to the next.
    pub a_col: usize,
    /// The stride from one panel of a to the next.
    pub a_panel: usize,
    /// b, readable up to a multiple of [`COLUMNS`].
    pub b: *const T,
    /// The stride from one row of b to the next.
    pub b_row: usize,
    /// The stride from [`COLUMNS`] columns of b to the next.
    pub b_unit: usize,
    pub c: *mut T,
    /// The stride from one row of c to the next.
    pub c_row: usize,
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    /// How the result is combined with c.
    pub sums: Sums,
}

/// How the result is combined with the previous c.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// The result replaces c.
    Replace,
    /// The result is summed from zero and added to c: rounding chains are shorter if the depth is processed in blocks.
    Add,
    /// The chains of multiply-adds start from c, so that a term of zero changes no bit, wherever the depth is cut. Only
    /// for columns of whole registers.
    Continue,
}

impl<T: Lanes> Tiles<T> {
    /// Computes the matmul on the calling thread.
    ///
    /// # Safety
    /// a and b must be readable and c writable as far as sizes and strides reach, and c must not be shared.
    pub(super) unsafe fn run(self) {
        Arch::new().dispatch(self);
    }

    /// Computes the rows from `row` to `end` of one panel, in `V` registers from column `first` on: in blocks of `N`
    /// rows, then of fewer.
    ///
    /// # Safety
    /// As [`run`](Self::run); the rows and the first column must exist.
    #[inline(always)]
    unsafe fn blocks<S: Simd, const N: usize, const V: usize>(
        &self,
        simd: S,
        mut row: usize,
        end: usize,
        first: usize,
    ) {
        // SAFETY: blocks of rows within the views.
        unsafe {
            while row + N <= end {
                self.block::<S, N, V>(simd, row, first);
                row += N;
            }
            while row + 4 <= end {
                self.block::<S, 4, V>(simd, row, first);
                row += 4;
            }
            while row < end {
                self.block::<S, 1, V>(simd, row, first);
                row += 1;
            }
        }
    }

    /// Computes a block of `N` rows by `V` registers of c.
    ///
    /// # Safety
    /// As [`blocks`](Self::blocks).
    #[inline(always)]
    unsafe fn block<S: Simd, const N: usize, const V: usize>(
        &self,
        simd: S,
        row: usize,
        first: usize,
    ) {
        let lanes = T::lanes::<S>();
        // SAFETY: the block is inside the views.
        unsafe {
            let c = self.c.add(row * self.c_row + first);
            let columns = (self.columns - first).min(V * lanes);
            for n in 0..N {
                for line in 0..(V * lanes).div_ceil(COLUMNS) {
                    prefetch(c.wrapping_add(n * self.c_row + line * COLUMNS));
                }
            }
            let panel = self.a.add(row / PANEL * self.a_panel);
            let mut a = panel.wrapping_add(row % PANEL * self.a_row);
            // The address in b of column `first + column`.
            let place = |column: usize| {
                let column = first + column;
                self.b
                    .wrapping_add(column / COLUMNS * self.b_unit + column % COLUMNS)
            };
            let mut b: [_; V] = std::array::from_fn(|v| place(v * lanes));
            let mut sums = [[T::vsplat(simd, T::ZERO); V]; N];
            if self.sums == Sums::Continue {
                for (n, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = T::vload::<S>(c.add(n * self.c_row + v * lanes));
                    }
                }
            }
            for _ in 0..self.depth {
                let mut values = [T::vsplat(simd, T::ZERO); V];
                for (value, b) in values.iter_mut().zip(&mut b) {
                    *value = T::vload::<S>(*b);
                    *b = b.wrapping_add(self.b_row);
                }
                for (n, sums) in sums.iter_mut().enumerate() {
                    let factor = T::vsplat(simd, *a.add(n * self.a_row));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = T::vmul_add(simd, factor, value, *sum);
                    }
                }
                a = a.wrapping_add(self.a_col);
            }
            if columns < V * lanes {
                return self.store_part::<S, N, V>(sums, c, columns);
            }
            for (n, sums) in sums.into_iter().enumerate() {
                for (v, mut sum) in sums.into_iter().enumerate() {
                    let c = c.add(n * self.c_row + v * lanes);
                    if self.sums == Sums::Add {
                        sum = T::vadd(simd, sum, T::vload::<S>(c));
                    }
                    T::vstore::<S>(c, sum);
                }
            }
        }
    }

    /// Stores the first `columns` of a block to c, which ends there.
    ///
    /// # Safety
    /// As [`block`](Self::block).
    #[inline(always)]
    unsafe fn store_part<S: Simd, const N: usize, const V: usize>(
        &self,
        sums: [[T::Register<S>; V]; N],
        c: *mut T,
        columns: usize,
    ) {
        let lanes = T::lanes::<S>();
        let mut row = [T::ZERO; MAX_STRIP];
        for (n, sums) in sums.into_iter().enumerate() {
            // SAFETY: V registers fit in `row`, and c has `columns` columns.
            unsafe {
                for (v, sum) in sums.into_iter().enumerate() {
                    T::vstore::<S>(row.as_mut_ptr().add(v * lanes), sum);
                }
                let c = std::slice::from_raw_parts_mut(c.add(n * self.c_row), columns);
                for (c, sum) in c.iter_mut().zip(row) {
                    *c = if self.sums == Sums::Add {
                        *c + sum
                    } else {
                        sum
                    };
                }
            }
        }
    }
}

/// The elements of the widest strip: three registers of at most 16 elements.
const MAX_STRIP: usize = 3 * COLUMNS;

/// Prefetches the cache line at `at`, which need not be readable.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which does not fault; SSE is part of the architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

impl<T: Lanes> WithSimd for Tiles<T> {
    type Output = ();

    /// Loops over panels of a, each of which stays in the first-level cache while b streams from the second.
    ///
    /// Strips are as wide as the registers allow: a block of N x V needs N V sums, V values and one factor in
    /// registers, and wide blocks load less per multiply-add.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = T::lanes::<S>();
        for row in (0..self.rows).step_by(PANEL) {
            let end = self.rows.min(row + PANEL);
            let mut first = 0;
            while first < self.columns {
                let left = (self.columns - first).div_ceil(lanes);
                // Four registers are split two and two, not three and one.
                let width = match left {
                    1 | 2 => left,
                    4 => 2,
                    _ => 3,
                };
                // SAFETY: the caller of `run` promised valid views, and the strip begins within the columns.
                unsafe {
                    match (width, S::REGISTER_COUNT >= 32) {
                        (1, true) => self.blocks::<S, 8, 1>(simd, row, end, first),
                        (2, true) => self.blocks::<S, 8, 2>(simd, row, end, first),
                        (_, true) => self.blocks::<S, 8, 3>(simd, row, end, first),
                        (1, false) => self.blocks::<S, 4, 1>(simd, row, end, first),
                        (2, false) => self.blocks::<S, 4, 2>(simd, row, end, first),
                        (_, false) => self.blocks::<S, 4, 3>(simd, row, end, first),
                    }
                }
                first += width * lanes;
            }
        }
    }
}
