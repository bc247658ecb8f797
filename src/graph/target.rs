//! Whose kernels run.

use candle_core::Device;

/// Whose kernels run what is traced or predicted: it decides which ops have one. No such device need be there. Ops that
/// have none on a GPU are composed of candle's there, and keep and take more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Target {
    /// The CPU's.
    #[default]
    Cpu,
    /// Those for NVIDIA's GPUs of compute capability 8.0 and later, in f32, f16 and bf16. In f64, and on older GPUs,
    /// ops are composed of candle's: breakdowns of memory are too low there.
    Cuda,
}

impl Target {
    /// Those that run on `device`. Metal's are taken for the CPU's.
    pub fn of(device: &Device) -> Self {
        match device {
            Device::Cuda(_) => Self::Cuda,
            _ => Self::Cpu,
        }
    }
}

/// [`Target::of`].
impl From<&Device> for Target {
    fn from(device: &Device) -> Self {
        Self::of(device)
    }
}
