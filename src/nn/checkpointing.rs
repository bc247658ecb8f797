//! Activation checkpointing: the blocks of a model that are recomputed in backward.

use crate::{Error, Result};
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// The strategy of activation checkpointing for a model's blocks.
///
/// Gradients have the same bits with every strategy. Segments of n blocks are recomputed by
/// [`checkpoint`](super::checkpoint()), except the last one, whose graph backward needs immediately. The inputs of L /
/// n segments and the graphs of n blocks are alive at a time, instead of L graphs. Their sum is least for n = sqrt(L).
///
/// Flags and files use these names:
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
    /// Saves the whole graph.
    #[default]
    None,
    /// Saves the input of each block: `Every(1)`.
    Block,
    /// Saves the input of each segment of `n` blocks.
    Every(NonZeroUsize),
    /// `Every(sqrt(L))`, with sqrt(L) rounded up.
    Sqrt,
}

impl Checkpointing {
    /// Returns how many of `layers` blocks are recomputed in backward.
    pub fn recomputed_blocks(self, layers: usize) -> usize {
        match self.segment_blocks(layers) {
            Some(blocks) => (layers.div_ceil(blocks.get()).max(1) - 1) * blocks.get(),
            None => 0,
        }
    }

    /// Returns the number of blocks in a segment; `None` if nothing is recomputed.
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
                "block saves each block's input, every-N that of every N blocks, sqrt that of every sqrt(L)",
            )
        })
    }
}
