//! Gated feed-forward networks.

use super::{Layer, Linear, join};
use crate::ops::Gelu;
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The gated feed-forward network `w2(silu(w1 x) * w3 x)`, without biases: w1 and w3 (F, D), w2 (D, F).
///
/// Noam Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, SwiGlu};
///
/// let layer = SwiGlu::new(8, 32, nn::seeded(0, DType::F32, &Device::Cpu).pp("ffn"))?;
/// let x = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?; // (B, T, D)
/// assert_eq!(layer.forward(&x)?.dims(), [2, 3, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SwiGlu(Gated);

impl SwiGlu {
    /// Creates a layer with `w1.weight`, `w2.weight` and `w3.weight` from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(Gated::new(d_model, d_ff, vb)?))
    }

    /// Maps x (..., D) to (..., D).
    ///
    /// # Errors
    /// Those of [`ops::swiglu_linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0
            .forward(|w1, w3| ops::swiglu_linear(x, w1.weight(), w3.weight()))
    }
}

/// The gated feed-forward network `w2(gelu(w1 x) * w3 x)`, without biases: w1 and w3 (F, D), w2 (D, F).
///
/// GELU is approximated with tanh ([`Gelu::Tanh`]) unless [`with_gelu`](Self::with_gelu) sets another.
///
/// Noam Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, GeGlu, Layer};
///
/// let layer = GeGlu::new(8, 32, nn::seeded(0, DType::F32, &Device::Cpu).pp("ffn"))?;
/// let x = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?; // (B, T, D)
/// assert_eq!(layer.forward(&x)?.dims(), [2, 3, 8]);
/// assert_eq!(layer.weights().len(), 3);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GeGlu {
    layers: Gated,
    gelu: Gelu,
}

impl GeGlu {
    /// Creates a layer with `w1.weight`, `w2.weight` and `w3.weight` from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            layers: Gated::new(d_model, d_ff, vb)?,
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
    /// Those of [`ops::geglu_linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layers
            .forward(|w1, w3| ops::geglu_linear(x, w1.weight(), w3.weight(), self.gelu))
    }
}

#[derive(Clone, Debug)]
struct Gated {
    w1: Linear,
    w2: Linear,
    w3: Linear,
}

impl Gated {
    fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            w1: Linear::new(d_model, d_ff, vb.pp("w1"))?,
            w2: Linear::new(d_ff, d_model, vb.pp("w2"))?,
            w3: Linear::new(d_model, d_ff, vb.pp("w3"))?,
        })
    }

    fn forward(&self, gated: impl FnOnce(&Linear, &Linear) -> Result<Tensor>) -> Result<Tensor> {
        let hidden = in_module("w1, w3", || gated(&self.w1, &self.w3))?; // (..., F)
        in_module("w2", || self.w2.forward(&hidden))
    }

    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        for (name, layer) in [("w1", &self.w1), ("w2", &self.w2), ("w3", &self.w3)] {
            layer.visit(&join(path, name), visit);
        }
    }
}

impl Layer for SwiGlu {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.0.visit(path, visit);
    }
}

impl Layer for GeGlu {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.layers.visit(path, visit);
    }
}
