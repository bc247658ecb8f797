//! Rotary position embedding on adjacent pairs.

use super::{Real, parallel, simd};

/// Rotates each pair `(x[2i], x[2i+1])` of row `t` by the angle whose cosine and sine are `cos[t][i]`, `sin[t][i]`.
///
/// `x` and `y` are (batch, length, width), `cos` and `sin` (length, width / 2). `inverse` rotates back, which is the
/// backward: the matrix is orthogonal.
pub fn rotate<T: Real>(x: &[T], cos: &[T], sin: &[T], width: usize, inverse: bool, y: &mut [T]) {
    let half = width / 2;
    let length = cos.len() / half.max(1);
    let sign = if inverse { -T::ONE } else { T::ONE };
    parallel::for_rows(y, width, |first, y| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
                for (row, (y, x)) in rows.enumerate() {
                    let t = (first + row) % length;
                    let angles = t * half..(t + 1) * half;
                    let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
                    let (y, _) = y.as_chunks_mut::<2>();
                    let (x, _) = x.as_chunks::<2>();
                    for (((y, x), c), s) in y.iter_mut().zip(x).zip(cos).zip(sin) {
                        let s = *s * sign;
                        *y = [x[0] * *c - x[1] * s, x[0] * s + x[1] * *c];
                    }
                }
            },
        );
    });
}
