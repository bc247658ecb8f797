//! The two norms of rows.

/// Which norm of a row of D elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm: `y = w x / sqrt(mean(x^2) + eps)`.
    Rms,
    /// LayerNorm: `y = w (x - mean) / sqrt(mean((x - mean)^2) + eps) + b`.
    Layer,
}

impl Norm {
    /// What forward keeps of each row: the mean, if it takes one, and rstd, 1 over the square root.
    pub const fn statistics(self) -> usize {
        match self {
            Self::Rms => 1,
            Self::Layer => 2,
        }
    }

    /// What backward sums over rows: the gradients of w and, if there is one, b.
    pub const fn sums(self) -> usize {
        self.statistics()
    }
}
