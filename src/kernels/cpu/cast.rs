//! Casts from one stored type to another.

use super::{Real, Stored, parallel, simd, simd::BLOCK};

/// Computes `y = x`, rounded to nearest (ties to even) if y's type is narrower; slices of one length.
pub fn cast<T: Stored, U: Stored<Wide = T::Wide>>(x: &[T], y: &mut [U]) {
    assert_eq!(x.len(), y.len());
    parallel::for_rows(y, 1, |first, y| {
        let x = &x[first..first + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                if let Some(x) = T::as_wide(x) {
                    return U::store(x, y);
                }
                if let Some(y) = U::as_wide_mut(y) {
                    return T::load(x, y);
                }
                let mut buffer = [T::Wide::ZERO; BLOCK];
                for (x, y) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)) {
                    let wide = &mut buffer[..x.len()];
                    T::load(x, wide);
                    U::store(wide, y);
                }
            },
        );
    });
}
