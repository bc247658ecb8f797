//! RMSNorm and LayerNorm as a parameter of kernels.

/// A norm over rows of D elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm: `y = w x / sqrt(mean(x^2) + eps)`.
    Rms,
    /// RMSNorm with the weights counted from 1: `y = (1 + w) x / sqrt(mean(x^2) + eps)`.
    OffsetRms,
    /// LayerNorm: `y = w (x - mean) / sqrt(mean((x - mean)^2) + eps) + b`.
    Layer,
}

impl Norm {
    /// Returns how many statistics a row has: rstd, after the mean for LayerNorm.
    pub const fn statistics(self) -> usize {
        match self {
            Self::Rms | Self::OffsetRms => 1,
            Self::Layer => 2,
        }
    }

    /// Returns how many parameters have gradients that are summed over rows.
    pub const fn sums(self) -> usize {
        self.statistics()
    }
}
