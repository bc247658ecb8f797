//! Attention sizes and the range of keys that each query attends to.

use super::Mask;
use std::ops::Range;

/// The sizes and options of one attention call, shared by the kernels of every device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// B: the batch size.
    pub batch: usize,
    /// H: the number of heads of q.
    pub heads: usize,
    /// Hkv: the number of heads of k and v. Each serves H / Hkv consecutive heads of q.
    pub kv_heads: usize,
    /// Tq: the number of queries.
    pub queries: usize,
    /// Tk: the number of keys.
    pub keys: usize,
    /// Dh: the head dimension of q and k.
    pub head_dim: usize,
    /// Dv: the head dimension of v and the output. Flash attention requires Dv = Dh.
    pub value_dim: usize,
    /// The mask: the keys that each query attends to.
    pub mask: Mask,
    /// The factor of the scores.
    pub scale: f64,
    /// The soft cap C of the scaled scores, `C tanh(score / C)`.
    pub soft_cap: Option<f64>,
}

impl Sizes {
    /// Returns the key ranges of sequence `batch`. `first_keys` is (B, Tq), or empty if the mask alone decides.
    pub fn key_ranges<'a>(&self, first_keys: &'a [u32], batch: usize) -> KeyRanges<'a> {
        let first = batch * self.queries;
        KeyRanges {
            mask: self.mask,
            queries: self.queries,
            keys: self.keys,
            first_keys: first_keys
                .get(first..first + self.queries)
                .unwrap_or_default(),
        }
    }

    /// Returns the number of heads of q that share a head of k and v.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Returns B H, the number of matrices of q.
    pub fn matrices(&self) -> usize {
        self.batch * self.heads
    }

    /// Returns B Hkv, the number of matrices of k and v.
    pub fn kv_matrices(&self) -> usize {
        self.batch * self.kv_heads
    }
}

/// The range of keys of each query of one sequence. Neither end decreases from a query to the next.
#[derive(Clone, Copy, Debug)]
pub struct KeyRanges<'a> {
    mask: Mask,
    queries: usize,
    /// Tk: the number of keys.
    pub keys: usize,
    /// The first key of each query, (Tq), never decreasing. Empty if the mask alone decides.
    first_keys: &'a [u32],
}

impl KeyRanges<'_> {
    /// Returns the key ranges of a mask, without first keys.
    pub fn by_mask(mask: Mask, queries: usize, keys: usize) -> Self {
        Self {
            mask,
            queries,
            keys,
            first_keys: &[],
        }
    }

    /// Returns these ranges, limited to start at `first_keys` (Tq) or later.
    pub fn from_first_keys<'b>(&self, first_keys: &'b [u32]) -> KeyRanges<'b> {
        KeyRanges {
            mask: self.mask,
            queries: self.queries,
            keys: self.keys,
            first_keys,
        }
    }

    /// Returns the keys of row `row`, counted through matrices (.., Tq, Tk).
    #[inline(always)]
    pub fn of_row(&self, row: usize) -> Range<usize> {
        self.of_query(row % self.queries)
    }

    /// Returns the keys of query `query`.
    #[inline(always)]
    pub fn of_query(&self, query: usize) -> Range<usize> {
        let Range { start, end } = self.mask.visible(query, self.queries, self.keys);
        let first = self
            .first_keys
            .get(query)
            .map_or(0, |first| *first as usize);
        first.clamp(start, end)..end
    }

    /// Returns the smallest range that contains the keys of all `queries`, which must not be empty.
    pub fn of_queries(&self, queries: &Range<usize>) -> Range<usize> {
        self.of_query(queries.start).start..self.of_query(queries.end - 1).end
    }
}
