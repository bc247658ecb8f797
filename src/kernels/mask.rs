//! Attention masks.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

/// The keys that each query attends to, for `Tq` queries and `Tk` keys.
///
/// A query without any key (possible where `Tq != Tk`) has zero probabilities, a zero output and zero gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mask {
    /// Every query attends to every key.
    #[default]
    Full,
    /// Query `i` attends to the keys `j <= i`, aligned at the first key: the causal mask of training, where `Tq = Tk`.
    Causal,
    /// Query `i` attends to the keys `j <= i + Tk - Tq`, aligned at the last key. This is the mask of decoding, where
    /// the queries are the newest tokens and the keys are the whole cache.
    CausalEnd,
    /// Query `i` attends to `n` keys up to its own, `i - n < j <= i`: a sliding window, as in Mistral.
    Window(NonZeroUsize),
}

impl Mask {
    /// Returns the keys that query `query` attends to.
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

    /// Returns the offset of the diagonal: query i attends to no key after `i + offset`.
    #[cfg(feature = "cuda")]
    pub(crate) fn offset(self, queries: usize, keys: usize) -> i64 {
        match self {
            Mask::Full => keys as i64,
            Mask::Causal | Mask::Window(_) => 0,
            Mask::CausalEnd => keys as i64 - queries as i64,
        }
    }

    /// Returns [`window`](Self::window) as the CUDA kernels expect it: 0 means no limit.
    #[cfg(feature = "cuda")]
    pub(crate) fn window_or_0(self) -> i32 {
        self.window().map_or(0, |keys| {
            i32::try_from(keys.get()).unwrap_or(i32::MAX) // at least the number of keys
        })
    }

    /// Returns the window length, if the mask has one.
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
