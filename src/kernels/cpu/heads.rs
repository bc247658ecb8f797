//! Splitting and merging of attention heads: (B, T, H*Dh) and (B, H, T, Dh).

use super::parallel::{self, Shared, TASK_ELEMENTS};

/// The sizes of a tensor of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSizes {
    /// B.
    pub batch: usize,
    /// T.
    pub length: usize,
    /// H.
    pub heads: usize,
    /// Dh.
    pub head_dim: usize,
}

impl HeadSizes {
    /// Calls `f(merged, split)` with the offsets of each head's row of `head_dim` elements in both layouts, in parallel
    /// over groups of (b, t).
    fn for_heads(self, f: impl Fn(usize, usize) + Sync + Send) {
        let HeadSizes {
            batch,
            length,
            heads,
            head_dim,
        } = self;
        if heads * head_dim == 0 {
            return; // no elements, however many tokens
        }
        let tokens = batch * length;
        let per_task = (TASK_ELEMENTS / (heads * head_dim).max(1)).max(1);
        parallel::for_tasks(tokens.div_ceil(per_task), |task| {
            for token in task * per_task..tokens.min((task + 1) * per_task) {
                let (b, t) = (token / length, token % length);
                for h in 0..heads {
                    f(
                        (token * heads + h) * head_dim,
                        ((b * heads + h) * length + t) * head_dim,
                    );
                }
            }
        });
    }
}

/// Copies (B, T, H*Dh) to (B, H, T, Dh).
pub fn split<T: Copy + Send + Sync>(sizes: HeadSizes, merged: &[T], split: &mut [T]) {
    let width = sizes.head_dim;
    let split = Shared::new(split);
    sizes.for_heads(|from, to| {
        // SAFETY: every (b, t, h) has its own row.
        unsafe { split.range(to, width) }.copy_from_slice(&merged[from..from + width]);
    });
}

/// Copies (B, H, T, Dh) to (B, T, H*Dh).
pub fn merge<T: Copy + Send + Sync>(sizes: HeadSizes, split: &[T], merged: &mut [T]) {
    let width = sizes.head_dim;
    let merged = Shared::new(merged);
    sizes.for_heads(|to, from| {
        // SAFETY: every (b, t, h) has its own row.
        unsafe { merged.range(to, width) }.copy_from_slice(&split[from..from + width]);
    });
}
