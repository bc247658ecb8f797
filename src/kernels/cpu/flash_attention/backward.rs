//! Backward: algorithm 2, a task for each head of k and v, or for a part of its keys.

use super::backward_tile::{Scratch, Task};
use super::{Heads, Sizes, Tiles};
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::parallel::{self, Shared};
use crate::kernels::cpu::{Real, Stored, simd};

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
