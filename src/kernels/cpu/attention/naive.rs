//! Attention with all probabilities in memory. A block of queries goes through scores, softmax and weighted sum while
//! it is in cache, and reads only the range of keys that its queries see.
//!
//! A task processes some blocks of one matrix: all of them if there are enough matrices for many threads, else a chunk.
//! This depends on the sizes alone. In half precision, tiles are widened as they are copied, and outputs and gradients
//! are rounded once.

use crate::kernels::attention::{KeyRanges, Sizes};
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::gemm::tile::{COLUMNS, TileMatmul, pack_transposed};
use crate::kernels::cpu::parallel::{self, Shared, for_tasks_with};
use crate::kernels::cpu::rows::softmax;
use crate::kernels::cpu::{Real, Stored, simd};
use crate::probe::parts::Part;
use std::ops::Range;

/// Queries of a block.
const BLOCK: usize = 64;

/// The least number of tasks to aim for.
const TASKS: usize = 16;

/// The least number of query blocks in a chunk: a task first copies keys and values, which must pay off.
const CHUNK_BLOCKS: usize = 4;

/// The inputs of attention.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T> {
    /// (B H, Tq, Dh).
    pub q: &'a [T],
    /// (B Hkv, Tk, Dh).
    pub k: &'a [T],
    /// (B Hkv, Tk, Dv).
    pub v: &'a [T],
    /// The first key that each query sees, (B, Tq); empty if there are none.
    pub first_keys: &'a [u32],
}

/// The division of a call into chunks, and the padded row lengths of its buffers.
#[derive(Clone, Copy)]
struct Chunking {
    sizes: Sizes,
    /// Dh and Dv, rounded up to whole registers.
    head_row: usize,
    value_row: usize,
    /// The number of chunks that a matrix's queries are divided into.
    chunks: usize,
}

/// A block of queries, and the keys that it reads.
struct Block {
    queries: Range<usize>,
    /// From the first key that a query of the block sees, rounded down to a multiple of COLUMNS, to the last.
    keys: Range<usize>,
    /// The offset of `keys` within the keys of the task.
    before: usize,
}

impl Block {
    fn rows(&self) -> usize {
        self.queries.len()
    }

    /// Returns the number of keys, rounded up to whole registers.
    fn columns(&self) -> usize {
        self.keys.len().next_multiple_of(COLUMNS)
    }

    /// Returns the row stride of the scores: one cache line more than the row, so that the elements of a column do not
    /// compete for the same cache sets.
    fn row(&self) -> usize {
        self.columns() + COLUMNS
    }

    /// Returns the keys that a query sees, relative to the block's first.
    fn visible(&self, seen: KeyRanges<'_>, query: usize) -> Range<usize> {
        let Range { start, end } = seen.of_query(query);
        start.saturating_sub(self.keys.start)..end.saturating_sub(self.keys.start)
    }
}

impl Chunking {
    /// Plans the division of a call of `matrices` matrices, each of which gets at least one task.
    fn new(sizes: &Sizes, matrices: usize) -> Self {
        let most = (sizes.queries.div_ceil(BLOCK) / CHUNK_BLOCKS).max(1);
        Self {
            sizes: *sizes,
            head_row: sizes.head_dim.next_multiple_of(COLUMNS),
            value_row: sizes.value_dim.next_multiple_of(COLUMNS),
            chunks: TASKS.div_ceil(matrices.max(1)).clamp(1, most),
        }
    }

    /// Returns the queries of a chunk, in whole blocks.
    fn queries(&self, chunk: usize) -> Range<usize> {
        let blocks = self.sizes.queries.div_ceil(BLOCK);
        let at = |chunk: usize| (blocks * chunk / self.chunks * BLOCK).min(self.sizes.queries);
        at(chunk)..at(chunk + 1)
    }

    /// Returns all keys that some queries read, and the blocks of these queries.
    fn blocks(
        queries: Range<usize>,
        seen: KeyRanges<'_>,
    ) -> (Range<usize>, impl Iterator<Item = Block>) {
        let all = match queries.is_empty() {
            true => 0..0,
            false => seen.of_queries(&queries),
        };
        let first = all.start / COLUMNS * COLUMNS;
        let all = first..all.end;
        let blocks = queries.clone().step_by(BLOCK).map(move |start| {
            let queries = start..queries.end.min(start + BLOCK);
            let keys = seen.of_queries(&queries);
            let start = keys.start.max(first) / COLUMNS * COLUMNS; // the same whatever the chunk
            Block {
                keys: start..keys.end.max(start),
                queries,
                before: start - first,
            }
        });
        (all, blocks)
    }

    /// Returns the number of elements of the longest block's scores.
    fn scores_len(&self) -> usize {
        BLOCK * (self.sizes.keys.next_multiple_of(COLUMNS) + COLUMNS)
    }

    /// Returns the number of elements of keys or values (keys, row), keys rounded up to whole registers.
    fn keys_len(&self, row: usize) -> usize {
        self.sizes.keys.next_multiple_of(COLUMNS) * row
    }

    /// Returns the number of scratch elements per thread in [`forward()`].
    fn forward_len(&self) -> usize {
        let Sizes { head_dim, .. } = self.sizes;
        let blocks = BLOCK * (head_dim + self.value_row); // q, out
        let keys = self.keys_len(head_dim) + self.keys_len(self.value_row);
        blocks + keys + COLUMNS * head_dim + self.scores_len()
    }

    /// Returns the number of scratch elements per thread in [`backward()`].
    fn backward_len(&self) -> usize {
        let Sizes { value_dim, .. } = self.sizes;
        let blocks = BLOCK * (2 * self.head_row + self.value_row); // q, dq, dout
        let keys = self.keys_len(self.head_row) + self.keys_len(value_dim); // k, v
        let scores = 2 * self.scores_len(); // p, ds
        self.sums_len() + blocks + keys + COLUMNS * value_dim + scores
    }

    /// Returns the number of elements of the sums of dk and dv.
    fn sums_len(&self) -> usize {
        self.sizes.keys * (self.head_row + self.value_row)
    }
}

/// Returns the number of scratch elements that forward and backward allocate with `threads` threads, in the compute
/// type.
pub fn scratch_elements(sizes: &Sizes, threads: usize) -> [f64; 2] {
    let (forward, backward) = (
        Chunking::new(sizes, sizes.matrices()),
        Chunking::new(sizes, sizes.kv_matrices()),
    );
    let at_once = |cut: Chunking, matrices: usize, len: usize| {
        (matrices * cut.chunks).min(threads) as f64 * len as f64
    };
    let partial = match backward.chunks {
        1 => 0,
        chunks => sizes.kv_matrices() * chunks * backward.sums_len(),
    };
    [
        at_once(forward, sizes.matrices(), forward.forward_len()),
        at_once(backward, sizes.kv_matrices(), backward.backward_len()) + partial as f64,
    ]
}

/// Computes `p = softmax(scale q k^T)` over the visible keys and `out = p v`: p (B H, Tq, Tk), out (B H, Tq, Dv).
/// Unless `lse` is empty, it receives the log-sum-exp of every query's scores, (B H, Tq).
///
/// p stays in the compute type: rounding it to half precision would cost the gradients more than their own rounding.
pub fn forward<T: Stored>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    p: &mut [T::Wide],
    lse: &mut [T::Wide],
    out: &mut [T],
) {
    let cut = Chunking::new(sizes, sizes.matrices());
    let unit = unit_of_tiles::<T>(sizes.head_dim);
    let has_lse = !lse.is_empty();
    let (p, lse, out) = (Shared::new(p), Shared::new(lse), Shared::new(out));
    let &Sizes {
        queries,
        keys,
        head_dim,
        value_dim,
        ..
    } = sizes;
    let group = sizes.group();
    let scratch = || vec![T::Wide::ZERO; cut.forward_len()];
    for_tasks_with(sizes.matrices() * cut.chunks, scratch, |scratch, task| {
        let (i, chunk) = (task / cut.chunks, task % cut.chunks);
        let seen = sizes.key_ranges(inputs.first_keys, i / sizes.heads);
        let (all, blocks) = Chunking::blocks(cut.queries(chunk), seen);
        let mut rest = &mut scratch[..];
        let q_block = take(&mut rest, BLOCK * head_dim); // (queries, Dh)
        let out_block = take(&mut rest, BLOCK * cut.value_row); // (queries, value_row)
        let k = take(&mut rest, cut.keys_len(head_dim)); // (units, Dh, COLUMNS)
        let v = take(&mut rest, cut.keys_len(cut.value_row)); // (keys, value_row)
        let lines = take(&mut rest, COLUMNS * head_dim);
        let scores = rest; // (queries, Block::row)
        let of_kv = |x, width| rows_of::<T>(x, i / group * keys, &all, width);
        pack_transposed(of_kv(inputs.k, head_dim), head_dim, k, lines);
        load(of_kv(inputs.v, value_dim), value_dim, v, cut.value_row);
        for block in blocks {
            let (rows, row) = (block.rows(), block.row());
            let q = rows_of(inputs.q, i * queries, &block.queries, head_dim);
            load(q, head_dim, q_block, head_dim);
            let product = TileMatmul {
                a: q_block,
                a_row: head_dim,
                a_col: 1,
                b: &k[block.before * head_dim..],
                b_row: COLUMNS,
                b_unit: head_dim * COLUMNS,
                c: &mut *scores,
                c_row: row,
                rows,
                columns: block.columns(),
                depth: head_dim,
                accumulate: false,
                unit,
            };
            product.run(Part::Scores);
            let first = i * queries + block.queries.start;
            // SAFETY: no other task has these queries.
            let lse = match has_lse {
                true => unsafe { lse.range(first, rows) },
                false => &mut [],
            };
            let visible = |row: usize| block.visible(seen, block.queries.start + row);
            softmax::forward_rows_to(&mut scores[..rows * row], row, sizes.scale, visible, lse);
            // SAFETY: as above.
            let p = unsafe { p.range(first * keys, rows * keys) };
            for (p, scores) in p.chunks_exact_mut(keys).zip(scores.chunks_exact(row)) {
                let Range { start, end } = block.keys;
                p[..start].fill(T::Wide::ZERO);
                p[start..end].copy_from_slice(&scores[..end - start]);
                p[end..].fill(T::Wide::ZERO);
            }
            let product = TileMatmul {
                a: scores,
                a_row: row,
                a_col: 1,
                b: &v[block.before * cut.value_row..],
                b_row: cut.value_row,
                b_unit: COLUMNS,
                c: &mut *out_block,
                c_row: cut.value_row,
                rows,
                columns: cut.value_row,
                depth: block.keys.len(),
                accumulate: false,
                unit,
            };
            product.run(Part::Values);
            // SAFETY: as above.
            let out = unsafe { out.range(first * value_dim, rows * value_dim) };
            store(out_block, cut.value_row, out, value_dim);
        }
    });
}

/// Computes `dq`, `dk` and `dv` from `dout` and from forward's q, k, v and p.
///
/// `dv = p^T dout`, `dp = dout v^T`, `ds = scale p (dp - sum(dp p))`, `dq = ds k`, `dk = ds^T q`. A task processes a
/// chunk of queries of all matrices of q that share one of k and v, one after another; the sums of chunks are added in
/// order.
pub fn backward<T: Stored>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    dout: &[T],
    p: &[T::Wide],
    [dq, dk, dv]: [&mut [T]; 3],
) {
    let cut = Chunking::new(sizes, sizes.kv_matrices());
    let (matrices, sums_len) = (sizes.kv_matrices(), cut.sums_len());
    let is_cut = cut.chunks > 1;
    let partial_len = if is_cut { sums_len } else { 0 };
    let mut partial = vec![T::Wide::ZERO; matrices * cut.chunks * partial_len];
    let (dq, dk, dv) = (Shared::new(dq), Shared::new(dk), Shared::new(dv));
    let finish = |matrix: usize, sums: &[T::Wide]| {
        let (sum_k, sum_v) = sums.split_at(sizes.keys * cut.head_row);
        let [k_len, v_len] = [sizes.head_dim, sizes.value_dim].map(|width| sizes.keys * width);
        // SAFETY: only one task has this matrix.
        let (dk, dv) = unsafe {
            (
                dk.range(matrix * k_len, k_len),
                dv.range(matrix * v_len, v_len),
            )
        };
        store(sum_k, cut.head_row, dk, sizes.head_dim);
        store(sum_v, cut.value_row, dv, sizes.value_dim);
    };
    {
        let partial = Shared::new(&mut partial);
        let scratch = || vec![T::Wide::ZERO; cut.backward_len()];
        for_tasks_with(matrices * cut.chunks, scratch, |scratch, task| {
            let (sums, scratch) = scratch.split_at_mut(sums_len);
            of_chunk(&cut, inputs, (dout, p), task, (&mut *sums, scratch), &dq);
            match is_cut {
                // SAFETY: no other task has these sums.
                true => unsafe { partial.range(task * sums_len, sums_len) }.copy_from_slice(sums),
                false => finish(task, sums),
            }
        });
    }
    if is_cut {
        let partial = Shared::new(&mut partial);
        let of_matrix = cut.chunks * sums_len;
        parallel::for_tasks(matrices, |matrix| {
            // SAFETY: no other task has this matrix.
            let all = unsafe { partial.range(matrix * of_matrix, of_matrix) };
            let (sums, others) = all.split_at_mut(sums_len);
            for other in others.chunks_exact(sums_len.max(1)) {
                for (sum, other) in sums.iter_mut().zip(other) {
                    *sum += *other;
                }
            }
            finish(matrix, sums);
        });
    }
}

/// Computes dq of a chunk of queries and its contribution to dk and dv, as sums (keys, head_row) and (keys, value_row).
fn of_chunk<T: Stored>(
    cut: &Chunking,
    inputs: Inputs<'_, T>,
    (dout, p): (&[T], &[T::Wide]),
    task: usize,
    (sums, mut scratch): (&mut [T::Wide], &mut [T::Wide]),
    dq: &Shared<'_, T>,
) {
    let Sizes {
        queries,
        keys,
        head_dim,
        value_dim,
        scale,
        ..
    } = cut.sizes;
    let (head_row, value_row) = (cut.head_row, cut.value_row);
    let (group, unit) = (cut.sizes.group(), unit_of_tiles::<T>(head_dim));
    let (shared, chunk) = (task / cut.chunks, task % cut.chunks);
    sums.fill(T::Wide::ZERO);
    let (dk, dv) = sums.split_at_mut(keys * head_row);
    let rest = &mut scratch;
    let q_block = take(rest, BLOCK * head_row); // (queries, head_row)
    let dq_block = take(rest, BLOCK * head_row);
    let dout_block = take(rest, BLOCK * value_row); // (queries, value_row)
    let k = take(rest, cut.keys_len(head_row)); // (keys, head_row)
    let v = take(rest, cut.keys_len(value_dim)); // (units, Dv, COLUMNS)
    let lines = take(rest, COLUMNS * value_dim);
    let p_block = take(rest, cut.scores_len()); // (queries, Block::row)
    let ds = take(rest, cut.scores_len());
    for i in shared * group..(shared + 1) * group {
        let seen = cut.sizes.key_ranges(inputs.first_keys, i / cut.sizes.heads);
        let (all, blocks) = Chunking::blocks(cut.queries(chunk), seen);
        if i == shared * group {
            let of_kv = |x, width| rows_of::<T>(x, shared * keys, &all, width);
            load(of_kv(inputs.k, head_dim), head_dim, k, head_row);
            pack_transposed(of_kv(inputs.v, value_dim), value_dim, v, lines);
        }
        for block in blocks {
            let (rows, row, first) = (block.rows(), block.row(), i * queries + block.queries.start);
            let of_q = |x, width| rows_of::<T>(x, i * queries, &block.queries, width);
            load(of_q(inputs.q, head_dim), head_dim, q_block, head_row);
            load(of_q(dout, value_dim), value_dim, dout_block, value_row);
            let p_rows = p[first * keys..(first + rows) * keys].chunks_exact(keys);
            for (to, p) in p_block.chunks_exact_mut(row).zip(p_rows) {
                to[..block.keys.len()].copy_from_slice(&p[block.keys.clone()]);
            }
            let at = all.start + block.before; // the block's first key
            let product = TileMatmul {
                a: &*p_block,
                a_row: 1,
                a_col: row,
                b: &*dout_block,
                b_row: value_row,
                b_unit: COLUMNS,
                c: &mut dv[at * value_row..],
                c_row: value_row,
                rows: block.keys.len(),
                columns: value_row,
                depth: rows,
                accumulate: true,
                unit,
            };
            product.run(Part::Values);
            let product = TileMatmul {
                a: &*dout_block,
                a_row: value_row,
                a_col: 1,
                b: &v[block.before * value_dim..],
                b_row: COLUMNS,
                b_unit: value_dim * COLUMNS,
                c: &mut *ds, // dp
                c_row: row,
                rows,
                columns: block.columns(),
                depth: value_dim,
                accumulate: false,
                unit,
            };
            product.run(Part::Values);
            let visible = |row: usize| block.visible(seen, block.queries.start + row);
            let len = rows * row;
            softmax::backward_rows_from(&mut ds[..len], &p_block[..len], row, scale, visible);
            let product = TileMatmul {
                a: &*ds,
                a_row: row,
                a_col: 1,
                b: &k[block.before * head_row..],
                b_row: head_row,
                b_unit: COLUMNS,
                c: &mut *dq_block,
                c_row: head_row,
                rows,
                columns: head_row,
                depth: block.keys.len(),
                accumulate: false,
                unit,
            };
            product.run(Part::Scores);
            // SAFETY: no other task has these queries.
            let dq = unsafe { dq.range(first * head_dim, rows * head_dim) };
            store(dq_block, head_row, dq, head_dim);
            let product = TileMatmul {
                a: &*ds,
                a_row: 1,
                a_col: row,
                b: &*q_block,
                b_row: head_row,
                b_unit: COLUMNS,
                c: &mut dk[at * head_row..],
                c_row: head_row,
                rows: block.keys.len(),
                columns: head_row,
                depth: rows,
                accumulate: true,
                unit,
            };
            product.run(Part::Scores);
        }
    }
}

/// Splits the next `len` elements off `rest`.
fn take<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (taken, left) = std::mem::take(rest).split_at_mut(len);
    *rest = left;
    taken
}

/// Returns rows of `width` elements; `rows` counts from row `first`.
fn rows_of<'x, T>(x: &'x [T], first: usize, rows: &Range<usize>, width: usize) -> &'x [T] {
    &x[(first + rows.start) * width..(first + rows.end) * width]
}

/// Copies rows of x (rows, width) to `to` (rows, to_row), with zeros beyond the width.
fn load<T: Stored>(x: &[T], width: usize, to: &mut [T::Wide], to_row: usize) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (x, to) in x.chunks_exact(width).zip(to.chunks_exact_mut(to_row)) {
                let (to, padding) = to.split_at_mut(width);
                T::load(x, to);
                padding.fill(T::Wide::ZERO);
            }
        },
    );
}

/// Copies rows of `from` (rows, from_row) to x (rows, width), dropping the padding.
fn store<T: Stored>(from: &[T::Wide], from_row: usize, x: &mut [T], width: usize) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (from, x) in from.chunks_exact(from_row).zip(x.chunks_exact_mut(width)) {
                T::store(&from[..width], x);
            }
        },
    );
}
