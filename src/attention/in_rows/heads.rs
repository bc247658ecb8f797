//! Operands of attention's GPU kernels as strided heads, for both layouts: (B, T, H Dh) and (B, H, T, Dh).

use super::are;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::flash_attention::Heads;
use crate::ops::lowering::{Kernel, Named};

/// The names of q, k and v, and of the packed operand that replaces them.
pub(in crate::attention) const QKV: ([&str; 3], &str) = (["q", "k", "v"], "qkv");
/// The names of their gradients.
pub(in crate::attention) const DQKV: ([&str; 3], &str) = (["dq", "dk", "dv"], "dqkv");

/// Returns an operand in the layout of q: in rows (B, T, H Dh), or of these dimensions.
pub(in crate::attention) fn as_q<'a>(
    kernel: &Kernel,
    sizes: &Sizes,
    view: View<'a>,
    dims: [usize; 4],
) -> Heads<'a> {
    match are(kernel) {
        true => of_rows(sizes, view, sizes.heads, sizes.heads),
        false => Heads::new(view, dims),
    }
}

/// Returns q, k and v or their gradients: three operands in rows or of these dimensions, or ranges of the packed one.
pub(in crate::attention) fn as_qkv<'a>(
    kernel: &Kernel,
    sizes: &Sizes,
    operands: &Named<View<'a>>,
    (apart, packed): ([&str; 3], &str),
    dims: [[usize; 4]; 3],
) -> [Heads<'a>; 3] {
    let heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads];
    let Some(packed) = operands.get(packed) else {
        let views = apart.map(|name| *operands.operand(name));
        return [0, 1, 2].map(|i| match are(kernel) {
            true => of_rows(sizes, views[i], heads[i], heads[i]),
            false => Heads::new(views[i], dims[i]),
        });
    };
    let firsts = [0, heads[0], heads[0] + heads[1]];
    let of_row = heads.iter().sum();
    [0, 1, 2].map(|i| {
        let view = packed.slice_from(firsts[i] * sizes.head_dim);
        of_rows(sizes, view, heads[i], of_row)
    })
}

/// Returns the first heads of rows that have `of_row` heads.
fn of_rows<'a>(sizes: &Sizes, view: View<'a>, heads: usize, of_row: usize) -> Heads<'a> {
    let row = of_row * sizes.head_dim;
    Heads {
        view,
        strides: [sizes.queries * row, sizes.head_dim, row],
        dims: [sizes.batch, heads, sizes.queries, sizes.head_dim],
    }
}
