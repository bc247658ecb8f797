//! Backward: algorithm 2, a task for each head of k and v, or for a part of its keys.

use super::heads::Rows;
use super::score_gradient::{Query, ScoreGradient};
use super::transpose::{load_block, to_columns};
use super::{Heads, Sizes, Tiles};
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product};
use crate::kernels::cpu::lanes::Lanes;
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::{Real, Stored, simd};
use std::ops::Range;

/// What forward took and gave, and the gradient of its output.
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
    /// What rounding took from `out`, (B, H, Tq, Dh), or nothing.
    pub rounded_off: Option<Heads<'a, T>>,
    /// (B, H, Tq).
    pub lse: &'a [T::Wide],
    /// (B, H, Tq, Dh).
    pub d_out: Heads<'a, T>,
}

/// What backward writes.
pub struct Gradients<'a, T> {
    /// (B, H, Tq, Dh).
    pub dq: &'a mut [T],
    /// (B, Hkv, Tk, Dh).
    pub dk: &'a mut [T],
    /// (B, Hkv, Tk, Dh).
    pub dv: &'a mut [T],
}

/// `dq`, `dk` and `dv`: probabilities are computed again from the scores and `lse`, tile by tile.
///
/// `delta = sum(dO O)`, `P = exp(scale Q K^T - lse)`, `dV = P^T dO`, `dS = P (dO V^T - delta)`, `dQ = scale dS K`,
/// `dK = scale dS^T Q`.
///
/// A task walks its tiles of keys, whose dk and dv it keeps in cache, and adds to dq as it goes. Where there are fewer
/// heads than [`BACKWARD_TASKS`], the keys of a head are shared out among several tasks, each with a dq of its own; these are then
/// summed in order.
pub fn backward<T: Stored>(
    sizes: &Sizes,
    tiles: &Tiles,
    inputs: Inputs<'_, T>,
    gradients: Gradients<'_, T>,
) {
    let Sizes {
        queries,
        keys,
        head_dim,
        ..
    } = *sizes;
    let Gradients { dq, dk, dv } = gradients;
    let (q_rows, kv_rows) = (
        sizes.batch * sizes.heads * queries,
        sizes.batch * sizes.kv_heads * keys,
    );
    assert_eq!(dq.len(), q_rows * head_dim, "dq");
    assert_eq!([dk.len(), dv.len()], [kv_rows * head_dim; 2], "dk and dv");
    assert_eq!(inputs.lse.len(), q_rows, "lse");
    let delta = delta(sizes, &inputs); // (B, H, Tq)

    let matrices = sizes.batch * sizes.kv_heads;
    let k_tiles = keys.div_ceil(tiles.backward_k_tile);
    let splits = BACKWARD_TASKS
        .div_ceil(matrices.max(1))
        .clamp(1, k_tiles.max(1));
    // One task's dq: the queries of all heads that share its k and v, rows filled up to whole registers.
    let width = head_dim.next_multiple_of(COLUMNS);
    let (rows, in_place) = (
        sizes.group() * queries,
        splits == 1 && width == head_dim && T::as_wide(&[]).is_some(),
    );
    let partial = rows * width;
    let mut partials = match splits {
        1 => Vec::new(),
        _ => vec![T::Wide::ZERO; matrices * splits * partial],
    };
    {
        let (dq, dk, dv) = (Shared::new(&mut *dq), Shared::new(dk), Shared::new(dv));
        let partials = Shared::new(&mut partials);
        parallel::for_tasks_with(
            matrices * splits,
            || {
                let own_dq = match in_place || splits > 1 {
                    true => Vec::new(),
                    false => vec![T::Wide::ZERO; partial],
                };
                (Scratch::<T::Wide>::new(sizes, tiles), own_dq)
            },
            |(scratch, own_dq), task| {
                let (matrix, split) = (task / splits, task % splits);
                let k_tiles = k_tiles * split / splits..k_tiles * (split + 1) / splits;
                let task = Task {
                    sizes,
                    inputs: &inputs,
                    delta: &delta,
                    matrix,
                };
                let range = |tile: usize| {
                    tile * tiles.backward_k_tile..keys.min((tile + 1) * tiles.backward_k_tile)
                };
                let walk = |dq: &mut [T::Wide]| {
                    dq.fill(T::Wide::ZERO);
                    for tile in k_tiles {
                        let keys_range = range(tile);
                        let first = (matrix * keys + keys_range.start) * head_dim;
                        let count = keys_range.len() * head_dim;
                        // SAFETY: these keys are this task's.
                        let (dk, dv) = unsafe { (dk.range(first, count), dv.range(first, count)) };
                        scratch.keys(&task, keys_range, dq, dk, dv);
                    }
                };
                if splits > 1 {
                    // SAFETY: each task has its own part.
                    return walk(unsafe {
                        partials.range((matrix * splits + split) * partial, partial)
                    });
                }
                // SAFETY: the heads of q that share a head of k and v are neighbours, and this task's alone.
                let dq = unsafe { dq.range(matrix * rows * head_dim, rows * head_dim) };
                if in_place && let Some(dq) = T::as_wide_mut(dq) {
                    walk(dq);
                } else {
                    walk(own_dq);
                    for (row, dq) in own_dq.chunks(width).zip(dq.chunks_mut(head_dim)) {
                        T::store(&row[..head_dim], dq);
                    }
                }
            },
        );
    }
    if splits > 1 {
        sum_partials(splits, rows, width, head_dim, &mut partials, dq);
    }
}

/// Heads of k and v, over all batches, below which a head's keys are shared out. Fixed, so that the bits do not depend on the threads.
pub const BACKWARD_TASKS: usize = 8;

/// dq from the parts that tasks made of it: partials (matrices, splits, rows, width), dq (matrices, rows, head_dim).
fn sum_partials<T: Stored>(
    splits: usize,
    rows: usize,
    width: usize,
    head_dim: usize,
    partials: &mut [T::Wide],
    dq: &mut [T],
) {
    let partials = Shared::new(partials);
    parallel::for_rows(dq, head_dim, |first, dq| {
        for (i, dq) in dq.chunks_mut(head_dim).enumerate() {
            let (matrix, row) = ((first + i) / rows, (first + i) % rows);
            // SAFETY: row by row of dq, each the work of one task.
            let part = |split: usize| unsafe {
                partials.range(((matrix * splits + split) * rows + row) * width, width)
            };
            let sum = part(0);
            for split in 1..splits {
                for (sum, term) in sum.iter_mut().zip(&*part(split)) {
                    *sum += *term;
                }
            }
            T::store(&sum[..head_dim], dq);
        }
    });
}

/// `sum(dO O)` of every query (algorithm 2, line 4): (B, H, Tq).
fn delta<T: Stored>(sizes: &Sizes, inputs: &Inputs<'_, T>) -> Vec<T::Wide> {
    let mut delta = vec![T::Wide::ZERO; inputs.lse.len()];
    let head_dim = sizes.head_dim;
    if sizes.queries == 0 {
        return delta;
    }
    let tile = parallel::TASK_ELEMENTS.div_ceil(head_dim);
    let tiles = sizes.queries.div_ceil(tile);
    let shared = Shared::new(&mut delta);
    parallel::for_tasks(sizes.batch * sizes.heads * tiles, |task| {
        let (matrix, tile_index) = (task / tiles, task % tiles);
        let (batch, head) = (matrix / sizes.heads, matrix % sizes.heads);
        let range = tile_index * tile..sizes.queries.min((tile_index + 1) * tile);
        let (out, d_out) = (
            inputs.out.matrix(batch, head),
            inputs.d_out.matrix(batch, head),
        );
        let rest = inputs.rounded_off.map(|rest| rest.matrix(batch, head));
        // SAFETY: each task has its own queries.
        let delta = unsafe { shared.range(matrix * sizes.queries + range.start, range.len()) };
        let mut buffers = vec![T::Wide::ZERO; 3 * head_dim];
        let (o, rest_of) = buffers.split_at_mut(head_dim);
        let (r, d) = rest_of.split_at_mut(head_dim);
        for (query, delta) in range.zip(delta) {
            out.load(query, o);
            d_out.load(query, d);
            if let Some(rest) = &rest {
                rest.load(query, r);
            }
            *delta = simd::vectorized(
                #[inline(always)]
                || simd::sum_over([&*o, &*r, &*d], |[o, r, d]| (o + r) * d),
            );
        }
    });
    delta
}

/// What the tasks of one call share, and which head of k and v this is.
struct Task<'a, T: Stored> {
    sizes: &'a Sizes,
    inputs: &'a Inputs<'a, T>,
    /// (B, H, Tq).
    delta: &'a [T::Wide],
    /// batch * Hkv + kv head.
    matrix: usize,
}

/// The buffers of one task. Rows of Dh elements are filled up with zeros to `width`.
struct Scratch<T> {
    /// Dh as whole registers.
    width: usize,
    q_tile: usize,
    k_tile: usize,
    /// K^T and V^T: (Dh, k_tile).
    k_t: Vec<T>,
    v_t: Vec<T>,
    /// scale K: (k_tile, width).
    k: Vec<T>,
    /// (k_tile, width).
    dk: Vec<T>,
    dv: Vec<T>,
    /// scale Q: (q_tile, width).
    q: Vec<T>,
    /// dO: (q_tile, width).
    d_out: Vec<T>,
    /// Scores, then P: (q_tile, k_tile).
    p: Vec<T>,
    /// dP, then dS: (q_tile, k_tile).
    ds: Vec<T>,
    queries: Vec<Query<T>>,
    /// Rows on their way to columns: (COLUMNS, Dh).
    block: Vec<T>,
}

impl<T: Lanes> Scratch<T> {
    fn new(sizes: &Sizes, tiles: &Tiles) -> Self {
        let width = sizes.head_dim.next_multiple_of(COLUMNS);
        let q_tile = tiles.backward_q_tile.min(sizes.queries).max(1);
        let k_tile = tiles.backward_k_tile.min(sizes.keys);
        let k_tile = k_tile.next_multiple_of(COLUMNS);
        let zeros = |rows: usize, columns: usize| vec![T::ZERO; rows * columns];
        Self {
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
            block: vec![T::ZERO; COLUMNS * sizes.head_dim],
        }
    }

    /// One tile of keys: writes its dk and dv (keys, Dh), adds to dq (group * Tq, width).
    fn keys<S: Stored<Wide = T>>(
        &mut self,
        task: &Task<'_, S>,
        keys: Range<usize>,
        dq: &mut [T],
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
        for member in 0..sizes.group() {
            let head = kv_head * sizes.group() + member;
            let q = inputs.q.matrix(batch, head);
            let d_out = inputs.d_out.matrix(batch, head);
            let first_row = (batch * sizes.heads + head) * sizes.queries; // of lse and delta
            for start in (0..sizes.queries).step_by(self.q_tile) {
                let range = start..sizes.queries.min(start + self.q_tile);
                let seen = |query: usize| {
                    let end = sizes.visible(query).min(keys.end);
                    end.saturating_sub(keys.start)
                };
                let count = seen(range.end - 1); // no query of the tile sees more
                if count == 0 {
                    continue;
                }
                self.load_queries(sizes, range.clone(), q, d_out);
                let at = (member * sizes.queries + start) * self.width;
                let dq = &mut dq[at..at + range.len() * self.width];
                self.queries.clear();
                self.queries.extend(range.clone().map(|query| {
                    let lse = inputs.lse[first_row + query];
                    Query {
                        lse: if lse == T::NEG_INFINITY { T::ZERO } else { lse },
                        delta: task.delta[first_row + query],
                        visible: seen(query),
                    }
                }));
                if seen(start) == count || self.finite(range.len()) {
                    self.queries(sizes, 0..range.len(), dq);
                } else {
                    // A hidden dS is 0, and 0 NaN is NaN: no query may meet a key that it does not see.
                    for (i, dq) in dq.chunks_mut(self.width).enumerate() {
                        self.queries(sizes, i..i + 1, dq);
                    }
                }
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

    /// K and V of a tile in the layouts that the products want; dk and dv empty.
    fn load_keys<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        range: Range<usize>,
        k: Rows<'_, S>,
        v: Rows<'_, S>,
    ) {
        self.dk.fill(T::ZERO);
        self.dv.fill(T::ZERO);
        let (head_dim, scale) = (sizes.head_dim, T::real(sizes.scale));
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

    /// scale Q and dO of a tile, rows filled up to `width`.
    fn load_queries<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        range: Range<usize>,
        q: Rows<'_, S>,
        d_out: Rows<'_, S>,
    ) {
        let scale = T::real(sizes.scale);
        let (q_rows, d_out_rows) = (
            self.q.chunks_mut(self.width),
            self.d_out.chunks_mut(self.width),
        );
        for (query, (q_row, d_out_row)) in range.zip(q_rows.zip(d_out_rows)) {
            q.load(query, &mut q_row[..sizes.head_dim]);
            d_out.load(query, &mut d_out_row[..sizes.head_dim]);
            simd::vectorized(
                #[inline(always)]
                || q_row.iter_mut().for_each(|value| *value *= scale),
            );
        }
    }

    /// Whether the tiles of keys and the first `rows` queries hold nothing but numbers.
    fn finite(&self, rows: usize) -> bool {
        let count = rows * self.width;
        let tiles = [&self.q[..count], &self.d_out[..count], &self.k, &self.v_t];
        tiles.into_iter().all(simd::all_finite)
    }

    /// The queries `rows` of the tile against the keys that the last of them sees; dq (rows, width).
    fn queries(&mut self, sizes: &Sizes, rows: Range<usize>, dq: &mut [T]) {
        let (width, head_dim, k_tile) = (self.width, sizes.head_dim, self.k_tile);
        let count = self.queries[rows.end - 1].visible; // none before it sees more
        if count == 0 {
            return;
        }
        let columns = count.next_multiple_of(COLUMNS);
        let queries = &self.queries[rows.clone()];
        let q = &self.q[rows.start * width..];
        let d_out = &self.d_out[rows.start * width..];
        let rows = rows.len();
        // Line 10: S = (scale Q) K^T, in the bits that forward had.
        let product = Product {
            a: q,
            a_row: width,
            a_col: 1,
            b: &self.k_t,
            b_row: k_tile,
            c: &mut self.p,
            c_row: k_tile,
            rows,
            columns,
            depth: head_dim,
            accumulate: false,
        };
        product.run();
        // Line 13: dP = dO V^T.
        let product = Product {
            a: d_out,
            a_row: width,
            a_col: 1,
            b: &self.v_t,
            b_row: k_tile,
            c: &mut self.ds,
            c_row: k_tile,
            rows,
            columns,
            depth: head_dim,
            accumulate: false,
        };
        product.run();
        // Lines 11 and 14.
        let elements = ScoreGradient {
            queries,
            scores: &mut self.p,
            dp: &mut self.ds,
            row: k_tile,
            keys: columns,
        };
        elements.run();
        // Line 12: dV += P^T dO.
        let product = Product {
            a: &self.p,
            a_row: 1,
            a_col: k_tile,
            b: d_out,
            b_row: width,
            c: &mut self.dv,
            c_row: width,
            rows: count,
            columns: width,
            depth: rows,
            accumulate: true,
        };
        product.run();
        // Line 15: dQ += dS (scale K).
        let product = Product {
            a: &self.ds,
            a_row: k_tile,
            a_col: 1,
            b: &self.k,
            b_row: width,
            c: dq,
            c_row: width,
            rows,
            columns: width,
            depth: count,
            accumulate: true,
        };
        product.run();
        // Line 16: dK += dS^T (scale Q).
        let product = Product {
            a: &self.ds,
            a_row: 1,
            a_col: k_tile,
            b: q,
            b_row: width,
            c: &mut self.dk,
            c_row: width,
            rows: count,
            columns: width,
            depth: rows,
            accumulate: true,
        };
        product.run();
    }
}
