//! Normally distributed random numbers.

use super::{Blocks, Real, Stored, parallel, simd};
use crate::kernels::normal::quantile;
use crate::kernels::philox::{Stream, WORDS};

/// Computes `y = mean + std z`, with z the normal quantiles of the stream's words, in f64. The result is rounded to the
/// compute type, then to T.
pub fn normal<T: Stored>(stream: Stream, mean: f64, std: f64, y: &mut [T]) {
    // Tasks and blocks begin at multiples of WORDS.
    parallel::for_rows(y, 1, |first, y| {
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, 0, 1>::new().each(
                    [],
                    [y],
                    #[inline(always)]
                    |start, [], [y]| {
                        for (i, y) in y.chunks_mut(WORDS).enumerate() {
                            let words = stream.words(first + start + i * WORDS);
                            for (y, word) in y.iter_mut().zip(words) {
                                *y = T::Wide::real(quantile(word).mul_add(std, mean));
                            }
                        }
                    },
                );
            },
        );
    });
}
