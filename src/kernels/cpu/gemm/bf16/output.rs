//! The output of a bf16 matmul: writes sums to c, rounded if c is bf16.

use super::super::matrix::MatMut;
use super::tile::{BLOCK, SIDE};
use super::unit::Unit;
use crate::kernels::cpu::simd::same_type_mut;
use half::bf16;

/// The matrix that a matmul writes, in tasks whose blocks are disjoint.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    to: Elements,
    pub(super) rows: usize,
    pub(super) cols: usize,
    row_stride: usize,
    /// Whether the matmul is added to c.
    adds: bool,
}

#[derive(Clone, Copy)]
enum Elements {
    F32(*mut f32),
    Bf16(*mut bf16),
}

// SAFETY: callers of `store` promise that blocks do not overlap.
unsafe impl Sync for Output {}

impl Output {
    /// Returns c in f32 or bf16; `None` for other types. The result must not outlive c's borrow.
    pub fn new<C: 'static>(c: &mut MatMut<'_, C>, adds: bool) -> Option<Self> {
        let to = match same_type_mut::<C, f32>(c.data) {
            Some(c) => Elements::F32(c.as_mut_ptr()),
            None => Elements::Bf16(same_type_mut::<C, bf16>(c.data)?.as_mut_ptr()),
        };
        Some(Self {
            to,
            rows: c.rows,
            cols: c.cols,
            row_stride: c.row_stride,
            adds,
        })
    }

    /// Prefetches `rows` rows of the block that begins at a row and a column.
    #[inline(always)]
    pub(super) fn prefetch(&self, [row, column]: [usize; 2], rows: usize) {
        let bytes = match self.to {
            Elements::F32(to) => (to.cast::<u8>(), size_of::<f32>()),
            Elements::Bf16(to) => (to.cast::<u8>(), size_of::<bf16>()),
        };
        for row in row..row + rows {
            let at = bytes
                .0
                .wrapping_add((row * self.row_stride + column) * bytes.1);
            for line in (0..BLOCK * bytes.1).step_by(64) {
                prefetch_to_write(at.wrapping_add(line));
            }
        }
    }

    /// Writes the sums of a block, tiles (2, 2), to c at `place`, cropped to `sizes` rows and columns.
    ///
    /// # Safety
    /// The block must be inside c, c still borrowed, and no other thread may access the block.
    pub(super) unsafe fn store(
        self,
        unit: Unit,
        place: [usize; 2],
        sizes: [usize; 2],
        sums: &[f32],
    ) {
        assert!(sums.len() >= BLOCK * BLOCK && sizes.into_iter().all(|size| size <= BLOCK));
        // SAFETY: the caller's promise; a unit of x86-64 exists only if the processor has its instructions.
        unsafe {
            match unit {
                #[cfg(target_arch = "x86_64")]
                Unit::Amx | Unit::Avx512 => self.store_lines(place, sizes, sums),
                #[cfg(target_arch = "aarch64")]
                Unit::Neon => self.for_lines(place, sizes, sums, |at, sums, count| {
                    self.store_plainly(at, &sums[..count]);
                }),
                #[cfg(test)]
                Unit::Emulated(_) => self.for_lines(place, sizes, sums, |at, sums, count| {
                    self.store_plainly(at, &sums[..count]);
                }),
            }
        }
    }

    /// Calls `store(at, sums, count)` for every row of every tile: the first `count` of [`SIDE`] sums go to elements
    /// from `at`.
    #[inline(always)]
    fn for_lines(
        self,
        [row, column]: [usize; 2],
        [rows, columns]: [usize; 2],
        sums: &[f32],
        mut store: impl FnMut(usize, &[f32; SIDE], usize),
    ) {
        let start = row * self.row_stride + column;
        let (lines, _) = sums.as_chunks::<SIDE>();
        for (i, tile) in lines.chunks_exact(SIDE).enumerate() {
            let (row, column) = (i / 2 * SIDE, i % 2 * SIDE);
            let count = columns.saturating_sub(column).min(SIDE);
            if count == 0 {
                continue;
            }
            let mut at = start + row * self.row_stride + column;
            for line in &tile[..rows.saturating_sub(row).min(SIDE)] {
                store(at, line, count);
                at += self.row_stride;
            }
        }
    }

    /// Does the same as [`store`](Self::store), with one loop per kind of output.
    ///
    /// # Safety
    /// As [`store`](Self::store); the processor must have AVX512-BW, AVX512-VL and AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn store_lines(self, place: [usize; 2], sizes: [usize; 2], sums: &[f32]) {
        use std::arch::x86_64::{
            __m256bh, __m256i, _mm256_mask_storeu_epi16, _mm256_maskz_loadu_epi16, _mm512_add_ps,
            _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_loadu_ps,
            _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_slli_epi32,
        };
        let mask = |count: usize| u16::MAX >> (SIDE - count);
        // SAFETY: a line has SIDE sums; masks limit accesses of c to the block; both types are 32 bytes.
        unsafe {
            match (self.to, self.adds) {
                (Elements::F32(to), false) => {
                    self.for_lines(place, sizes, sums, |at, sums, count| {
                        let line = _mm512_loadu_ps(sums.as_ptr());
                        _mm512_mask_storeu_ps(to.add(at), mask(count), line);
                    })
                }
                (Elements::F32(to), true) => {
                    self.for_lines(place, sizes, sums, |at, sums, count| {
                        let (to, mask) = (to.add(at), mask(count));
                        let before = _mm512_maskz_loadu_ps(mask, to);
                        let line = _mm512_add_ps(before, _mm512_loadu_ps(sums.as_ptr()));
                        _mm512_mask_storeu_ps(to, mask, line);
                    })
                }
                (Elements::Bf16(to), adds) => {
                    self.for_lines(place, sizes, sums, |at, sums, count| {
                        let (to, mask) = (to.add(at).cast::<i16>(), mask(count));
                        let mut line = _mm512_loadu_ps(sums.as_ptr());
                        if adds {
                            let before = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, to));
                            let before = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(before));
                            line = _mm512_add_ps(before, line);
                        }
                        let rounded: __m256bh = _mm512_cvtneps_pbh(line);
                        let rounded: __m256i = std::mem::transmute(rounded);
                        _mm256_mask_storeu_epi16(to, mask, rounded);
                    })
                }
            }
        }
    }

    /// # Safety
    /// `sums.len()` elements must be writable from element `at` on.
    #[cfg(any(test, target_arch = "aarch64"))]
    unsafe fn store_plainly(self, at: usize, sums: &[f32]) {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                match self.to {
                    Elements::F32(to) => {
                        let to = to.add(at + i);
                        *to = if self.adds { *to + sum } else { *sum };
                    }
                    Elements::Bf16(to) => {
                        let to = to.add(at + i);
                        let before = if self.adds { (*to).to_f32() } else { 0.0 };
                        *to = bf16::from_f32(before + sum);
                    }
                }
            }
        }
    }
}

/// Prefetches the cache line at `at` for writing; it need not be mapped.
#[inline(always)]
fn prefetch_to_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which does not fault; processors that do not have it execute a no-op.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_ET0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
