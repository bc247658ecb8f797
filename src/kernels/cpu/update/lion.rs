//! Lion's update.
//!
//! ```text
//! c  = m + (1 - beta1) (g - m)
//! p  = (1 - lr * weight_decay) p - lr sign(c)
//! m += (1 - beta2) (g - m)
//! ```
//!
//! The sign of NaN is NaN. In `f32` it reads 12 bytes per element and writes 8.

use super::{COEFFICIENTS, Elementwise, Real};

/// The coefficients of a step of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// The factor of a parameter by weight decay: `1 - lr * weight_decay`.
    pub decay: f64,
    /// The weight of the gradient in the mean whose sign is the direction: `1 - beta1`.
    pub one_minus_beta1: f64,
    /// The weight of the gradient in the running mean: `1 - beta2`.
    pub one_minus_beta2: f64,
    /// The learning rate.
    pub lr: f64,
}

impl Lion {
    /// Returns the name of its kernel on a GPU.
    pub fn kernel(&self) -> &'static str {
        "lion"
    }

    /// Returns the coefficients in the order of its kernels.
    pub fn words(&self) -> [f64; COEFFICIENTS] {
        let words = [self.decay, self.one_minus_beta1, self.one_minus_beta2];
        let [decay, one_minus_beta1, one_minus_beta2] = words;
        [
            decay,
            one_minus_beta1,
            one_minus_beta2,
            self.lr,
            0.0,
            0.0,
            0.0,
        ]
    }
}

impl Elementwise<1> for Lion {
    const STATES: [&'static str; 1] = ["exp_avg"];

    #[inline(always)]
    fn element<T: Real>(
        [decay, first_share, second_share, lr, ..]: [T; COEFFICIENTS],
        p: T,
        g: T,
        [m]: [T; 1],
    ) -> (T, [T; 1]) {
        let difference = g - m;
        let c = m + first_share * difference;
        let zero_or_nan = if c > T::ZERO { T::ONE } else { c };
        let sign = if c < T::ZERO { -T::ONE } else { zero_or_nan };
        (p * decay - lr * sign, [m + second_share * difference])
    }
}
