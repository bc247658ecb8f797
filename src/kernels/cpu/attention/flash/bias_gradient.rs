//! The gradient of a bias of flash attention's scores.

use super::backward::delta;
use super::backward_tile::{HeadTile, Inputs, Scratch};
use super::{Sizes, Tiles};
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::parallel::{Shared, for_tasks_with};
use crate::kernels::cpu::{Lanes, Real, Stored, simd};
use std::ops::Range;

/// Computes the gradient of a bias of these dimensions, each that of the scores (B, H, Tq, Tk) or 1: `dS = P (dO V^T -
/// delta)`, summed over the pairs that share an element.
///
/// P and dP are recomputed, as in backward. A task has the keys of a tile in one matrix of the bias, or all keys if they
/// share an element, and adds the heads and queries in order.
pub fn bias_gradient<T: Stored>(
    sizes: &Sizes,
    tiles: &Tiles,
    inputs: Inputs<'_, T>,
    dims: [usize; 4],
    d_bias: &mut [T::Wide],
) {
    let [batches, heads, queries, keys] = dims;
    assert_eq!(d_bias.len(), batches * heads * queries * keys, "d_bias");
    d_bias.fill(T::Wide::ZERO);
    let delta = delta(sizes, &inputs); // (B, H, Tq)
    let d_bias = Shared::new(d_bias);
    let k_tile = tiles.backward_k_tile;
    let parts = parts(sizes, tiles, keys);
    let unit = unit_of_tiles::<T>(sizes.head_dim);
    let scratch = || Scratch::<T::Wide>::new(sizes, tiles, true, unit);
    for_tasks_with(batches * heads * parts, scratch, |scratch, task| {
        let (matrix, part) = (task / parts, task % parts);
        let sharing = |i: usize, of: usize, all: usize| match of {
            1 => 0..all,
            _ => i..i + 1,
        };
        let of_task = match parts {
            1 => 0..sizes.keys,
            _ => part * k_tile..sizes.keys.min((part + 1) * k_tile),
        };
        for batch in sharing(matrix / heads, batches, sizes.batch) {
            for head in sharing(matrix % heads, heads, sizes.heads) {
                for first_key in of_task.clone().step_by(k_tile) {
                    let tile = HeadTile {
                        sizes,
                        inputs: &inputs,
                        delta: &delta,
                        batch,
                        head,
                        keys: first_key..of_task.end.min(first_key + k_tile),
                    };
                    scratch.each_score_gradient(&tile, |query, seen, ds| {
                        let query = if queries == 1 { 0 } else { query };
                        let row = (matrix * queries + query) * keys;
                        if keys == 1 {
                            // SAFETY: no other task has this matrix.
                            let sum = unsafe { d_bias.range(row, 1) };
                            sum[0] += simd::sum(ds);
                        } else {
                            // SAFETY: no other task has these keys of this matrix.
                            let sums = unsafe { d_bias.range(row + seen.start, ds.len()) };
                            sums.iter_mut().zip(ds).for_each(|(sum, ds)| *sum += *ds);
                        }
                    });
                }
            }
        }
    });
}

/// Returns the number of parts that the keys of a bias, `keys` or 1, are divided into.
fn parts(sizes: &Sizes, tiles: &Tiles, keys: usize) -> usize {
    match keys {
        1 => 1,
        _ => sizes.keys.div_ceil(tiles.backward_k_tile),
    }
}

/// Returns the number of scratch elements that [`bias_gradient`] allocates. f64 because huge sizes must not overflow.
pub fn bias_gradient_scratch_elements(sizes: &Sizes, tiles: &Tiles, dims: [usize; 4]) -> f64 {
    let [batches, heads, _, keys] = dims;
    let tasks = batches * heads * parts(sizes, tiles, keys);
    let of_tiles = Scratch::<f32>::elements(sizes, tiles, true);
    let delta = sizes.batch as f64 * sizes.heads as f64 * sizes.queries as f64;
    delta + tasks.min(rayon::current_num_threads()) as f64 * of_tiles
}

impl<T: Lanes> Scratch<T> {
    /// Calls `f` with each query that sees keys of the tile, a range of these keys and their dS.
    fn each_score_gradient<S: Stored<Wide = T>>(
        &mut self,
        tile: &HeadTile<'_, S>,
        mut f: impl FnMut(usize, Range<usize>, &[T]),
    ) {
        let (sizes, inputs) = (tile.sizes, tile.inputs);
        let kv_head = tile.head / sizes.group();
        self.load_keys(
            sizes,
            tile.keys.clone(),
            inputs.k.matrix(tile.batch, kv_head),
            inputs.v.matrix(tile.batch, kv_head),
        );
        for start in (0..sizes.queries).step_by(self.q_tile()) {
            let range = start..sizes.queries.min(start + self.q_tile());
            if !self.begin_queries(tile, range.clone()) {
                continue;
            }
            self.score_gradients(tile, 0..range.len(), false);
            for (row, query) in range.enumerate() {
                let (seen, ds) = self.seen_score_gradients(row);
                let first = tile.keys.start;
                f(query, first + seen.start..first + seen.end, ds);
            }
        }
    }
}
