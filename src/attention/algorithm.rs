//! The algorithm of attention, selected by name.

use super::{AttentionConfig, flash, naive};
use crate::{Error, Result};
use candle_core::Tensor;
use std::fmt;
use std::str::FromStr;

/// The algorithm that computes attention. Results differ only by rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Algorithm {
    /// [`naive()`]: saves the probabilities, O(Tq Tk) memory.
    #[default]
    Naive,
    /// [`flash()`]: works tile by tile, O(Tq + Tk) memory.
    Flash,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 2] = [Self::Naive, Self::Flash];

    /// Computes attention; [`naive()`] and [`flash()`] list the shapes.
    ///
    /// # Errors
    /// The errors of the algorithm.
    pub fn attend(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        config: &AttentionConfig,
    ) -> Result<Tensor> {
        match self {
            Self::Naive => naive(q, k, v, config),
            Self::Flash => flash(q, k, v, config),
        }
    }

    /// Returns the name in flags and reports: "naive" or "flash".
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Flash => "flash",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|a| a.name() == name);
        known.ok_or_else(|| {
            Error::config("attention", "algorithm", format!("{name:?}")).must_be(
                "naive or flash",
                "flash needs less memory, and less time from a few hundred keys on",
            )
        })
    }
}
