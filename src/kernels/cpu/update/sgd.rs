//! SGD's update.
//!
//! ```text
//! g += weight_decay p
//! b  = momentum b + share g;  g = g + momentum b (Nesterov) or b   (with momentum)
//! p -= lr g
//! ```
//!
//! In `f32` it reads 8 bytes per element and writes 4, with momentum 12 and 8.

use super::{COEFFICIENTS, Elementwise, Real};

/// The coefficients of a step of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f64,
    /// The coupled weight decay.
    pub weight_decay: f64,
    /// The decay rate of the momentum buffer; 0 for an update without one.
    pub momentum: f64,
    /// The weight of the gradient in the momentum buffer: 1 in the first step, then `1 - dampening`.
    pub share: f64,
    /// Whether a step is by the gradient plus the decayed buffer.
    pub nesterov: bool,
}

impl Sgd {
    /// Returns the name of its kernel on a GPU.
    pub fn kernel(&self) -> &'static str {
        match self.has_momentum() {
            true => "sgd_momentum",
            false => "sgd",
        }
    }

    /// Returns the coefficients in the order of its kernels.
    pub fn words(&self) -> [f64; COEFFICIENTS] {
        let nesterov = f64::from(u8::from(self.nesterov));
        let words = [self.lr, self.weight_decay, self.momentum, self.share];
        let [lr, weight_decay, momentum, share] = words;
        [lr, weight_decay, momentum, share, nesterov, 0.0, 0.0]
    }

    /// Returns whether there is a momentum buffer.
    pub fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }
}

impl Elementwise<0> for Sgd {
    const STATES: [&'static str; 0] = [];

    #[inline(always)]
    fn element<T: Real>(
        [lr, weight_decay, ..]: [T; COEFFICIENTS],
        p: T,
        g: T,
        states: [T; 0],
    ) -> (T, [T; 0]) {
        let g = g + weight_decay * p;
        (p - lr * g, states)
    }
}

/// In PyTorch's order of operations.
impl Elementwise<1> for Sgd {
    const STATES: [&'static str; 1] = ["momentum_buffer"];

    #[inline(always)]
    fn element<T: Real>(
        [lr, weight_decay, momentum, share, nesterov, ..]: [T; COEFFICIENTS],
        p: T,
        g: T,
        [buffer]: [T; 1],
    ) -> (T, [T; 1]) {
        let g = g + weight_decay * p;
        let buffer = momentum * buffer + share * g;
        let ahead = g + momentum * buffer;
        let step = if nesterov > T::ZERO { ahead } else { buffer };
        (p - lr * step, [buffer])
    }
}
