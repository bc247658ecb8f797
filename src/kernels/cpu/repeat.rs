//! Repetition of rows, and its gradient, the sum over repeats.

use super::simd::BLOCK;
use super::{Real, Stored, parallel, simd};

/// Copies each row of `x` (rows, width) `times` times in succession to `y` (rows * times, width).
pub fn repeat<T: Copy + Send + Sync>(x: &[T], width: usize, times: usize, y: &mut [T]) {
    parallel::for_rows(y, width, |first, y| {
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            let row = (first + i) / times;
            y.copy_from_slice(&x[row * width..(row + 1) * width]);
        }
    });
}

/// Computes `dx` (rows, width), the sum of each row's repeats in `dy` (rows * times, width). Sums are in the compute
/// type and rounded once.
pub fn fold<T: Stored>(dy: &[T], width: usize, times: usize, dx: &mut [T]) {
    parallel::for_rows(dx, width, |first, dx| {
        simd::vectorized(
            #[inline(always)]
            || {
                let (mut sum, mut term) = ([T::Wide::ZERO; BLOCK], [T::Wide::ZERO; BLOCK]);
                for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
                    let repeats = &dy[(first + i) * times * width..][..times * width];
                    for (block, dx) in dx.chunks_mut(BLOCK).enumerate() {
                        let (sum, term) = (&mut sum[..dx.len()], &mut term[..dx.len()]);
                        sum.fill(T::Wide::ZERO);
                        for repeat in repeats.chunks_exact(width) {
                            T::load(&repeat[block * BLOCK..][..dx.len()], term);
                            for (sum, term) in sum.iter_mut().zip(term.iter()) {
                                *sum += *term;
                            }
                        }
                        T::store(sum, dx);
                    }
                }
            },
        );
    });
}
