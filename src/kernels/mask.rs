//! Which keys a query may look at.

use std::fmt;
use std::num::NonZeroUsize;
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
    /// Query `i` sees this many keys up to its own, `i - n < j <= i`: a sliding window, as Mistral's.
    Window(NonZeroUsize),
}

impl Mask {
    /// The keys that query `query` sees.
    ///
    /// ```
    /// use tallow::attention::Mask;
    /// assert_eq!(Mask::Causal.visible(1, 3, 5), 0..2);
    /// assert_eq!(Mask::CausalEnd.visible(1, 3, 5), 0..4);
    /// assert_eq!(Mask::CausalEnd.visible(0, 3, 2), 0..0);
    /// assert_eq!(Mask::Window(2.try_into().unwrap()).visible(2, 3, 5), 1..3);
    /// ```
    #[inline]
    pub fn visible(self, query: usize, queries: usize, keys: usize) -> Range<usize> {
        match self {
            Mask::Full => 0..keys,
            Mask::Causal => 0..(query + 1).min(keys),
            Mask::CausalEnd => 0..(query + 1 + keys).saturating_sub(queries).min(keys),
            Mask::Window(keys_seen) => {
                let end = (query + 1).min(keys);
                (query + 1).saturating_sub(keys_seen.get()).min(end)..end
            }
        }
    }

    /// Query i sees no key after i + this, of so many queries and keys.
    #[cfg(feature = "cuda")]
    pub(crate) fn offset(self, queries: usize, keys: usize) -> i64 {
        match self {
            Mask::Full => keys as i64,
            Mask::Causal | Mask::Window(_) => 0,
            Mask::CausalEnd => keys as i64 - queries as i64,
        }
    }

    /// [`window`](Self::window) as kernels on a GPU take it: 0 where it is not limited.
    #[cfg(feature = "cuda")]
    pub(crate) fn window_or_0(self) -> i32 {
        self.window().map_or(0, |keys| {
            i32::try_from(keys.get()).unwrap_or(i32::MAX) // more than there are
        })
    }

    /// How many keys before its own a query sees at most, where that is limited.
    #[cfg(feature = "cuda")]
    pub(crate) fn window(self) -> Option<NonZeroUsize> {
        match self {
            Mask::Window(keys_seen) => Some(keys_seen),
            _ => None,
        }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::CausalEnd => "causal, aligned at the last key",
            Self::Window(keys_seen) => return write!(f, "causal, a window of {keys_seen}"),
        })
    }
}
