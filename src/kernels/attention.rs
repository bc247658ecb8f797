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
    /// Dv: the head dimension of v and the output.
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

    /// Returns the larger of Dh and Dv.
    pub fn widest(&self) -> usize {
        self.head_dim.max(self.value_dim)
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

/// A contiguous tensor that broadcasts to the scores (B, H, Tq, Tk): each of its dimensions is theirs, or 1.
#[derive(Clone, Copy, Debug)]
pub struct PerScore<'a, T> {
    data: &'a [T],
    dims: [usize; 4],
}

/// The matrix (Tq, Tk) of one head of a [`PerScore`]; a stride of 0 repeats.
#[derive(Clone, Copy, Debug)]
pub struct PerScoreOfHead<'a, T> {
    data: &'a [T],
    row: usize,
    column: usize,
}

impl<'a, T: Copy> PerScore<'a, T> {
    /// Creates a tensor of these dimensions.
    pub fn new(data: &'a [T], dims: [usize; 4]) -> Self {
        assert_eq!(data.len(), dims.iter().product::<usize>());
        Self { data, dims }
    }

    /// Returns the matrix of a head.
    pub fn of(&self, batch: usize, head: usize) -> PerScoreOfHead<'a, T> {
        let [batches, heads, queries, keys] = self.dims;
        let index = |i: usize, of: usize| if of == 1 { 0 } else { i };
        let matrix = index(batch, batches) * heads + index(head, heads);
        let stride = |of: usize, stride: usize| if of == 1 { 0 } else { stride };
        PerScoreOfHead {
            data: &self.data[matrix * queries * keys..],
            row: stride(queries, keys),
            column: stride(keys, 1),
        }
    }
}

impl<T: Copy> PerScoreOfHead<'_, T> {
    /// Returns the element of a pair.
    #[inline(always)]
    pub fn at(&self, query: usize, key: usize) -> T {
        self.data[query * self.row + key * self.column]
    }

    /// Calls `f` with the different rows of some queries, each limited to `keys`, until it returns false.
    pub fn each_row(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        mut f: impl FnMut(&[T]) -> bool,
    ) {
        let keys = match self.column {
            0 => 0..1,
            _ => keys.clone(),
        };
        let last = if self.row == 0 { 1 } else { queries.len() };
        for query in queries.clone().take(last) {
            if !f(&self.data[query * self.row..][keys.clone()]) {
                return;
            }
        }
    }
}
