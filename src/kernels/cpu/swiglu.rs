//! The SwiGLU gate: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

use super::{Blocks, Real, Stored, parallel, simd};

/// `y = silu(gate) * up`, elementwise.
pub fn forward<T: Stored>(gate: &[T], up: &[T], y: &mut [T]) {
    parallel::for_rows(y, 1, |first, y| {
        let range = first..first + y.len();
        let (gate, up) = (&gate[range.clone()], &up[range]);
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, 2, 1>::new().each(
                    [gate, up],
                    [y],
                    #[inline(always)]
                    |_, [gate, up], [y]| {
                        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                            *y = *g / (T::Wide::ONE + (-*g).exponential()) * *u;
                        }
                    },
                );
            },
        );
    });
}

/// With s = sigmoid(gate): `dgate = dy up s (1 + gate (1 - s))`, `dup = dy gate s`.
pub fn backward<T: Stored>(dy: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
    parallel::for_rows2(dgate, 1, dup, 1, |first, dgate, dup| {
        let range = first..first + dgate.len();
        let (dy, gate, up) = (&dy[range.clone()], &gate[range.clone()], &up[range]);
        simd::vectorized(
            #[inline(always)]
            || {
                Blocks::<T, 3, 2>::new().each(
                    [dy, gate, up],
                    [dgate, dup],
                    #[inline(always)]
                    |_, [dy, gate, up], [dgate, dup]| {
                        let outputs = dgate.iter_mut().zip(dup);
                        for ((((dg, du), dy), g), u) in outputs.zip(dy).zip(gate).zip(up) {
                            let s = T::Wide::ONE / (T::Wide::ONE + (-*g).exponential());
                            *dg = *dy * *u * s * (T::Wide::ONE + *g * (T::Wide::ONE - s));
                            *du = *dy * *g * s;
                        }
                    },
                );
            },
        );
    });
}
