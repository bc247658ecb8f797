//! Splitting of factors into sums of bf16 terms.

use half::bf16;

/// An element of a factor, as a sum of bf16 terms.
///
/// A bf16 number is its own only term. An f32 number x is the sum of two terms, up to an error of 2^-17 |x|: x rounded,
/// and the rounded remainder, which is at most 2^-8 |x|. The remainder is 0 for infinities, NaNs and numbers that round
/// to infinity.
pub(in super::super) trait Element: Copy + Sync + Load {
    const TERMS: usize;

    /// Returns the terms; the second is 0 if there is only one.
    #[cfg(any(test, target_arch = "aarch64"))]
    fn terms(self) -> [bf16; 2];
}

impl Element for bf16 {
    const TERMS: usize = 1;

    #[cfg(any(test, target_arch = "aarch64"))]
    fn terms(self) -> [bf16; 2] {
        [self, bf16::ZERO]
    }
}

impl Element for f32 {
    const TERMS: usize = 2;

    #[cfg(any(test, target_arch = "aarch64"))]
    fn terms(self) -> [bf16; 2] {
        let first = bf16::from_f32(self);
        let rest = self - first.to_f32();
        [
            first,
            bf16::from_f32(if rest.is_finite() { rest } else { 0.0 }),
        ]
    }
}

/// On other architectures elements are read one by one.
#[cfg(not(target_arch = "x86_64"))]
pub(in super::super) trait Load {}
#[cfg(not(target_arch = "x86_64"))]
impl<X: Element> Load for X {}
#[cfg(target_arch = "x86_64")]
pub(in super::super) use x86::Load;

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use half::bf16;
    use std::arch::x86_64::{
        __m256i, __m512, __m512bh, __m512i, _CMP_LT_OQ, _mm256_maskz_loadu_epi16, _mm512_abs_ps,
        _mm512_castsi512_ps, _mm512_castsi512_si256, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32,
        _mm512_cvtne2ps_pbh, _mm512_extracti64x4_epi64, _mm512_loadu_si512,
        _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_epi32, _mm512_maskz_mov_ps, _mm512_or_si512,
        _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512,
        _mm512_slli_epi32, _mm512_sub_ps, _mm512_test_epi32_mask,
    };

    /// Loads registers of a tile: first terms and, if the type has two, second terms.
    pub trait Load: Sized {
        /// Loads 32 contiguous elements of the depth, with zeros where `mask` is 0.
        ///
        /// # Safety
        /// The elements of the mask must be readable; the processor must have AVX512-BW, AVX512-VL and AVX512-BF16.
        unsafe fn along(from: *const Self, mask: u32) -> [__m512i; 2];

        /// Loads two elements of the depth, interleaved, for 16 contiguous lines: those at `from` and those `depth`
        /// further. Zeros where their masks are 0.
        ///
        /// # Safety
        /// As [`along`](Self::along).
        unsafe fn across(from: *const Self, depth: usize, masks: [u16; 2]) -> [__m512i; 2];
    }

    // `map` on arrays is avoided: it compiles to a call of a function without these target features.
    impl Load for bf16 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn along(from: *const bf16, mask: u32) -> [__m512i; 2] {
            // SAFETY: the caller's promise.
            let line = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
            [line, _mm512_setzero_si512()]
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn across(from: *const bf16, depth: usize, masks: [u16; 2]) -> [__m512i; 2] {
            // SAFETY: the caller's promise.
            let (x, y) = unsafe {
                (
                    _mm256_maskz_loadu_epi16(masks[0], from.cast()),
                    _mm256_maskz_loadu_epi16(masks[1], from.wrapping_add(depth).cast()),
                )
            };
            let y = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(y));
            let pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(x), y);
            [pairs, _mm512_setzero_si512()]
        }
    }

    impl Load for f32 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn along(from: *const f32, mask: u32) -> [__m512i; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                terms(
                    _mm512_maskz_loadu_epi32(mask as u16, from.cast()),
                    _mm512_maskz_loadu_epi32((mask >> 16) as u16, from.wrapping_add(16).cast()),
                )
            }
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn across(from: *const f32, depth: usize, masks: [u16; 2]) -> [__m512i; 2] {
            /// The permutation that interleaves the elements of both halves.
            const IN_TURN: [u16; 32] = {
                let mut order = [0; 32];
                let mut i = 0;
                while i < 32 {
                    order[i] = (i / 2 + i % 2 * 16) as u16;
                    i += 1;
                }
                order
            };
            // SAFETY: the caller's promise; IN_TURN has as many indices as a register has elements.
            unsafe {
                let in_turn = _mm512_loadu_si512(IN_TURN.as_ptr().cast());
                let [first, second] = terms(
                    _mm512_maskz_loadu_epi32(masks[0], from.cast()),
                    _mm512_maskz_loadu_epi32(masks[1], from.wrapping_add(depth).cast()),
                );
                [
                    _mm512_permutexvar_epi16(in_turn, first),
                    _mm512_permutexvar_epi16(in_turn, second),
                ]
            }
        }
    }

    /// Returns the terms of two consecutive registers of f32.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn terms(x: __m512i, y: __m512i) -> [__m512i; 2] {
        let first = rounded(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y));
        // Tests whether any bits are set that bf16 does not have; none are in tiles that were widened from bf16.
        if _mm512_test_epi32_mask(_mm512_or_si512(x, y), _mm512_set1_epi32(0xFFFF)) == 0 {
            return [first, _mm512_setzero_si512()];
        }
        let of_x = rest(x, _mm512_castsi512_si256(first));
        let of_y = rest(y, _mm512_extracti64x4_epi64::<1>(first));
        [first, rounded(of_x, of_y)]
    }

    /// Returns the rounding errors of a register of f32; 0 for infinities and NaNs.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn rest(x: __m512i, rounded: __m256i) -> __m512 {
        let rounded = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded));
        let rest = _mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(rounded));
        let infinity = _mm512_set1_ps(f32::INFINITY);
        let is_finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(rest), infinity);
        _mm512_maskz_mov_ps(is_finite, rest)
    }

    /// Rounds two consecutive registers of f32 to bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn rounded(x: __m512, y: __m512) -> __m512i {
        let rounded: __m512bh = _mm512_cvtne2ps_pbh(y, x);
        // SAFETY: both are 64 bytes of plain data.
        unsafe { std::mem::transmute(rounded) }
    }
}
