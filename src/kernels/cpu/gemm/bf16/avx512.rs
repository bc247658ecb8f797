//! Blocks of c by AVX-512 dot products of pairs.
//!
//! With `vdpbf16ps`, an element of c is one chain of fused multiply-adds over the block's depth, the odd element of
//! each pair first, which is then added to c. Rounding chains are shorter if the depth is processed in blocks.

use super::tile::{Factors, PAIRS, SIDE, TILE, Tiles};
use half::bf16;
use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};

/// The number of rows whose sums are in registers at a time.
const ROWS: usize = 8;

/// Computes a block like [`amx::multiply`](super::amx::multiply).
///
/// # Safety
/// The processor must have AVX512-BF16; the factors must be readable for their steps, and the sums writable.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(factors: Factors, tiles: Tiles, sums: *mut f32, adds: bool) {
    for row in (0..tiles.rows * SIDE).step_by(ROWS) {
        // SAFETY: the caller's promise; the rows are the block's.
        unsafe {
            match tiles.columns {
                1 => rows::<1>(factors, row, sums, adds),
                _ => rows::<2>(factors, row, sums, adds),
            }
        }
    }
}

/// Computes [`ROWS`] rows of the block from `row` on, `N` tiles wide.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const N: usize>(factors: Factors, row: usize, sums: *mut f32, adds: bool) {
    let (panel, row) = (row / SIDE, row % SIDE);
    // SAFETY: rows of this block's tiles.
    unsafe {
        let at = |r: usize, n: usize| sums.add((2 * panel + n) * SIDE * SIDE + (row + r) * SIDE);
        let mut c = [[_mm512_setzero_ps(); N]; ROWS];
        let a = factors.a.add(panel * factors.a_panel);
        for step in 0..factors.steps {
            let a = a.add(step * TILE + row * 2 * PAIRS).cast::<i32>();
            let b = factors.b.add(step * TILE);
            for pair in 0..PAIRS {
                let mut values = [bits(_mm512_set1_epi32(0)); N];
                for (n, value) in values.iter_mut().enumerate() {
                    let at: *const bf16 = b.add(n * factors.b_panel + pair * 2 * SIDE);
                    *value = bits(_mm512_loadu_si512(at.cast()));
                }
                for (r, c) in c.iter_mut().enumerate() {
                    let factor = bits(_mm512_set1_epi32(a.add(r * PAIRS + pair).read_unaligned()));
                    for (c, value) in c.iter_mut().zip(values) {
                        *c = _mm512_dpbf16_ps(*c, factor, value);
                    }
                }
            }
        }
        for (r, c) in c.into_iter().enumerate() {
            for (n, mut c) in c.into_iter().enumerate() {
                if adds {
                    c = _mm512_add_ps(c, _mm512_loadu_ps(at(r, n)));
                }
                _mm512_storeu_ps(at(r, n), c);
            }
        }
    }
}

/// Returns the same bits as pairs of bf16.
#[inline(always)]
fn bits(x: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of plain data.
    unsafe { std::mem::transmute(x) }
}
