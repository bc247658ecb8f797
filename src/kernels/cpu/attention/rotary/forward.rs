//! Forward: a task for each head.

use super::load::Head;
use super::{BLOCK, Inputs, Sizes, take};
use crate::kernels::Mask;
use crate::kernels::attention::Seen;
use crate::kernels::cpu::gemm::bf16::unit_of_tiles;
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product};
use crate::kernels::cpu::parallel::{Shared, for_tasks_in};
use crate::kernels::cpu::{Stored, rows::softmax};
use crate::probe::parts::Part;

/// What forward writes.
pub struct Outputs<'a, T: Stored> {
    /// softmax(scale q k^T) of every block, for backward; [`Sizes::probabilities_len`] elements. `None` if they are not
    /// wanted it.
    pub p: Option<&'a mut [T::Wide]>,
    /// (B, T, H*Dh).
    pub out: &'a mut [T],
}

/// `p = softmax(scale q k^T)` under the causal mask with q and k rotated, `out = p v`.
///
/// As many threads work as `scratch` has [`Sizes::forward_scratch_len`] for.
pub fn forward<T: Stored>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    outputs: Outputs<'_, T>,
    scratch: &mut [T::Wide],
) {
    let Outputs { p, out } = outputs;
    let keeps = p.is_some();
    let p = p.unwrap_or_default();
    assert!(!keeps || p.len() == sizes.probabilities_len(), "p");
    let (length, head_dim) = (sizes.heads.length, sizes.heads.head_dim);
    let (row, transposed_row) = (sizes.head_row(), sizes.transposed_row());
    let size = sizes.matrix_len();
    let (p, out) = (Shared::new(p), Shared::new(out));
    let scratch_len = sizes.forward_scratch_len();
    let unit = unit_of_tiles::<T>(head_dim);
    for_tasks_in(
        sizes.matrices(),
        scratch,
        scratch_len,
        |mut rest, matrix| {
            let q = take(&mut rest, length * row); // (T, row)
            let k = take(&mut rest, head_dim * transposed_row); // (Dh, T)
            let v = take(&mut rest, length * row); // (T, row)
            let out_block = take(&mut rest, BLOCK * row); // (queries, row)
            let columns = take(&mut rest, COLUMNS * head_dim);
            let p_block = rest; // (queries, keys)
            let head = Head::new(sizes, matrix);
            head.load(inputs.q, Some(inputs.angles), q, row);
            head.load_transposed(inputs.k, Some(inputs.angles), k, transposed_row, columns);
            head.load(inputs.v, None, v, row);
            for (queries, start) in sizes.blocks() {
                let score_row = Sizes::score_row(&queries);
                let rows = queries.len();
                let p = match keeps {
                    // SAFETY: matrix `matrix` is this task's.
                    true => unsafe { p.range(matrix * size + start, rows * score_row) },
                    false => &mut p_block[..rows * score_row],
                };
                let scores = Product {
                    a: &q[queries.start * row..],
                    a_row: row,
                    a_col: 1,
                    b: k,
                    b_row: transposed_row,
                    b_unit: COLUMNS,
                    c: p,
                    c_row: score_row,
                    rows,
                    columns: score_row,
                    depth: head_dim,
                    accumulate: false,
                    unit,
                };
                scores.run(Part::Scores);
                let first = queries.start;
                let seen = Seen::by_mask(Mask::Causal, length, score_row);
                softmax::forward_rows(p, first, seen, sizes.scale);
                let weighted = Product {
                    a: p,
                    a_row: score_row,
                    a_col: 1,
                    b: v,
                    b_row: row,
                    b_unit: COLUMNS,
                    c: out_block,
                    c_row: row,
                    rows,
                    columns: row,
                    depth: queries.end,
                    accumulate: false,
                    unit,
                };
                weighted.run(Part::Values);
                // SAFETY: the head is this task's.
                unsafe { head.store(out_block, row, queries, None, &out) };
            }
        },
    );
}
