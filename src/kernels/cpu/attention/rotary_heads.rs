//! Rotary positions on heads that lie side by side in the model dimension, (B, T, H*Dh), as a projection leaves them.
//!
//! The same rotation as [`rope`](crate::kernels::cpu::rope), for callers that have no use for q and k head by head, or
//! that meet the heads on another way.

use crate::kernels::cpu::heads::HeadSizes;
use crate::kernels::cpu::parallel::{self, TASK_ELEMENTS};
use crate::kernels::cpu::{Real, Stored, simd, simd::BLOCK};

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

/// As [`turn`], from elements that may be of a narrower type: what is turned is rounded to it, as it is where it is
/// stored.
#[inline(always)]
pub(super) fn turn_loaded<S: Stored>(x: &[S], at: (&[S::Wide], &[S::Wide]), y: &mut [S::Wide]) {
    if let Some(x) = S::as_wide(x) {
        return turn(x, at, false, y);
    }
    S::load(x, y);
    turn_in_place(y, at);
    let mut narrow = [S::zero(); BLOCK];
    for y in y.chunks_mut(BLOCK) {
        let narrow = &mut narrow[..y.len()];
        S::store(y, narrow);
        S::load(narrow, y);
    }
}

/// As [`turn`] back, to elements that may be of a narrower type, which x is rounded to first: as it is where it is
/// stored.
#[inline(always)]
pub(super) fn turn_back_stored<S: Stored>(
    x: &[S::Wide],
    (cos, sin): (&[S::Wide], &[S::Wide]),
    y: &mut [S],
) {
    if let Some(y) = S::as_wide_mut(y) {
        return turn(x, (cos, sin), true, y);
    }
    let mut buffers = [[S::Wide::ZERO; BLOCK]; 2];
    let angles = cos.chunks(BLOCK / 2).zip(sin.chunks(BLOCK / 2));
    for ((x, y), at) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).zip(angles) {
        let [rounded, turned] = buffers.each_mut().map(|buffer| &mut buffer[..x.len()]);
        S::store(x, y);
        S::load(y, rounded);
        turn(rounded, at, true, turned);
        S::store(turned, y);
    }
}

/// Turns every head of x (B, T, H*Dh) by its position's angles: its adjacent pairs, or its halves.
pub fn rotate_in_place<S: Stored>(
    sizes: HeadSizes,
    angles: Angles<'_, S::Wide>,
    by_halves: bool,
    x: &mut [S],
) {
    let HeadSizes {
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
                        match by_halves {
                            false => turn_stored(x, at),
                            true => turn_halves(x, at, false),
                        }
                    }
                }
            },
        );
    });
}

/// As [`turn_in_place`], elements of a narrower type rounded once.
#[inline(always)]
fn turn_stored<S: Stored>(x: &mut [S], (cos, sin): (&[S::Wide], &[S::Wide])) {
    if let Some(x) = S::as_wide_mut(x) {
        return turn_in_place(x, (cos, sin));
    }
    let mut buffer = [S::Wide::ZERO; BLOCK];
    let angles = cos.chunks(BLOCK / 2).zip(sin.chunks(BLOCK / 2));
    for (x, at) in x.chunks_mut(BLOCK).zip(angles) {
        let wide = &mut buffer[..x.len()];
        S::load(x, wide);
        turn_in_place(wide, at);
        S::store(wide, x);
    }
}

/// Turns the pairs (x[i], x[i + Dh/2]) where they lie, elements of a narrower type rounded once.
#[inline(always)]
fn turn_halves<S: Stored>(x: &mut [S], (cos, sin): (&[S::Wide], &[S::Wide]), inverse: bool) {
    let sign = if inverse { -S::Wide::ONE } else { S::Wide::ONE };
    let turn = |x1: &mut [S::Wide], x2: &mut [S::Wide], cos: &[S::Wide], sin: &[S::Wide]| {
        for (((x1, x2), c), s) in x1.iter_mut().zip(x2).zip(cos).zip(sin) {
            let s = *s * sign;
            (*x1, *x2) = (*x1 * *c - *x2 * s, *x1 * s + *x2 * *c);
        }
    };
    let (x1, x2) = x.split_at_mut(cos.len());
    if let (Some(x1), Some(x2)) = (S::as_wide_mut(x1), S::as_wide_mut(x2)) {
        return turn(x1, x2, cos, sin);
    }
    let mut buffers = [[S::Wide::ZERO; BLOCK]; 2];
    let angles = cos.chunks(BLOCK).zip(sin.chunks(BLOCK));
    for ((x1, x2), (cos, sin)) in x1.chunks_mut(BLOCK).zip(x2.chunks_mut(BLOCK)).zip(angles) {
        let [wide1, wide2] = buffers.each_mut().map(|buffer| &mut buffer[..cos.len()]);
        S::load(x1, wide1);
        S::load(x2, wide2);
        turn(wide1, wide2, cos, sin);
        S::store(wide1, x1);
        S::store(wide2, x2);
    }
}

/// (B, H, T, Dh) to (B, T, H*Dh), rotated back: how the gradients of q and k return.
pub fn merge_rotated_back<S: Stored>(
    sizes: HeadSizes,
    angles: Angles<'_, S::Wide>,
    by_halves: bool,
    split: &[S],
    merged: &mut [S],
) {
    let HeadSizes {
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
                        let from = &split[from..from + head_dim];
                        match by_halves {
                            false => turn_back(from, at, to),
                            true => {
                                to.copy_from_slice(from);
                                turn_halves(to, at, true);
                            }
                        }
                    }
                }
            },
        );
    });
}

/// As [`turn`] back, elements of a narrower type rounded once.
#[inline(always)]
fn turn_back<S: Stored>(x: &[S], (cos, sin): (&[S::Wide], &[S::Wide]), y: &mut [S]) {
    if let Some(x) = S::as_wide(x) {
        return turn_back_stored(x, (cos, sin), y);
    }
    let mut buffer = [S::Wide::ZERO; BLOCK];
    let angles = cos.chunks(BLOCK / 2).zip(sin.chunks(BLOCK / 2));
    for ((x, y), at) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).zip(angles) {
        let wide = &mut buffer[..x.len()];
        S::load(x, wide);
        turn_back_stored(wide, at, y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::{heads, rope};

    #[test]
    fn as_split_and_rope() {
        check::<f32>();
        check::<half::bf16>();
        check::<half::f16>();
    }

    fn check<S: Stored<Wide = f32>>() {
        let wave = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.7).sin()).collect() };
        for (batch, length, heads, head_dim) in [
            (1, 1, 1, 2),
            (3, 13, 2, 24),
            (2, 123, 3, 40),
            (1, 3, 2, 600),
        ] {
            let sizes = HeadSizes {
                batch,
                length,
                heads,
                head_dim,
            };
            let n = batch * length * heads * head_dim;
            let x: Vec<S> = wave(n).iter().map(|x| S::from_f64(f64::from(*x))).collect();
            let tables = wave(length * head_dim);
            let (cos, sin) = tables.split_at(length * head_dim / 2);
            let angles = Angles { cos, sin };
            let [mut split, mut rotated, mut wanted] = [(); 3].map(|()| vec![S::zero(); n]);

            heads::split(sizes, &x, &mut split);
            for (by_halves, rotate) in [
                (false, rope::rotate as fn(&[S], _, _, _, _, &mut [S])),
                (true, rope::rotate_halves),
            ] {
                rotate(&split, cos, sin, head_dim, false, &mut rotated);
                heads::merge(sizes, &rotated, &mut wanted);
                let mut got = x.clone();
                rotate_in_place(sizes, angles, by_halves, &mut got);
                assert!(got == wanted, "{sizes:?}");

                rotate(&x, cos, sin, head_dim, true, &mut rotated);
                heads::merge(sizes, &rotated, &mut wanted);
                let mut got = vec![S::from_f64(f64::NAN); n];
                merge_rotated_back(sizes, angles, by_halves, &x, &mut got);
                assert!(got == wanted, "{sizes:?}");
            }
        }
    }
}
