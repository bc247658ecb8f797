//! Elements dropped at random.

use super::{Blocks, Real, Stored, parallel, simd};
use crate::kernels::Dropout;
use crate::kernels::philox::WORDS;

/// `y = x / (1 - p)` where an element stays, else 0. `key` has 4 words. dx from dy is the same.
pub fn dropout<T: Stored>(x: &[T], key: &[u32], dropout: Dropout, y: &mut [T]) {
    assert_eq!(x.len(), y.len());
    let (stream, threshold) = (dropout.stream(key), dropout.threshold());
    let scale = T::Wide::real(dropout.scale());
    // Tasks and blocks begin at multiples of WORDS.
    parallel::for_rows(y, 1, |first, y| {
        let x = &x[first..first + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, 1, 1>::new().each(
                    [x],
                    [y],
                    #[inline(always)]
                    |start, [x], [y]| {
                        let parts = x.chunks(WORDS).zip(y.chunks_mut(WORDS));
                        for (i, (x, y)) in parts.enumerate() {
                            let words = stream.words(first + start + i * WORDS);
                            for ((x, y), word) in x.iter().zip(y).zip(words) {
                                let stays = word >= threshold;
                                *y = if stays { *x * scale } else { T::Wide::ZERO };
                            }
                        }
                    },
                );
            },
        );
    });
}
