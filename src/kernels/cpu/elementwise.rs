//! The loop of elementwise kernels: parallel, vectorised, and widened if elements are in half precision.

use super::{Blocks, Stored, parallel, simd};

/// Computes `y = f(inputs)` element by element; slices of one length.
pub(super) fn each<T: Stored, const N: usize>(
    inputs: [&[T]; N],
    y: &mut [T],
    f: impl Fn([T::Wide; N]) -> T::Wide + Sync,
) {
    assert!(inputs.iter().all(|x| x.len() == y.len()));
    parallel::for_rows(y, 1, |first, y| {
        let inputs = inputs.map(|x| &x[first..first + y.len()]);
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, N, 1>::new().each(
                    inputs,
                    [y],
                    #[inline(always)]
                    |_, inputs, [y]| {
                        let inputs = inputs.map(|x| &x[..y.len()]);
                        for (i, y) in y.iter_mut().enumerate() {
                            *y = f(inputs.map(|x| x[i]));
                        }
                    },
                );
            },
        );
    });
}
