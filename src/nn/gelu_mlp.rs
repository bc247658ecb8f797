//! The feed-forward network without a gate.

use super::{Layer, Linear, join};
use crate::ops::Gelu;
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The feed-forward network `w2(gelu(w1 x + b1)) + b2` of GPT-2: w1 (F, D), b1 (F), w2 (D, F), b2 (D), and GELU by its
/// approximation with tanh ([`Gelu::Tanh`]) unless [another](Self::with_gelu) is chosen.
///
/// Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016, section 2.
#[derive(Clone, Debug)]
pub struct GeluMlp {
    w1: Linear,
    w2: Linear,
    gelu: Gelu,
}

impl GeluMlp {
    /// Takes `w1.weight`, `w1.bias`, `w2.weight` and `w2.bias` from the builder.
    ///
    /// # Errors
    /// Whatever the builder answers: a missing or misshapen weight, say.
    pub fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            w1: Linear::with_bias(d_model, d_ff, vb.pp("w1"))?,
            w2: Linear::with_bias(d_ff, d_model, vb.pp("w2"))?,
            gelu: Gelu::Tanh,
        })
    }

    /// Returns the same layer with this GELU.
    pub fn with_gelu(self, gelu: Gelu) -> Self {
        Self { gelu, ..self }
    }

    /// x (..., D) to (..., D).
    ///
    /// # Errors
    /// As [`ops::linear_bias()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = ops::gelu(&in_module("w1", || self.w1.forward(x))?, self.gelu)?; // (..., F)
        in_module("w2", || self.w2.forward(&hidden))
    }
}

impl Layer for GeluMlp {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.w1.visit(&join(path, "w1"), visit);
        self.w2.visit(&join(path, "w2"), visit);
    }
}
