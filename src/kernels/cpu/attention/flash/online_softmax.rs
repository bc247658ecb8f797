//! One step of the online softmax, with queries in the lanes.

use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::probe::parts::{Part, timed};
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// The margin by which a score may exceed the `max` that sums are relative to. Probabilities up to e^4 lose no
/// precision in floating point.
const SLACK: f64 = 4.0;

/// The running state of each query of a panel in forward.
pub(super) struct State<'a, T> {
    /// The reference of the sums: the largest score so far, or up to [`SLACK`] less.
    pub max: &'a mut [T],
    /// The sum of exp(score - max).
    pub sum: &'a mut [T],
    /// The factor that the last step applied to earlier sums: exp(old max - new max).
    pub rescale: &'a mut [T],
}

/// Turns a tile of scores into exp(score - max) and updates the state (algorithm 1, lines 9 and 10).
pub(super) struct OnlineSoftmax<'a, T> {
    /// (keys, queries), the queries a multiple of [`COLUMNS`].
    pub scores: &'a mut [T],
    /// The number of queries in the panel.
    pub queries: usize,
    /// The first key of the tile that each query sees, and the end of the range; read only if `by_all` is not the whole
    /// tile.
    pub first: &'a [T],
    pub end: &'a [T],
    /// The keys that all queries see.
    pub by_all: Range<usize>,
    pub state: State<'a, T>,
}

impl<T: Lanes> OnlineSoftmax<'_, T> {
    /// Runs the step; returns whether any sum was rescaled.
    pub(super) fn run(self) -> bool {
        let queries = self.queries;
        assert!(queries.is_multiple_of(COLUMNS) && self.scores.len().is_multiple_of(queries));
        let State { max, sum, rescale } = &self.state;
        assert!([max.len(), sum.len(), rescale.len()] == [queries; 3]);
        assert!([self.first.len(), self.end.len()] == [queries; 2]);
        timed(Part::Softmax, || Arch::new().dispatch(self))
    }

    /// Runs the step for the queries of one register.
    ///
    /// # Safety
    /// `first` and the lanes after it must be queries of the panel.
    #[inline(always)]
    unsafe fn register<S: Simd>(&mut self, simd: S, first: usize) {
        /// The number of independent chains of maxima and sums, for instruction-level parallelism.
        const CHAINS: usize = 4;

        let low = T::vsplat(simd, T::NEG_INFINITY);
        let zero = T::vsplat(simd, T::ZERO);
        let keys = self.scores.len() / self.queries;
        // SAFETY: the caller's promise, and `run` checked the lengths.
        unsafe {
            let column = self.scores.as_mut_ptr().add(first);
            let queries = self.queries;
            // Selected, not multiplied by 0: a NaN in a hidden score has no effect.
            let begins = T::vload::<S>(self.first.as_ptr().add(first));
            for key in 0..self.by_all.start {
                let index = T::vsplat(simd, T::real(key as f64));
                let score = T::vload::<S>(column.add(key * queries));
                let score = T::vselect_at_most(simd, begins, index, score, low);
                T::vstore::<S>(column.add(key * queries), score);
            }
            let end = T::vload::<S>(self.end.as_ptr().add(first));
            for key in self.by_all.end..keys {
                let index = T::vsplat(simd, T::real(key as f64));
                let score = T::vload::<S>(column.add(key * queries));
                let score = T::vselect_at_most(simd, end, index, low, score);
                T::vstore::<S>(column.add(key * queries), score);
            }

            let old = T::vload::<S>(self.state.max.as_ptr().add(first));
            let mut largest = [old; CHAINS];
            let whole = keys - keys % CHAINS;
            for key in (0..whole).step_by(CHAINS) {
                for (chain, largest) in largest.iter_mut().enumerate() {
                    *largest = T::vmax(
                        simd,
                        T::vload::<S>(column.add((key + chain) * queries)),
                        *largest,
                    );
                }
            }
            for key in whole..keys {
                largest[0] = T::vmax(simd, T::vload::<S>(column.add(key * queries)), largest[0]);
            }
            let max = T::vmax(
                simd,
                T::vmax(simd, largest[0], largest[1]),
                T::vmax(simd, largest[2], largest[3]),
            );
            // Sums keep their reference until it is off by SLACK. The result is exact either way, and most tiles then
            // need no rescaling.
            let tolerated = T::vadd(simd, old, T::vsplat(simd, T::real(SLACK)));
            let max = T::vselect_at_most(simd, max, tolerated, old, max);
            // For a query that has seen no key yet, -inf is replaced by a finite number: -inf - -inf would be NaN.
            let finite = T::vselect_at_most(simd, max, low, zero, max);

            let mut sums = [zero; CHAINS];
            for key in (0..whole).step_by(CHAINS) {
                for (chain, sum) in sums.iter_mut().enumerate() {
                    let at = column.add((key + chain) * queries);
                    *sum = T::vadd(simd, *sum, exponential(simd, at, finite));
                }
            }
            for key in whole..keys {
                let p = exponential(simd, column.add(key * queries), finite);
                sums[0] = T::vadd(simd, sums[0], p);
            }
            let new = T::vadd(
                simd,
                T::vadd(simd, sums[0], sums[1]),
                T::vadd(simd, sums[2], sums[3]),
            );
            let rescale = T::vexp(simd, T::vsub(simd, old, finite));
            let sum = self.state.sum.as_mut_ptr().add(first);
            T::vstore::<S>(sum, T::vmul_add(simd, T::vload::<S>(sum), rescale, new));
            T::vstore::<S>(self.state.max.as_mut_ptr().add(first), max);
            T::vstore::<S>(self.state.rescale.as_mut_ptr().add(first), rescale);
        }
    }
}

/// Replaces a register of scores by `exp(score - max)`, and returns it.
///
/// # Safety
/// `at` must be readable and writable for one register.
#[inline(always)]
unsafe fn exponential<T: Lanes, S: Simd>(
    simd: S,
    at: *mut T,
    max: T::Register<S>,
) -> T::Register<S> {
    // SAFETY: the caller's promise.
    unsafe {
        let p = T::vexp(simd, T::vsub(simd, T::vload::<S>(at), max));
        T::vstore::<S>(at, p);
        p
    }
}

impl<T: Lanes> WithSimd for OnlineSoftmax<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> bool {
        for first in (0..self.queries).step_by(T::lanes::<S>()) {
            // SAFETY: whole registers of the panel, whose width is a multiple of a register.
            unsafe { self.register(simd, first) };
        }
        self.state.rescale.iter().any(|factor| *factor != T::ONE)
    }
}
