//! Backward of flash attention: algorithm 2, one task per tile of keys.

use super::backward_tile::{Inputs, Scratch, Task, padded};
use super::transpose::{load_block, to_columns};
use super::turns::AllTurns;
use super::{Sizes, Tiles};
use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::{Real, Stored};
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// The outputs of backward.
pub struct Gradients<'a, T> {
    /// (B, H, Tq, Dh).
    pub dq: &'a mut [T],
    /// (B, Hkv, Tk, Dh).
    pub dk: &'a mut [T],
    /// (B, Hkv, Tk, Dv).
    pub dv: &'a mut [T],
}

/// Computes `dq`, `dk` and `dv`. Probabilities are recomputed tile by tile from the scores and `lse`.
///
/// `delta = sum(dO O)`, `P = exp(scale Q K^T - lse)`, `dV = P^T dO`, `dS = P (dO V^T - delta)`, `dQ = scale dS K`,
/// `dK = scale dS^T Q`. An error in lse affects a whole row of P: at scores of 100, f32 leaves lse six digits. If
/// forward saved the rounding error of lse, it is subtracted too.
///
/// A task handles one tile of keys. It keeps dk and dv of the tile in cache while it loops over the queries, and adds
/// to dq. Tasks of one head write the same dq: they take turns at each tile of queries, in the order of the keys, so
/// the order of the sums does not depend on the thread count. A second thread at the same head runs one tile of queries
/// behind the first.
pub fn backward<T: Stored>(
    sizes: &Sizes,
    tiles: &Tiles,
    inputs: Inputs<'_, T>,
    gradients: Gradients<'_, T>,
) {
    let (head_dim, value_dim, keys) = (sizes.head_dim, sizes.value_dim, sizes.keys);
    let Gradients { dq, dk, dv } = gradients;
    let kv_rows = sizes.batch * sizes.kv_heads * keys;
    let q_rows = sizes.batch * sizes.heads * sizes.queries;
    assert_eq!(dq.len(), q_rows * head_dim, "dq");
    assert_eq!(dk.len(), kv_rows * head_dim, "dk");
    assert_eq!(dv.len(), kv_rows * value_dim, "dv");
    let lse_len = inputs.lse.len();
    assert!(lse_len == q_rows || lse_len == 2 * q_rows, "lse");
    let delta = delta(sizes, &inputs); // (B, H, Tq)
    let (dk, dv) = (Shared::new(dk), Shared::new(dv));
    let pass = Pass {
        sizes,
        tiles,
        inputs: &inputs,
        delta: &delta,
        dk: &dk,
        dv: &dv,
    };

    let matrices = sizes.batch * sizes.kv_heads;
    let width = head_dim.next_multiple_of(COLUMNS);
    if width == head_dim
        && let Some(dq) = T::as_wide_mut(dq)
    {
        return pass.run(0..matrices, dq);
    }
    // dq is accumulated in a separate buffer of padded rows and then rounded, for enough heads at a time to keep the
    // threads busy.
    let wave = matrices.min(2 * rayon::current_num_threads()).max(1);
    let rows = sizes.group() * sizes.queries; // of dq, to one head of k and v
    let mut sums = vec![T::Wide::ZERO; wave * rows * width];
    for first in (0..matrices).step_by(wave) {
        let some = first..matrices.min(first + wave);
        let sums = &mut sums[..some.len() * rows * width];
        pass.run(some.clone(), sums);
        let dq = &mut dq[some.start * rows * head_dim..some.end * rows * head_dim];
        parallel::for_rows(dq, head_dim, |first, dq| {
            let sums = sums[first * width..].chunks(width);
            for (row, dq) in sums.zip(dq.chunks_mut(head_dim)) {
                T::store(&row[..head_dim], dq);
            }
        });
    }
}

/// Returns the number of scratch elements that [`backward`] allocates: delta, the tiles of all threads, and the sums of
/// dq unless they are accumulated in place. `stored_bytes` is the size of an element of dq; `masked` is whether there
/// are masks. f64 because huge sizes must not overflow.
pub fn backward_scratch_elements(
    sizes: &Sizes,
    tiles: &Tiles,
    stored_bytes: usize,
    masked: bool,
) -> f64 {
    let threads = rayon::current_num_threads();
    let width = padded(sizes.head_dim);
    let matrices = sizes.batch.saturating_mul(sizes.kv_heads);
    let in_place = sizes.head_dim.is_multiple_of(COLUMNS) && stored_bytes >= size_of::<f32>();
    let sums = match in_place {
        true => 0.0,
        false => {
            let wave = matrices.min(2 * threads).max(1);
            wave as f64 * sizes.group() as f64 * sizes.queries as f64 * width
        }
    };
    let tasks = matrices.saturating_mul(sizes.keys.div_ceil(tiles.backward_k_tile));
    let of_tiles = tasks.min(threads) as f64 * Scratch::<f32>::elements(sizes, tiles, masked);
    let delta = sizes.batch as f64 * sizes.heads as f64 * sizes.queries as f64;
    delta + sums + of_tiles
}

/// Data that all tasks of one call share.
struct Pass<'a, T: Stored> {
    sizes: &'a Sizes,
    tiles: &'a Tiles,
    inputs: &'a Inputs<'a, T>,
    /// (B, H, Tq).
    delta: &'a [T::Wide],
    /// (B, Hkv, Tk, Dh).
    dk: &'a Shared<'a, T>,
    /// (B, Hkv, Tk, Dv).
    dv: &'a Shared<'a, T>,
}

impl<T: Stored> Pass<'_, T> {
    /// Computes the gradients of some heads of k and v and of the queries that attend to them: dq (matrices, group *
    /// Tq, width).
    fn run(&self, matrices: Range<usize>, dq: &mut [T::Wide]) {
        let (sizes, keys) = (self.sizes, self.sizes.keys);
        let k_tile = self.tiles.backward_k_tile;
        let size = dq.len() / matrices.len().max(1);
        parallel::for_rows(dq, 1, |_, dq| dq.fill(T::Wide::ZERO));
        // Every task takes its turn at a tile of queries, starting with the tile of the first key that one of the
        // queries sees.
        let first_task = |head: usize, query: usize| {
            let batch = (matrices.start + head / sizes.group()) / sizes.kv_heads;
            let seen = sizes
                .key_ranges(self.inputs.first_keys, batch)
                .of_query(query);
            seen.start / k_tile
        };
        let heads = matrices.len() * sizes.group();
        let turns = AllTurns::new(heads, sizes.queries, self.tiles, first_task);
        let dq = Shared::new(dq);
        // Tasks are ordered by tile, with all heads of a tile next to each other: neighbouring tasks seldom wait for
        // each other's turn, and with a causal mask the longest tasks come first.
        let tasks = keys.div_ceil(k_tile) * matrices.len();
        let unit = unit_of_tiles::<T>(self.sizes.head_dim);
        let masked = !self.inputs.masks.is_none();
        let scratch = || Scratch::<T::Wide>::new(sizes, self.tiles, masked, unit);
        parallel::for_tasks_with(tasks, scratch, |scratch, task| {
            let (tile, index) = (task / matrices.len(), task % matrices.len());
            let keys_range = tile * k_tile..keys.min((tile + 1) * k_tile);
            let task = Task {
                sizes,
                inputs: self.inputs,
                delta: self.delta,
                matrix: matrices.start + index,
                tile,
                turns: turns.of(index * sizes.group()),
                dq: &dq,
                dq_start: index * size,
            };
            let (first, count) = (task.matrix * keys + keys_range.start, keys_range.len());
            let [of_k, of_v] =
                [sizes.head_dim, sizes.value_dim].map(|dim| (first * dim, count * dim));
            // SAFETY: no other task has these keys.
            let (dk, dv) =
                unsafe { (self.dk.range(of_k.0, of_k.1), self.dv.range(of_v.0, of_v.1)) };
            scratch.keys(&task, keys_range, dk, dv);
        });
    }
}

/// Returns `sum(dO O)` of every query (algorithm 2, line 4): (B, H, Tq).
///
/// The order of additions is that of the matmul dO V^T. So if one probability is 1 and O is a row of V, `dP - delta` is
/// exactly 0.
pub(super) fn delta<T: Stored>(sizes: &Sizes, inputs: &Inputs<'_, T>) -> Vec<T::Wide> {
    let mut delta = vec![T::Wide::ZERO; sizes.batch * sizes.heads * sizes.queries];
    let value_dim = sizes.value_dim;
    if delta.is_empty() {
        return delta;
    }
    let tile = parallel::TASK_ELEMENTS.div_ceil(value_dim);
    let tile = tile.next_multiple_of(COLUMNS);
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
        let rest = inputs.rounding_error.map(|rest| rest.matrix(batch, head));
        // SAFETY: each task has its own queries.
        let delta = unsafe { shared.range(matrix * sizes.queries + range.start, range.len()) };
        let mut buffers = vec![T::Wide::ZERO; 4 * COLUMNS * value_dim];
        let (block, buffers) = buffers.split_at_mut(COLUMNS * value_dim);
        let (other, columns) = buffers.split_at_mut(COLUMNS * value_dim);
        let (out_t, d_out_t) = columns.split_at_mut(COLUMNS * value_dim);
        for (start, delta) in range
            .clone()
            .step_by(COLUMNS)
            .zip(delta.chunks_mut(COLUMNS))
        {
            let queries = start..start + delta.len();
            load_block(out, queries.clone(), value_dim, block);
            if let Some(rest) = rest {
                load_block(rest, queries.clone(), value_dim, other);
                block.iter_mut().zip(&*other).for_each(|(o, r)| *o += *r);
            }
            to_columns(block, value_dim, T::Wide::ONE, out_t, COLUMNS);
            load_block(d_out, queries, value_dim, block);
            to_columns(block, value_dim, T::Wide::ONE, d_out_t, COLUMNS);
            let mut sums = [T::Wide::ZERO; COLUMNS];
            Arch::new().dispatch(InnerProducts {
                a: d_out_t,
                b: out_t,
                sums: &mut sums,
            });
            delta.copy_from_slice(&sums[..delta.len()]);
        }
    });
    delta
}

/// Dot products of the columns of a and b (depth, COLUMNS): sums (COLUMNS), added in the order of the tile matmuls.
struct InnerProducts<'a, T> {
    a: &'a [T],
    b: &'a [T],
    sums: &'a mut [T; COLUMNS],
}

impl<T: Lanes> WithSimd for InnerProducts<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        assert_eq!(self.a.len(), self.b.len());
        for first in (0..COLUMNS).step_by(T::lanes::<S>()) {
            let mut sum = T::vsplat(simd, T::ZERO);
            for (a, b) in self
                .a
                .chunks_exact(COLUMNS)
                .zip(self.b.chunks_exact(COLUMNS))
            {
                // SAFETY: rows of COLUMNS elements hold a whole number of registers.
                let [a, b] = unsafe { [a, b].map(|row| T::vload::<S>(row.as_ptr().add(first))) };
                sum = T::vmul_add(simd, a, b, sum);
            }
            // SAFETY: as above.
            unsafe { T::vstore::<S>(self.sums.as_mut_ptr().add(first), sum) };
        }
    }
}
