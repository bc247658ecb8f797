//! Dropout masks: a function of the key, the site and the position of an element.

use super::cpu::{Real, simd};
use super::philox::{BLOCK_HALVES, HALVES, Stream};
use std::ops::Range;

/// The parameters of a dropout call, except the key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// p, the probability that an element is dropped: at least 0 and under 1.
    pub probability: f64,
    /// The number of the mask within a step, under 2^24.
    pub site: u32,
}

/// The number of values of an element's 16 random bits.
const VALUES: f64 = 65_536.0;

impl Dropout {
    /// Returns the threshold: an element is kept if its 16 random bits are at least p 2^16, rounded.
    pub fn threshold(&self) -> u16 {
        (self.probability * VALUES).round().min(VALUES - 1.0) as u16
    }

    /// Returns the factor of kept elements, 1 / (1 - p), with p rounded to a multiple of 2^-16 by the threshold.
    pub fn scale(&self) -> f64 {
        VALUES / (VALUES - f64::from(self.threshold()))
    }

    /// Returns the mask of rows of `width` elements. `key` has four words: seed, seed >> 32, step, micro-batch.
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

/// The mask of rows. Each element uses one half word of the random stream; each row begins at a new counter.
#[derive(Clone, Copy, Debug)]
pub struct DropoutMask {
    stream: Stream,
    threshold: u16,
    scale: f64,
    /// Half words from a row to the next.
    row: usize,
}

/// Elements per call of [`DropoutMask::kept`].
pub(crate) const ELEMENTS_PER_CALL: usize = HALVES;

impl DropoutMask {
    /// Returns the factor of kept elements.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Returns whether each element of row `row` is kept, from `column` on, a multiple of 8. Past the end of a row
    /// whose length is a multiple of 8, the elements of the next row follow.
    #[inline(always)]
    pub(crate) fn kept(&self, row: usize, column: usize) -> [bool; ELEMENTS_PER_CALL] {
        let halves = self.stream.halves(row * self.row + column);
        halves.map(|half| half >= self.threshold)
    }

    /// Writes the factors of a range of columns of a row: 1 / (1 - p) for kept elements, 0 for dropped ones.
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

    /// Calls `f(i, is_kept)` for each element of a range of columns, where `i` counts from the start of the range.
    #[inline(always)]
    pub fn each(&self, row: usize, columns: Range<usize>, mut f: impl FnMut(usize, bool)) {
        let first = columns.start - columns.start % BLOCK_HALVES;
        for start in (first..columns.end).step_by(ELEMENTS_PER_CALL) {
            let stay = self.kept(row, start);
            let part = start.max(columns.start)..columns.end.min(start + ELEMENTS_PER_CALL);
            for column in part {
                f(column - columns.start, stay[column - start]);
            }
        }
    }
}
