//! The terms of bf16 that elements of factors are sums of.

use half::bf16;

/// What factors are made of.
///
/// A number in bf16 is its own only term. One in f32, x, is the sum of two but for 2^-17 |x|: x rounded, and the rest,
/// rounded, of at most 2^-8 |x|. Of infinities and NaNs there is no rest, nor of what rounds to an infinity.
pub(in super::super) trait Element: Copy + Sync + Load {
    /// How many terms.
    const TERMS: usize;

    /// The terms; the second is 0 where there is but one.
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

/// Elsewhere they are read one by one.
#[cfg(not(target_arch = "x86_64"))]
pub(in super::super) trait Load {}
#[cfg(not(target_arch = "x86_64"))]
impl<X: Element> Load for X {}
#[cfg(target_arch = "x86_64")]
pub(in super::super) use x86::Load;

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::super::tile::{DEPTH, SIDE};
    use half::bf16;
    use std::arch::x86_64::{
        __m256i, __m512bh, __m512i, _CMP_LT_OQ, _MM_HINT_T0, _mm_prefetch,
        _mm256_maskz_loadu_epi16, _mm512_abs_ps, _mm512_castps_si512, _mm512_castsi512_ps,
        _mm512_castsi512_si256, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh,
        _mm512_extracti64x4_epi64, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
        _mm512_maskz_loadu_epi32, _mm512_maskz_mov_ps, _mm512_or_si512, _mm512_permutexvar_epi16,
        _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_sub_ps,
        _mm512_test_epi32_mask,
    };

    /// A tile: 16 lines of 32 elements of the depth, or 16 pairs of the depth of 16 lines.
    pub type Registers = [__m512i; SIDE];

    /// Reads a tile's terms: the first, and the second where not all are zeros.
    pub trait Load: Sized {
        /// Up to 16 lines of up to 32 elements of the depth, one after another in memory.
        ///
        /// # Safety
        /// As many are readable; AVX-512 with words, short vectors and bf16.
        unsafe fn along(
            from: *const Self,
            line: usize,
            lines: usize,
            length: usize,
        ) -> (Registers, Option<Registers>);

        /// Up to 32 elements of the depth, in pairs, of up to 16 lines that lie side by side.
        ///
        /// # Safety
        /// As [`along`](Self::along).
        unsafe fn across(
            from: *const Self,
            depth: usize,
            lines: usize,
            length: usize,
        ) -> (Registers, Option<Registers>);
    }

    impl Load for bf16 {
        /// Asks for the lines that follow: each is too short for the processor to foresee.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn along(
            from: *const bf16,
            line: usize,
            lines: usize,
            length: usize,
        ) -> (Registers, Option<Registers>) {
            let mask = u32::MAX >> DEPTH.saturating_sub(length);
            let mut tile = [_mm512_setzero_si512(); SIDE];
            for (i, to) in tile.iter_mut().enumerate().take(lines) {
                let from = from.wrapping_add(i * line);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(SIDE * line).cast());
                // SAFETY: of a line that is there, the elements that are.
                *to = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
            }
            (tile, None)
        }

        /// Asks for the lines that follow: they lie too far apart for the processor to foresee.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn across(
            from: *const bf16,
            depth: usize,
            lines: usize,
            length: usize,
        ) -> (Registers, Option<Registers>) {
            let mask = u16::MAX >> SIDE.saturating_sub(lines);
            let element = |k: usize| {
                if k >= length {
                    return _mm512_setzero_si512();
                }
                let from = from.wrapping_add(k * depth);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(2 * SIDE).cast());
                // SAFETY: of an element of the depth that is there, the lines that are.
                _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) })
            };
            let mut tile = [_mm512_setzero_si512(); SIDE];
            for (pair, to) in tile.iter_mut().enumerate() {
                let [first, second] = [element(2 * pair), element(2 * pair + 1)];
                *to = _mm512_or_si512(first, _mm512_slli_epi32::<16>(second));
            }
            (tile, None)
        }
    }

    // Of f32 the tile lies in cache, where its second terms are read from again if there are any: tiles widened from
    // bf16 have none.
    impl Load for f32 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn along(
            from: *const f32,
            line: usize,
            lines: usize,
            length: usize,
        ) -> (Registers, Option<Registers>) {
            let mask = u32::MAX >> DEPTH.saturating_sub(length);
            let read = |i: usize| {
                let from = from.wrapping_add(i * line);
                let masks = [mask as u16, (mask >> SIDE) as u16];
                // SAFETY: of a line that is there, the elements that are.
                [0, 1].map(|half| unsafe {
                    _mm512_maskz_loadu_epi32(masks[half], from.wrapping_add(half * SIDE).cast())
                })
            };
            let mut tile = [_mm512_setzero_si512(); SIDE];
            let mut lower = _mm512_setzero_si512();
            for (i, to) in tile.iter_mut().enumerate().take(lines) {
                let [x, y] = read(i);
                *to = rounded([x, y]);
                lower = _mm512_or_si512(lower, _mm512_or_si512(x, y));
            }
            if !has_rest(lower) {
                return (tile, None);
            }
            let mut rests = [_mm512_setzero_si512(); SIDE];
            for (i, to) in rests.iter_mut().enumerate().take(lines) {
                *to = rest(read(i));
            }
            (tile, Some(rests))
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn across(
            from: *const f32,
            depth: usize,
            lines: usize,
            length: usize,
        ) -> (Registers, Option<Registers>) {
            let mask = u16::MAX >> SIDE.saturating_sub(lines);
            let read = |pair: usize| {
                [2 * pair, 2 * pair + 1].map(|k| {
                    if k >= length {
                        return _mm512_setzero_si512();
                    }
                    // SAFETY: of an element of the depth that is there, the lines that are.
                    unsafe { _mm512_maskz_loadu_epi32(mask, from.wrapping_add(k * depth).cast()) }
                })
            };
            // One element of either register in turn.
            let in_turn: [u16; DEPTH] = std::array::from_fn(|i| (i / 2 + i % 2 * SIDE) as u16);
            // SAFETY: as many bytes as a register has.
            let in_turn = unsafe { _mm512_loadu_si512(in_turn.as_ptr().cast()) };
            let mut tile = [_mm512_setzero_si512(); SIDE];
            let mut lower = _mm512_setzero_si512();
            for (pair, to) in tile.iter_mut().enumerate() {
                let [x, y] = read(pair);
                *to = _mm512_permutexvar_epi16(in_turn, rounded([x, y]));
                lower = _mm512_or_si512(lower, _mm512_or_si512(x, y));
            }
            if !has_rest(lower) {
                return (tile, None);
            }
            let mut rests = [_mm512_setzero_si512(); SIDE];
            for (pair, to) in rests.iter_mut().enumerate() {
                *to = _mm512_permutexvar_epi16(in_turn, rest(read(pair)));
            }
            (tile, Some(rests))
        }
    }

    /// Whether bits are set that bf16 does not have.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn has_rest(x: __m512i) -> bool {
        _mm512_test_epi32_mask(x, _mm512_set1_epi32(0xFFFF)) != 0
    }

    /// Two registers of f32, one after the other, in bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn rounded(x: [__m512i; 2]) -> __m512i {
        let [x, y] = x.map(|x| _mm512_castsi512_ps(x));
        let rounded: __m512bh = _mm512_cvtne2ps_pbh(y, x);
        // SAFETY: both are 64 bytes of plain data.
        unsafe { std::mem::transmute(rounded) }
    }

    /// What rounding takes from two registers of f32, in bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn rest(x: [__m512i; 2]) -> __m512i {
        let firsts = rounded(x);
        let firsts = [
            _mm512_castsi512_si256(firsts),
            _mm512_extracti64x4_epi64::<1>(firsts),
        ];
        let rest = |x: __m512i, first: __m256i| {
            let first = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(first));
            let rest = _mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(first));
            let infinity = _mm512_set1_ps(f32::INFINITY);
            let is_finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(rest), infinity);
            _mm512_castps_si512(_mm512_maskz_mov_ps(is_finite, rest))
        };
        rounded([rest(x[0], firsts[0]), rest(x[1], firsts[1])])
    }
}
