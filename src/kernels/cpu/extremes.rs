//! The largest or smallest elements along one dimension of (outer, n, inner), and their gradient.

use super::parallel::{self, TASK_ELEMENTS};
use super::simd::BLOCK;
use super::{Blocks, Real, Stored, simd};

/// The number of independent maxima of a contiguous run.
const LANES: usize = 32;

#[inline(always)]
#[allow(clippy::eq_op)] // only NaN differs from itself
fn is_nan<R: Copy + PartialEq>(x: R) -> bool {
    x != x
}

/// Returns the larger of two, or the smaller if not `LARGEST`; NaN if one is NaN.
#[inline(always)]
fn better<R: Real, const LARGEST: bool>(best: R, x: R) -> R {
    let is_better = if LARGEST { x > best } else { x < best };
    if is_better || is_nan(x) { x } else { best }
}

/// Computes y (outer, inner), the largest elements of x (outer, n, inner) along n, or the smallest; NaN if one is NaN.
pub fn forward<T: Stored, const LARGEST: bool>(x: &[T], [n, inner]: [usize; 2], y: &mut [T]) {
    // A task has whole cache lines of columns.
    let width = (TASK_ELEMENTS / n.max(1)).max(if inner == 1 { 1 } else { 64 });
    parallel::for_rows(y, 1, |first, y| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                let mut best = [T::Wide::ZERO; BLOCK];
                let mut at = 0;
                while at < y.len() {
                    let (outer, column) = ((first + at) / inner, (first + at) % inner);
                    let run = (inner - column).min(y.len() - at).min(width).min(BLOCK);
                    let best = &mut best[..run];
                    let rows = &x[outer * n * inner..][..n * inner];
                    match inner {
                        1 => best[0] = of_run::<T, LARGEST>(&mut reading, rows),
                        _ => {
                            T::load(&rows[column..][..run], best);
                            for row in rows.chunks_exact(inner).skip(1) {
                                reading.each(
                                    [&row[column..][..run]],
                                    [],
                                    #[inline(always)]
                                    |start, [x], []| {
                                        for (best, x) in best[start..].iter_mut().zip(x) {
                                            *best = better::<_, LARGEST>(*best, *x);
                                        }
                                    },
                                );
                            }
                        }
                    }
                    T::store(best, &mut y[at..at + run]);
                    at += run;
                }
            },
        );
    });
}

/// Returns the largest or smallest of contiguous elements.
#[inline(always)]
fn of_run<T: Stored, const LARGEST: bool>(reading: &mut Blocks<T, 1, 0>, x: &[T]) -> T::Wide {
    let mut first = [T::Wide::ZERO];
    T::load(&x[..1], &mut first);
    let mut lanes = [first[0]; LANES];
    reading.each(
        [x],
        [],
        #[inline(always)]
        |_, [x], []| {
            let (whole, rest) = x.as_chunks::<LANES>();
            for x in whole.iter().map(|x| &x[..]).chain([rest]) {
                for (lane, x) in lanes.iter_mut().zip(x) {
                    *lane = better::<_, LARGEST>(*lane, *x);
                }
            }
        },
    );
    let lanes = lanes.into_iter();
    lanes.fold(first[0], better::<_, LARGEST>)
}

/// Computes dx (outer, n, inner): dy (outer, inner) at the first element of x along n that is y, else 0.
pub fn backward<T: Stored>([dy, y]: [&[T]; 2], x: &[T], [n, inner]: [usize; 2], dx: &mut [T]) {
    parallel::for_rows(dx, n * inner, |first, dx| {
        for (outer, dx) in (first..).zip(dx.chunks_exact_mut(n * inner)) {
            let x = &x[outer * n * inner..][..n * inner];
            let of_outer = outer * inner..(outer + 1) * inner;
            of_columns([&dy[of_outer.clone()], &y[of_outer]], x, dx);
        }
    });
}

/// Computes dx (n, inner) from dy and y (inner).
fn of_columns<T: Stored>([dy, y]: [&[T]; 2], x: &[T], dx: &mut [T]) {
    let inner = y.len();
    for first in (0..inner).step_by(BLOCK) {
        let columns = first..inner.min(first + BLOCK);
        let (dy, y) = (&dy[columns.clone()], &y[columns.clone()]);
        let mut found = [false; BLOCK];
        for (x, dx) in x.chunks_exact(inner).zip(dx.chunks_exact_mut(inner)) {
            let each = dx[columns.clone()].iter_mut().zip(&x[columns.clone()]);
            let each = each.zip(dy.iter().zip(y)).zip(&mut found);
            for (((dx, x), (dy, y)), found) in each {
                let is_first = !*found && (x == y || is_nan(*x));
                *found |= is_first;
                *dx = if is_first { *dy } else { T::zero() };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn check<T: Stored, const LARGEST: bool>([outer, n, inner]: [usize; 3]) {
        let value = |i: usize| T::from_f64(((i * 7919 % 101) as f64 - 50.0) / 8.0); // with repeats
        let x: Vec<T> = (0..outer * n * inner).map(value).collect();
        let mut y = vec![T::zero(); outer * inner];
        forward::<T, LARGEST>(&x, [n, inner], &mut y);
        let dy: Vec<T> = (0..y.len())
            .map(|i| T::from_f64(i as f64 % 7.0 + 1.0))
            .collect();
        let mut dx = vec![T::from_f64(f64::NAN); x.len()];
        backward([&dy, &y], &x, [n, inner], &mut dx);
        for (at, y) in y.iter().enumerate() {
            let place = |i: usize| (at / inner * n + i) * inner + at % inner;
            let mut best = 0;
            for i in 1..n {
                let (a, b) = (x[place(i)].to_f64(), x[place(best)].to_f64());
                if if LARGEST { a > b } else { a < b } {
                    best = i;
                }
            }
            assert_eq!(y.to_f64(), x[place(best)].to_f64());
            for i in 0..n {
                let wanted = if i == best { dy[at].to_f64() } else { 0.0 };
                assert_eq!(dx[place(i)].to_f64(), wanted);
            }
        }
    }

    #[test]
    fn extremes_of_every_type_and_odd_sizes() {
        for sizes in [
            [1, 1, 1],
            [3, 1031, 1],
            [1001, 7, 1],
            [2, 33, 65],
            [5, 3, 1031],
            [1, 9001, 3],
        ] {
            check::<f64, true>(sizes);
            check::<f32, false>(sizes);
            check::<f16, true>(sizes);
            check::<bf16, false>(sizes);
        }
    }

    #[test]
    fn a_nan_is_the_extreme_and_gets_the_gradient() {
        let x = [1f32, f32::NAN, 3.0, f32::NAN, 5.0, 6.0];
        for inner in [1, 2] {
            let mut y = vec![0f32; inner];
            forward::<f32, true>(&x, [6 / inner, inner], &mut y);
            let mut dx = [9f32; 6];
            backward([&vec![1.0; inner], &y], &x, [6 / inner, inner], &mut dx);
            match inner {
                1 => assert!(y[0].is_nan() && dx == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
                _ => {
                    assert!(y[0] == 5.0 && y[1].is_nan());
                    assert_eq!(dx, [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
                }
            }
        }
    }
}
