//! Blocks of the factors, copied to tiles as the instructions read them.
//!
//! A tile is [`SIDE`] lines, which are rows of a or columns of b, by [`DEPTH`] of the depth: of a (line, depth), of b
//! pairs of the depth (pair, line, 2). One is the other, transposed as a matrix of pairs. A panel is the tiles of
//! [`SIDE`] lines, one after another.

use super::tile::{DEPTH, SIDE, TILE};
use super::unit::Unit;
use half::bf16;
use std::ops::Range;

/// A factor by its lines: rows of a, columns of b.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    pub data: &'a [bf16],
    /// From one line to the next.
    pub line: usize,
    /// From one element of the depth to the next. One of both strides is 1.
    pub depth: usize,
    /// It is b: pairs of the depth are what lies together.
    pub is_b: bool,
}

/// Elements that the panels of so many lines have.
pub(super) fn packed_len(lines: usize, depth: usize) -> usize {
    lines.div_ceil(SIDE) * depth.div_ceil(DEPTH) * TILE
}

impl Lines<'_> {
    /// `lines` at `depth` as panels in `to`, zeros beyond both.
    pub fn pack(self, unit: Unit, lines: Range<usize>, depth: Range<usize>, to: &mut [bf16]) {
        if lines.is_empty() || depth.is_empty() {
            return;
        }
        assert!(packed_len(lines.len(), depth.len()) <= to.len());
        assert!(self.line == 1 || self.depth == 1, "strides");
        let last = (lines.end - 1) * self.line + (depth.end - 1) * self.depth;
        assert!(last < self.data.len(), "lines beyond a factor");
        match unit {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: these units are there only where AVX-512 is; the block lies inside the data, and its panels in
            // `to`, as just asserted.
            Unit::Amx | Unit::Avx512 => unsafe { x86::pack(self, lines, depth, to) },
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => self.pack_plainly(lines, depth, to),
            #[cfg(test)]
            Unit::Emulated(_) => self.pack_plainly(lines, depth, to),
        }
    }

    #[cfg(any(test, target_arch = "aarch64"))]
    fn pack_plainly(self, lines: Range<usize>, depth: Range<usize>, to: &mut [bf16]) {
        let steps = depth.len().div_ceil(DEPTH);
        to[..packed_len(lines.len(), depth.len())].fill(bf16::ZERO);
        for (i, line) in lines.enumerate() {
            for (k, at) in depth.clone().enumerate() {
                let tile = (i / SIDE * steps + k / DEPTH) * TILE;
                let (i, k) = (i % SIDE, k % DEPTH);
                let place = match self.is_b {
                    true => k / 2 * 2 * SIDE + 2 * i + k % 2,
                    false => i * DEPTH + k,
                };
                to[tile + place] = self.data[line * self.line + at * self.depth];
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::{DEPTH, Lines, SIDE, TILE};
    use half::bf16;
    use std::arch::x86_64::{
        __m512i, _mm512_cvtepu16_epi32, _mm512_maskz_loadu_epi16, _mm512_or_si512,
        _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_storeu_si512,
        _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
    };
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm256_maskz_loadu_epi16};
    use std::ops::Range;

    /// # Safety
    /// AVX-512 with words and short vectors; the block lies inside the data, and its panels inside `to`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn pack(x: Lines<'_>, lines: Range<usize>, depth: Range<usize>, to: &mut [bf16]) {
        let mut to = to.as_mut_ptr();
        for line in lines.clone().step_by(SIDE) {
            let count = lines.end - line;
            for k in depth.clone().step_by(DEPTH) {
                let length = depth.end - k;
                // SAFETY: a tile of the block, of which no more than `count` lines and `length` elements are read.
                unsafe {
                    let from = x.data.as_ptr().add(line * x.line + k * x.depth);
                    let tile = match x.depth == 1 {
                        true => along(from, x.line, count, length),
                        false => across(from, x.depth, count, length),
                    };
                    // Lines along the depth are a's tile as they lie, pairs of lines across it b's.
                    let tile = match (x.depth == 1) == x.is_b {
                        true => transposed(tile),
                        false => tile,
                    };
                    for (i, pairs) in tile.into_iter().enumerate() {
                        _mm512_storeu_si512(to.add(i * DEPTH).cast(), pairs);
                    }
                    to = to.add(TILE);
                }
            }
        }
    }

    /// Up to 16 lines of up to 32 elements of the depth, one after another in memory. Asks for the lines that follow:
    /// each is too short for the processor to foresee.
    ///
    /// # Safety
    /// As many are readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn along(
        from: *const bf16,
        line: usize,
        lines: usize,
        length: usize,
    ) -> [__m512i; SIDE] {
        let mask = u32::MAX >> DEPTH.saturating_sub(length);
        let mut tile = [_mm512_setzero_si512(); SIDE];
        for (i, to) in tile.iter_mut().enumerate() {
            if i < lines {
                let from = from.wrapping_add(i * line);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(SIDE * line).cast());
                // SAFETY: of a line that is there, the elements that are.
                *to = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
            }
        }
        tile
    }

    /// Up to 32 elements of the depth, in pairs, of up to 16 lines that lie side by side. Asks for the lines that
    /// follow: they lie too far apart for the processor to foresee.
    ///
    /// # Safety
    /// As many are readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn across(
        from: *const bf16,
        depth: usize,
        lines: usize,
        length: usize,
    ) -> [__m512i; SIDE] {
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
        tile
    }

    /// A matrix of 16 x 16 pairs, transposed.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn transposed(x: [__m512i; SIDE]) -> [__m512i; SIDE] {
        let (mut x, mut y) = (x, x);
        for i in 0..8 {
            y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
        }
        for i in 0..4 {
            let [a, b, c, d] = [y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]];
            x[4 * i] = _mm512_unpacklo_epi64(a, c);
            x[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            x[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            x[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        const EVEN: i32 = 0x88;
        const ODD: i32 = 0xDD;
        for i in 0..4 {
            y[i] = _mm512_shuffle_i32x4::<EVEN>(x[i], x[4 + i]);
            y[4 + i] = _mm512_shuffle_i32x4::<ODD>(x[i], x[4 + i]);
            y[8 + i] = _mm512_shuffle_i32x4::<EVEN>(x[8 + i], x[12 + i]);
            y[12 + i] = _mm512_shuffle_i32x4::<ODD>(x[8 + i], x[12 + i]);
        }
        for i in 0..8 {
            x[i] = _mm512_shuffle_i32x4::<EVEN>(y[i], y[8 + i]);
            x[8 + i] = _mm512_shuffle_i32x4::<ODD>(y[i], y[8 + i]);
        }
        x
    }
}
