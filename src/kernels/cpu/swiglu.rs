//! The SwiGLU gate: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

use super::{Real, parallel, simd};

/// `y = silu(gate) * up`, elementwise.
pub fn forward<T: Real>(gate: &[T], up: &[T], y: &mut [T]) {
    parallel::for_rows(y, 1, |first, y| {
        let (gate, up) = (&gate[first..], &up[first..]);
        simd::vectorized(
            #[inline(always)]
            || {
                for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                    *y = *g / (T::ONE + (-*g).exponential()) * *u;
                }
            },
        );
    });
}

/// With s = sigmoid(gate): `dgate = dy up s (1 + gate (1 - s))`, `dup = dy gate s`.
pub fn backward<T: Real>(dy: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
    parallel::for_rows2(dgate, 1, dup, 1, |first, dgate, dup| {
        let (dy, gate, up) = (&dy[first..], &gate[first..], &up[first..]);
        simd::vectorized(
            #[inline(always)]
            || {
                let outputs = dgate.iter_mut().zip(dup);
                for ((((dg, du), dy), g), u) in outputs.zip(dy).zip(gate).zip(up) {
                    let s = T::ONE / (T::ONE + (-*g).exponential());
                    *dg = *dy * *u * s * (T::ONE + *g * (T::ONE - s));
                    *du = *dy * *g * s;
                }
            },
        );
    });
}
