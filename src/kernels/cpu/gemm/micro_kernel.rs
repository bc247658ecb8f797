//! The micro-kernel: blocks of c in registers while the depth is walked. No packing, no threads.

use crate::kernels::cpu::Lanes;
use pulp::{Arch, Simd, WithSimd};

/// Whether products run on registers of 64 bytes, and 32 of them.
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

/// Elements that the columns of a tile come in: a cache line of `f32`, whole registers on every instruction set.
pub const COLUMNS: usize = 16;

/// Rows of a that lie together where it is packed, and of a block of registers at most.
pub(super) const PANEL: usize = 8;

/// `c = a b` or `c += a b` over plain memory, for several threads to write one c: a (rows, depth) in panels of
/// [`PANEL`] rows, b (depth, columns) in units of [`COLUMNS`] columns.
#[derive(Clone, Copy)]
pub(super) struct Tiles<T> {
    /// a.
    pub a: *const T,
    /// From one row of a to the next in a panel.
    pub a_row: usize,
    /// From one column of a to the next.
    pub a_col: usize,
    /// From one panel of a to the next.
    pub a_panel: usize,
    /// b, readable up to a multiple of [`COLUMNS`].
    pub b: *const T,
    /// From one row of b to the next.
    pub b_row: usize,
    /// From [`COLUMNS`] columns of b to the next.
    pub b_unit: usize,
    /// c.
    pub c: *mut T,
    /// From one row of c to the next.
    pub c_row: usize,
    /// Rows of a and c.
    pub rows: usize,
    /// Columns of b and c.
    pub columns: usize,
    /// Columns of a, rows of b.
    pub depth: usize,
    /// What becomes of c.
    pub sums: Sums,
}

/// What becomes of c, which had a value before.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// It is the product.
    Replace,
    /// The product is summed on its own and added: shorter chains of rounding where the depth is taken in blocks.
    Add,
    /// Its value is where the chains of multiply-adds begin, so that a term of zero changes no bit, wherever the depth
    /// is cut. Only where the columns are whole registers.
    Continue,
}

impl<T: Lanes> Tiles<T> {
    /// Computes it, on the calling thread.
    ///
    /// # Safety
    /// a and b are readable, c is writable as far as sizes and strides reach, and c is not shared.
    pub(super) unsafe fn run(self) {
        Arch::new().dispatch(self);
    }

    /// The rows from `row` to `end`, of one panel, in `V` registers from column `first`: in blocks of `N` rows, then of
    /// fewer.
    ///
    /// # Safety
    /// As [`run`](Self::run), and the rows and the first column exist.
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

    /// `N` rows by `V` registers of c, in registers.
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
        // SAFETY: the block lies inside the views.
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
            // Where column `first + column` begins.
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

    /// The first `columns` of a block into c, which ends there.
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
            // SAFETY: V registers fit `row`, and c has that many columns.
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

/// Elements of the widest strip: three registers, of 16 elements at most.
const MAX_STRIP: usize = 3 * COLUMNS;

/// Asks for the cache line at `at`, which need not be readable, before it is needed.
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

    /// A panel of a after the other, which stays in the first-level cache while b passes from the second.
    ///
    /// Strips as wide as the registers allow: a block of N x V wants N V sums, V values and one factor in registers;
    /// wide blocks load less for each multiply-add.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = T::lanes::<S>();
        for row in (0..self.rows).step_by(PANEL) {
            let end = self.rows.min(row + PANEL);
            let mut first = 0;
            while first < self.columns {
                let left = (self.columns - first).div_ceil(lanes);
                // Four registers are two and two, not three and one.
                let width = match left {
                    1 | 2 => left,
                    4 => 2,
                    _ => 3,
                };
                // SAFETY: the caller of `run` vouches for the views, and the strip begins within the columns.
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
