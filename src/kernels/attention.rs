//! The sizes of attention, and which keys its queries see.

use super::Mask;
use std::ops::Range;

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
    /// The soft cap of the scaled scores, `cap tanh(score / cap)`.
    pub soft_cap: Option<f64>,
}

impl Sizes {
    /// Which keys the queries of sequence `batch` see; `first_keys` are (B, Tq), or nothing where the mask says it all.
    pub fn seen<'a>(&self, first_keys: &'a [u32], batch: usize) -> Seen<'a> {
        let first = batch * self.queries;
        Seen {
            mask: self.mask,
            queries: self.queries,
            keys: self.keys,
            first_keys: first_keys
                .get(first..first + self.queries)
                .unwrap_or_default(),
        }
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

/// Which keys the queries of one sequence see. Neither end of what a query sees lies before that of the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    mask: Mask,
    queries: usize,
    /// Tk.
    pub keys: usize,
    /// (Tq), the first key that each query sees, which never falls; or nothing, where each begins at the first.
    first_keys: &'a [u32],
}

impl Seen<'_> {
    /// What the mask leaves, of so many queries and keys.
    pub fn by_mask(mask: Mask, queries: usize, keys: usize) -> Self {
        Self {
            mask,
            queries,
            keys,
            first_keys: &[],
        }
    }

    /// Of them, what lies not before these first keys, (Tq).
    pub fn from_first_keys<'b>(&self, first_keys: &'b [u32]) -> Seen<'b> {
        Seen {
            mask: self.mask,
            queries: self.queries,
            keys: self.keys,
            first_keys,
        }
    }

    /// The keys that row `row` of matrices (.., Tq, Tk) sees, one below the other.
    #[inline(always)]
    pub fn by_row(&self, row: usize) -> Range<usize> {
        self.by(row % self.queries)
    }

    /// The keys that query `query` sees.
    #[inline(always)]
    pub fn by(&self, query: usize) -> Range<usize> {
        let Range { start, end } = self.mask.visible(query, self.queries, self.keys);
        let first = self
            .first_keys
            .get(query)
            .map_or(0, |first| *first as usize);
        first.clamp(start, end)..end
    }

    /// The keys from the first that a query in `queries` sees to the last.
    pub fn by_all_of(&self, queries: &Range<usize>) -> Range<usize> {
        self.by(queries.start).start..self.by(queries.end - 1).end
    }
}
