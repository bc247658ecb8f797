//! Sums along one dimension of (outer, n, inner), in f64, and their gradient.

use super::parallel::{self, Shared, TASK_ELEMENTS};
use super::simd::BLOCK;
use super::{Blocks, Stored, simd};

/// The number of independent partial sums of a contiguous run. It is fixed, so that the order of additions is.
const LANES: usize = 32;

/// The fewest neighbouring sums of a task, so that it reads cache lines.
const COLUMNS: usize = 64;

/// Computes y (outer, inner), `factor` times the sums of x (outer, n, inner), rounded once. `parts` is scratch of
/// (outer, chunks, inner) elements if the sums are divided into chunks.
pub fn forward<T: Stored>(
    x: &[T],
    [n, inner]: [usize; 2],
    factor: f64,
    y: &mut [T],
    parts: Option<&mut [f64]>,
) {
    let rounded = |sums: &[f64], y: &mut [T]| {
        let each = y.iter_mut().zip(sums);
        each.for_each(|(y, sum)| *y = T::from_f64(sum * factor));
    };
    match parts {
        None => of_chunks(x, [n, inner], 1, y, rounded),
        Some(parts) => {
            let chunks = parts.len() / y.len().max(1);
            let unrounded = |sums: &[f64], parts: &mut [f64]| parts.copy_from_slice(sums);
            of_chunks(x, [n, inner], chunks, parts, unrounded);
            of_chunks(parts, [chunks, inner], 1, y, rounded);
        }
    }
}

/// Writes the sum of each chunk of x (outer, n, inner) to `sums` (outer, chunks, inner), with `write`.
fn of_chunks<T: Stored, S: Send>(
    x: &[T],
    [n, inner]: [usize; 2],
    chunks: usize,
    sums: &mut [S],
    write: impl Fn(&[f64], &mut [S]) + Sync,
) {
    let per_chunk = n.div_ceil(chunks);
    let task = (TASK_ELEMENTS / per_chunk.max(1)).max(if inner == 1 { 1 } else { COLUMNS });
    let (count, shared) = (sums.len(), Shared::new(sums));
    parallel::for_tasks(count.div_ceil(task), |number| {
        let mut at = number * task;
        let end = count.min(at + task);
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, 1, 0>::new();
                let mut totals = [0f64; BLOCK];
                while at < end {
                    let (chunk, column) = (at / inner, at % inner);
                    let width = (inner - column).min(end - at).min(BLOCK);
                    let (row, chunk) = (chunk / chunks, chunk % chunks);
                    let [first, last] =
                        [chunk, chunk + 1].map(|chunk| row * n + n.min(chunk * per_chunk));
                    let totals = &mut totals[..width];
                    match inner {
                        1 => totals[0] = of_run(&mut reading, &x[first..last]),
                        _ => {
                            totals.fill(0.0);
                            for row in first..last {
                                let x = &x[row * inner + column..][..width];
                                add(&mut reading, x, totals);
                            }
                        }
                    }
                    // SAFETY: tasks do not overlap, nor do the ranges of a task.
                    write(totals, unsafe { shared.range(at, width) });
                    at += width;
                }
            },
        );
    });
}

/// Returns the sum of contiguous elements.
#[inline(always)]
fn of_run<T: Stored>(reading: &mut Blocks<T, 1, 0>, x: &[T]) -> f64 {
    let mut lanes = [0f64; LANES];
    reading.each(
        [x],
        [],
        #[inline(always)]
        |_, [x], []| {
            let (whole, rest) = x.as_chunks::<LANES>();
            for x in whole {
                lanes
                    .iter_mut()
                    .zip(x)
                    .for_each(|(lane, x)| *lane += (*x).into());
            }
            lanes
                .iter_mut()
                .zip(rest)
                .for_each(|(lane, x)| *lane += (*x).into());
        },
    );
    lanes[..LANES.min(x.len())].iter().sum()
}

/// Adds x to `totals`; slices of one length.
#[inline(always)]
fn add<T: Stored>(reading: &mut Blocks<T, 1, 0>, x: &[T], totals: &mut [f64]) {
    reading.each(
        [x],
        [],
        #[inline(always)]
        |start, [x], []| {
            let totals = totals[start..].iter_mut();
            totals.zip(x).for_each(|(total, x)| *total += (*x).into());
        },
    );
}

/// Computes dx (outer, n, inner), `factor` times dy (outer, inner), repeated n times and rounded once.
pub fn backward<T: Stored>(dy: &[T], [n, inner]: [usize; 2], factor: f64, dx: &mut [T]) {
    let scaled = |dy: &T| T::from_f64(dy.to_f64() * factor);
    parallel::for_rows(dx, 1, |first, dx| {
        let mut at = 0;
        while at < dx.len() {
            let (row, column) = ((first + at) / inner, (first + at) % inner);
            let (outer, repeat) = (row / n, row % n);
            if inner == 1 {
                let run = (n - repeat).min(dx.len() - at);
                dx[at..at + run].fill(scaled(&dy[outer]));
                at += run;
                continue;
            }
            let run = (inner - column).min(dx.len() - at);
            if repeat > 0 && run == inner && at >= inner {
                dx.copy_within(at - inner..at, at); // the repeat before
            } else {
                let dy = &dy[outer * inner + column..][..run];
                let each = dx[at..at + run].iter_mut().zip(dy);
                each.for_each(|(dx, dy)| *dx = scaled(dy));
            }
            at += run;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::workspace::sum_chunks;
    use half::{bf16, f16};

    const SIZES: [[usize; 3]; 10] = [
        [1, 1, 1],
        [3, 0, 5],
        [1, 100_003, 1],
        [7, 9001, 1],
        [1001, 7, 1],
        [1, 3001, 3],
        [2, 700, 513],
        [5, 3, 1031],
        [40_001, 2, 2],
        [3, 1, 4],
    ];

    fn wave<T: Stored>(n: usize) -> Vec<T> {
        let value = |i: usize| (i as f64 * 0.37).sin() + 0.5;
        (0..n).map(|i| T::from_f64(value(i))).collect()
    }

    fn bits_with_threads<R: Send>(threads: usize, f: impl Fn() -> R + Send + Sync) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().expect("a pool").install(f)
    }

    fn summed<T: Stored>(sizes: [usize; 3], x: &[T], factor: f64) -> Vec<T> {
        let [outer, n, inner] = sizes;
        let mut y = vec![T::from_f64(f64::NAN); outer * inner];
        let chunks = sum_chunks(sizes);
        let mut parts = vec![f64::NAN; outer * chunks * inner];
        let parts = (chunks > 1).then_some(&mut parts[..]);
        forward(x, [n, inner], factor, &mut y, parts);
        y
    }

    /// Sums are the exact ones rounded once, up to the order of additions in f64, for any number of threads.
    fn check<T: Stored>(sizes: [usize; 3], relative: f64) {
        let [outer, n, inner] = sizes;
        let (x, factor) = (wave::<T>(outer * n * inner), 0.3);
        let y = summed(sizes, &x, factor);
        for (at, y) in y.iter().enumerate() {
            let (row, column) = (at / inner, at % inner);
            let of_row = (0..n).map(|i| x[(row * n + i) * inner + column].to_f64());
            let exact = factor * of_row.sum::<f64>();
            let far = (y.to_f64() - exact).abs();
            assert!(far <= relative * exact.abs(), "{sizes:?}: {y} for {exact}");
        }
        let of = |y: &[T]| y.iter().map(|y| y.to_f64().to_bits()).collect::<Vec<_>>();
        for threads in [1, 3] {
            let again = bits_with_threads(threads, || of(&summed(sizes, &x, factor)));
            assert_eq!(of(&y), again, "{sizes:?}");
        }

        let mut dx = vec![T::from_f64(f64::NAN); x.len()];
        backward(&y, [n, inner], factor, &mut dx);
        for (at, dx) in dx.iter().enumerate() {
            let dy = y[at / (n * inner) * inner + at % inner];
            assert_eq!(dx.to_f64(), T::from_f64(dy.to_f64() * factor).to_f64());
        }
    }

    #[test]
    fn sums_and_gradients_of_every_type_and_odd_sizes() {
        for sizes in SIZES {
            check::<f64>(sizes, 1e-13);
            check::<f32>(sizes, 6e-8);
            check::<f16>(sizes, 4.9e-4);
            check::<bf16>(sizes, 4e-3);
        }
    }
}
