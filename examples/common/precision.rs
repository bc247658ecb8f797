//! The flag that selects precisions.

use clap::Args;
use indexmap::IndexSet;
use tallow::Result;
use tallow::precision::Precision;

/// The flag of every example that can compute in half precision.
#[derive(Args, Clone, Debug)]
pub struct PrecisionFlags {
    /// f32, bf16, f16; endings -cpu, -full, -dropping-casts
    ///
    /// bf16 and f16 are autocast with f32 parameters and PyTorch's lists of ops for CUDA. bf16-cpu has the lists for
    /// the CPU. bf16-full is half precision throughout, parameters too. bf16-dropping-casts and bf16-cpu-dropping-casts
    /// drop the copy of a weight after each use. f16 has the same endings.
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "f32", value_name = "NAME")]
    precision: Vec<Precision>,
}

impl PrecisionFlags {
    /// Returns the precisions of the flag without duplicates.
    pub fn precisions(&self) -> Vec<Precision> {
        let unique: IndexSet<Precision> = self.precision.iter().copied().collect();
        unique.into_iter().collect()
    }

    /// Returns the single precision of the flag, for programs that run once.
    pub fn precision(&self) -> Result<Precision> {
        match self.precisions()[..] {
            [precision] => Ok(precision),
            ref several => {
                let hint = "run the program once for each";
                Err(super::refusal("--precision", "one", several.len(), hint))
            }
        }
    }
}
