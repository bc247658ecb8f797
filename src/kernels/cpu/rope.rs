//! Rotary position embedding, on adjacent pairs or on halves.

use super::{Blocks, Real, Stored, parallel, simd};

/// Rotates each pair `(x[2i], x[2i+1])` of row `t` by the angle whose cosine and sine are `cos[t][i]`, `sin[t][i]`.
///
/// `x` and `y` are (batch, length, width), `cos` and `sin` (length, width / 2). `inverse` rotates back, which is the
/// backward, because the rotation matrix is orthogonal.
pub fn rotate<T: Stored>(
    x: &[T],
    cos: &[T::Wide],
    sin: &[T::Wide],
    width: usize,
    inverse: bool,
    y: &mut [T],
) {
    let half = width / 2;
    let length = cos.len() / half.max(1);
    let one = T::Wide::ONE;
    let sign = if inverse { -one } else { one };
    parallel::for_rows(y, width, |first, y| {
        let x = &x[first * width..first * width + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                // All rows of the task run as one sequence, because a row may be shorter than a block. A block ends
                // after a whole pair, but anywhere in a row.
                Blocks::<T, 1, 1>::new().each(
                    [x],
                    [y],
                    #[inline(always)]
                    |start, [x], [y]| {
                        let mut row = first + start / width;
                        let mut pair = start % width / 2;
                        let mut at = 0;
                        while at < x.len() {
                            let end = x.len().min(at + width - 2 * pair);
                            let angle = row % length * half + pair;
                            let angles = angle..angle + (end - at) / 2;
                            let (y, _) = y[at..end].as_chunks_mut::<2>();
                            let (x, _) = x[at..end].as_chunks::<2>();
                            let pairs = y.iter_mut().zip(x);
                            for (((y, x), c), s) in
                                pairs.zip(&cos[angles.clone()]).zip(&sin[angles])
                            {
                                let s = *s * sign;
                                *y = [x[0] * *c - x[1] * s, x[0] * s + x[1] * *c];
                            }
                            (row, pair, at) = (row + 1, 0, end);
                        }
                    },
                );
            },
        );
    });
}

/// Rotates the pairs `(x[i], x[i + width / 2])`, otherwise like [`rotate`].
pub fn rotate_halves<T: Stored>(
    x: &[T],
    cos: &[T::Wide],
    sin: &[T::Wide],
    width: usize,
    inverse: bool,
    y: &mut [T],
) {
    let half = width / 2;
    let length = cos.len() / half.max(1);
    let sign = if inverse { -T::Wide::ONE } else { T::Wide::ONE };
    parallel::for_rows(y, width, |first, y| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut blocks = Blocks::<T, 2, 2>::new();
                for (i, y) in y.chunks_exact_mut(width).enumerate() {
                    let row = first + i;
                    let (x1, x2) = x[row * width..(row + 1) * width].split_at(half);
                    let (y1, y2) = y.split_at_mut(half);
                    let angles = row % length * half..(row % length + 1) * half;
                    let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
                    blocks.each(
                        [x1, x2],
                        [y1, y2],
                        #[inline(always)]
                        |start, [x1, x2], [y1, y2]| {
                            let angles = start..start + x1.len();
                            let tables = cos[angles.clone()].iter().zip(&sin[angles]);
                            let y = y1.iter_mut().zip(y2);
                            for (((y1, y2), (x1, x2)), (c, s)) in
                                y.zip(x1.iter().zip(x2)).zip(tables)
                            {
                                let s = *s * sign;
                                (*y1, *y2) = (*x1 * *c - *x2 * s, *x1 * s + *x2 * *c);
                            }
                        },
                    );
                }
            },
        );
    });
}
