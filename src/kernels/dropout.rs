//! Which elements are dropped, and what the others are multiplied by.

use super::cpu::{Real, simd};
use super::philox::{BLOCK_HALVES, HALVES, Stream};
use std::ops::Range;

/// What dropout takes beside elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// p, from 0 to under 1.
    pub probability: f64,
    /// Which of a step's masks, under 2^24.
    pub site: u32,
}

/// Values of an element's 16 random bits.
const VALUES: f64 = 65_536.0;

impl Dropout {
    /// An element stays if its 16 random bits are at least this: p 2^16, rounded.
    pub fn threshold(&self) -> u16 {
        (self.probability * VALUES).round().min(VALUES - 1.0) as u16
    }

    /// 1 / (1 - p), with p as the threshold has it.
    pub fn scale(&self) -> f64 {
        VALUES / (VALUES - f64::from(self.threshold()))
    }

    /// Which elements of rows of `width` stay in the step that `key` says: seed, seed >> 32, step, micro-batch.
    pub fn mask(&self, key: &[u32], width: usize) -> DropoutMask {
        let mut words = [0; 4];
        words.copy_from_slice(key);
        DropoutMask {
            stream: Stream::new(words, self.site),
            threshold: self.threshold(),
            scale: self.scale(),
            row: width.next_multiple_of(BLOCK_HALVES),
        }
    }
}

/// Which elements of rows stay: a row has half words from a counter of its own on, one for each element.
#[derive(Clone, Copy, Debug)]
pub struct DropoutMask {
    stream: Stream,
    threshold: u16,
    scale: f64,
    /// Half words from row to row.
    row: usize,
}

/// Elements of one call of [`DropoutMask::stay`].
pub(crate) const SIDE_BY_SIDE: usize = HALVES;

impl DropoutMask {
    /// What elements that stay are multiplied by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether the elements of row `row` stay from `column` on, a multiple of 8. (Where rows are as long as a multiple
    /// of 8, the next row's follow.)
    #[inline(always)]
    pub(crate) fn stay(&self, row: usize, column: usize) -> [bool; SIDE_BY_SIDE] {
        let halves = self.stream.halves(row * self.row + column);
        halves.map(|half| half >= self.threshold)
    }

    /// What the elements of some columns of a row are multiplied by: 1 / (1 - p), or 0.
    pub fn factors<T: Real>(&self, row: usize, columns: Range<usize>, factors: &mut Vec<T>) {
        let scale = T::real(self.scale);
        factors.resize(columns.len(), T::ZERO);
        simd::vectorized(
            #[inline(always)]
            || {
                self.each(row, columns, |i, stays| {
                    factors[i] = if stays { scale } else { T::ZERO };
                });
            },
        );
    }

    /// Calls `f(i, stays)` for the elements of some columns of a row, `i` counted from the first of them.
    #[inline(always)]
    pub fn each(&self, row: usize, columns: Range<usize>, mut f: impl FnMut(usize, bool)) {
        let first = columns.start - columns.start % BLOCK_HALVES;
        for start in (first..columns.end).step_by(SIDE_BY_SIDE) {
            let stay = self.stay(row, start);
            let part = start.max(columns.start)..columns.end.min(start + SIDE_BY_SIDE);
            for column in part {
                f(column - columns.start, stay[column - start]);
            }
        }
    }
}
