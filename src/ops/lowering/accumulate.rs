//! Sums over micro-batches.

use std::fmt;

/// Whether a call adds to what it writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accumulate {
    /// It is overwritten.
    #[default]
    Never,
    /// Overwritten by the first micro-batch, added to by the others.
    AfterFirst,
    /// Added to.
    Always,
}

impl Accumulate {
    /// Whether to add, in micro-batch `micro_batch` of a step.
    pub fn adds(self, micro_batch: usize) -> bool {
        match self {
            Self::Never => false,
            Self::AfterFirst => micro_batch > 0,
            Self::Always => true,
        }
    }
}

impl fmt::Display for Accumulate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Never => "",
            Self::AfterFirst => "+= from the second micro-batch",
            Self::Always => "+=",
        })
    }
}
