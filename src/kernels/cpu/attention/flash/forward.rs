//! Forward: algorithm 1, a task for each tile of queries.

use super::heads::Rows;
use super::online_softmax::{OnlineSoftmax, State};
use super::transpose::{load_block, to_columns, to_rows};
use super::{Heads, Sizes, Tiles};
use crate::kernels::attention::Seen;
use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product};
use crate::kernels::cpu::parallel::{Shared, for_tasks_with};
use crate::kernels::cpu::simd::{all_finite, vectorized};
use crate::kernels::cpu::{Real, Stored};
use crate::probe::parts::Part;
use std::ops::Range;

/// Queries of a panel: its scores' rows are three AVX-512 registers of `f32`, the best width for the products.
const PANEL: usize = 3 * COLUMNS;

/// What forward writes.
pub struct Outputs<'a, T: Stored> {
    /// (B, H, Tq, Dh).
    pub out: &'a mut [T],
    /// What rounding took from `out`, for dtypes narrower than what is computed in; (B, H, Tq, Dh), or empty.
    pub rounding_error: &'a mut [T],
    /// log(sum(exp(scores))) of every query, (B, H, Tq); or (2, B, H, Tq), then followed by what rounding took from
    /// each, which backward needs to be as exact as its scores are.
    pub lse: &'a mut [T::Wide],
}

/// What forward reads.
#[derive(Clone, Copy)]
pub struct ForwardInputs<'a, T> {
    /// (B, H, Tq, Dh).
    pub q: Heads<'a, T>,
    /// (B, Hkv, Tk, Dh).
    pub k: Heads<'a, T>,
    /// (B, Hkv, Tk, Dh).
    pub v: Heads<'a, T>,
    /// The first key that each query sees, (B, Tq), or nothing.
    pub first_keys: &'a [u32],
}

/// `out = softmax(scale q k^T) v` and the log-sum-exp of each row of scores.
///
/// A query that sees no key gets out 0 and lse -inf.
pub fn forward<T: Stored>(
    sizes: &Sizes,
    tiles: &Tiles,
    inputs: ForwardInputs<'_, T>,
    outputs: Outputs<'_, T>,
) {
    let ForwardInputs {
        q,
        k,
        v,
        first_keys,
    } = inputs;
    let length = sizes.batch * sizes.heads * sizes.queries;
    let Outputs {
        out,
        rounding_error,
        lse,
    } = outputs;
    assert_eq!(out.len(), length * sizes.head_dim, "out");
    assert!(lse.len() == length || lse.len() == 2 * length, "lse");
    assert!(rounding_error.is_empty() || rounding_error.len() == out.len());
    let (lse, lse_rest) = lse.split_at_mut(length);
    if out.is_empty() || sizes.keys == 0 {
        out.fill(T::zero());
        rounding_error.fill(T::zero());
        lse.fill(T::Wide::NEG_INFINITY);
        return lse_rest.fill(T::Wide::ZERO);
    }
    let (keeps_rest, keeps_lse_rest) = (!rounding_error.is_empty(), !lse_rest.is_empty());
    let (out, rest) = (Shared::new(out), Shared::new(rounding_error));
    let (lse, lse_rest) = (Shared::new(lse), Shared::new(lse_rest));
    let q_tiles = sizes.queries.div_ceil(tiles.forward_q_tile);
    let tasks = sizes.batch * sizes.heads * q_tiles;
    for_tasks_with(
        tasks,
        || Scratch::<T::Wide>::new(sizes, tiles),
        |scratch, task| {
            let (matrix, tile) = (task / q_tiles, task % q_tiles);
            let (batch, head) = (matrix / sizes.heads, matrix % sizes.heads);
            let start = tile * tiles.forward_q_tile;
            let range = start..sizes.queries.min(start + tiles.forward_q_tile);
            let kv_head = head / sizes.group();
            scratch.attend(
                sizes,
                &sizes.seen(first_keys, batch),
                range.clone(),
                q.matrix(batch, head),
                k.matrix(batch, kv_head),
                v.matrix(batch, kv_head),
            );
            let first = matrix * sizes.queries + range.start;
            let (at, count) = (first * sizes.head_dim, range.len() * sizes.head_dim);
            // SAFETY: each task writes its own queries.
            let (out, lse) = unsafe { (out.range(at, count), lse.range(first, range.len())) };
            // SAFETY: as above.
            let rest = keeps_rest.then(|| unsafe { rest.range(at, count) });
            // SAFETY: as above.
            let lse_rest = keeps_lse_rest.then(|| unsafe { lse_rest.range(first, range.len()) });
            scratch.finish(sizes.head_dim, out, rest, lse, lse_rest);
        },
    );
}

/// Elements that [`forward`] takes for the tiles of all its threads. (In f64: huge sizes do not overflow.)
pub fn forward_scratch_elements(sizes: &Sizes, tiles: &Tiles) -> f64 {
    let (q_tile, k_tile) = (tiles.forward_q_tile, tiles.forward_k_tile.min(sizes.keys));
    let panels = sizes.queries.min(q_tile).div_ceil(PANEL);
    let head_dim = sizes.head_dim as f64;
    // As in `Scratch::new`: Q^T and O^T of every panel, and its softmaxes' states; scores; K and V; rows.
    let of_panels = (panels * PANEL) as f64 * (2.0 * head_dim + 3.0);
    let rest = k_tile as f64 * (PANEL as f64 + 2.0 * head_dim) + COLUMNS as f64 * head_dim;
    let q_tiles = sizes.queries.div_ceil(q_tile);
    let tasks = sizes
        .batch
        .saturating_mul(sizes.heads)
        .saturating_mul(q_tiles);
    tasks.min(rayon::current_num_threads()) as f64 * (of_panels + rest)
}

/// The buffers of one task.
struct Scratch<T> {
    /// Keys of a tile.
    k_tile: usize,
    panels: Vec<Panel<T>>,
    /// Scores, then probabilities: (k_tile, PANEL).
    scores: Vec<T>,
    /// Which keys of a tile each query of a panel sees; kept for tiles that not all see whole.
    seen: SeenByPanel<T>,
    /// A tile of K and of V, where they cannot be used as they lie: (k_tile, Dh).
    k: Vec<T>,
    v: Vec<T>,
    /// Rows of q or out on their way to columns or back: (COLUMNS, Dh).
    block: Vec<T>,
}

/// From which key on, and up to which, each query of a panel sees a tile.
struct SeenByPanel<T> {
    first: [T; PANEL],
    end: [T; PANEL],
}

/// Up to [`PANEL`] queries side by side.
struct Panel<T> {
    queries: Range<usize>,
    /// Lanes in use: the queries, filled up to a multiple of [`COLUMNS`].
    lanes: usize,
    /// scale Q^T: (Dh, lanes).
    q: Vec<T>,
    /// O^T, not yet divided by the sums: (Dh, lanes).
    out: Vec<T>,
    max: [T; PANEL],
    sum: [T; PANEL],
    rescale: [T; PANEL],
}

impl<T: Lanes> Scratch<T> {
    fn new(sizes: &Sizes, tiles: &Tiles) -> Self {
        let panel = || Panel {
            queries: 0..0,
            lanes: 0,
            q: vec![T::ZERO; sizes.head_dim * PANEL],
            out: vec![T::ZERO; sizes.head_dim * PANEL],
            max: [T::ZERO; PANEL],
            sum: [T::ZERO; PANEL],
            rescale: [T::ZERO; PANEL],
        };
        let longest = sizes.queries.min(tiles.forward_q_tile);
        let k_tile = tiles.forward_k_tile.min(sizes.keys);
        Self {
            k_tile,
            panels: (0..longest.div_ceil(PANEL)).map(|_| panel()).collect(),
            scores: vec![T::ZERO; k_tile * PANEL],
            seen: SeenByPanel {
                first: [T::ZERO; PANEL],
                end: [T::ZERO; PANEL],
            },
            k: vec![T::ZERO; k_tile * sizes.head_dim],
            v: vec![T::ZERO; k_tile * sizes.head_dim],
            block: vec![T::ZERO; COLUMNS * sizes.head_dim],
        }
    }

    /// Attends for the queries `range` of one head, up to the division by the sums.
    fn attend<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        seen: &Seen<'_>,
        range: Range<usize>,
        q: Rows<'_, S>,
        k: Rows<'_, S>,
        v: Rows<'_, S>,
    ) {
        let scale = T::real(sizes.scale);
        let mut start = range.start;
        for panel in &mut self.panels {
            let end = range.end.min(start + PANEL);
            panel.begin(start..end, scale, q, &mut self.block);
            start = end;
        }
        let by_tile = seen.by_all_of(&range);
        for first_key in by_tile.clone().step_by(self.k_tile) {
            let keys = first_key..by_tile.end.min(first_key + self.k_tile);
            let width = sizes.head_dim;
            let k = k.tile(keys.clone(), width, &mut self.k); // (keys, Dh)
            let v = v.tile(keys.clone(), width, &mut self.v); // (keys, Dh)
            for panel in self.panels.iter_mut().filter(|p| !p.queries.is_empty()) {
                let by_panel = seen.by_all_of(&panel.queries);
                let first = by_panel.start.max(keys.start);
                let count = by_panel.end.min(keys.end).saturating_sub(first);
                if count == 0 {
                    continue; // the whole tile is hidden
                }
                let scores = &mut self.scores[..count * panel.lanes];
                // Counted from the first key that the panel sees.
                let by = |query: usize| {
                    let seen = seen.by(query);
                    seen.start.saturating_sub(first)..seen.end.saturating_sub(first)
                };
                let last = panel.queries.end - 1;
                let by_all = by(last).start.min(count)..by(panel.queries.start).end.min(count);
                if by_all != (0..count) {
                    let each = self.seen.first.iter_mut().zip(&mut self.seen.end);
                    for (lane, (first, end)) in each.enumerate().take(panel.lanes) {
                        let seen = by((panel.queries.start + lane).min(last));
                        (*first, *end) = (T::real(seen.start as f64), T::real(seen.end as f64));
                    }
                }
                let skipped = first - keys.start;
                let (k, v) = ((&k.0[skipped * k.1..], k.1), (&v.0[skipped * v.1..], v.1));
                panel.step(k, v, scores, &self.seen, by_all);
            }
        }
    }

    /// Divides by the sums, and writes the queries' rows of the outputs.
    fn finish<S: Stored<Wide = T>>(
        &mut self,
        head_dim: usize,
        out: &mut [S],
        mut rest: Option<&mut [S]>,
        lse: &mut [T],
        mut lse_rest: Option<&mut [T]>,
    ) {
        let first = self.panels[0].queries.start;
        for panel in &self.panels {
            for lane in (0..panel.lanes).step_by(COLUMNS) {
                let start = panel.queries.start + lane;
                let queries = start..panel.queries.end.min(start + COLUMNS);
                let mut factors = [T::ZERO; COLUMNS];
                let sums = panel.max.iter().zip(&panel.sum).skip(lane);
                for ((query, (max, sum)), factor) in queries.clone().zip(sums).zip(&mut factors) {
                    let (rounded, rest) = sum_and_rest(*max, sum.logarithm());
                    lse[query - first] = rounded;
                    if let Some(lse_rest) = &mut lse_rest {
                        lse_rest[query - first] = rest;
                    }
                    // Nothing seen: 0 / 0 otherwise. A NaN stays one.
                    if *sum != T::ZERO {
                        *factor = T::ONE / *sum;
                    }
                }
                let columns = &panel.out[lane..];
                to_rows(columns, panel.lanes, &factors, head_dim, &mut self.block);
                let rows = &mut self.block[..queries.len() * head_dim];
                let at = (start - first) * head_dim..(queries.end - first) * head_dim;
                S::store(rows, &mut out[at.clone()]);
                if let Some(rest) = &mut rest {
                    for (value, stored) in rows.iter_mut().zip(&out[at.clone()]) {
                        let mut rounded = [T::ZERO];
                        S::load(std::slice::from_ref(stored), &mut rounded);
                        *value -= rounded[0];
                    }
                    S::store(rows, &mut rest[at]);
                }
            }
        }
    }
}

/// `a + b` rounded, and what rounding took from it; of minus infinity nothing.
///
/// Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.
fn sum_and_rest<T: Lanes>(a: T, b: T) -> (T, T) {
    let sum = a + b;
    if sum == T::NEG_INFINITY {
        return (sum, T::ZERO);
    }
    let of_b = sum - a;
    (sum, (a - (sum - of_b)) + (b - of_b))
}

impl<T: Lanes> Panel<T> {
    /// Restarts with `queries`, rows of `q`; `block` is (COLUMNS, Dh) to work in.
    fn begin<S: Stored<Wide = T>>(
        &mut self,
        queries: Range<usize>,
        scale: T,
        q: Rows<'_, S>,
        block: &mut [T],
    ) {
        let head_dim = block.len() / COLUMNS;
        self.lanes = queries.len().next_multiple_of(COLUMNS);
        self.max.fill(T::NEG_INFINITY);
        self.sum.fill(T::ZERO);
        self.q.resize(head_dim * self.lanes, T::ZERO);
        self.out.clear();
        self.out.resize(head_dim * self.lanes, T::ZERO);
        for first in (0..self.lanes).step_by(COLUMNS) {
            let start = queries.start + first;
            load_block(q, start..queries.end.min(start + COLUMNS), head_dim, block);
            to_columns(block, head_dim, scale, &mut self.q[first..], self.lanes);
        }
        self.queries = queries;
    }

    /// Takes in one tile of keys, of which all see `by_all`: k and v (keys, Dh) with their row strides, scores (keys,
    /// lanes) to work in.
    fn step(
        &mut self,
        (k, k_row): (&[T], usize),
        (v, v_row): (&[T], usize),
        scores: &mut [T],
        seen: &SeenByPanel<T>,
        by_all: Range<usize>,
    ) {
        let lanes = self.lanes;
        let head_dim = self.q.len() / lanes;
        let keys = scores.len() / lanes;
        // Line 8: S^T = K (scale Q^T).
        let product = Product {
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
        };
        product.run(Part::Scores);
        // Line 9.
        let step = OnlineSoftmax {
            scores,
            queries: lanes,
            first: &seen.first[..lanes],
            end: &seen.end[..lanes],
            by_all: by_all.clone(),
            state: State {
                max: &mut self.max[..lanes],
                sum: &mut self.sum[..lanes],
                rescale: &mut self.rescale[..lanes],
            },
        };
        // Line 10: O^T = O^T rescale + V^T P^T.
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
        let mut next = 0;
        for key in (0..by_all.start).chain(by_all.end.max(by_all.start)..keys) {
            let row = &v[key * v_row..][..head_dim];
            if all_finite(row) {
                continue;
            }
            // A hidden p is 0, and 0 NaN is NaN: who does not see this key must not meet it.
            self.add_values(v, v_row, scores, next..key);
            for (lane, p) in scores[key * lanes..][..lanes].iter().enumerate() {
                let key = T::real(key as f64);
                if seen.first[lane] <= key && key < seen.end[lane] {
                    for (out, value) in self.out.chunks_mut(lanes).zip(row) {
                        out[lane] += *p * *value;
                    }
                }
            }
            next = key + 1;
        }
        self.add_values(v, v_row, scores, next..keys);
    }

    /// `O^T += V^T P^T` for some keys of a tile: v (keys, Dh), p (keys, lanes).
    fn add_values(&mut self, v: &[T], v_row: usize, p: &[T], keys: Range<usize>) {
        let lanes = self.lanes;
        if keys.is_empty() {
            return;
        }
        let product = Product {
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
        };
        product.run(Part::Values);
    }
}
