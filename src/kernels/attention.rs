//! The sizes of attention.

use super::Mask;

/// The sizes of one call, and how it attends, as kernels on every device take them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// B.
    pub batch: usize,
    /// H: heads of q.
    pub heads: usize,
    /// Hkv: heads of k and v; each serves H / Hkv heads of q in a row.
    pub kv_heads: usize,
    /// Tq.
    pub queries: usize,
    /// Tk.
    pub keys: usize,
    /// Dh, of q and k.
    pub head_dim: usize,
    /// Dv, of v and the output; flash attention has it equal to Dh.
    pub value_dim: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// What scores are multiplied by.
    pub scale: f64,
}

impl Sizes {
    /// How many keys query `query` sees: the first so many.
    pub fn visible(&self, query: usize) -> usize {
        self.mask.visible(query, self.queries, self.keys).end
    }

    /// How many heads of q share a head of k and v.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// B H: matrices of q.
    pub fn matrices(&self) -> usize {
        self.batch * self.heads
    }

    /// B Hkv: matrices of k and v.
    pub fn kv_matrices(&self) -> usize {
        self.batch * self.kv_heads
    }
}
