//! Forward of flash attention: algorithm 1, one task per tile of queries.

use super::heads::Rows;
use super::masks::{HeadMasks, MaskedTile, Masks};
use super::panel::{PANEL, Panel, PanelKeys};
use super::transpose::to_rows;
use super::{Heads, Sizes, Tiles};
use crate::kernels::DropoutMask;
use crate::kernels::attention::KeyRanges;
use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::bf16::{Unit, unit_of_tiles};
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::parallel::{Shared, for_tasks_with};
use crate::kernels::cpu::{Real, Stored};
use std::ops::Range;

/// The outputs of forward.
pub struct Outputs<'a, T: Stored> {
    /// (B, H, Tq, Dv).
    pub out: &'a mut [T],
    /// The rounding error of `out`, for dtypes narrower than the compute type; (B, H, Tq, Dv), or empty.
    pub rounding_error: &'a mut [T],
    /// log(sum(exp(scores))) of every query, (B, H, Tq). With shape (2, B, H, Tq) the second half is the rounding error
    /// of each, which backward needs to be as exact as its scores.
    pub lse: &'a mut [T::Wide],
}

/// The inputs of forward.
#[derive(Clone, Copy)]
pub struct ForwardInputs<'a, T: Stored> {
    /// (B, H, Tq, Dh).
    pub q: Heads<'a, T>,
    /// (B, Hkv, Tk, Dh).
    pub k: Heads<'a, T>,
    /// (B, Hkv, Tk, Dv).
    pub v: Heads<'a, T>,
    /// The first key that each query sees, (B, Tq); empty if there are none.
    pub first_keys: &'a [u32],
    /// Masks and biases.
    pub masks: Masks<'a, T::Wide>,
    /// The dropout mask of the probabilities (B H Tq, Tk), if there is dropout.
    pub dropout: Option<DropoutMask>,
}

/// Computes `out = softmax(scale q k^T) v` and the log-sum-exp of each row of scores.
///
/// A query that sees no key gets out 0 and lse -inf. With dropout, lse is still that of all scores.
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
        masks,
        dropout,
    } = inputs;
    let length = sizes.batch * sizes.heads * sizes.queries;
    let Outputs {
        out,
        rounding_error,
        lse,
    } = outputs;
    assert_eq!(out.len(), length * sizes.value_dim, "out");
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
        || {
            let unit = unit_of_tiles::<T>(sizes.head_dim);
            Scratch::<T::Wide>::new(sizes, tiles, !masks.is_none(), unit)
        },
        |scratch, task| {
            let (matrix, tile) = (task / q_tiles, task % q_tiles);
            let (batch, head) = (matrix / sizes.heads, matrix % sizes.heads);
            let start = tile * tiles.forward_q_tile;
            let range = start..sizes.queries.min(start + tiles.forward_q_tile);
            let kv_head = head / sizes.group();
            let first_row = matrix * sizes.queries;
            scratch.attend(
                sizes,
                &sizes.key_ranges(first_keys, batch),
                masks.of(batch, head),
                dropout.as_ref().map(|mask| (mask, first_row)),
                range.clone(),
                [
                    q.matrix(batch, head),
                    k.matrix(batch, kv_head),
                    v.matrix(batch, kv_head),
                ],
            );
            let first = first_row + range.start;
            let (at, count) = (first * sizes.value_dim, range.len() * sizes.value_dim);
            // SAFETY: each task writes its own queries.
            let (out, lse) = unsafe { (out.range(at, count), lse.range(first, range.len())) };
            // SAFETY: as above.
            let rest = keeps_rest.then(|| unsafe { rest.range(at, count) });
            // SAFETY: as above.
            let lse_rest = keeps_lse_rest.then(|| unsafe { lse_rest.range(first, range.len()) });
            let scale = T::Wide::real(dropout.map_or(1.0, |mask| mask.scale()));
            scratch.finish(scale, sizes.value_dim, out, rest, lse, lse_rest);
        },
    );
}

/// Returns the number of elements that [`forward`] allocates for the tiles of all its threads, with masks or without.
/// f64 because huge sizes must not overflow.
pub fn forward_scratch_elements(sizes: &Sizes, tiles: &Tiles, masked: bool) -> f64 {
    let (q_tile, k_tile) = (tiles.forward_q_tile, tiles.forward_k_tile.min(sizes.keys));
    let panels = sizes.queries.min(q_tile).div_ceil(PANEL);
    let both = sizes.head_dim as f64 + sizes.value_dim as f64;
    // As in `Scratch::new`: Q^T and O^T of every panel and its softmax states; scores; K and V; rows.
    let of_panels = (panels * PANEL) as f64 * (both + 3.0);
    let score_tiles = if masked { 2.0 } else { 1.0 };
    let of_key = score_tiles * PANEL as f64 + both;
    let rest = k_tile as f64 * of_key + COLUMNS as f64 * sizes.widest() as f64;
    let q_tiles = sizes.queries.div_ceil(q_tile);
    let tasks = sizes
        .batch
        .saturating_mul(sizes.heads)
        .saturating_mul(q_tiles);
    tasks.min(rayon::current_num_threads()) as f64 * (of_panels + rest)
}

/// The buffers of one task.
struct Scratch<T> {
    k_tile: usize,
    panels: Vec<Panel<T>>,
    /// Scores, then probabilities: (k_tile, PANEL).
    scores: Vec<T>,
    /// The keys of a tile that each query of a panel sees; set only if some query does not see the whole tile.
    seen: PanelKeys<T>,
    /// The terms of masks: (k_tile, PANEL), or empty if there are none.
    terms: Vec<T>,
    /// Tiles of K (k_tile, Dh) and V (k_tile, Dv), copied if they cannot be read in place.
    k: Vec<T>,
    v: Vec<T>,
    /// Rows of q or out to be transposed: (COLUMNS, Dh or Dv).
    block: Vec<T>,
}

impl<T: Lanes> Scratch<T> {
    fn new(sizes: &Sizes, tiles: &Tiles, masked: bool, unit: Option<Unit>) -> Self {
        let longest = sizes.queries.min(tiles.forward_q_tile);
        let k_tile = tiles.forward_k_tile.min(sizes.keys);
        Self {
            k_tile,
            panels: (0..longest.div_ceil(PANEL))
                .map(|_| Panel::new(sizes, unit))
                .collect(),
            scores: vec![T::ZERO; k_tile * PANEL],
            seen: PanelKeys::new(),
            terms: vec![T::ZERO; if masked { k_tile * PANEL } else { 0 }],
            k: vec![T::ZERO; k_tile * sizes.head_dim],
            v: vec![T::ZERO; k_tile * sizes.value_dim],
            block: vec![T::ZERO; COLUMNS * sizes.widest()],
        }
    }

    /// Attends for the queries `range` of one head, up to the division by the sums. `dropout` is the mask and its row
    /// for the head's first query.
    fn attend<S: Stored<Wide = T>>(
        &mut self,
        sizes: &Sizes,
        seen: &KeyRanges<'_>,
        masks: HeadMasks<'_, T>,
        dropout: Option<(&DropoutMask, usize)>,
        range: Range<usize>,
        [q, k, v]: [Rows<'_, S>; 3],
    ) {
        let mut start = range.start;
        for panel in &mut self.panels {
            let end = range.end.min(start + PANEL);
            panel.begin(start..end, sizes, q, &mut self.block);
            start = end;
        }
        let by_tile = seen.of_queries(&range);
        for first_key in by_tile.clone().step_by(self.k_tile) {
            let keys = first_key..by_tile.end.min(first_key + self.k_tile);
            let k = k.tile(keys.clone(), sizes.head_dim, &mut self.k); // (keys, Dh)
            let v = v.tile(keys.clone(), sizes.value_dim, &mut self.v); // (keys, Dv)
            for panel in self.panels.iter_mut().filter(|p| !p.queries.is_empty()) {
                let by_panel = seen.of_queries(&panel.queries);
                let first = by_panel.start.max(keys.start);
                let count = by_panel.end.min(keys.end).saturating_sub(first);
                if count == 0 {
                    continue; // the whole tile is hidden
                }
                let (size, lanes) = (count * panel.lanes, panel.lanes);
                let terms = match masks.is_none() {
                    true => None,
                    false => {
                        let terms = &mut self.terms[..size];
                        terms.fill(T::ZERO); // of the lanes without a query
                        let (queries, keys) = (&panel.queries, first..first + count);
                        match masks.read(queries, &keys, terms, [1, lanes]) {
                            MaskedTile::Plain => None,
                            MaskedTile::Terms => Some(&*terms),
                            MaskedTile::Hidden => continue,
                        }
                    }
                };
                let scores = &mut self.scores[..size];
                // Relative to the first key that the panel sees.
                let by = |query: usize| {
                    let seen = seen.of_query(query);
                    seen.start.saturating_sub(first)..seen.end.saturating_sub(first)
                };
                let last = panel.queries.end - 1;
                let by_all = by(last).start.min(count)..by(panel.queries.start).end.min(count);
                if by_all != (0..count) || terms.is_some() {
                    let each = self.seen.first.iter_mut().zip(&mut self.seen.end);
                    for (lane, (first, end)) in each.enumerate().take(panel.lanes) {
                        let seen = by((panel.queries.start + lane).min(last));
                        (*first, *end) = (T::real(seen.start as f64), T::real(seen.end as f64));
                    }
                }
                let skipped = first - keys.start;
                let (k, v) = ((&k.0[skipped * k.1..], k.1), (&v.0[skipped * v.1..], v.1));
                panel.probabilities(k, scores, terms, &self.seen, by_all.clone());
                if let Some((mask, first_row)) = dropout {
                    panel.apply_dropout(scores, mask, first_row, first);
                }
                panel.add(v, scores, terms, &self.seen, by_all);
            }
        }
    }

    /// Multiplies by `scale`, divides by the sums, and writes the rows of the outputs.
    fn finish<S: Stored<Wide = T>>(
        &mut self,
        scale: T,
        value_dim: usize,
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
                    // If a query sees nothing its factor stays 0 instead of 0 / 0. NaN stays NaN.
                    if *sum != T::ZERO {
                        *factor = scale / *sum;
                    }
                }
                let columns = &panel.out[lane..];
                to_rows(columns, panel.lanes, &factors, value_dim, &mut self.block);
                let rows = &mut self.block[..queries.len() * value_dim];
                let at = (start - first) * value_dim..(queries.end - first) * value_dim;
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

/// Returns `a + b`, rounded, and its rounding error; the error of -inf is 0.
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
