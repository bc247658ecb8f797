//! The layers that blocks consist of, by architecture.

use super::{Activation, GeGlu, Layer, LayerNorm, Mlp, RmsNorm, SwiGlu};
use crate::Result;
use crate::ops::Gelu;
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The layers of a transformer, and how it encodes positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Architecture {
    /// [`RmsNorm`], [`SwiGlu`] and rotary embeddings: CS336's model, Llama, Qwen, Mistral.
    ///
    /// Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
    #[default]
    Llama,
    /// [`LayerNorm`], [`Mlp`], biases in every linear layer except the head, and learned position embeddings.
    ///
    /// Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    Gpt2,
    /// [`RmsNorm`] with [unit offset](RmsNorm::with_unit_offset) before and after attention and feed-forward network,
    /// [`GeGlu`], embeddings multiplied by sqrt(D), and rotary embeddings. A sliding window applies to blocks 0, 2, 4
    /// and so on. Window, soft caps and scale come from the configuration.
    ///
    /// Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024.
    Gemma2,
}

/// The norm of an architecture.
#[derive(Clone, Debug)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    /// # Errors
    /// As [`RmsNorm::new`] or [`LayerNorm::new`].
    pub fn new(kind: Architecture, d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(match kind {
            Architecture::Llama => Self::Rms(RmsNorm::new(d_model, eps, vb)?),
            Architecture::Gpt2 => Self::Layer(LayerNorm::new(d_model, eps, vb)?),
            Architecture::Gemma2 => Self::Rms(RmsNorm::with_unit_offset(d_model, eps, vb)?),
        })
    }

    /// Maps x (..., D) to (..., D).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }
}

impl Layer for Norm {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        match self {
            Self::Rms(norm) => norm.visit(path, visit),
            Self::Layer(norm) => norm.visit(path, visit),
        }
    }
}

/// The feed-forward network of an architecture.
#[derive(Clone, Debug)]
pub(super) enum FeedForward {
    SwiGlu(SwiGlu),
    GeGlu(GeGlu),
    Plain(Mlp),
}

impl FeedForward {
    /// # Errors
    /// As [`SwiGlu::new`], [`GeGlu::new`] or [`Mlp::new`].
    pub fn new(
        kind: Architecture,
        d_model: usize,
        d_ff: usize,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        Ok(match kind {
            Architecture::Llama => Self::SwiGlu(SwiGlu::new(d_model, d_ff, vb)?),
            Architecture::Gemma2 => Self::GeGlu(GeGlu::new(d_model, d_ff, vb)?),
            Architecture::Gpt2 => Self::Plain(Mlp::new(d_model, d_ff, vb)?),
        })
    }

    /// Returns the same network with this GELU, if it has one.
    pub fn with_gelu(self, gelu: Gelu) -> Self {
        match self {
            Self::SwiGlu(network) => Self::SwiGlu(network),
            Self::GeGlu(network) => Self::GeGlu(network.with_gelu(gelu)),
            Self::Plain(network) => Self::Plain(network.with_activation(Activation::Gelu(gelu))),
        }
    }

    /// Maps x (..., D) to (..., D).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::SwiGlu(network) => network.forward(x),
            Self::GeGlu(network) => network.forward(x),
            Self::Plain(network) => network.forward(x),
        }
    }
}

impl Layer for FeedForward {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        match self {
            Self::SwiGlu(network) => network.visit(path, visit),
            Self::GeGlu(network) => network.visit(path, visit),
            Self::Plain(network) => network.visit(path, visit),
        }
    }
}
