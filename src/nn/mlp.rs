//! The feed-forward network without a gate.

use super::{Layer, Linear, join};
use crate::ops::Gelu;
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The activation function of an [`Mlp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// [`ops::gelu()`], exact or by tanh.
    Gelu(Gelu),
    /// [`ops::relu()`].
    Relu,
    /// [`ops::silu()`], also called swish.
    Silu,
    /// [`ops::tanh()`].
    Tanh,
    /// [`ops::sigmoid()`].
    Sigmoid,
}

impl Default for Activation {
    /// GELU by tanh, as in GPT-2.
    fn default() -> Self {
        Self::Gelu(Gelu::Tanh)
    }
}

impl Activation {
    /// Applies the function to each element of x.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use tallow::nn::Activation;
    ///
    /// let x = Tensor::new(&[-1f32, 2.0], &Device::Cpu)?;
    /// assert_eq!(Activation::Relu.forward(&x)?.to_vec1::<f32>()?, [0.0, 2.0]);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of the op.
    pub fn forward(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gelu(gelu) => ops::gelu(x, gelu),
            Self::Relu => ops::relu(x),
            Self::Silu => ops::silu(x),
            Self::Tanh => ops::tanh(x),
            Self::Sigmoid => ops::sigmoid(x),
        }
    }
}

/// The feed-forward network `w2 f(w1 x + b1) + b2`: w1 (F, D), b1 (F), w2 (D, F), b2 (D).
///
/// f is GELU, approximated with tanh, unless [`with_activation`](Self::with_activation) sets another
/// [activation](Activation).
///
/// Vaswani et al., "Attention Is All You Need", 2017, equation 2, with ReLU; Radford et al., "Improving Language
/// Understanding by Generative Pre-Training", 2018, with GELU.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, Activation, Mlp};
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu).pp("ffn");
/// let layer = Mlp::new(8, 32, vb)?.with_activation(Activation::Relu);
/// let x = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?; // (B, T, D)
/// assert_eq!(layer.forward(&x)?.dims(), [2, 3, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mlp {
    w1: Linear,
    w2: Linear,
    activation: Activation,
}

impl Mlp {
    /// Creates a layer with `w1.weight`, `w1.bias`, `w2.weight` and `w2.bias` from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(d_model: usize, d_ff: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            w1: Linear::with_bias(d_model, d_ff, vb.pp("w1"))?,
            w2: Linear::with_bias(d_ff, d_model, vb.pp("w2"))?,
            activation: Activation::default(),
        })
    }

    /// Sets the activation.
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// Maps x (..., D) to (..., D).
    ///
    /// # Errors
    /// Those of [`ops::linear_bias()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = in_module("w1", || self.w1.forward(x))?; // (..., F)
        let hidden = self.activation.forward(&hidden)?;
        in_module("w2", || self.w2.forward(&hidden))
    }
}

impl Layer for Mlp {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.w1.visit(&join(path, "w1"), visit);
        self.w2.visit(&join(path, "w2"), visit);
    }
}
