//! Forward: a task for each chunk of each matrix.

use super::rows::{self, Exponentials, State, Strip};
use super::{Sizes, load, strips, take};
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product, pack_transposed};
use crate::kernels::cpu::parallel::{Shared, for_tasks_in};
use crate::kernels::cpu::{Real, Stored};
use crate::probe::parts::Part;
use std::ops::Range;

/// What is attended with: (B H, T, Dh) each.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T> {
    /// Queries.
    pub q: &'a [T],
    /// Keys.
    pub k: &'a [T],
    /// Values.
    pub v: &'a [T],
}

/// What forward writes.
pub struct Outputs<'a, T: Stored, E> {
    /// (B H, T, Dh).
    pub out: &'a mut [T],
    /// What rounding took from out, for backward: (B H, T, Dh); or nothing, where nothing is rounded, or there is no
    /// backward.
    pub rounding_error: &'a mut [T],
    /// exp(scale q k^T - top) of every block, for backward; [`Sizes::exponentials_len`] elements.
    pub e: &'a mut [E],
    /// What its rows are multiplied by to be probabilities: (B H, T).
    pub inv_row_sum: &'a mut [T::Wide],
}

/// `e = exp(scale q k^T - top)` under the mask, `out = inv_row_sum e v`.
///
/// As many threads work as `scratch` has [`Sizes::forward_scratch_len`] for.
pub fn forward<T: Stored, E: Stored<Wide = T::Wide>>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    outputs: Outputs<'_, T, E>,
    scratch: &mut [T::Wide],
) {
    let Outputs {
        out,
        rounding_error,
        e,
        inv_row_sum,
    } = outputs;
    assert_eq!(e.len(), sizes.exponentials_len(), "e");
    assert_eq!(inv_row_sum.len(), sizes.matrices * sizes.length, "share");
    assert!(rounding_error.is_empty() || rounding_error.len() == out.len());
    let keeps_rest = !rounding_error.is_empty();
    let (out, rest) = (Shared::new(out), Shared::new(rounding_error));
    let (e, inv_row_sum) = (Shared::new(e), Shared::new(inv_row_sum));
    let scratch_len = sizes.forward_scratch_len();
    for_tasks_in(sizes.tasks(), scratch, scratch_len, |scratch, task| {
        let (matrix, _, blocks) = sizes.task(task);
        let queries = sizes.queries_of(&blocks);
        let first = matrix * sizes.length + queries.start;
        let (at, len) = (first * sizes.head_dim, queries.len() * sizes.head_dim);
        let in_e = sizes.exponentials_of(blocks.clone());
        // SAFETY: these queries are this task's.
        let outputs = unsafe {
            Outputs {
                out: out.range(at, len),
                rounding_error: match keeps_rest {
                    true => rest.range(at, len),
                    false => &mut [],
                },
                e: e.range(matrix * sizes.matrix_len() + in_e.start, in_e.len()),
                inv_row_sum: inv_row_sum.range(first, queries.len()),
            }
        };
        of_chunk(sizes, (matrix, blocks, queries), inputs, outputs, scratch);
    });
}

/// A chunk of queries.
///
/// A strip of keys meets all blocks of the chunk before the next one does: it and its values stay in cache.
fn of_chunk<T: Stored, E: Stored<Wide = T::Wide>>(
    sizes: &Sizes,
    (matrix, blocks, queries): (usize, Range<usize>, Range<usize>),
    inputs: Inputs<'_, T>,
    outputs: Outputs<'_, T, E>,
    mut scratch: &mut [T::Wide],
) {
    let (width, row, strip_row) = (sizes.head_dim, sizes.head_row(), sizes.strip_row());
    let scale = T::Wide::real(sizes.scale);
    let [q, out] = [(); 2].map(|()| take(&mut scratch, sizes.chunk_rows() * row)); // (queries, row)
    let v = take(&mut scratch, sizes.strip() * row); // (keys, row)
    let k = take(&mut scratch, sizes.strip() * width); // (units, Dh, COLUMNS)
    let lines = take(&mut scratch, COLUMNS * width);
    let scores = take(&mut scratch, Sizes::BLOCK_ROWS * strip_row); // (queries, strip_row)
    let rescale = take(&mut scratch, Sizes::BLOCK_ROWS);
    let [tops, sums] = [(); 2].map(|()| take(&mut scratch, sizes.chunk_rows()));
    let out = &mut out[..queries.len() * row];
    let sums = &mut sums[..queries.len()];

    let first = matrix * sizes.length * width; // of this matrix, in q, k and v
    let own = first + queries.start * width..first + queries.end * width;
    load::rows(&inputs.q[own], width, q, row);
    let unit = unit_of_tiles::<T>(width);
    tops.fill(T::Wide::NEG_INFINITY);
    sums.fill(T::Wide::ZERO);
    for strip in strips(sizes.keys(queries.end)) {
        let keys = first + strip.start * width..first + strip.end * width;
        pack_transposed(&inputs.k[keys.clone()], width, k, lines);
        load::rows(&inputs.v[keys], width, v, row);
        for block in blocks.clone() {
            let here = sizes.queries(block);
            let seen = sizes.keys(here.end);
            let Some(columns) = seen.min(strip.end).checked_sub(strip.start + 1) else {
                continue; // none of these keys
            };
            let (rows, columns, e_row) = (here.len(), columns + 1, sizes.score_row(here.end));
            let place = here.start - queries.start..here.end - queries.start;
            let product = Product {
                a: &q[place.start * row..],
                a_row: row,
                a_col: 1,
                b: k,
                b_row: COLUMNS,
                b_unit: width * COLUMNS,
                c: scores,
                c_row: strip_row,
                rows,
                columns: columns.next_multiple_of(COLUMNS),
                depth: width,
                accumulate: false,
                unit,
            };
            product.run(Part::Scores);
            let e = &mut outputs.e[sizes.start(block) - sizes.start(blocks.start)..];
            let e = &mut e[..rows * e_row];
            let exponentials = Exponentials {
                strip: Strip {
                    first: strip.start,
                    columns,
                },
                scale,
                visible: |row: usize| sizes.keys(here.start + row + 1),
                scores: &mut *scores,
                scores_row: strip_row,
                e: &mut *e,
                e_row,
                state: State {
                    tops: &mut tops[place.clone()],
                    sums: &mut sums[place.clone()],
                    rescale: &mut *rescale,
                },
            };
            let out = &mut out[place.start * row..place.end * row];
            if exponentials.run() && strip.start > 0 {
                let factors = &rescale[..rows];
                rows::rescale(e, e_row, strip.start, factors);
                rows::rescale(out, row, row, factors);
            }
            let weighted = Product {
                a: scores,
                a_row: strip_row,
                a_col: 1,
                b: v,
                b_row: row,
                b_unit: COLUMNS,
                c: out,
                c_row: row,
                rows,
                columns: row,
                depth: columns,
                accumulate: strip.start > 0,
                unit,
            };
            weighted.run(Part::Values);
        }
    }
    for (inv_row_sum, sum) in outputs.inv_row_sum.iter_mut().zip(sums) {
        *inv_row_sum = T::Wide::ONE / *sum;
    }
    rows::rescale(out, row, row, outputs.inv_row_sum);
    match outputs.rounding_error {
        [] => load::store(out, row, outputs.out, width),
        rest => load::store_with_rest(out, row, outputs.out, rest, width),
    }
}
