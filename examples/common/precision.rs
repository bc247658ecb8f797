//! The flags that select precisions, and their combinations.

use clap::{Args, ValueEnum};
use tallow::precision::{Precision, Regime};
use tallow::{Error, Result};

/// Flags of every example that can compute in half precision.
#[derive(Args, Clone, Debug)]
pub struct PrecisionFlags {
    /// f32, bf16, f16: autocast with f32 parameters; several
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "NAME")]
    precision: Vec<Precision>,

    /// Autocast's lists of ops, cuda or cpu [default: cuda]
    #[arg(long, hide_short_help = true, value_enum, value_name = "NAME")]
    autocast: Option<AutocastFlag>,

    /// Half precision throughout, parameters too
    #[arg(long, conflicts_with_all = ["autocast", "drop_casts"])]
    full_half: bool,

    /// Drop the copy of a weight after each use
    #[arg(long)]
    drop_casts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AutocastFlag {
    /// PyTorch's lists for CUDA: softmax and layer norm in f32
    Cuda,
    /// PyTorch's lists for the CPU: softmax and layer norm in their input's dtype
    Cpu,
}

impl PrecisionFlags {
    /// Returns the precisions of the flags without duplicates; f32 if there are none.
    pub fn precisions(&self) -> Result<Vec<Precision>> {
        let named = match self.precision[..] {
            [] => &[Precision::F32],
            ref named => named,
        };
        // f32 among others is the baseline. If it is the only precision, the other flags have no effect.
        if self.names_half_precision() && named.iter().all(|p| *p == Precision::F32) {
            return refuse("bf16 or f16 among --precision", "f32 alone");
        }
        let mut combined = Vec::new();
        for precision in named {
            let precision = self.combined(*precision)?;
            if !combined.contains(&precision) {
                combined.push(precision);
            }
        }
        Ok(combined)
    }

    /// Returns the single precision of the flags, or f32: for programs that run once.
    pub fn precision(&self) -> Result<Precision> {
        match self.precisions()?[..] {
            [precision] => Ok(precision),
            ref several => refuse("one precision", &format!("{} of them", several.len())),
        }
    }

    /// Returns the precision in the regime of the other flags.
    fn combined(&self, named: Precision) -> Result<Precision> {
        let regime = match (self.full_half, self.autocast) {
            (true, _) => Some(Regime::Full),
            (_, Some(AutocastFlag::Cuda)) => Some(Regime::CudaAutocast),
            (_, Some(AutocastFlag::Cpu)) => Some(Regime::CpuAutocast),
            _ => None,
        };
        let own = named.regime(); // names have regimes too: bf16-cpu, bf16-full
        let contradicted = match regime {
            Some(Regime::Full) if named.drops_casts() => true,
            Some(regime) => own != Regime::default() && regime != own,
            None => self.drop_casts && own == Regime::Full,
        };
        if contradicted {
            return refuse(
                "flags that agree with each other",
                &format!("--precision {named} and another regime"),
            );
        }
        let precision = named.with_regime(regime.unwrap_or(own));
        Ok(precision.with_dropped_casts(self.drop_casts || named.drops_casts()))
    }

    fn names_half_precision(&self) -> bool {
        self.autocast.is_some() || self.full_half || self.drop_casts
    }
}

fn refuse<T>(expected: &str, got: &str) -> Result<T> {
    Err(Error::Config {
        config: super::PROGRAM,
        field: "--precision",
        expected: expected.into(),
        got: got.into(),
        hint: "--autocast, --drop-casts and --full-half say how bf16 and f16 are used".into(),
    })
}
