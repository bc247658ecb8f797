//! What work costs.

use std::ops::{Add, AddAssign};

/// FLOPs and bytes of one call of an op, or of several together.
///
/// The model's work, whatever computes it, as [`flops`](crate::model::flops) counts it: a causal mask saves nothing,
/// and what flash attention computes twice counts once. Bytes are the least that must move: every tensor read once and
/// written once, what forward keeps for backward included, caches and second passes not. So a rate over the memory's
/// own says that the tensors were still in cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// 2 for each multiply-add of the matrix products.
    pub product_flops: f64,
    /// Everything else, an exponential, a root and a division counting 1.
    pub other_flops: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub written_bytes: f64,
}

impl Cost {
    /// All FLOPs.
    pub fn flops(&self) -> f64 {
        self.product_flops + self.other_flops
    }

    /// All bytes.
    pub fn bytes(&self) -> f64 {
        self.read_bytes + self.written_bytes
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            product_flops: self.product_flops + other.product_flops,
            other_flops: self.other_flops + other.other_flops,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
