//! What a trace is for.

/// Whose kernels the traced function would run: it decides which ops have one. No such device need be there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU of compute capability 8.0 or later.
    Cuda,
}
