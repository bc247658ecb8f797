//! AdamW's update.
//!
//! With decay `1 - lr * weight_decay` and bias corrections `c1 = 1 - beta1^t`, `c2 = 1 - beta2^t`:
//!
//! ```text
//! p *= decay
//! m += (1 - beta1) (g - m)
//! v  = beta2 v + (1 - beta2) g^2
//! p -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)
//! ```
//!
//! In `f32` it reads 16 bytes per element and writes 12.

use super::{COEFFICIENTS, Elementwise, Real};

/// The coefficients of a step of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The factor of a parameter by weight decay: `1 - lr * weight_decay`.
    pub decay: f64,
    /// The weight of the gradient in the first moment: `1 - beta1`.
    pub one_minus_beta1: f64,
    /// The decay rate of the second moment.
    pub beta2: f64,
    /// The weight of the squared gradient in the second moment: `1 - beta2`.
    pub one_minus_beta2: f64,
    /// `lr / (1 - beta1^t)`.
    pub step_size: f64,
    /// `sqrt(1 - beta2^t)`.
    pub second_correction: f64,
    /// A term of the denominator: it is added to the root of the corrected second moment.
    pub eps: f64,
}

impl AdamW {
    /// Returns the coefficients of step `step`, counted from 1.
    pub fn new(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: usize) -> Self {
        let (beta1, beta2) = betas;
        let step = step as f64;
        Self {
            decay: 1.0 - lr * weight_decay,
            one_minus_beta1: 1.0 - beta1,
            beta2,
            one_minus_beta2: 1.0 - beta2,
            step_size: lr / (1.0 - beta1.powf(step)),
            second_correction: (1.0 - beta2.powf(step)).sqrt(),
            eps,
        }
    }

    /// Returns the name of its kernel on a GPU.
    pub fn kernel(&self) -> &'static str {
        "adamw"
    }

    /// Returns the coefficients in the order of its kernels.
    pub fn words(&self) -> [f64; COEFFICIENTS] {
        [
            self.decay,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.step_size,
            self.second_correction,
            self.eps,
        ]
    }
}

/// In PyTorch's order of operations.
impl Elementwise<2> for AdamW {
    const STATES: [&'static str; 2] = ["exp_avg", "exp_avg_sq"];

    #[inline(always)]
    fn element<T: Real>(
        coefficients: [T; COEFFICIENTS],
        p: T,
        g: T,
        [m, v]: [T; 2],
    ) -> (T, [T; 2]) {
        let [
            decay,
            first_share,
            beta2,
            second_share,
            step_size,
            second_correction,
            eps,
        ] = coefficients;
        let first = m + first_share * (g - m);
        let second = v * beta2 + second_share * g * g;
        let denominator = second.square_root() / second_correction + eps;
        (p * decay - step_size * first / denominator, [first, second])
    }
}
