//! The norms that the kernels compute.

/// A norm of rows of D elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm: `y = w x / sqrt(mean(x^2) + eps)`.
    Rms,
    /// RMSNorm with an offset of 1 on the weights, as in Gemma: `y = (1 + w) x / sqrt(mean(x^2) + eps)`.
    OffsetRms,
    /// LayerNorm: `y = w (x - mean) / sqrt(mean((x - mean)^2) + eps) + b`.
    Layer,
}

impl Norm {
    /// Returns the number of statistics per row: rstd, preceded by the mean for LayerNorm.
    pub const fn statistics(self) -> usize {
        match self {
            Self::Rms | Self::OffsetRms => 1,
            Self::Layer => 2,
        }
    }

    /// Returns the number of parameters whose gradients are sums over rows: w, and b for LayerNorm.
    pub const fn sums(self) -> usize {
        self.statistics()
    }
}
