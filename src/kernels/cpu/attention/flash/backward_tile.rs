//! One task of flash attention's backward: a tile of keys and all tiles of queries that see it.

use super::heads::{Heads, Rows};
use super::scale::{cap_by, multiply, multiply_by};
use super::score_gradient::{Query, ScoreGradient};
use super::transpose::{load_block, to_columns};
use super::turns::Turns;
use super::{Sizes, Tiles};
use crate::kernels::DropoutMask;
use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::bf16::Unit;
use crate::kernels::cpu::gemm::tile::{COLUMNS, TileMatmul};
use crate::kernels::cpu::parallel::Shared;
use crate::kernels::cpu::{Stored, simd};
use crate::probe::parts::Part;
use std::ops::Range;
use std::slice;

/// The inputs of backward: forward's inputs and outputs, and the gradient of its output.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T: Stored> {
    /// (B, H, Tq, Dh).
    pub q: Heads<'a, T>,
    /// (B, Hkv, Tk, Dh).
    pub k: Heads<'a, T>,
    /// (B, Hkv, Tk, Dh).
    pub v: Heads<'a, T>,
    /// (B, H, Tq, Dh).
    pub out: Heads<'a, T>,
    /// The rounding error of `out`, (B, H, Tq, Dh), if forward saved it.
    pub rounding_error: Option<Heads<'a, T>>,
    /// (B, H, Tq) or (2, B, H, Tq), as forward wrote it.
    pub lse: &'a [T::Wide],
    /// (B, H, Tq, Dh).
    pub d_out: Heads<'a, T>,
    /// The first key that each query sees, (B, Tq); empty if there are none.
    pub first_keys: &'a [u32],
    /// The dropout mask of the probabilities (B H Tq, Tk), if forward had dropout.
    pub dropout: Option<DropoutMask>,
}

/// One task: a tile of keys, and the data that the tasks of a call share.
pub(super) struct Task<'a, T: Stored> {
    pub sizes: &'a Sizes,
    pub inputs: &'a Inputs<'a, T>,
    /// (B, H, Tq).
    pub delta: &'a [T::Wide],
    /// batch * Hkv + kv head.
    pub matrix: usize,
    /// The index of the tile of keys within its head.
    pub tile: usize,
    /// The turns of the heads of q that share these keys.
    pub turns: Turns<'a>,
    /// The dq that all tasks add to. The rows of these heads, (group * Tq, width), begin at `dq_start`.
    pub dq: &'a Shared<'a, T::Wide>,
    pub dq_start: usize,
}

/// The buffers of one task. Rows of Dh elements are padded with zeros to `width`.
pub(super) struct Scratch<T> {
    /// The matmul unit for bf16, if one is used. It is faster and more exact with unscaled Q and K; scores and dS are
    /// then multiplied by the scale.
    unit: Option<Unit>,
    /// Dh, rounded up to whole registers.
    width: usize,
    q_tile: usize,
    k_tile: usize,
    /// K^T and V^T: (Dh, k_tile).
    k_t: Vec<T>,
    v_t: Vec<T>,
    /// scale K, or K: (k_tile, width).
    k: Vec<T>,
    /// (k_tile, width).
    dk: Vec<T>,
    dv: Vec<T>,
    /// scale Q, or Q: (q_tile, width).
    q: Vec<T>,
    /// dO: (q_tile, width).
    d_out: Vec<T>,
    /// Scores, then P: (q_tile, k_tile).
    p: Vec<T>,
    /// dP, then dS: (q_tile, k_tile).
    ds: Vec<T>,
    queries: Vec<Query<T>>,
    /// The dropout factors of one query's probabilities: (k_tile), or empty without dropout.
    factors: Vec<T>,
    /// Rows to be transposed: (COLUMNS, Dh).
    block: Vec<T>,
}

/// Returns Dh rounded up to whole registers. f64 because huge sizes must not overflow.
pub(super) fn padded_width(sizes: &Sizes) -> f64 {
    sizes.head_dim.div_ceil(COLUMNS) as f64 * COLUMNS as f64
}

impl<T: Lanes> Scratch<T> {
    pub(super) fn new(sizes: &Sizes, tiles: &Tiles, unit: Option<Unit>) -> Self {
        let width = sizes.head_dim.next_multiple_of(COLUMNS);
        let q_tile = tiles.backward_q_tile.min(sizes.queries).max(1);
        let k_tile = tiles.backward_k_tile.min(sizes.keys);
        let k_tile = k_tile.next_multiple_of(COLUMNS);
        let zeros = |rows: usize, columns: usize| vec![T::ZERO; rows * columns];
        Self {
            unit,
            width,
            q_tile,
            k_tile,
            k_t: zeros(sizes.head_dim, k_tile),
            v_t: zeros(sizes.head_dim, k_tile),
            k: zeros(k_tile, width),
            dk: zeros(k_tile, width),
            dv: zeros(k_tile, width),
            q: zeros(q_tile, width),
            d_out: zeros(q_tile, width),
            p: zeros(q_tile, k_tile),
            ds: zeros(q_tile, k_tile),
            queries: Vec::with_capacity(q_tile),
            factors: Vec::new(),
            block: vec![T::ZERO; COLUMNS * sizes.head_dim],
        }
    }

    /// Returns the number of elements that [`new`](Self::new) allocates; dropout adds k_tile. f64 because huge sizes
    /// must not overflow.
    pub(super) fn elements(sizes: &Sizes, tiles: &Tiles) -> f64 {
        let (head_dim, width) = (sizes.head_dim as f64, padded_width(sizes));
        let q_tile = tiles.backward_q_tile.min(sizes.queries).max(1) as f64;
        let k_tile = tiles.backward_k_tile.min(sizes.keys);
        let k_tile = k_tile.next_multiple_of(COLUMNS) as f64;
        let of_keys = k_tile * (2.0 * head_dim + 3.0 * width);
        of_keys + 2.0 * q_tile * (width + k_tile) + COLUMNS as f64 * head_dim
    }

    /// Processes one tile of keys: writes its dk and dv (keys, Dh) and adds to dq in its turn.
    pub(super) fn keys<S: Stored<Wide = T>>(
        &mut self,
        task: &Task<'_, S>,
        keys: Range<usize>,
        dk: &mut [S],
        dv: &mut [S],
    ) {
        let (sizes, inputs) = (task.sizes, task.inputs);
        let (batch, kv_head) = (task.matrix / sizes.kv_heads, task.matrix % sizes.kv_heads);
        self.load_keys(
            sizes,
            keys.clone(),
            inputs.k.matrix(batch, kv_head),
            inputs.v.matrix(batch, kv_head),
        );
        let (_, lse_rest) = inputs.lse.split_at(task.delta.len());
        let seen_keys = sizes.key_ranges(inputs.first_keys, batch);
        // Relative to the tile's first key.
        let inside = |seen: Range<usize>| {
            let [first, end] = [seen.start, seen.end].map(|key| key.clamp(keys.start, keys.end));
            first - keys.start..end - keys.start
        };
        for member in 0..sizes.group() {
            let head = kv_head * sizes.group() + member;
            let q = inputs.q.matrix(batch, head);
            let d_out = inputs.d_out.matrix(batch, head);
            let first_row = (batch * sizes.heads + head) * sizes.queries; // of lse and delta
            for start in (0..sizes.queries).step_by(self.q_tile) {
                let range = start..sizes.queries.min(start + self.q_tile);
                let by_tile = inside(seen_keys.of_queries(&range));
                if by_tile.is_empty() {
                    continue;
                }
                self.load_queries(sizes, range.clone(), q, d_out);
                self.queries.clear();
                self.queries.extend(range.clone().map(|query| {
                    let lse = inputs.lse[first_row + query];
                    let lse_rest = lse_rest.get(first_row + query);
                    Query {
                        lse: if lse == T::NEG_INFINITY { T::ZERO } else { lse },
                        lse_rest: lse_rest.copied().unwrap_or(T::ZERO),
                        delta: task.delta[first_row + query],
                        seen: inside(seen_keys.of_query(query)),
                    }
                }));
                // A query that sees none of these keys must not contribute, whatever it holds.
                for (row, query) in self.queries.iter().enumerate() {
                    if query.seen.is_empty() {
                        let row = row * self.width..(row + 1) * self.width;
                        self.q[row.clone()].fill(T::ZERO);
                        self.d_out[row].fill(T::ZERO);
                    }
                }
                // The dS of a hidden key is 0, and 0 * NaN is NaN. If there are NaNs or infinities, queries are
                // processed one by one, so that none meets a key that it does not see.
                let [first, last] =
                    [range.start, range.end - 1].map(|query| seen_keys.of_query(query));
                let by_all = inside(last).start..inside(first).end;
                let together = by_all == by_tile || self.finite(range.len());
                let step = if together { range.len() } else { 1 };
                // The mask's rows are those of lse; its columns are keys.
                let dropout = inputs.dropout.as_ref();
                let dropout = dropout.map(|mask| (mask, first_row + range.start, keys.clone()));
                for first in (0..range.len()).step_by(step) {
                    self.queries(sizes, first..first + step, dropout.clone());
                }
                let q_tile = start / self.q_tile;
                // The tiles of keys that a tile of queries sees are contiguous, so every task from the first one on
                // takes its turn.
                task.turns.wait(member, q_tile, task.tile);
                let at = task.dq_start + (member * sizes.queries + start) * self.width;
                // SAFETY: no other task has these rows until `pass_on`.
                let dq = unsafe { task.dq.range(at, range.len() * self.width) };
                for first in (0..range.len()).step_by(step) {
                    self.add_to_dq(first..first + step, &mut dq[first * self.width..]);
                }
                task.turns.pass_on(member, q_tile, task.tile);
            }
        }
        let head_dim = sizes.head_dim;
        let rows = self.dk.chunks(self.width).zip(self.dv.chunks(self.width));
        let outputs = dk.chunks_mut(head_dim).zip(dv.chunks_mut(head_dim));
        for ((from_k, from_v), (dk, dv)) in rows.zip(outputs) {
            S::store(&from_k[..head_dim], dk);
            S::store(&from_v[..head_dim], dv);
        }
    }

    /// Loads K and V of a tile in the layouts of the matmuls; zeroes dk and dv.
    fn load_keys<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        range: Range<usize>,
        k: Rows<'_, S>,
        v: Rows<'_, S>,
    ) {
        self.dk.fill(T::ZERO);
        self.dv.fill(T::ZERO);
        let (head_dim, scale) = (sizes.head_dim, self.scale_of_factors(sizes));
        for first in (0..range.len()).step_by(COLUMNS) {
            let start = range.start + first;
            let keys = start..range.end.min(start + COLUMNS);
            load_block(v, keys.clone(), head_dim, &mut self.block);
            let to = &mut self.v_t[first..];
            to_columns(&self.block, head_dim, T::ONE, to, self.k_tile);
            load_block(k, keys, head_dim, &mut self.block);
            let to = &mut self.k_t[first..];
            to_columns(&self.block, head_dim, T::ONE, to, self.k_tile);
            let rows = self.k[first * self.width..].chunks_mut(self.width);
            for (to, from) in rows.zip(self.block.chunks(head_dim)) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = scale * *from;
                }
            }
        }
    }

    /// Loads scale Q and dO of a tile, rows padded to `width`.
    fn load_queries<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        range: Range<usize>,
        q: Rows<'_, S>,
        d_out: Rows<'_, S>,
    ) {
        let scale = self.scale_of_factors(sizes);
        let (q_rows, d_out_rows) = (
            self.q.chunks_mut(self.width),
            self.d_out.chunks_mut(self.width),
        );
        for (query, (q_row, d_out_row)) in range.zip(q_rows.zip(d_out_rows)) {
            q.load(query, &mut q_row[..sizes.head_dim]);
            d_out.load(query, &mut d_out_row[..sizes.head_dim]);
            multiply_by(q_row, scale);
        }
    }

    /// Returns the factor that Q and K are multiplied by when they are loaded.
    fn scale_of_factors(&self, sizes: &Sizes) -> T {
        match self.unit {
            None => T::real(sizes.scale),
            Some(_) => T::ONE,
        }
    }

    /// Returns whether the tiles of keys and the first `rows` queries are free of NaN and infinity.
    fn finite(&self, rows: usize) -> bool {
        let count = rows * self.width;
        let tiles = [&self.q[..count], &self.d_out[..count], &self.k, &self.v_t];
        tiles.into_iter().all(simd::all_finite)
    }

    /// Returns the range from the first key that some of these queries see to the last.
    fn keys_of_rows(&self, rows: &Range<usize>) -> Range<usize> {
        self.queries[rows.start].seen.start..self.queries[rows.end - 1].seen.end
    }

    /// Processes the queries `rows` of the tile against the keys that they see, except for dq. `dropout` is the mask,
    /// its row for the tile's first query, and the tile's keys.
    fn queries(
        &mut self,
        sizes: &Sizes,
        rows: Range<usize>,
        dropout: Option<(&DropoutMask, usize, Range<usize>)>,
    ) {
        let (width, head_dim, k_tile) = (self.width, sizes.head_dim, self.k_tile);
        let seen = self.keys_of_rows(&rows);
        if seen.is_empty() {
            return;
        }
        let columns = seen.end.next_multiple_of(COLUMNS);
        let queries = &self.queries[rows.clone()];
        let q = &self.q[rows.start * width..];
        let d_out = &self.d_out[rows.start * width..];
        let p = &mut self.p[rows.start * k_tile..];
        let ds = &mut self.ds[rows.start * k_tile..];
        let first_row = rows.start;
        let rows = rows.len();
        // Line 10: S = (scale Q) K^T, with the same bits as in forward.
        let product = TileMatmul {
            a: q,
            a_row: width,
            a_col: 1,
            b: &self.k_t,
            b_row: k_tile,
            b_unit: COLUMNS,
            c: p,
            c_row: k_tile,
            rows,
            columns,
            depth: head_dim,
            accumulate: false,
            unit: self.unit,
        };
        product.run(Part::Scores);
        let scale_of_scores = self.unit.map(|_| T::real(sizes.scale));
        let scale = |x: &mut [T]| {
            if let Some(scale) = scale_of_scores {
                x.chunks_mut(k_tile)
                    .for_each(|row| multiply_by(&mut row[..columns], scale));
            }
        };
        scale(&mut p[..rows * k_tile]);
        let soft_cap = sizes.soft_cap.map(T::real);
        if let Some(cap) = soft_cap {
            p[..rows * k_tile]
                .chunks_mut(k_tile)
                .for_each(|row| cap_by(&mut row[..columns], cap));
        }
        // Line 13: dP = dO V^T.
        let product = TileMatmul {
            a: d_out,
            a_row: width,
            a_col: 1,
            b: &self.v_t,
            b_row: k_tile,
            b_unit: COLUMNS,
            c: ds,
            c_row: k_tile,
            rows,
            columns,
            depth: head_dim,
            accumulate: false,
            unit: self.unit,
        };
        product.run(Part::Values);
        // Lines 11 and 14.
        match dropout {
            None => ScoreGradient {
                queries,
                scores: p,
                dp: ds,
                row: k_tile,
                keys: columns,
                soft_cap,
            }
            .run(),
            // A dropped element has dP = 0. Its P is zeroed only after dS is computed from it.
            Some((mask, row, keys)) => {
                let each = p.chunks_mut(k_tile).zip(ds.chunks_mut(k_tile)).zip(queries);
                for (i, ((p, dp), query)) in each.enumerate() {
                    mask.factors(row + first_row + i, keys.clone(), &mut self.factors);
                    multiply(dp, &self.factors);
                    ScoreGradient {
                        queries: slice::from_ref(query),
                        scores: p,
                        dp,
                        row: k_tile,
                        keys: columns,
                        soft_cap,
                    }
                    .run();
                    multiply(p, &self.factors);
                }
            }
        }
        scale(&mut ds[..rows * k_tile]);
        // Line 12: dV += P^T dO.
        let product = TileMatmul {
            a: &p[seen.start..],
            a_row: 1,
            a_col: k_tile,
            b: d_out,
            b_row: width,
            b_unit: COLUMNS,
            c: &mut self.dv[seen.start * width..],
            c_row: width,
            rows: seen.len(),
            columns: width,
            depth: rows,
            accumulate: true,
            unit: self.unit,
        };
        product.run(Part::Values);
        // Line 16: dK += dS^T (scale Q).
        let product = TileMatmul {
            a: &ds[seen.start..],
            a_row: 1,
            a_col: k_tile,
            b: q,
            b_row: width,
            b_unit: COLUMNS,
            c: &mut self.dk[seen.start * width..],
            c_row: width,
            rows: seen.len(),
            columns: width,
            depth: rows,
            accumulate: true,
            unit: self.unit,
        };
        product.run(Part::Scores);
    }

    /// Line 15: dQ += dS (scale K), after [`queries`](Self::queries) has run for these rows; dq (rows, width).
    fn add_to_dq(&self, rows: Range<usize>, dq: &mut [T]) {
        let seen = self.keys_of_rows(&rows);
        if seen.is_empty() {
            return;
        }
        let product = TileMatmul {
            a: &self.ds[rows.start * self.k_tile + seen.start..],
            a_row: self.k_tile,
            a_col: 1,
            b: &self.k[seen.start * self.width..],
            b_row: self.width,
            b_unit: COLUMNS,
            c: dq,
            c_row: self.width,
            rows: rows.len(),
            columns: self.width,
            depth: seen.len(),
            accumulate: true,
            unit: self.unit,
        };
        product.run(Part::Scores);
    }
}
