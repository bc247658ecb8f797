//! The precision of a model, by name.

use super::{Autocast, autocast};
use crate::{Error, Result};
use Regime::{CpuAutocast, CudaAutocast, Full};
use candle_core::DType::{self, BF16, F16, F32};
use std::fmt;
use std::str::FromStr;

/// The precision of a model: f32, or half precision in one of the [regimes](Regime).
///
/// ```
/// use candle_core::DType;
/// use tallow::precision::{Precision, Regime};
///
/// let precision: Precision = "bf16".parse()?;
/// assert_eq!(precision, Precision::BF16); // autocast with CUDA's policy and f32 parameters
/// let full = precision.with_regime(Regime::Full);
/// assert_eq!(full.parameter_dtype(), DType::BF16);
/// assert_eq!(full.to_string(), "bf16-full");
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct Precision {
    dtype: DType,
    regime: Regime,
    drops_casts: bool,
}

impl Default for Precision {
    fn default() -> Self {
        Self::F32
    }
}

/// The way in which a model uses half precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Regime {
    /// Parameters in f32, forward and loss under [`Autocast::cuda`].
    #[default]
    CudaAutocast,
    /// Parameters in f32, forward and loss under [`Autocast::cpu`].
    CpuAutocast,
    /// Parameters, activations and gradients in half precision, without autocast. Optimizers of this crate keep master
    /// weights and moments in f32.
    Full,
}

/// The names of all precisions in flags and files.
const NAMES: [(&str, DType, Regime, bool); 11] = [
    ("f32", F32, CudaAutocast, false),
    ("bf16", BF16, CudaAutocast, false),
    ("bf16-dropping-casts", BF16, CudaAutocast, true),
    ("bf16-cpu", BF16, CpuAutocast, false),
    ("bf16-cpu-dropping-casts", BF16, CpuAutocast, true),
    ("bf16-full", BF16, Full, false),
    ("f16", F16, CudaAutocast, false),
    ("f16-dropping-casts", F16, CudaAutocast, true),
    ("f16-cpu", F16, CpuAutocast, false),
    ("f16-cpu-dropping-casts", F16, CpuAutocast, true),
    ("f16-full", F16, Full, false),
];

fn named() -> impl Iterator<Item = (&'static str, Precision)> {
    let precision = |(name, dtype, regime, drops_casts)| {
        let precision = Precision {
            dtype,
            regime,
            drops_casts,
        };
        (name, precision)
    };
    NAMES.into_iter().map(precision)
}

impl Precision {
    /// f32, without autocast.
    pub const F32: Self = Self::new(F32);
    /// [`Autocast::cuda`] in bf16.
    pub const BF16: Self = Self::new(BF16);
    /// [`Autocast::cuda`] in f16. Gradients below 6e-8 become 0: [scale the loss](crate::optim::GradScaler).
    pub const F16: Self = Self::new(F16);

    /// The three precisions with the default regime.
    pub const ALL: [Self; 3] = [Self::F32, Self::BF16, Self::F16];

    const fn new(dtype: DType) -> Self {
        Self {
            dtype,
            regime: CudaAutocast,
            drops_casts: false,
        }
    }

    /// Sets the regime. f32 has none and is unchanged.
    #[must_use]
    pub const fn with_regime(self, regime: Regime) -> Self {
        Self { regime, ..self }.with_dropped_casts(self.drops_casts)
    }

    /// Sets whether weights are cast at each use instead of once in a region ([`Autocast::with_weight_cache`]); off by
    /// default. It has no effect in f32 and in [`Regime::Full`].
    #[must_use]
    pub const fn with_dropped_casts(self, drops_casts: bool) -> Self {
        match (self.dtype, self.regime) {
            (F32, _) => Self::F32,
            (_, Full) => Self {
                drops_casts: false,
                ..self
            },
            _ => Self {
                drops_casts,
                ..self
            },
        }
    }

    /// Returns the dtype of matmuls.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Returns the dtype of the parameters: f32 except in [`Regime::Full`].
    pub fn parameter_dtype(self) -> DType {
        match self.regime {
            Full => self.dtype(),
            CudaAutocast | CpuAutocast => F32,
        }
    }

    /// Returns the regime; the default for f32.
    pub fn regime(self) -> Regime {
        self.regime
    }

    /// Returns whether weights are [cast at each use](Self::with_dropped_casts).
    pub fn drops_casts(self) -> bool {
        self.drops_casts
    }

    /// Returns the autocast policy, if there is one.
    pub fn policy(self) -> Option<Autocast> {
        let policy = match (self.dtype, self.regime) {
            (F32, _) | (_, Full) => return None,
            (dtype, CudaAutocast) => Autocast::cuda(dtype),
            (dtype, CpuAutocast) => Autocast::cpu(dtype),
        };
        Some(policy.with_weight_cache(!self.drops_casts))
    }

    /// Runs `f` under the autocast policy, if there is one.
    ///
    /// # Errors
    /// Errors of `f`.
    pub fn run<T>(self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.policy() {
            Some(policy) => autocast(policy, f),
            None => f(),
        }
    }

    /// Returns the name in flags and reports: the dtype, then `-cpu` or `-full` for another regime than the default,
    /// then `-dropping-casts`.
    pub fn name(self) -> &'static str {
        let found = named().find(|(_, precision)| *precision == self);
        found.map_or("f32", |(name, _)| name)
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Precision {
    type Err = Error;

    /// Parses a [name](Self::name), in any case. PyTorch's names of dtypes are aliases: float32, fp32, float16, fp16,
    /// half, bfloat16.
    fn from_str(name: &str) -> Result<Self> {
        const ALIASES: [(&str, &str); 6] = [
            ("bfloat16", "bf16"),
            ("float32", "f32"),
            ("float16", "f16"),
            ("fp32", "f32"),
            ("fp16", "f16"),
            ("half", "f16"),
        ];
        let lower = name.to_lowercase();
        let alias = ALIASES.iter().find_map(|(alias, ours)| {
            let regime = lower.strip_prefix(alias)?;
            Some(format!("{ours}{regime}"))
        });
        let ours = alias.unwrap_or(lower);
        let found = named().find(|(known, _)| *known == ours);
        found.map(|(_, precision)| precision).ok_or_else(|| {
            Error::config("precision", "name", format!("{name:?}")).must_be(
                "f32, bf16 or f16, these two also with an ending: -cpu, -full, -dropping-casts",
                "bf16 has the range of f32, and f16 three bits more",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Tensor, Var};

    #[test]
    fn every_combination_has_a_name_of_its_own() {
        for dtype in Precision::ALL {
            for regime in [Regime::CudaAutocast, Regime::CpuAutocast, Regime::Full] {
                for drops in [false, true] {
                    let one = dtype.with_regime(regime).with_dropped_casts(drops);
                    let other = dtype.with_dropped_casts(drops).with_regime(regime);
                    assert_eq!(one, other);
                    assert!(named().any(|(_, known)| known == one), "{one:?}");
                    assert_eq!(one.name().parse::<Precision>().unwrap(), one);
                    assert_eq!(one.dtype(), dtype.dtype());
                }
            }
        }
        let mut names: Vec<&str> = named().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), NAMES.len());
    }

    #[cfg(feature = "files")]
    #[test]
    fn json_gives_back_what_it_was_given() {
        for (name, precision) in named() {
            let json = serde_json::to_string(&precision).unwrap();
            assert_eq!(json, format!("\"{name}\""));
            let read: Precision = serde_json::from_str(&json).unwrap();
            assert_eq!(read, precision);
        }
    }

    #[test]
    fn regimes_are_what_they_say() -> Result<()> {
        let x = Tensor::ones((2, 3), DType::F32, &candle_core::Device::Cpu)?;
        let w = Var::ones((5, 3), DType::F32, &candle_core::Device::Cpu)?;
        let softmax = |precision: Precision| {
            precision.run(|| {
                let y = crate::ops::linear(&x, &w)?;
                let p = crate::ops::softmax(&y, 1.0, crate::kernels::Mask::Full)?;
                Ok((y.dtype(), p.dtype()))
            })
        };
        assert_eq!(softmax(Precision::F32)?, (F32, F32));
        assert_eq!(softmax(Precision::BF16)?, (BF16, F32));
        let cpu = Precision::BF16.with_regime(Regime::CpuAutocast);
        assert_eq!(softmax(cpu)?, (BF16, BF16));
        let full = Precision::BF16.with_regime(Regime::Full);
        assert_eq!(softmax(full)?, (F32, F32)); // there is no region: it is the parameters that are in half
        assert_eq!(full.parameter_dtype(), BF16);
        assert_eq!(cpu.parameter_dtype(), F32);
        Ok(())
    }
}
