//! Precision chosen by name.

use super::{Autocast, autocast};
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What a model with f32 parameters computes in.
///
/// ```
/// use tallow::precision::Precision;
/// let precision: Precision = "bf16".parse()?;
/// assert_eq!(precision, Precision::Bf16);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32 throughout: no region.
    #[default]
    F32,
    /// [`Autocast::cuda`] in bf16.
    Bf16,
    /// [`Autocast::cuda`] in f16. Gradients under 6e-8 become 0 in it, which is what scaling the loss is for.
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// The policy of its region; `None` where there is none.
    pub fn policy(self) -> Option<Autocast> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(Autocast::cuda(DType::BF16)),
            Self::F16 => Some(Autocast::cuda(DType::F16)),
        }
    }

    /// Runs `f` in its region.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn run<T>(self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.policy() {
            Some(policy) => autocast(policy, f),
            None => f(),
        }
    }

    /// As flags and reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Precision {
    type Err = Error;

    /// By [name](Self::name); PyTorch's fp32 and fp16 will do too.
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "f32" | "fp32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "f16" | "fp16" => Ok(Self::F16),
            _ => Err(Error::Config {
                config: "precision",
                field: "name",
                expected: "f32, bf16 or f16".into(),
                got: format!("{name:?}"),
                hint: "bf16 has the range of f32, and f16 three bits more".into(),
            }),
        }
    }
}
