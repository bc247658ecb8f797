//! Rotary positions on heads that lie side by side in the model dimension, (B, T, H*Dh), as a projection leaves them.
//!
//! The same rotation as [`rope`](super::rope), for callers that have no use for q and k head by head, or that meet the
//! heads on another way.

use super::heads::Heads;
use super::parallel::{self, TASK_ELEMENTS};
use super::{Real, simd};

/// The angles of all positions: (length, Dh / 2) each.
#[derive(Clone, Copy)]
pub struct Angles<'a, T> {
    /// Cosines.
    pub cos: &'a [T],
    /// Sines.
    pub sin: &'a [T],
}

impl<'a, T: Real> Angles<'a, T> {
    /// Of one position.
    #[inline(always)]
    pub(super) fn at(&self, position: usize, head_dim: usize) -> (&'a [T], &'a [T]) {
        let range = position * (head_dim / 2)..(position + 1) * (head_dim / 2);
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// `y = x` turned by the angles; `inverse` turns back.
#[inline(always)]
pub(super) fn turn<T: Real>(x: &[T], (cos, sin): (&[T], &[T]), inverse: bool, y: &mut [T]) {
    let sign = if inverse { -T::ONE } else { T::ONE };
    let (y, _) = y.as_chunks_mut::<2>();
    let (x, _) = x.as_chunks::<2>();
    for (((y, x), c), s) in y.iter_mut().zip(x).zip(cos).zip(sin) {
        let s = *s * sign;
        *y = [x[0] * *c - x[1] * s, x[0] * s + x[1] * *c];
    }
}

/// As [`turn`], where it lies.
#[inline(always)]
fn turn_in_place<T: Real>(x: &mut [T], (cos, sin): (&[T], &[T])) {
    let (x, _) = x.as_chunks_mut::<2>();
    for ((x, c), s) in x.iter_mut().zip(cos).zip(sin) {
        *x = [x[0] * *c - x[1] * *s, x[0] * *s + x[1] * *c];
    }
}

/// Turns every head of x (B, T, H*Dh) by its position's angles.
pub fn rotate_in_place<T: Real>(sizes: Heads, angles: Angles<'_, T>, x: &mut [T]) {
    let Heads {
        length, head_dim, ..
    } = sizes;
    let width = sizes.heads * head_dim;
    parallel::for_rows(x, width, |first, x| {
        simd::vectorized(
            #[inline(always)]
            || {
                for (row, x) in x.chunks_exact_mut(width).enumerate() {
                    let at = angles.at((first + row) % length, head_dim);
                    for x in x.chunks_exact_mut(head_dim) {
                        turn_in_place(x, at);
                    }
                }
            },
        );
    });
}

/// (B, H, T, Dh) to (B, T, H*Dh), turned back: how the gradients of q and k return.
pub fn merge_turned_back<T: Real>(
    sizes: Heads,
    angles: Angles<'_, T>,
    split: &[T],
    merged: &mut [T],
) {
    let Heads {
        length,
        heads,
        head_dim,
        ..
    } = sizes;
    let width = heads * head_dim;
    debug_assert!(width <= TASK_ELEMENTS || merged.len().is_multiple_of(width));
    parallel::for_rows(merged, width, |first, merged| {
        simd::vectorized(
            #[inline(always)]
            || {
                for (row, merged) in merged.chunks_exact_mut(width).enumerate() {
                    let (b, t) = ((first + row) / length, (first + row) % length);
                    let at = angles.at(t, head_dim);
                    for (h, to) in merged.chunks_exact_mut(head_dim).enumerate() {
                        let from = ((b * heads + h) * length + t) * head_dim;
                        turn(&split[from..from + head_dim], at, true, to);
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::{heads, rope};

    #[test]
    fn as_split_and_rope() {
        let wave = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.7).sin()).collect() };
        for (batch, length, heads, head_dim) in [(1, 1, 1, 2), (3, 13, 2, 24), (2, 123, 3, 40)] {
            let sizes = Heads {
                batch,
                length,
                heads,
                head_dim,
            };
            let n = batch * length * heads * head_dim;
            let (x, tables) = (wave(n), wave(length * head_dim));
            let (cos, sin) = tables.split_at(length * head_dim / 2);
            let angles = Angles { cos, sin };
            let (mut split, mut rotated, mut wanted) =
                (vec![0f32; n], vec![0f32; n], vec![0f32; n]);

            heads::split(sizes, &x, &mut split);
            rope::rotate(&split, cos, sin, head_dim, false, &mut rotated);
            heads::merge(sizes, &rotated, &mut wanted);
            let mut got = x.clone();
            rotate_in_place(sizes, angles, &mut got);
            assert_eq!(got, wanted);

            rope::rotate(&x, cos, sin, head_dim, true, &mut rotated);
            heads::merge(sizes, &rotated, &mut wanted);
            let mut got = vec![f32::NAN; n];
            merge_turned_back(sizes, angles, &x, &mut got);
            assert_eq!(got, wanted);
        }
    }
}
