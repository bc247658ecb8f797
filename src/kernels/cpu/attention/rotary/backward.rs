//! Backward: a task for each head.

use super::load::Head;
use super::{BLOCK, Inputs, Sizes, take};
use crate::kernels::Mask;
use crate::kernels::attention::Seen;
use crate::kernels::cpu::gemm::bf16::{Unit, unit_of_tiles};
use crate::kernels::cpu::gemm::tile::{COLUMNS, Product};
use crate::kernels::cpu::parallel::{Shared, for_tasks_in};
use crate::kernels::cpu::{Lanes, Stored, rows::softmax};
use crate::probe::parts::Part;

/// What backward writes: gradients of the projections, rotated back; (B, T, H*Dh) each.
pub struct Gradients<'a, T> {
    /// Of q.
    pub dq: &'a mut [T],
    /// Of k.
    pub dk: &'a mut [T],
    /// Of v.
    pub dv: &'a mut [T],
}

/// The gradients, from `d_out` (B, T, H*Dh) and from the inputs and `p` as forward had them.
///
/// `dv = p^T d_out`, `dp = d_out v^T`, `ds = scale p (dp - sum(dp p))`, `dq = ds k`, `dk = ds^T q`. As many threads
/// work as `scratch` has [`Sizes::backward_scratch_len`] for.
pub fn backward<T: Stored>(
    sizes: &Sizes,
    inputs: Inputs<'_, T>,
    p: &[T::Wide],
    d_out: &[T],
    gradients: Gradients<'_, T>,
    scratch: &mut [T::Wide],
) {
    assert_eq!(p.len(), sizes.probabilities_len(), "p");
    let (length, head_dim) = (sizes.heads.length, sizes.heads.head_dim);
    let (row, transposed_row) = (sizes.head_row(), sizes.transposed_row());
    let size = sizes.matrix_len();
    let Gradients { dq, dk, dv } = gradients;
    let (all_dq, all_dk, all_dv) = (Shared::new(dq), Shared::new(dk), Shared::new(dv));
    let scratch_len = sizes.backward_scratch_len();
    let unit = unit_of_tiles::<T>(head_dim);
    for_tasks_in(
        sizes.matrices(),
        scratch,
        scratch_len,
        |mut rest, matrix| {
            // (T, row) each.
            let [q, k, d_out_rows, dk, dv] = [(); 5].map(|()| take(&mut rest, length * row));
            let dq = take(&mut rest, BLOCK * row); // (queries, row)
            let v = take(&mut rest, head_dim * transposed_row); // (Dh, T)
            let columns = take(&mut rest, COLUMNS * head_dim);
            let ds = rest; // (queries, keys)
            let head = Head::new(sizes, matrix);
            let angles = Some(inputs.angles);
            head.load(inputs.q, angles, q, row);
            head.load(inputs.k, angles, k, row);
            head.load_transposed(inputs.v, None, v, transposed_row, columns);
            head.load(d_out, None, d_out_rows, row);
            let p = &p[matrix * size..][..size];
            // From the last block, which sees all keys, and so writes all of dk and dv before others add to them.
            for (queries, start) in sizes.blocks().rev() {
                let score_row = Sizes::score_row(&queries);
                let (first, rows, keys) = (queries.start, queries.len(), queries.end);
                let p = &p[start..start + rows * score_row];
                let ds = &mut ds[..rows * score_row];
                let accumulate = keys < length;
                let d_out_block = &d_out_rows[first * row..];
                // dp = d_out v^T.
                product(
                    unit,
                    [rows, score_row, head_dim],
                    (d_out_block, row, 1),
                    (v, transposed_row),
                )
                .into(Part::Values, ds, score_row, false);
                let seen = Seen::by_mask(Mask::Causal, length, score_row);
                softmax::backward_rows(ds, p, first, seen, sizes.scale);
                // dv += p^T d_out, dk += ds^T q.
                product(
                    unit,
                    [keys, row, rows],
                    (p, 1, score_row),
                    (d_out_block, row),
                )
                .into(Part::Values, dv, row, accumulate);
                product(
                    unit,
                    [keys, row, rows],
                    (ds, 1, score_row),
                    (&q[first * row..], row),
                )
                .into(Part::Scores, dk, row, accumulate);
                // dq = ds k.
                product(unit, [rows, row, keys], (ds, score_row, 1), (k, row)).into(
                    Part::Scores,
                    dq,
                    row,
                    false,
                );
                // SAFETY: the head is this task's.
                unsafe { head.store(dq, row, queries, angles, &all_dq) };
            }
            // SAFETY: as above.
            unsafe {
                head.store(dk, row, 0..length, angles, &all_dk);
                head.store(dv, row, 0..length, None, &all_dv);
            }
        },
    );
}

/// A product that is to be written somewhere.
struct Factors<'a, T> {
    /// What multiplies.
    unit: Option<Unit>,
    /// Rows, columns, depth.
    sizes: [usize; 3],
    /// The left factor, from one of its rows to the next, and from one column to the next.
    a: (&'a [T], usize, usize),
    /// The right factor, and from one of its rows to the next.
    b: (&'a [T], usize),
}

fn product<'a, T>(
    unit: Option<Unit>,
    sizes: [usize; 3],
    a: (&'a [T], usize, usize),
    b: (&'a [T], usize),
) -> Factors<'a, T> {
    Factors { unit, sizes, a, b }
}

impl<T: Lanes> Factors<'_, T> {
    fn into(self, part: Part, c: &mut [T], c_row: usize, accumulate: bool) {
        let [rows, columns, depth] = self.sizes;
        let (a, a_row, a_col) = self.a;
        let (b, b_row) = self.b;
        let product = Product {
            a,
            a_row,
            a_col,
            b,
            b_row,
            b_unit: COLUMNS,
            c,
            c_row,
            rows,
            columns,
            depth,
            accumulate,
            unit: self.unit,
        };
        product.run(part);
    }
}
