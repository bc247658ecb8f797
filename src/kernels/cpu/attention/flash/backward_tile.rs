//! One task of flash attention's backward: a tile of keys and all tiles of queries that see it.

use super::heads::{Heads, Rows};
use super::masks::{MaskedTile, Masks, visible_hull, visible_runs};
use super::scale::{cap_by, multiply, multiply_by, multiply_rows};
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
    /// (B, Hkv, Tk, Dv).
    pub v: Heads<'a, T>,
    /// (B, H, Tq, Dv).
    pub out: Heads<'a, T>,
    /// The rounding error of `out`, (B, H, Tq, Dv), if forward saved it.
    pub rounding_error: Option<Heads<'a, T>>,
    /// (B, H, Tq) or (2, B, H, Tq), as forward wrote it.
    pub lse: &'a [T::Wide],
    /// (B, H, Tq, Dv).
    pub d_out: Heads<'a, T>,
    /// The first key that each query sees, (B, Tq); empty if there are none.
    pub first_keys: &'a [u32],
    /// Masks and biases, as in forward.
    pub masks: Masks<'a, T::Wide>,
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

/// A tile of keys, as a head of q attends to it.
pub(super) struct HeadTile<'a, T: Stored> {
    pub sizes: &'a Sizes,
    pub inputs: &'a Inputs<'a, T>,
    /// (B, H, Tq).
    pub delta: &'a [T::Wide],
    pub batch: usize,
    pub head: usize,
    pub keys: Range<usize>,
}

impl<T: Stored> HeadTile<'_, T> {
    /// Returns the row of the head's first query in lse and delta.
    fn first_row(&self) -> usize {
        (self.batch * self.sizes.heads + self.head) * self.sizes.queries
    }

    /// Returns a range of keys relative to the tile's first key.
    fn inside(&self, seen: Range<usize>) -> Range<usize> {
        let Range { start, end } = self.keys;
        let [first, last] = [seen.start, seen.end].map(|key| key.clamp(start, end));
        first - start..last - start
    }
}

/// The buffers of one task. Rows of Dh elements are padded with zeros to `width`, those of Dv to `value_width`.
pub(super) struct Scratch<T> {
    /// The matmul unit for bf16, if one is used. It is faster and more exact with unscaled Q and K; scores and dS are
    /// then multiplied by the scale.
    unit: Option<Unit>,
    /// Dh and Dv, rounded up to whole registers.
    width: usize,
    value_width: usize,
    q_tile: usize,
    k_tile: usize,
    /// K^T: (Dh, k_tile).
    k_t: Vec<T>,
    /// V^T: (Dv, k_tile).
    v_t: Vec<T>,
    /// scale K, or K: (k_tile, width).
    k: Vec<T>,
    /// (k_tile, width).
    dk: Vec<T>,
    /// (k_tile, value_width).
    dv: Vec<T>,
    /// scale Q, or Q: (q_tile, width).
    q: Vec<T>,
    /// dO: (q_tile, value_width).
    d_out: Vec<T>,
    /// Scores, then P: (q_tile, k_tile).
    p: Vec<T>,
    /// dP, then dS: (q_tile, k_tile).
    ds: Vec<T>,
    queries: Vec<Query<T>>,
    /// The tile's first query.
    first_query: usize,
    /// The terms of masks: (q_tile, k_tile), or empty if there are none.
    terms: Vec<T>,
    /// Whether the tile has terms.
    has_terms: bool,
    /// The dropout factors of one query's probabilities: (k_tile), or empty without dropout.
    factors: Vec<T>,
    /// Rows to be transposed: (COLUMNS, Dh or Dv).
    block: Vec<T>,
}

/// Returns Dh or Dv rounded up to whole registers. f64 because huge sizes must not overflow.
pub(super) fn padded(dim: usize) -> f64 {
    dim.div_ceil(COLUMNS) as f64 * COLUMNS as f64
}

impl<T: Lanes> Scratch<T> {
    pub(super) fn new(sizes: &Sizes, tiles: &Tiles, masked: bool, unit: Option<Unit>) -> Self {
        let [width, value_width] =
            [sizes.head_dim, sizes.value_dim].map(|dim| dim.next_multiple_of(COLUMNS));
        let q_tile = tiles.backward_q_tile.min(sizes.queries).max(1);
        let k_tile = tiles.backward_k_tile.min(sizes.keys);
        let k_tile = k_tile.next_multiple_of(COLUMNS);
        let zeros = |rows: usize, columns: usize| vec![T::ZERO; rows * columns];
        Self {
            unit,
            width,
            value_width,
            q_tile,
            k_tile,
            k_t: zeros(sizes.head_dim, k_tile),
            v_t: zeros(sizes.value_dim, k_tile),
            k: zeros(k_tile, width),
            dk: zeros(k_tile, width),
            dv: zeros(k_tile, value_width),
            q: zeros(q_tile, width),
            d_out: zeros(q_tile, value_width),
            p: zeros(q_tile, k_tile),
            ds: zeros(q_tile, k_tile),
            queries: Vec::with_capacity(q_tile),
            first_query: 0,
            terms: zeros(if masked { q_tile } else { 0 }, k_tile),
            has_terms: false,
            factors: Vec::new(),
            block: vec![T::ZERO; COLUMNS * sizes.widest()],
        }
    }

    /// Returns the number of elements that [`new`](Self::new) allocates; dropout adds k_tile. f64 because huge sizes
    /// must not overflow.
    pub(super) fn elements(sizes: &Sizes, tiles: &Tiles, masked: bool) -> f64 {
        let dims = [sizes.head_dim, sizes.value_dim];
        let [head_dim, value_dim] = dims.map(|dim| dim as f64);
        let [width, value_width] = dims.map(padded);
        let q_tile = tiles.backward_q_tile.min(sizes.queries).max(1) as f64;
        let k_tile = tiles.backward_k_tile.min(sizes.keys);
        let k_tile = k_tile.next_multiple_of(COLUMNS) as f64;
        let of_keys = k_tile * (head_dim + value_dim + 2.0 * width + value_width);
        let score_tiles = if masked { 3.0 } else { 2.0 };
        let of_queries = q_tile * (width + value_width + score_tiles * k_tile);
        of_keys + of_queries + COLUMNS as f64 * sizes.widest() as f64
    }

    /// Processes one tile of keys: writes its dk (keys, Dh) and dv (keys, Dv), and adds to dq in its turn.
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
        let seen_keys = sizes.key_ranges(inputs.first_keys, batch);
        for member in 0..sizes.group() {
            let head = kv_head * sizes.group() + member;
            let head = HeadTile {
                sizes,
                inputs,
                delta: task.delta,
                batch,
                head,
                keys: keys.clone(),
            };
            for start in (0..sizes.queries).step_by(self.q_tile) {
                let range = start..sizes.queries.min(start + self.q_tile);
                let by_tile = head.inside(seen_keys.of_queries(&range));
                if by_tile.is_empty() {
                    continue;
                }
                let is_seen = self.begin_queries(&head, range.clone());
                // The dS of a hidden key is 0, and 0 * NaN is NaN. If there are NaNs or infinities, queries are
                // processed one by one, so that none meets a key that it does not see.
                let [first, last] =
                    [range.start, range.end - 1].map(|query| seen_keys.of_query(query));
                let by_all = head.inside(last).start..head.inside(first).end;
                let see_alike = by_all == by_tile && !self.has_terms;
                let together = see_alike || self.finite(range.len());
                if is_seen && together {
                    self.queries(&head, 0..range.len());
                }
                let q_tile = start / self.q_tile;
                // The tiles of keys that a tile of queries sees, but for masks in tensors, are contiguous, so every
                // task from the first one on takes its turn.
                task.turns.wait(member, q_tile, task.tile);
                let at = task.dq_start + (member * sizes.queries + start) * self.width;
                // SAFETY: no other task has these rows until `pass_on`.
                let dq = unsafe { task.dq.range(at, range.len() * self.width) };
                if is_seen && together {
                    self.add_to_dq(0..range.len(), dq);
                } else if is_seen {
                    self.queries_one_by_one(&head, range.len(), dq);
                }
                task.turns.pass_on(member, q_tile, task.tile);
            }
        }
        let gradients = [
            (&self.dk, self.width, dk, sizes.head_dim),
            (&self.dv, self.value_width, dv, sizes.value_dim),
        ];
        for (sums, width, gradient, dim) in gradients {
            for (sums, row) in sums.chunks(width).zip(gradient.chunks_mut(dim)) {
                S::store(&sums[..dim], row);
            }
        }
    }

    /// Prepares a tile of queries: loads Q and dO, reads masks, and finds the keys that each query sees. Returns
    /// whether any sees one.
    pub(super) fn begin_queries<S: Stored<Wide = T>>(
        &mut self,
        head: &HeadTile<'_, S>,
        range: Range<usize>,
    ) -> bool {
        let (sizes, inputs) = (head.sizes, head.inputs);
        let masks = inputs.masks.of(head.batch, head.head);
        self.has_terms = false;
        if !masks.is_none() {
            match masks.read(&range, &head.keys, &mut self.terms, [self.k_tile, 1]) {
                MaskedTile::Plain => {}
                MaskedTile::Terms => self.has_terms = true,
                MaskedTile::Hidden => return false,
            }
        }
        let q = inputs.q.matrix(head.batch, head.head);
        let d_out = inputs.d_out.matrix(head.batch, head.head);
        self.load_queries(sizes, range.clone(), q, d_out);
        let (_, lse_rest) = inputs.lse.split_at(head.delta.len());
        let seen_keys = sizes.key_ranges(inputs.first_keys, head.batch);
        let first_row = head.first_row();
        let (has_terms, terms, k_tile) = (self.has_terms, &self.terms, self.k_tile);
        self.first_query = range.start;
        self.queries.clear();
        self.queries.extend(range.enumerate().map(|(row, query)| {
            let lse = inputs.lse[first_row + query];
            let lse_rest = lse_rest.get(first_row + query);
            let seen = head.inside(seen_keys.of_query(query));
            let seen = match has_terms {
                false => seen,
                true => visible_hull(&terms[row * k_tile..], seen),
            };
            Query {
                lse: if lse == T::NEG_INFINITY { T::ZERO } else { lse },
                lse_rest: lse_rest.copied().unwrap_or(T::ZERO),
                delta: head.delta[first_row + query],
                seen,
            }
        }));
        // A query that sees none of these keys must not contribute, whatever it holds.
        for (row, query) in self.queries.iter().enumerate() {
            if query.seen.is_empty() {
                self.q[row * self.width..][..self.width].fill(T::ZERO);
                self.d_out[row * self.value_width..][..self.value_width].fill(T::ZERO);
            }
        }
        self.queries.iter().any(|query| !query.seen.is_empty())
    }

    /// Returns the number of queries of a tile.
    pub(super) fn q_tile(&self) -> usize {
        self.q_tile
    }

    /// Returns the keys that a query of the tile sees, and their dS after [`score_gradients`](Self::score_gradients).
    pub(super) fn seen_score_gradients(&self, row: usize) -> (Range<usize>, &[T]) {
        let seen = self.queries[row].seen.clone();
        let ds = &self.ds[row * self.k_tile..][seen.clone()];
        (seen, ds)
    }

    /// Processes each of `count` queries against each range of keys that it sees, dq included.
    fn queries_one_by_one<S: Stored<Wide = T>>(
        &mut self,
        head: &HeadTile<'_, S>,
        count: usize,
        dq: &mut [T],
    ) {
        for row in 0..count {
            let seen = self.queries[row].seen.clone();
            let runs = match self.has_terms {
                false => vec![seen],
                true => visible_runs(&self.terms[row * self.k_tile..], seen),
            };
            for run in runs {
                self.queries[row].seen = run;
                self.queries(head, row..row + 1);
                self.add_to_dq(row..row + 1, &mut dq[row * self.width..]);
            }
        }
    }

    /// Loads K and V of a tile in the layouts of the matmuls; zeroes dk and dv.
    pub(super) fn load_keys<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        range: Range<usize>,
        k: Rows<'_, S>,
        v: Rows<'_, S>,
    ) {
        self.dk.fill(T::ZERO);
        self.dv.fill(T::ZERO);
        let scale = self.scale_of_factors(sizes);
        let (head_dim, value_dim) = (sizes.head_dim, sizes.value_dim);
        for first in (0..range.len()).step_by(COLUMNS) {
            let start = range.start + first;
            let keys = start..range.end.min(start + COLUMNS);
            let block = &mut self.block[..COLUMNS * value_dim];
            load_block(v, keys.clone(), value_dim, block);
            to_columns(
                block,
                value_dim,
                T::ONE,
                &mut self.v_t[first..],
                self.k_tile,
            );
            let block = &mut self.block[..COLUMNS * head_dim];
            load_block(k, keys, head_dim, block);
            to_columns(block, head_dim, T::ONE, &mut self.k_t[first..], self.k_tile);
            let rows = self.k[first * self.width..].chunks_mut(self.width);
            for (to, from) in rows.zip(block.chunks(head_dim)) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = scale * *from;
                }
            }
        }
    }

    /// Loads scale Q and dO of a tile, in padded rows.
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
            self.d_out.chunks_mut(self.value_width),
        );
        for (query, (q_row, d_out_row)) in range.zip(q_rows.zip(d_out_rows)) {
            q.load(query, &mut q_row[..sizes.head_dim]);
            d_out.load(query, &mut d_out_row[..sizes.value_dim]);
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
        let (q, d_out) = (
            &self.q[..rows * self.width],
            &self.d_out[..rows * self.value_width],
        );
        let tiles = [q, d_out, &self.k, &self.v_t];
        tiles.into_iter().all(simd::all_finite)
    }

    /// Returns the range from the first key that some of these queries see to the last.
    fn keys_of_rows(&self, rows: &Range<usize>) -> Range<usize> {
        if !self.has_terms {
            // Neither end decreases from a query to the next.
            return self.queries[rows.start].seen.start..self.queries[rows.end - 1].seen.end;
        }
        let seen = self.queries[rows.clone()].iter().map(|query| &query.seen);
        let seen = seen.filter(|seen| !seen.is_empty());
        let all = seen.fold(None, |all: Option<Range<usize>>, seen| match all {
            None => Some(seen.clone()),
            Some(all) => Some(all.start.min(seen.start)..all.end.max(seen.end)),
        });
        all.unwrap_or(0..0)
    }

    /// Computes P and dS of the queries `rows` of the tile and the keys that they see; dS is the gradient of the scores
    /// before a soft cap, or after it. It is not yet multiplied by the scale. Returns the keys.
    pub(super) fn score_gradients<S: Stored<Wide = T>>(
        &mut self,
        head: &HeadTile<'_, S>,
        rows: Range<usize>,
        before_cap: bool,
    ) -> Range<usize> {
        let (sizes, keys) = (head.sizes, &head.keys);
        let (width, value_width, k_tile) = (self.width, self.value_width, self.k_tile);
        let seen = self.keys_of_rows(&rows);
        if seen.is_empty() {
            return seen;
        }
        let columns = seen.end.next_multiple_of(COLUMNS);
        let queries = &self.queries[rows.clone()];
        let q = &self.q[rows.start * width..];
        let d_out = &self.d_out[rows.start * value_width..];
        let p = &mut self.p[rows.start * k_tile..];
        let ds = &mut self.ds[rows.start * k_tile..];
        let terms = self.has_terms.then(|| &self.terms[rows.start * k_tile..]);
        // The dropout mask's rows are those of lse; its columns are keys.
        let first_row = head.first_row() + self.first_query + rows.start;
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
            depth: sizes.head_dim,
            accumulate: false,
            unit: self.unit,
        };
        product.run(Part::Scores);
        if self.unit.is_some() {
            multiply_rows(
                &mut p[..rows * k_tile],
                k_tile,
                columns,
                T::real(sizes.scale),
            );
        }
        let soft_cap = sizes.soft_cap.map(T::real);
        if let Some(cap) = soft_cap {
            p[..rows * k_tile]
                .chunks_mut(k_tile)
                .for_each(|row| cap_by(&mut row[..columns], cap));
        }
        let soft_cap = soft_cap.filter(|_| before_cap); // of dS
        // Line 13: dP = dO V^T.
        let product = TileMatmul {
            a: d_out,
            a_row: value_width,
            a_col: 1,
            b: &self.v_t,
            b_row: k_tile,
            b_unit: COLUMNS,
            c: ds,
            c_row: k_tile,
            rows,
            columns,
            depth: sizes.value_dim,
            accumulate: false,
            unit: self.unit,
        };
        product.run(Part::Values);
        // Lines 11 and 14.
        match &head.inputs.dropout {
            None => ScoreGradient {
                queries,
                scores: p,
                dp: ds,
                row: k_tile,
                keys: columns,
                soft_cap,
                terms,
            }
            .run(),
            // A dropped element has dP = 0. Its P is zeroed only after dS is computed from it.
            Some(mask) => {
                let each = p.chunks_mut(k_tile).zip(ds.chunks_mut(k_tile)).zip(queries);
                for (i, ((p, dp), query)) in each.enumerate() {
                    mask.factors(first_row + i, keys.clone(), &mut self.factors);
                    multiply(dp, &self.factors);
                    ScoreGradient {
                        queries: slice::from_ref(query),
                        scores: p,
                        dp,
                        row: k_tile,
                        keys: columns,
                        soft_cap,
                        terms: terms.map(|terms| &terms[i * k_tile..]),
                    }
                    .run();
                    multiply(p, &self.factors);
                }
            }
        }
        seen
    }

    /// Processes the queries `rows` of the tile against the keys that they see, except for dq.
    fn queries<S: Stored<Wide = T>>(&mut self, head: &HeadTile<'_, S>, rows: Range<usize>) {
        let seen = self.score_gradients(head, rows.clone(), true);
        if seen.is_empty() {
            return;
        }
        let (width, value_width, k_tile) = (self.width, self.value_width, self.k_tile);
        let q = &self.q[rows.start * width..];
        let d_out = &self.d_out[rows.start * value_width..];
        let p = &self.p[rows.start * k_tile..];
        let ds = &mut self.ds[rows.start * k_tile..];
        let rows = rows.len();
        if self.unit.is_some() {
            let columns = seen.end.next_multiple_of(COLUMNS);
            let scale = T::real(head.sizes.scale);
            multiply_rows(&mut ds[..rows * k_tile], k_tile, columns, scale);
        }
        // Line 12: dV += P^T dO.
        let product = TileMatmul {
            a: &p[seen.start..],
            a_row: 1,
            a_col: k_tile,
            b: d_out,
            b_row: value_width,
            b_unit: COLUMNS,
            c: &mut self.dv[seen.start * value_width..],
            c_row: value_width,
            rows: seen.len(),
            columns: value_width,
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
