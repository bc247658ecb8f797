//! Which blocks of a model are recomputed in backward.

use crate::{Error, Result};
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// What a model's blocks leave for backward: activation checkpointing by name.
///
/// Gradients have the same bits with each. Where blocks are recomputed, all but the last segment of them are, by
/// [`checkpoint`](super::checkpoint()); the last one's graph, which backward wants at once, is kept. With segments of n
/// blocks, L / n inputs and the graph of n blocks are alive at a time in place of L graphs: about 2 sqrt(L) at best,
/// for n = sqrt(L).
///
/// As flags and files write it:
///
/// ```
/// use tallow::nn::Checkpointing;
///
/// for name in ["none", "block", "every-3", "sqrt"] {
///     let strategy: Checkpointing = name.parse()?;
///     println!("{strategy}: {} of 12 blocks are recomputed", strategy.recomputed_blocks(12));
/// }
/// assert_eq!("every-3".parse::<Checkpointing>()?.recomputed_blocks(12), 9);
/// assert_eq!("sqrt".parse::<Checkpointing>()?.recomputed_blocks(12), 8); // three segments of four
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
#[non_exhaustive]
pub enum Checkpointing {
    /// The whole graph.
    #[default]
    None,
    /// Each block's input: `Every(1)`.
    Block,
    /// The input of every segment of so many blocks.
    Every(NonZeroUsize),
    /// `Every(sqrt(L))`, rounded up.
    Sqrt,
}

impl Checkpointing {
    /// How many of `layers` blocks forward runs a second time, in backward.
    pub fn recomputed_blocks(self, layers: usize) -> usize {
        match self.segment_blocks(layers) {
            Some(blocks) => (layers.div_ceil(blocks.get()).max(1) - 1) * blocks.get(),
            None => 0,
        }
    }

    /// How many blocks a segment has; `None` where nothing is recomputed.
    pub(crate) fn segment_blocks(self, layers: usize) -> Option<NonZeroUsize> {
        match self {
            Self::None => None,
            Self::Block => Some(NonZeroUsize::MIN),
            Self::Every(blocks) => Some(blocks),
            Self::Sqrt => {
                let floor = layers.isqrt();
                let ceiling = floor + usize::from(floor * floor < layers);
                NonZeroUsize::new(ceiling).or(Some(NonZeroUsize::MIN))
            }
        }
    }
}

impl fmt::Display for Checkpointing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.pad("none"),
            Self::Block => f.pad("block"),
            Self::Every(blocks) => f.pad(&format!("every-{blocks}")),
            Self::Sqrt => f.pad("sqrt"),
        }
    }
}

impl FromStr for Checkpointing {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let every = |blocks: &str| blocks.parse().ok().map(Self::Every);
        let known = match name {
            "none" => Some(Self::None),
            "block" => Some(Self::Block),
            "sqrt" => Some(Self::Sqrt),
            _ => name.strip_prefix("every-").and_then(every),
        };
        known.ok_or_else(|| {
            Error::config("checkpointing", "strategy", format!("{name:?}")).must_be(
                "none, block, every-N with N from 1, or sqrt",
                "block keeps each block's input, every-N one of N blocks', sqrt of sqrt(L)",
            )
        })
    }
}

impl TryFrom<String> for Checkpointing {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl From<Checkpointing> for String {
    fn from(strategy: Checkpointing) -> Self {
        strategy.to_string()
    }
}
