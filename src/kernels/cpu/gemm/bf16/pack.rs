//! Packing: blocks of the factors are copied to tiles in the instructions' layout.
//!
//! A tile is [`SIDE`] lines (rows of a or columns of b) by [`DEPTH`] elements of the depth. A tile of a is (line,
//! depth); a tile of b holds pairs of the depth, (pair, line, 2). One is the transpose of the other as a matrix of
//! pairs. A panel is the consecutive tiles of [`SIDE`] lines.
//!
//! Factors in bf16 are copied unchanged; those in f32 are copied as [two terms](Element), each in its own panels.

use super::terms::Element;
use super::tile::{DEPTH, SIDE, TILE};
use super::unit::Unit;
use half::bf16;
use std::ops::Range;

/// A factor as lines: rows of a, columns of b.
#[derive(Clone, Copy)]
pub(in super::super) struct Lines<'a, X> {
    pub data: &'a [X],
    /// The stride from one line to the next.
    pub line: usize,
    /// The stride from [`SIDE`] lines to the next [`SIDE`].
    pub panel: usize,
    /// The stride from one element of the depth to the next. This or `line` is 1.
    pub depth: usize,
    /// Whether the factor is b, whose tiles hold pairs of the depth.
    pub is_b: bool,
}

/// Returns the number of elements in the panels of `lines` lines.
pub(super) fn packed_len(lines: usize, depth: usize) -> usize {
    lines.div_ceil(SIDE) * depth.div_ceil(DEPTH) * TILE
}

impl<X: Element> Lines<'_, X> {
    /// Packs `lines` at `depth` into panels in `to`, padded with zeros: first the panels of the first term, then those
    /// of the second. Returns the number of terms to multiply: one if all second terms are zero.
    pub fn pack(
        self,
        unit: Unit,
        lines: Range<usize>,
        depth: Range<usize>,
        to: &mut [bf16],
    ) -> usize {
        if lines.is_empty() || depth.is_empty() {
            return 1;
        }
        let len = packed_len(lines.len(), depth.len());
        assert!(X::TERMS * len <= to.len());
        assert!(self.line == 1 || self.depth == 1, "strides");
        assert!(lines.start.is_multiple_of(SIDE), "panels");
        let last = self.at(lines.end - 1) + (depth.end - 1) * self.depth;
        assert!(last < self.data.len(), "lines beyond a factor");
        let to = &mut to[..X::TERMS * len];
        match unit {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: these units exist only if the processor has AVX-512; the block is inside the data, and its panels
            // are inside `to`, as just asserted.
            Unit::Amx | Unit::Avx512 => unsafe { x86::pack(self, lines, depth, to) },
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => self.pack_plainly(lines, depth, to),
            #[cfg(test)]
            Unit::Emulated(_) => self.pack_plainly(lines, depth, to),
        }
    }

    /// Returns the offset of a line.
    fn at(&self, line: usize) -> usize {
        line / SIDE * self.panel + line % SIDE * self.line
    }

    #[cfg(any(test, target_arch = "aarch64"))]
    fn pack_plainly(self, lines: Range<usize>, depth: Range<usize>, to: &mut [bf16]) -> usize {
        let steps = depth.len().div_ceil(DEPTH);
        let len = packed_len(lines.len(), depth.len());
        to.fill(bf16::ZERO);
        let mut terms = 1;
        for (i, line) in lines.enumerate() {
            for (k, at) in depth.clone().enumerate() {
                let tile = (i / SIDE * steps + k / DEPTH) * TILE;
                let (i, k) = (i % SIDE, k % DEPTH);
                let place = match self.is_b {
                    true => k / 2 * 2 * SIDE + 2 * i + k % 2,
                    false => i * DEPTH + k,
                };
                let [first, second] = self.data[self.at(line) + at * self.depth].terms();
                to[tile + place] = first;
                if second != bf16::ZERO {
                    to[len + tile + place] = second;
                    terms = 2;
                }
            }
        }
        terms
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{DEPTH, Element, Lines, SIDE, TILE};
    use half::bf16;
    use std::arch::x86_64::{
        __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_or_si512, _mm512_setzero_si512,
        _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_test_epi32_mask, _mm512_unpackhi_epi32,
        _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
    };
    use std::ops::Range;

    /// A tile: 16 lines of 32 elements of the depth, or 16 pairs of the depth of 16 lines.
    type Registers = [__m512i; SIDE];

    /// # Safety
    /// The processor must have AVX512-BW, AVX512-VL and AVX512-BF16; the block must be inside the data, and `to`
    /// exactly its panels.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub unsafe fn pack<X: Element>(
        x: Lines<'_, X>,
        lines: Range<usize>,
        depth: Range<usize>,
        to: &mut [bf16],
    ) -> usize {
        let len = to.len() / X::TERMS;
        let mut to = to.as_mut_ptr();
        let mut seen = _mm512_setzero_si512(); // bits of second terms
        for line in lines.clone().step_by(SIDE) {
            for k in depth.clone().step_by(DEPTH) {
                let sizes = [lines.end - line, depth.end - k];
                // SAFETY: a tile of the block, of which at most `sizes` is read; `to` holds a tile of each term.
                unsafe {
                    let from = x.data.as_ptr().add(x.at(line) + k * x.depth);
                    seen = _mm512_or_si512(seen, tile(x, from, sizes, to, len));
                    to = to.add(TILE);
                }
            }
        }
        match _mm512_test_epi32_mask(seen, seen) {
            0 => 1,
            _ => 2,
        }
    }

    /// Writes a tile of first terms to `to`, and one of second terms `len` elements further. Returns the OR of the bits
    /// of the second terms.
    ///
    /// # Safety
    /// As [`pack`]; `lines` by `length` elements must be readable from `from` on, and no more are read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn tile<X: Element>(
        x: Lines<'_, X>,
        from: *const X,
        [lines, length]: [usize; 2],
        to: *mut bf16,
        len: usize,
    ) -> __m512i {
        let zero = _mm512_setzero_si512();
        let is_along = x.depth == 1;
        let line_mask = u32::MAX >> DEPTH.saturating_sub(length);
        let pair_mask = u16::MAX >> SIDE.saturating_sub(lines);
        // Reads a register and prefetches the one that follows it in memory, which the hardware prefetcher does not
        // predict.
        let read = |i: usize| match is_along {
            true if i < lines => {
                let from = from.wrapping_add(i * x.line);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(SIDE * x.line).cast());
                // SAFETY: only existing elements of an existing line are read.
                unsafe { X::along(from, line_mask) }
            }
            false if 2 * i < length => {
                let from = from.wrapping_add(2 * i * x.depth);
                for element in [from, from.wrapping_add(x.depth)] {
                    _mm_prefetch::<_MM_HINT_T0>(element.wrapping_add(2 * SIDE).cast());
                }
                let second = if 2 * i + 1 < length { pair_mask } else { 0 };
                // SAFETY: only existing lines of existing elements of the depth are read.
                unsafe { X::across(from, x.depth, [pair_mask, second]) }
            }
            _ => [zero; 2],
        };
        let mut seen = zero;
        // Contiguous lines are a's layout, and contiguous pairs of lines are b's: no transpose is needed.
        if is_along != x.is_b {
            for i in 0..SIDE {
                let [first, second] = read(i);
                // SAFETY: a line of the tiles at `to`.
                unsafe {
                    store(first, to.add(i * DEPTH));
                    if X::TERMS == 2 {
                        store(second, to.add(len + i * DEPTH));
                    }
                }
                seen = _mm512_or_si512(seen, second);
            }
            return seen;
        }
        let (mut firsts, mut seconds) = ([zero; SIDE], [zero; SIDE]);
        for i in 0..SIDE {
            [firsts[i], seconds[i]] = read(i);
            seen = _mm512_or_si512(seen, seconds[i]);
        }
        if _mm512_test_epi32_mask(seen, seen) != 0 {
            seconds = transposed(seconds);
        }
        for (term, registers) in [transposed(firsts), seconds]
            .into_iter()
            .enumerate()
            .take(X::TERMS)
        {
            for (i, register) in registers.into_iter().enumerate() {
                // SAFETY: a line of the tiles at `to`.
                unsafe { store(register, to.add(term * len + i * DEPTH)) };
            }
        }
        seen
    }

    /// # Safety
    /// A line of a tile must be writable at `to`; the processor must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(line: __m512i, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), line) };
    }

    /// Transposes a matrix of 16 x 16 pairs.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transposed(x: Registers) -> Registers {
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
