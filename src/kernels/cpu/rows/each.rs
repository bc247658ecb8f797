//! The loops over rows that norms share: in parallel, vectorised, and widened where elements are in half precision.

use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::{Blocks, Stored, simd};

/// A row of `N` inputs and of the output.
pub(super) struct Row<'a, T: Stored, const N: usize> {
    inputs: [&'a [T]; N],
    output: &'a mut [T],
    reading: &'a mut Blocks<T, N, 0>,
    writing: &'a mut Blocks<T, N, 1>,
}

impl<T: Stored, const N: usize> Row<'_, T, N> {
    /// Calls `f(start, inputs)` on consecutive blocks, as [`Blocks::each`] does.
    #[inline(always)]
    pub(super) fn read(&mut self, mut f: impl FnMut(usize, [&[T::Wide]; N])) {
        self.reading.each(
            self.inputs,
            [],
            #[inline(always)]
            |start, inputs, []| f(start, inputs),
        );
    }

    /// Calls `f(start, inputs, output)` on consecutive blocks: the output is written whole.
    #[inline(always)]
    pub(super) fn write(self, mut f: impl FnMut(usize, [&[T::Wide]; N], &mut [T::Wide])) {
        self.writing.each(
            self.inputs,
            [self.output],
            #[inline(always)]
            |start, inputs, [output]| f(start, inputs, output),
        );
    }
}

/// Calls `f(index, row)` for every row of `width` elements; what it returns is the row of `statistics` (rows, K).
pub(super) fn each_row<T: Stored, const N: usize, const K: usize>(
    width: usize,
    inputs: [&[T]; N],
    output: &mut [T],
    statistics: &mut [T::Wide],
    f: impl Fn(usize, Row<'_, T, N>) -> [T::Wide; K] + Sync,
) {
    let statistics = Shared::new(statistics);
    parallel::for_rows(output, width, |first, output| {
        let inputs = inputs.map(|x| &x[first * width..][..output.len()]);
        // SAFETY: these rows are this task's.
        let statistics = unsafe { statistics.range(first * K, output.len() / width * K) };
        simd::vectorized(
            #[inline(always)]
            || {
                let (mut reading, mut writing) = (Blocks::new(), Blocks::new());
                for (i, output) in output.chunks_exact_mut(width).enumerate() {
                    let row = Row {
                        inputs: inputs.map(|x| &x[i * width..][..width]),
                        output,
                        reading: &mut reading,
                        writing: &mut writing,
                    };
                    statistics[i * K..][..K].copy_from_slice(&f(first + i, row));
                }
            },
        );
    });
}

/// Sums over rows into `out` (width), in a fixed order: `add(index, inputs, out)` adds a block of the row `index`
/// of the inputs (rows, width).
pub(super) fn sum_rows<T: Stored, const N: usize>(
    inputs: [&[T]; N],
    out: &mut [T::Wide],
    add: impl Fn(usize, [&[T::Wide]; N], &mut [T::Wide]) + Sync,
) {
    let width = out.len();
    let rows = inputs[0].len().checked_div(width).unwrap_or(0);
    parallel::sum_rows(out, rows, |rows, out| {
        simd::vectorized(
            #[inline(always)]
            || {
                let mut reading = Blocks::<T, N, 0>::new();
                for row in rows {
                    reading.each(
                        inputs.map(|x| &x[row * width..][..width]),
                        [],
                        #[inline(always)]
                        |start, inputs, []| add(row, inputs, &mut out[start..]),
                    );
                }
            },
        );
    });
}
