//! A panel of queries, which processes the tiles of keys one after another.

use super::Sizes;
use super::heads::Rows;
use super::masks::add_terms;
use super::online_softmax::{OnlineSoftmax, State};
use super::scale::{cap_by, multiply_by};
use super::transpose::{load_block, to_columns};
use crate::kernels::DropoutMask;
use crate::kernels::cpu::gemm::bf16::Unit;
use crate::kernels::cpu::gemm::tile::{COLUMNS, TileMatmul};
use crate::kernels::cpu::simd::{all_finite, vectorized};
use crate::kernels::cpu::{Lanes, Stored};
use crate::probe::parts::Part;
use std::ops::Range;

/// The queries of a panel: a row of scores is three AVX-512 registers of `f32`, the fastest width of the matmuls.
pub(super) const PANEL: usize = 3 * COLUMNS;

/// The first key of a tile that each query of a panel sees, and the end of the range.
pub(super) struct PanelKeys<T> {
    pub first: [T; PANEL],
    pub end: [T; PANEL],
}

/// Up to [`PANEL`] queries.
pub(super) struct Panel<T> {
    pub queries: Range<usize>,
    /// The matmul unit for bf16, if one is used.
    unit: Option<Unit>,
    /// The lanes in use: the number of queries, rounded up to a multiple of [`COLUMNS`].
    pub lanes: usize,
    /// scale Q^T: (Dh, lanes). If `scale` is set it is Q^T, and the scores are multiplied by `scale`.
    q: Vec<T>,
    scale: Option<T>,
    soft_cap: Option<T>,
    /// O^T, not yet divided by the sums: (Dv, lanes).
    pub out: Vec<T>,
    pub max: [T; PANEL],
    pub sum: [T; PANEL],
    rescale: [T; PANEL],
}

impl<T: Lanes> PanelKeys<T> {
    pub fn new() -> Self {
        Self {
            first: [T::ZERO; PANEL],
            end: [T::ZERO; PANEL],
        }
    }
}

impl<T: Lanes> Panel<T> {
    pub fn new(sizes: &Sizes, unit: Option<Unit>) -> Self {
        Self {
            queries: 0..0,
            unit,
            lanes: 0,
            q: vec![T::ZERO; sizes.head_dim * PANEL],
            scale: None,
            soft_cap: None,
            out: vec![T::ZERO; sizes.value_dim * PANEL],
            max: [T::ZERO; PANEL],
            sum: [T::ZERO; PANEL],
            rescale: [T::ZERO; PANEL],
        }
    }

    /// Restarts with the rows `queries` of `q`; `block` is scratch of (COLUMNS, Dh) or more.
    pub fn begin<S: Stored<Wide = T>>(
        &mut self,
        queries: Range<usize>,
        sizes: &Sizes,
        q: Rows<'_, S>,
        block: &mut [T],
    ) {
        let (head_dim, scale) = (sizes.head_dim, T::real(sizes.scale));
        let block = &mut block[..COLUMNS * head_dim];
        self.lanes = queries.len().next_multiple_of(COLUMNS);
        self.max.fill(T::NEG_INFINITY);
        self.sum.fill(T::ZERO);
        self.q.resize(head_dim * self.lanes, T::ZERO);
        // A bf16 unit is faster and more exact with unscaled Q.
        self.scale = self.unit.map(|_| scale);
        self.soft_cap = sizes.soft_cap.map(T::real);
        let scale = if self.unit.is_some() { T::ONE } else { scale };
        self.out.clear();
        self.out.resize(sizes.value_dim * self.lanes, T::ZERO);
        for first in (0..self.lanes).step_by(COLUMNS) {
            let start = queries.start + first;
            load_block(q, start..queries.end.min(start + COLUMNS), head_dim, block);
            to_columns(block, head_dim, scale, &mut self.q[first..], self.lanes);
        }
        self.queries = queries;
    }

    /// Computes the scores of one tile of keys and turns them into probabilities (keys, lanes), not yet divided by the
    /// sums. k (keys, Dh) comes with its row stride. `terms` (keys, lanes) are added to the scores. By their ranges,
    /// all queries see the keys `by_all`. Earlier sums are rescaled.
    pub fn probabilities(
        &mut self,
        (k, k_row): (&[T], usize),
        scores: &mut [T],
        terms: Option<&[T]>,
        seen: &PanelKeys<T>,
        by_all: Range<usize>,
    ) {
        let lanes = self.lanes;
        let head_dim = self.q.len() / lanes;
        let keys = scores.len() / lanes;
        // Line 8: S^T = K (scale Q^T).
        let product = TileMatmul {
            a: k,
            a_row: k_row,
            a_col: 1,
            b: &self.q,
            b_row: lanes,
            b_unit: COLUMNS,
            c: scores,
            c_row: lanes,
            rows: keys,
            columns: lanes,
            depth: head_dim,
            accumulate: false,
            unit: self.unit,
        };
        product.run(Part::Scores);
        if let Some(scale) = self.scale {
            multiply_by(scores, scale);
        }
        if let Some(cap) = self.soft_cap {
            cap_by(scores, cap);
        }
        if let Some(terms) = terms {
            add_terms(scores, terms);
        }
        // Line 9.
        let step = OnlineSoftmax {
            scores,
            queries: lanes,
            first: &seen.first[..lanes],
            end: &seen.end[..lanes],
            by_all,
            state: State {
                max: &mut self.max[..lanes],
                sum: &mut self.sum[..lanes],
                rescale: &mut self.rescale[..lanes],
            },
        };
        // Line 10: O^T rescale.
        if step.run() {
            let rescale = &self.rescale[..lanes];
            let out = &mut self.out;
            vectorized(
                #[inline(always)]
                || {
                    for row in out.chunks_exact_mut(lanes) {
                        for (value, factor) in row.iter_mut().zip(rescale) {
                            *value *= *factor;
                        }
                    }
                },
            );
        }
    }

    /// Zeroes the dropped probabilities of a tile (keys, lanes), whose first key is `first_key`. `first_row` is the
    /// mask's row for the head's first query.
    pub fn apply_dropout(
        &self,
        p: &mut [T],
        mask: &DropoutMask,
        first_row: usize,
        first_key: usize,
    ) {
        let lanes = self.lanes;
        let keys = first_key..first_key + p.len() / lanes;
        vectorized(
            #[inline(always)]
            || {
                for (lane, query) in self.queries.clone().enumerate() {
                    mask.each(first_row + query, keys.clone(), |key, stays| {
                        let p = &mut p[key * lanes + lane];
                        *p = if stays { *p } else { T::ZERO };
                    });
                }
            },
        );
    }

    /// Adds the values v (keys, Dv) of a tile, with their row stride, weighted by its probabilities (keys, lanes).
    /// `terms` are those of the scores.
    pub fn add(
        &mut self,
        (v, v_row): (&[T], usize),
        p: &[T],
        terms: Option<&[T]>,
        seen: &PanelKeys<T>,
        by_all: Range<usize>,
    ) {
        let lanes = self.lanes;
        let value_dim = self.out.len() / lanes;
        let keys = p.len() / lanes;
        let by_all = if terms.is_some() { 0..0 } else { by_all };
        // Line 10: O^T += V^T P^T.
        let mut next = 0;
        for key in (0..by_all.start).chain(by_all.end.max(by_all.start)..keys) {
            let row = &v[key * v_row..][..value_dim];
            if all_finite(row) {
                continue;
            }
            // A hidden p is 0, and 0 * NaN is NaN: this key's values are added only to queries that see it.
            self.add_values(v, v_row, p, next..key);
            for (lane, p) in p[key * lanes..][..lanes].iter().enumerate() {
                let hidden = terms.is_some_and(|x| x[key * lanes + lane] == T::NEG_INFINITY);
                let key = T::real(key as f64);
                if !hidden && seen.first[lane] <= key && key < seen.end[lane] {
                    for (out, value) in self.out.chunks_mut(lanes).zip(row) {
                        out[lane] += *p * *value;
                    }
                }
            }
            next = key + 1;
        }
        self.add_values(v, v_row, p, next..keys);
    }

    /// `O^T += V^T P^T` for some keys of a tile: v (keys, Dv), p (keys, lanes).
    fn add_values(&mut self, v: &[T], v_row: usize, p: &[T], keys: Range<usize>) {
        let lanes = self.lanes;
        if keys.is_empty() {
            return;
        }
        let product = TileMatmul {
            a: &v[keys.start * v_row..],
            a_row: 1,
            a_col: v_row,
            b: &p[keys.start * lanes..],
            b_row: lanes,
            b_unit: COLUMNS,
            rows: self.out.len() / lanes,
            c: &mut self.out,
            c_row: lanes,
            columns: lanes,
            depth: keys.len(),
            accumulate: true,
            unit: self.unit,
        };
        product.run(Part::Values);
    }
}
