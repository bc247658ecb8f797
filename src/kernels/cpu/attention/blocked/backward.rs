//! Backward: a task for each chunk of each matrix, then the sums of the chunks.

use super::forward::Inputs;
use super::rows::{self, Strip};
use super::{Sizes, load, strips, take};
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product, pack_transposed};
use crate::kernels::cpu::parallel::{self, Shared, for_tasks_in};
use crate::kernels::cpu::simd::BLOCK;
use crate::kernels::cpu::{Real, Stored, simd};
use crate::probe::parts::Part;
use std::ops::Range;

/// What backward reads beside the inputs.
#[derive(Clone, Copy)]
pub struct Saved<'a, T: Stored, E> {
    /// As forward left it.
    pub e: &'a [E],
    /// As forward left it.
    pub inv_row_sum: &'a [T::Wide],
    /// As forward left it.
    pub out: &'a [T],
    /// As forward left it; nothing where forward had no room for it, and then the gradients are off by as much.
    pub rounding_error: &'a [T],
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

/// Where a chunk's sums go, (T, Dh).
enum Sums<'a, T: Stored> {
    /// They are the gradient.
    Whole(&'a mut [T]),
    /// Others will be added.
    Part(&'a mut [T::Wide]),
}

/// `dv = p^T d_out`, `dp = d_out v^T`, `ds = scale p (dp - delta)`, `dq = ds k`, `dk = ds^T q`, where `delta`, the sum
/// of dp p, is taken as d_out's inner product with out. d_out is multiplied by share as it is read, so that e stands in
/// p's place.
///
/// As many threads work as `scratch` has [`Sizes::backward_scratch_len`] for; `partial` has [`Sizes::partial_sums_len`]
/// elements. e is read once, and no other matrix of (T, T) is written.
pub fn backward<T: Stored, E: Stored<Wide = T::Wide>>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    saved: Saved<'_, T, E>,
    gradients: Gradients<'_, T>,
    partial: &mut [T::Wide],
    scratch: &mut [T::Wide],
) {
    let rounds = T::as_wide(&[]).is_none();
    assert_eq!(saved.e.len(), sizes.exponentials_len(), "e");
    assert_eq!(
        partial.len(),
        sizes.partial_sums_len(rounds),
        "partial sums"
    );
    let (length, width) = (sizes.length, sizes.head_dim);
    let all = sizes.matrices * length * width;
    let kept = sizes.partial_sums(rounds);
    let Gradients { dq, dk, dv } = gradients;
    {
        let (dq, partial) = (Shared::new(dq), Shared::new(partial));
        let sums = [Shared::new(dk), Shared::new(dv)];
        let scratch_len = sizes.backward_scratch_len(rounds);
        for_tasks_in(sizes.tasks(), scratch, scratch_len, |scratch, task| {
            let (matrix, chunk, blocks) = sizes.task(task);
            let first = matrix * length * width;
            let queries = sizes.queries_of(&blocks);
            // SAFETY: chunk `chunk` of this matrix is this task's.
            let sums = [0, 1].map(|i| unsafe {
                match (chunk + kept).checked_sub(sizes.chunks()) {
                    None => Sums::Whole(sums[i].range(first, length * width)),
                    Some(part) => {
                        let at = (i * kept + part) * all + first;
                        Sums::Part(partial.range(at, length * width))
                    }
                }
            });
            // SAFETY: as above.
            let dq = unsafe { dq.range(first + queries.start * width, queries.len() * width) };
            let what = (matrix, blocks, queries);
            of_chunk(sizes, what, inputs, saved, (dq, sums), scratch);
        });
    }
    if kept > 0 {
        let (of_dk, of_dv) = partial.split_at(partial.len() / 2);
        add_chunks(dk, of_dk, width);
        add_chunks(dv, of_dv, width);
    }
}

/// The gradients of a chunk of queries: their own dq (queries, Dh), and what they give to dk and dv (T, Dh).
///
/// A strip of keys meets all blocks of the chunk before the next one does: it, its values and its gradients stay in
/// cache.
fn of_chunk<T: Stored, E: Stored<Wide = T::Wide>>(
    sizes: &Sizes,
    (matrix, blocks, queries): (usize, Range<usize>, Range<usize>),
    inputs: Inputs<'_, T>,
    saved: Saved<'_, T, E>,
    (to_dq, [mut to_dk, mut to_dv]): (&mut [T], [Sums<'_, T>; 2]),
    mut scratch: &mut [T::Wide],
) {
    let (length, width, row) = (sizes.length, sizes.head_dim, sizes.head_row());
    let scale = T::Wide::real(sizes.scale);
    // (keys, row) each; (queries, row) each.
    let [k, dk, dv] = [(); 3].map(|()| take(&mut scratch, sizes.strip() * row));
    let [q, d_out, dq] = [(); 3].map(|()| take(&mut scratch, sizes.chunk_rows() * row));
    let strip_row = sizes.strip_row();
    let v = take(&mut scratch, sizes.strip() * width); // (units, Dh, COLUMNS)
    let block = take(&mut scratch, COLUMNS * width);
    let ds = take(&mut scratch, Sizes::BLOCK_ROWS * strip_row); // (queries, strip_row)
    let delta = take(&mut scratch, queries.len());
    let e_in_f32 = scratch; // (queries, strip_row)

    let first = matrix * length * width; // of this matrix, in q, k and the like
    let own = first + queries.start * width..first + queries.end * width;
    load::rows(&inputs.q[own.clone()], width, q, row);
    let inv_row_sum = &saved.inv_row_sum[matrix * length..][queries.clone()];
    load::scaled_rows(&saved.d_out[own.clone()], width, inv_row_sum, d_out, row);
    let outs = [saved.out, saved.rounding_error].map(|x| x.get(own.clone()).unwrap_or_default());
    deltas((d_out, row), outs, (&mut *block, width), delta);
    let e = &saved.e[matrix * sizes.matrix_len()..][..sizes.matrix_len()];
    let keys = sizes.keys(queries.end);
    let unit = unit_of_tiles::<T>(width);
    for strip in strips(keys) {
        let rows = first + strip.start * width..first + strip.end * width;
        load::rows(&inputs.k[rows.clone()], width, k, row);
        pack_transposed(&inputs.v[rows], width, v, block);
        let mut is_first = true;
        // From the last block, which sees all keys, and so writes all of dk and dv before others add to them.
        for block in blocks.clone().rev() {
            let here = sizes.queries(block);
            let columns = sizes.keys(here.end).min(strip.end);
            let Some(columns) = columns
                .checked_sub(strip.start)
                .filter(|columns| *columns > 0)
            else {
                break; // nor do those before it see any of these keys
            };
            let (rows, score_row) = (here.len(), sizes.score_row(here.end));
            let e = &e[sizes.start(block)..][..rows * score_row];
            let (e, e_row) = match E::as_wide(e) {
                Some(e) => (&e[strip.start..], score_row),
                None => {
                    load::part_of_rows(&e[strip.start..], score_row, columns, e_in_f32, strip_row);
                    (&*e_in_f32, strip_row)
                }
            };
            let place = here.start - queries.start;
            let (q, d_out) = (&q[place * row..], &d_out[place * row..]);
            let dp = Product {
                a: d_out,
                a_row: row,
                a_col: 1,
                b: v,
                b_row: COLUMNS,
                b_unit: width * COLUMNS,
                c: ds,
                c_row: strip_row,
                rows,
                columns: columns.next_multiple_of(COLUMNS),
                depth: width,
                accumulate: false,
                unit,
            };
            dp.run(Part::Values);
            let part = Strip {
                first: strip.start,
                columns,
            };
            let visible = |row: usize| sizes.keys(here.start + row + 1);
            let delta = &delta[place..place + rows];
            rows::gradients(part, (e, e_row), delta, scale, visible, (ds, strip_row));
            for (part, a, a_col, b, c) in [
                (Part::Values, e, e_row, d_out, &mut *dv),
                (Part::Scores, &*ds, strip_row, q, &mut *dk),
            ] {
                let product = Product {
                    a,
                    a_row: 1,
                    a_col,
                    b,
                    b_row: row,
                    b_unit: COLUMNS,
                    c,
                    c_row: row,
                    rows: columns,
                    columns: row,
                    depth: rows,
                    accumulate: !is_first,
                    unit,
                };
                product.run(part);
            }
            let product = Product {
                a: ds,
                a_row: strip_row,
                a_col: 1,
                b: k,
                b_row: row,
                b_unit: COLUMNS,
                c: &mut dq[place * row..],
                c_row: row,
                rows,
                columns: row,
                depth: columns,
                accumulate: strip.start > 0,
                unit,
            };
            product.run(Part::Scores);
            is_first = false;
        }
        for (from, to) in [(&*dk, &mut to_dk), (&*dv, &mut to_dv)] {
            let rows = strip.start * width..strip.end * width;
            match to {
                Sums::Whole(to) => load::store(from, row, &mut to[rows], width),
                Sums::Part(to) => load::store(from, row, &mut to[rows], width),
            }
        }
    }
    load::store(dq, row, to_dq, width);
    for to in [to_dk, to_dv] {
        match to {
            Sums::Whole(to) => to[keys * width..].fill(T::zero()),
            Sums::Part(to) => to[keys * width..].fill(T::Wide::ZERO),
        }
    }
}

/// Each row's inner product of x (rows, x_row) with the sum of both ys (rows, width), of which the second may be
/// missing. `block` is (2, width) at least, to work in.
fn deltas<T: Stored>(
    (x, x_row): (&[T::Wide], usize),
    [y, rest]: [&[T]; 2],
    (block, width): (&mut [T::Wide], usize),
    deltas: &mut [T::Wide],
) {
    let (in_f32, of_rest) = block.split_at_mut(width);
    let of_rest = &mut of_rest[..width];
    of_rest.fill(T::Wide::ZERO);
    simd::vectorized(
        #[inline(always)]
        || {
            let rows = x.chunks_exact(x_row).zip(y.chunks_exact(width));
            for (i, ((x, y), delta)) in rows.zip(deltas).enumerate() {
                T::load(y, in_f32);
                if !rest.is_empty() {
                    T::load(&rest[i * width..][..width], of_rest);
                }
                let terms = [&x[..width], &*in_f32, &*of_rest];
                *delta = simd::sum_over(terms, |[x, y, rest]| x * (y + rest));
            }
        },
    );
}

/// `sum += partial_0 + partial_1 + ..`, in this order, or `sum = ..` where it is rounded: each partial sum as long as
/// `sum`, whose rows are `width` elements.
fn add_chunks<T: Stored>(sum: &mut [T], partial: &[T::Wide], width: usize) {
    let len = sum.len();
    parallel::for_rows(sum, width, |row, sum| {
        simd::vectorized(
            #[inline(always)]
            || {
                if let Some(sum) = T::as_wide_mut(sum) {
                    for part in partial.chunks_exact(len) {
                        add(sum, &part[row * width..]);
                    }
                    return;
                }
                for (i, to) in sum.chunks_mut(BLOCK).enumerate() {
                    let mut sums = [T::Wide::ZERO; BLOCK];
                    let sums = &mut sums[..to.len()];
                    for part in partial.chunks_exact(len) {
                        add(sums, &part[row * width + i * BLOCK..]);
                    }
                    T::store(sums, to);
                }
            },
        );
    });
}

#[inline(always)]
fn add<T: Real>(sum: &mut [T], x: &[T]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += *x;
    }
}
