//! Which keys a query may look at.

use std::fmt;
use std::ops::Range;

/// Which keys each query of an attention sees, for `Tq` queries and `Tk` keys.
///
/// A query that sees no key at all (possible where `Tq != Tk`) gets zeros: zero probabilities, zero output, zero
/// gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mask {
    /// Every query sees every key.
    #[default]
    Full,
    /// Query `i` sees the keys `j <= i`: aligned at the first key. For `Tq = Tk` this is the causal mask of training.
    Causal,
    /// Query `i` sees the keys `j <= i + Tk - Tq`: aligned at the last key, as when the queries are the newest
    /// tokens and the keys a whole cache.
    CausalEnd,
}

impl Mask {
    /// The keys that query `query` sees; all masks here leave a prefix.
    ///
    /// ```
    /// use tallow::attention::Mask;
    /// assert_eq!(Mask::Causal.visible(1, 3, 5), 0..2);
    /// assert_eq!(Mask::CausalEnd.visible(1, 3, 5), 0..4);
    /// assert_eq!(Mask::CausalEnd.visible(0, 3, 2), 0..0);
    /// ```
    #[inline]
    pub fn visible(self, query: usize, queries: usize, keys: usize) -> Range<usize> {
        match self {
            Mask::Full => 0..keys,
            Mask::Causal => 0..(query + 1).min(keys),
            Mask::CausalEnd => 0..(query + 1 + keys).saturating_sub(queries).min(keys),
        }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::CausalEnd => "causal, aligned at the last key",
        })
    }
}
