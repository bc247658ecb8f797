//! Backward: a task for each chunk of each matrix, then the sums of the chunks.

use super::forward::Inputs;
use super::products::{by_columns, by_depth};
use super::rows::{self, Strip};
use super::{Sizes, load, strips, take};
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product};
use crate::kernels::cpu::parallel::{self, Shared, for_tasks_in};
use crate::kernels::cpu::{Lanes, simd};
use std::ops::Range;

/// What backward reads beside the inputs.
#[derive(Clone, Copy)]
pub struct Saved<'a, T> {
    /// As forward left it.
    pub e: &'a [T],
    /// As forward left it.
    pub share: &'a [T],
    /// As forward left it.
    pub out: &'a [T],
    /// The gradient of out: (B H, T, Dh).
    pub d_out: &'a [T],
}

/// What backward writes: (B H, T, Dh) each.
pub struct Gradients<'a, T> {
    /// Of q.
    pub dq: &'a mut [T],
    /// Of k.
    pub dk: &'a mut [T],
    /// Of v.
    pub dv: &'a mut [T],
}

/// `dv = p^T d_out`, `dp = d_out v^T`, `ds = scale p (dp - delta)`, `dq = ds k`, `dk = ds^T q`, where `delta`, the sum of
/// dp p, is taken as d_out's inner product with out. d_out is multiplied by share as it is read, so that e stands in p's
/// place.
///
/// As many threads work as `scratch` has [`Sizes::backward_scratch_len`] for; `partial` has [`Sizes::partial_sums_len`]
/// elements. e is read once, and no other matrix of (T, T) is written.
pub fn backward<T: Lanes>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    saved: Saved<'_, T>,
    gradients: Gradients<'_, T>,
    partial: &mut [T],
    scratch: &mut [T],
) {
    assert_eq!(saved.e.len(), sizes.exponentials_len(), "e");
    assert_eq!(partial.len(), sizes.partial_sums_len(), "partial sums");
    let (length, width) = (sizes.length, sizes.head_dim);
    let all = sizes.matrices * length * width;
    let Gradients { dq, dk, dv } = gradients;
    {
        let (dq, partial) = (Shared::new(dq), Shared::new(partial));
        let sums = [Shared::new(dk), Shared::new(dv)];
        let scratch_len = sizes.backward_scratch_len();
        for_tasks_in(sizes.tasks(), scratch, scratch_len, |scratch, task| {
            let (matrix, chunk, blocks) = sizes.task(task);
            let first = matrix * length * width;
            let queries = sizes.queries(blocks.start).start..sizes.queries(blocks.end - 1).end;
            // SAFETY: chunk `chunk` of this matrix is this task's.
            let [dk, dv] = [0, 1].map(|i| unsafe {
                match chunk.checked_sub(1) {
                    None => sums[i].range(first, length * width),
                    Some(chunk) => {
                        let of_sum = i * (sizes.chunks() - 1) * all;
                        partial.range(of_sum + chunk * all + first, length * width)
                    }
                }
            });
            // SAFETY: as above.
            let dq = unsafe { dq.range(first + queries.start * width, queries.len() * width) };
            let own = Gradients { dq, dk, dv };
            of_chunk(
                sizes,
                (matrix, blocks, queries),
                inputs,
                saved,
                own,
                scratch,
            );
        });
    }
    if sizes.chunks() > 1 {
        let (of_dk, of_dv) = partial.split_at(partial.len() / 2);
        add_chunks(dk, of_dk, width);
        add_chunks(dv, of_dv, width);
    }
}

/// The gradients of a chunk of queries: their own dq (queries, Dh), and what they give to dk and dv (T, Dh).
///
/// A strip of keys meets all blocks of the chunk before the next one does: it, its values and its gradients stay in cache.
fn of_chunk<T: Lanes>(
    sizes: &Sizes,
    (matrix, blocks, queries): (usize, Range<usize>, Range<usize>),
    inputs: Inputs<'_, T>,
    saved: Saved<'_, T>,
    gradients: Gradients<'_, T>,
    mut scratch: &mut [T],
) {
    let (length, width, row) = (sizes.length, sizes.head_dim, sizes.head_row());
    let scale = T::real(sizes.scale);
    // (keys, row) each; (queries, row) each.
    let [k, dk, dv] = [(); 3].map(|()| take(&mut scratch, sizes.strip() * row));
    let [q, d_out, dq] = [(); 3].map(|()| take(&mut scratch, sizes.chunk_rows() * row));
    let strip_row = sizes.strip_row();
    let v = take(&mut scratch, width * strip_row); // (Dh, strip_row)
    let ds = take(&mut scratch, sizes.block_rows() * strip_row); // (queries, strip_row)
    let delta = &mut scratch[..queries.len()];

    let first = matrix * length * width; // of this matrix, in q, k and the like
    let own = first + queries.start * width..first + queries.end * width;
    load::rows(&inputs.q[own.clone()], width, q, row);
    let share = &saved.share[matrix * length..][queries.clone()];
    load::scaled_rows(&saved.d_out[own.clone()], width, share, d_out, row);
    deltas(d_out, row, &saved.out[own], width, delta);
    let e = &saved.e[matrix * sizes.matrix_len()..][..sizes.matrix_len()];
    let keys = sizes.keys(queries.end);
    for strip in strips(keys) {
        let rows = first + strip.start * width..first + strip.end * width;
        load::rows(&inputs.k[rows.clone()], width, k, row);
        load::columns(&inputs.v[rows], width, v, strip_row);
        let mut is_first = true;
        // From the last block, which sees all keys, and so writes all of dk and dv before others add to them.
        for block in blocks.clone().rev() {
            let block_queries = sizes.queries(block);
            let columns = sizes.keys(block_queries.end).min(strip.end);
            let Some(columns) = columns
                .checked_sub(strip.start)
                .filter(|columns| *columns > 0)
            else {
                break; // nor do those before it see any of these keys
            };
            let (rows, score_row) = (block_queries.len(), sizes.score_row(block_queries.end));
            let e = &e[sizes.start(block)..][..rows * score_row];
            let place = block_queries.start - queries.start;
            let (q, d_out) = (&q[place * row..], &d_out[place * row..]);
            let ds = &mut ds[..rows * strip_row];
            let dp = Product {
                a: d_out,
                a_row: row,
                a_col: 1,
                b: v,
                b_row: strip_row,
                c: ds,
                c_row: strip_row,
                rows,
                columns: columns.next_multiple_of(COLUMNS),
                depth: width,
                accumulate: false,
            };
            by_columns(dp, sizes.keys_at_once());
            let part = Strip {
                first: strip.start,
                columns,
                row: score_row,
            };
            let visible = |row: usize| sizes.keys(block_queries.start + row + 1);
            let delta = &delta[place..place + rows];
            rows::gradients(part, e, delta, scale, visible, ds, strip_row);
            let transposed = [
                (&e[strip.start..], score_row, d_out, &mut *dv),
                (&*ds, strip_row, q, &mut *dk),
            ];
            for (a, a_col, b, c) in transposed {
                let product = Product {
                    a,
                    a_row: 1,
                    a_col,
                    b,
                    b_row: row,
                    c,
                    c_row: row,
                    rows: columns,
                    columns: row,
                    depth: rows,
                    accumulate: !is_first,
                };
                product.run();
            }
            let product = Product {
                a: ds,
                a_row: strip_row,
                a_col: 1,
                b: k,
                b_row: row,
                c: &mut dq[place * row..],
                c_row: row,
                rows,
                columns: row,
                depth: columns,
                accumulate: strip.start > 0,
            };
            by_depth(product, sizes.keys_at_once());
            is_first = false;
        }
        let rows = strip.start * width..strip.end * width;
        load::store(dk, row, &mut gradients.dk[rows.clone()], width);
        load::store(dv, row, &mut gradients.dv[rows], width);
    }
    load::store(dq, row, gradients.dq, width);
    gradients.dk[keys * width..].fill(T::ZERO);
    gradients.dv[keys * width..].fill(T::ZERO);
}

/// Each row's inner product: x (rows, x_row), y (rows, width).
fn deltas<T: Lanes>(x: &[T], x_row: usize, y: &[T], width: usize, deltas: &mut [T]) {
    simd::vectorized(
        #[inline(always)]
        || {
            let rows = x.chunks_exact(x_row).zip(y.chunks_exact(width));
            for ((x, y), delta) in rows.zip(deltas) {
                *delta = simd::dot(&x[..width], y);
            }
        },
    );
}

/// `sum += partial_0 + partial_1 + ..`, in this order: each partial sum as long as `sum`, whose rows are `width` elements.
fn add_chunks<T: Lanes>(sum: &mut [T], partial: &[T], width: usize) {
    let len = sum.len();
    parallel::for_rows(sum, width, |row, sum| {
        for partial in partial.chunks_exact(len) {
            let partial = &partial[row * width..][..sum.len()];
            simd::vectorized(
                #[inline(always)]
                || {
                    for (sum, partial) in sum.iter_mut().zip(partial) {
                        *sum += *partial;
                    }
                },
            );
        }
    });
}
