//! The coefficients of an AdamW step.

/// The coefficients of a step, the same for all elements of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The key of the stochastic rounding of bf16 moments, which depends on the parameter and the step.
    pub rounding: u32, // first: with bf16 moments all updates differ in it, so `==` stops here
    /// The bound of gradients: each element is clamped to `[-clip_value, clip_value]`. Infinity does not clip.
    pub clip_value: f64,
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

impl Update {
    /// Returns the coefficients of step `step`, counted from 1, without clipping.
    pub fn new(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: usize) -> Self {
        let (beta1, beta2) = betas;
        let step = step as f64;
        Self {
            rounding: 0,
            clip_value: f64::INFINITY,
            decay: 1.0 - lr * weight_decay,
            one_minus_beta1: 1.0 - beta1,
            beta2,
            one_minus_beta2: 1.0 - beta2,
            step_size: lr / (1.0 - beta1.powf(step)),
            second_correction: (1.0 - beta2.powf(step)).sqrt(),
            eps,
        }
    }
}
