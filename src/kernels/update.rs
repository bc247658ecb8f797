//! One step of AdamW, in numbers.

/// The numbers of one step that all elements share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// What moments in bf16 are rounded by: the parameter's random bits in this step.
    pub rounding: u32, // first: updates are told apart by it, where all differ
    /// What gradients are clipped to, element by element: from minus this to this. Infinity does not clip.
    pub clip_value: f64,
    /// What decay leaves of a parameter: `1 - lr * weight_decay`.
    pub decay: f64,
    /// The gradient's share of the first moment: `1 - beta1`.
    pub first_share: f64,
    /// What stays of the second moment.
    pub beta2: f64,
    /// The squared gradient's share of the second moment: `1 - beta2`.
    pub second_share: f64,
    /// `lr / (1 - beta1^t)`.
    pub step_size: f64,
    /// `sqrt(1 - beta2^t)`.
    pub second_correction: f64,
    /// Added to the root of the corrected second moment.
    pub eps: f64,
}

impl Update {
    /// The numbers of step `step`, the first being 1.
    pub fn new(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: usize) -> Self {
        let (beta1, beta2) = betas;
        let step = step as f64;
        Self {
            rounding: 0,
            clip_value: f64::INFINITY,
            decay: 1.0 - lr * weight_decay,
            first_share: 1.0 - beta1,
            beta2,
            second_share: 1.0 - beta2,
            step_size: lr / (1.0 - beta1.powf(step)),
            second_correction: (1.0 - beta2.powf(step)).sqrt(),
            eps,
        }
    }
}
