//! Accumulation over micro-batches.

use std::fmt;

/// Whether a call overwrites its output or adds to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accumulate {
    /// Overwrites the output.
    #[default]
    Never,
    /// Overwrites it in the first micro-batch, and adds to it in the others.
    AfterFirst,
    /// Adds to the output.
    Always,
}

impl Accumulate {
    /// Returns whether to add in micro-batch `micro_batch` of a step.
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
