//! Forward: a task for each chunk of each matrix.

use super::products::{by_columns, by_depth};
use super::rows::{self, Strip};
use super::{Sizes, load, strips, take};
use crate::kernels::cpu::Lanes;
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product};
use crate::kernels::cpu::parallel::{Shared, for_tasks_in};

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
pub struct Outputs<'a, T> {
    /// (B H, T, Dh).
    pub out: &'a mut [T],
    /// exp(scale q k^T - top) of every block, for backward; [`Sizes::exponentials_len`] elements.
    pub e: &'a mut [T],
    /// What its rows are multiplied by to be probabilities: (B H, T).
    pub share: &'a mut [T],
}

/// `e = exp(scale q k^T - top)` under the mask, `out = share e v`.
///
/// As many threads work as `scratch` has [`Sizes::forward_scratch_len`] for.
pub fn forward<T: Lanes>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    outputs: Outputs<'_, T>,
    scratch: &mut [T],
) {
    let Outputs { out, e, share } = outputs;
    assert_eq!(e.len(), sizes.exponentials_len(), "e");
    assert_eq!(share.len(), sizes.matrices * sizes.length, "share");
    let (length, width) = (sizes.length, sizes.head_dim);
    let (row, keys_row, size) = (sizes.head_row(), sizes.keys_row(), sizes.matrix_len());
    let scale = T::real(sizes.scale);
    let (out, e, share) = (Shared::new(out), Shared::new(e), Shared::new(share));
    let scratch_len = sizes.forward_scratch_len();
    for_tasks_in(sizes.tasks(), scratch, scratch_len, |mut rest, task| {
        let (matrix, _, blocks) = sizes.task(task);
        let v = take(&mut rest, length * row); // (T, row)
        let out_block = take(&mut rest, sizes.block_rows() * row); // (queries, row)
        let k = take(&mut rest, width * keys_row); // (Dh, keys_row)
        let [tops, sums] = [(); 2].map(|()| take(&mut rest, sizes.block_rows())); // (queries)
        let scores = rest; // (queries, score_row)
        let keys = sizes.keys(sizes.queries(blocks.end - 1).end);
        let first = matrix * length * width;
        load::columns(&inputs.k[first..][..keys * width], width, k, keys_row);
        load::rows(&inputs.v[first..][..keys * width], width, v, row);
        for block in blocks {
            let queries = sizes.queries(block);
            let (rows, score_row) = (queries.len(), sizes.score_row(queries.end));
            let keys = sizes.keys(queries.end);
            let visible = |row: usize| sizes.keys(queries.start + row + 1);
            let (at, len) = (matrix * size + sizes.start(block), rows * score_row);
            // SAFETY: the block is this task's.
            let e = unsafe { e.range(at, len) };
            let scores = &mut scores[..len];
            let here = first + queries.start * width..first + queries.end * width;
            let product = Product {
                a: &inputs.q[here.clone()],
                a_row: width,
                a_col: 1,
                b: k,
                b_row: keys_row,
                c: scores,
                c_row: score_row,
                rows,
                columns: keys.next_multiple_of(COLUMNS),
                depth: width,
                accumulate: false,
            };
            by_columns(product, sizes.keys_at_once());
            let (tops, sums) = (&mut tops[..rows], &mut sums[..rows]);
            rows::tops(scores, score_row, scale, visible, tops);
            sums.fill(T::ZERO);
            for strip in strips(keys) {
                let part = Strip {
                    first: strip.start,
                    columns: strip.len(),
                    row: score_row,
                };
                rows::exponentials(part, scores, scale, tops, visible, e, sums);
                let weighted = Product {
                    a: &e[strip.start..],
                    a_row: score_row,
                    a_col: 1,
                    b: &v[strip.start * row..],
                    b_row: row,
                    c: out_block,
                    c_row: row,
                    rows,
                    columns: row,
                    depth: strip.len(),
                    accumulate: strip.start > 0,
                };
                by_depth(weighted, sizes.keys_at_once());
            }
            for sum in sums.iter_mut() {
                *sum = T::ONE / *sum;
            }
            // SAFETY: as above.
            let (out, share) = unsafe {
                let share = share.range(matrix * length + queries.start, rows);
                (out.range(here.start, here.len()), share)
            };
            share.copy_from_slice(sums);
            for ((out, from), share) in out
                .chunks_exact_mut(width)
                .zip(out_block.chunks_exact(row))
                .zip(share)
            {
                for (out, from) in out.iter_mut().zip(from) {
                    *out = *from * *share;
                }
            }
        }
    });
}
