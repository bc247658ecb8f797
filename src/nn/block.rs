//! A block of the transformer.

use super::architecture::{Architecture, FeedForward, Norm};
use super::{
    Attention, AttentionLayerConfig, DropoutRates, ForwardContext, Layer, RotaryEmbedding, join,
};
use crate::attention::{Algorithm, Mask};
use crate::ops::Gelu;
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// A pre-norm block: `y = x + attn(ln1(x))`, `z = y + ffn(ln2(y))`. With [`Gemma2`](Architecture::Gemma2),
/// `y = x + ln1_post(attn(ln1(x)))`, `z = y + ln2_post(ffn(ln2(y)))`. The [architecture](Architecture) selects the
/// norms and the feed-forward network.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, RotaryEmbedding, TransformerBlock};
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu).pp("layers.0");
/// let rotary = RotaryEmbedding::new(10_000.0, 8, 64, DType::F32, &Device::Cpu)?; // Dh = 8
/// let block = TransformerBlock::new(16, 2, 32, 1e-5, Some(rotary), vb)?;
/// let x = Tensor::randn(0f32, 1.0, (3, 5, 16), &Device::Cpu)?; // (B, T, D)
/// assert_eq!(block.forward(&x)?.dims(), [3, 5, 16]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TransformerBlock {
    ln1: Norm,
    attn: Attention,
    /// The norms of both branches, applied before they are added to the residual stream.
    post: Option<Box<[Norm; 2]>>,
    ln2: Norm,
    ffn: FeedForward,
    /// The dropout rate of both branches.
    dropout: f64,
}

impl TransformerBlock {
    /// Creates a causal block of [`Architecture::Llama`] with the parameters of `ln1`, `attn`, `ln2` and `ffn` from the
    /// builder; `eps` is that of the norms.
    ///
    /// # Errors
    /// Errors of the layers.
    pub fn new(
        d_model: usize,
        num_heads: usize,
        d_ff: usize,
        eps: f64,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let attention = AttentionLayerConfig {
            d_model,
            num_heads,
            mask: Mask::Causal,
            ..Default::default()
        };
        Self::with_config(Architecture::Llama, &attention, d_ff, eps, rotary, vb)
    }

    /// Creates a block of any architecture and attention configuration: with [`Mask::Full`], a block of an encoder.
    /// [`Gemma2`](Architecture::Gemma2) has the
    /// parameters of `ln1_post` and `ln2_post` in addition to those of [`new`](Self::new).
    ///
    /// # Errors
    /// Errors of the layers.
    pub fn with_config(
        architecture: Architecture,
        attention: &AttentionLayerConfig,
        d_ff: usize,
        eps: f64,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let d_model = attention.d_model;
        let norm = |name| Norm::new(architecture, d_model, eps, vb.pp(name));
        let post = match architecture {
            Architecture::Gemma2 => Some(Box::new([norm("ln1_post")?, norm("ln2_post")?])),
            Architecture::Llama | Architecture::Gpt2 => None,
        };
        Ok(Self {
            ln1: norm("ln1")?,
            attn: Attention::new(attention, rotary, vb.pp("attn"))?,
            post,
            ln2: norm("ln2")?,
            ffn: FeedForward::new(architecture, d_model, d_ff, vb.pp("ffn"))?,
            dropout: 0.0,
        })
    }

    /// Sets the algorithm of attention ([`Attention::with_attention`]).
    pub fn with_attention(self, attention: Algorithm) -> Self {
        let attn = self.attn.with_attention(attention);
        Self { attn, ..self }
    }

    /// Sets the GELU of the feed-forward network, if that is a [`Mlp`](super::Mlp) or a
    /// [`GeGlu`](super::GeGlu).
    pub fn with_gelu(self, gelu: Gelu) -> Self {
        Self {
            ffn: self.ffn.with_gelu(gelu),
            ..self
        }
    }

    /// Sets the dropout rates. They apply if the [context](ForwardContext) has a dropout key.
    pub fn with_dropout(self, rates: DropoutRates) -> Self {
        Self {
            attn: self.attn.with_dropout(rates.attention),
            dropout: rates.residual,
            ..self
        }
    }

    /// Maps x (B, T, D) to (B, T, D).
    ///
    /// # Errors
    /// Errors of the layers.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, &ForwardContext::default())
    }

    /// Maps x (B, T, D) to (B, T, D) with padding, score bias, packed documents or dropout. A block uses three
    /// [sites](crate::ops::DropoutKey::at) of the dropout key: attention the first, the two branches the others.
    ///
    /// # Errors
    /// Errors of the layers.
    pub fn forward_with(&self, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        // Under autocast the branch has a lower dtype; the sum has x's, so the residual stream stays f32.
        let x = {
            let normed = in_module("ln1", || self.ln1.forward(x))?;
            let mut branch = in_module("attn", || self.attn.forward_with(&normed, context))?;
            if let Some([post, _]) = self.post.as_deref() {
                branch = in_module("ln1_post", || post.forward(&branch))?;
            }
            ops::add(x, &context.at(1).apply_dropout(branch, self.dropout)?)?
        };
        let normed = in_module("ln2", || self.ln2.forward(&x))?;
        let mut branch = in_module("ffn", || self.ffn.forward(&normed))?;
        if let Some([_, post]) = self.post.as_deref() {
            branch = in_module("ln2_post", || post.forward(&branch))?;
        }
        ops::add(&x, &context.at(2).apply_dropout(branch, self.dropout)?)
    }
}

impl Layer for TransformerBlock {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.ln1.visit(&join(path, "ln1"), visit);
        self.attn.visit(&join(path, "attn"), visit);
        if let Some([attn, ffn]) = self.post.as_deref() {
            attn.visit(&join(path, "ln1_post"), visit);
            ffn.visit(&join(path, "ln2_post"), visit);
        }
        self.ln2.visit(&join(path, "ln2"), visit);
        self.ffn.visit(&join(path, "ffn"), visit);
    }
}
