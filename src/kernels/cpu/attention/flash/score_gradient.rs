//! P and dS from scores and dP, with keys in the lanes.

use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::probe::parts::{Part, timed};
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// A query in backward: its log-sum-exp, its delta and the keys that it sees.
#[derive(Clone)]
pub(super) struct Query<T> {
    /// log(sum(exp(scores))); any finite number for a query that sees nothing.
    pub lse: T,
    /// The rounding error of `lse`.
    pub lse_rest: T,
    /// sum(dO O).
    pub delta: T,
    /// The keys of the tile that it sees.
    pub seen: Range<usize>,
}

/// Replaces scores by `p = exp(scores + terms - lse - lse_rest)` and dp by `ds = p (dp - delta)`; both are 0 for hidden
/// keys (algorithm 2, lines 11 and 14). With a soft cap, `ds = p (dp - delta) (1 - (score / cap)^2)`.
pub(super) struct ScoreGradient<'a, T> {
    pub queries: &'a [Query<T>],
    /// Scores, then p: (queries, row).
    pub scores: &'a mut [T],
    /// dp, then ds: (queries, row).
    pub dp: &'a mut [T],
    /// The stride from one query to the next.
    pub row: usize,
    /// The keys of the tile, rounded up to a multiple of [`COLUMNS`].
    pub keys: usize,
    pub soft_cap: Option<T>,
    /// The terms of masks, added to the scores: (queries, row), -inf for a hidden pair.
    pub terms: Option<&'a [T]>,
}

impl<T: Lanes> ScoreGradient<'_, T> {
    pub(super) fn run(self) {
        assert!(self.keys.is_multiple_of(COLUMNS) && self.keys <= self.row);
        let size = self.queries.len() * self.row;
        assert!(self.scores.len() >= size && self.dp.len() >= size);
        assert!(self.terms.is_none_or(|terms| terms.len() >= size));
        timed(Part::Softmax, || Arch::new().dispatch(self));
    }
}

impl<T: Lanes> ScoreGradient<'_, T> {
    /// Computes all rows. `PLAIN` means neither a soft cap nor terms, without branches on them in the inner loop.
    #[inline(always)]
    fn rows<S: Simd, const PLAIN: bool>(self, simd: S) {
        let (soft_cap, terms) = match PLAIN {
            true => (None, None),
            false => (self.soft_cap, self.terms),
        };
        let lanes = T::lanes::<S>();
        let [zero, one] = [T::ZERO, T::ONE].map(|x| T::vsplat(simd, x));
        for (i, query) in self.queries.iter().enumerate() {
            let lse = T::vsplat(simd, query.lse);
            let lse_rest = T::vsplat(simd, query.lse_rest);
            let delta = T::vsplat(simd, query.delta);
            for first in (0..self.keys).step_by(lanes) {
                // SAFETY: `run` checked that the rows hold whole registers up to `keys`.
                unsafe {
                    let scores = self.scores.as_mut_ptr().add(i * self.row + first);
                    let dp = self.dp.as_mut_ptr().add(i * self.row + first);
                    let Range { start, end } = query.seen;
                    if end <= first || start >= first + lanes {
                        T::vstore::<S>(scores, zero);
                        T::vstore::<S>(dp, zero);
                        continue;
                    }
                    let score = T::vload::<S>(scores);
                    let terms = terms.map(|terms| {
                        let at = terms.as_ptr().add(i * self.row + first);
                        T::vload::<S>(at)
                    });
                    let total = match terms {
                        None => score,
                        Some(terms) => T::vadd(simd, score, terms),
                    };
                    let exponent = T::vsub(simd, total, lse);
                    let mut p = T::vexp(simd, T::vsub(simd, exponent, lse_rest));
                    let mut ds = T::vmul(simd, p, T::vsub(simd, T::vload::<S>(dp), delta));
                    if let Some(cap) = soft_cap {
                        let share = T::vmul(simd, score, T::vsplat(simd, T::ONE / cap));
                        let slope = T::vsub(simd, one, T::vmul(simd, share, share));
                        ds = T::vmul(simd, ds, slope);
                    }
                    if let Some(terms) = terms {
                        // Selected, as below.
                        let low = T::vsplat(simd, T::NEG_INFINITY);
                        p = T::vselect_at_most(simd, terms, low, zero, p);
                        ds = T::vselect_at_most(simd, terms, low, zero, ds);
                    }
                    T::vstore::<S>(scores, p);
                    T::vstore::<S>(dp, ds);
                    // Overwritten, not multiplied by 0: a NaN at a hidden key has no effect.
                    let (before, after) = (first..start, end.min(first + lanes)..first + lanes);
                    for hidden in before.chain(after) {
                        *scores.add(hidden - first) = T::ZERO;
                        *dp.add(hidden - first) = T::ZERO;
                    }
                }
            }
        }
    }
}

impl<T: Lanes> WithSimd for ScoreGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match (self.soft_cap, self.terms) {
            (None, None) => self.rows::<S, true>(simd),
            _ => self.rows::<S, false>(simd),
        }
    }
}
