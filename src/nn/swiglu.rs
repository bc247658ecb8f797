//! The feed-forward network.

use super::{Layer, Linear, join};
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The gated feed-forward network `w2(silu(w1 x) * w3 x)`, without biases: w1 and w3 (F, D), w2 (D, F).
#[derive(Clone, Debug)]
pub struct SwiGlu {
    w1: Linear,
    w2: Linear,
    w3: Linear,
}

impl SwiGlu {
    /// Takes `w1.weight`, `w2.weight` and `w3.weight` from the builder.
    ///
    /// # Errors
    /// Whatever the builder answers: a missing or misshapen weight, say.
    pub fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            w1: Linear::new(d_model, d_ff, vb.pp("w1"))?,
            w2: Linear::new(d_ff, d_model, vb.pp("w2"))?,
            w3: Linear::new(d_model, d_ff, vb.pp("w3"))?,
        })
    }

    /// x (..., D) to (..., D).
    ///
    /// # Errors
    /// As [`ops::swiglu_linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gated = || ops::swiglu_linear(x, self.w1.weight(), self.w3.weight());
        let hidden = in_module("w1, w3", gated)?; // (..., F)
        in_module("w2", || self.w2.forward(&hidden))
    }
}

impl Layer for SwiGlu {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        for (name, layer) in [("w1", &self.w1), ("w2", &self.w2), ("w3", &self.w3)] {
            layer.visit(&join(path, name), visit);
        }
    }
}
