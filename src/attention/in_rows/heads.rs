//! Heads in the rows of positions.

use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::flash_attention::Heads;
use crate::ops::lowering::Named;

/// Heads in rows (B, T, heads Dh), or a column range of longer rows.
#[derive(Clone, Copy)]
pub(in crate::attention) struct Rows<'a> {
    view: View<'a>,
    heads: usize,
    /// The row stride, in elements.
    row: usize,
}

impl<'a> Rows<'a> {
    /// Returns rows that have only these heads.
    fn dense(sizes: &Sizes, view: View<'a>, heads: usize) -> Self {
        let row = heads * sizes.head_dim;
        Self { view, heads, row }
    }

    /// Returns the heads with their strides.
    pub fn heads(self, sizes: &Sizes) -> Heads<'a> {
        Heads {
            view: self.view,
            strides: [sizes.queries * self.row, sizes.head_dim, self.row],
            dims: [sizes.batch, self.heads, sizes.queries, sizes.head_dim],
        }
    }
}

/// Returns an operand in the layout of q.
pub(in crate::attention) fn of_q<'a>(sizes: &Sizes, view: View<'a>) -> Rows<'a> {
    Rows::dense(sizes, view, sizes.heads)
}

/// Returns q, k and v or their gradients, from three operands or from the packed one.
pub(in crate::attention) fn of_qkv<'a>(
    sizes: &Sizes,
    operands: &Named<View<'a>>,
    apart: [&str; 3],
    packed: &str,
) -> [Rows<'a>; 3] {
    let heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads];
    let Some(packed) = operands.get(packed) else {
        let views = apart.map(|name| *operands.operand(name));
        return [0, 1, 2].map(|i| Rows::dense(sizes, views[i], heads[i]));
    };
    let row = heads.iter().sum::<usize>() * sizes.head_dim;
    let firsts = [0, heads[0], heads[0] + heads[1]];
    [0, 1, 2].map(|i| Rows {
        view: packed.part_from(firsts[i] * sizes.head_dim),
        heads: heads[i],
        row,
    })
}
