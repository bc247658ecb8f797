//! The feed-forward network of GPT-2.

use super::{Layer, Linear, join};
use crate::ops::Gelu;
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The feed-forward network `w2 gelu(w1 x + b1) + b2`: w1 (F, D), b1 (F), w2 (D, F), b2 (D).
///
/// GELU is approximated with tanh ([`Gelu::Tanh`]) unless [`with_gelu`](Self::with_gelu) sets another.
///
/// Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016, section 2.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, GeluMlp};
/// use tallow::ops::Gelu;
///
/// let layer = GeluMlp::new(8, 32, nn::seeded(0, DType::F32, &Device::Cpu).pp("ffn"))?.with_gelu(Gelu::Erf);
/// let x = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?; // (B, T, D)
/// assert_eq!(layer.forward(&x)?.dims(), [2, 3, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GeluMlp {
    w1: Linear,
    w2: Linear,
    gelu: Gelu,
}

impl GeluMlp {
    /// Creates a layer with `w1.weight`, `w1.bias`, `w2.weight` and `w2.bias` from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            w1: Linear::with_bias(d_model, d_ff, vb.pp("w1"))?,
            w2: Linear::with_bias(d_ff, d_model, vb.pp("w2"))?,
            gelu: Gelu::Tanh,
        })
    }

    /// Sets the GELU.
    pub fn with_gelu(self, gelu: Gelu) -> Self {
        Self { gelu, ..self }
    }

    /// Maps x (..., D) to (..., D).
    ///
    /// # Errors
    /// Those of [`ops::linear_bias()`].
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
