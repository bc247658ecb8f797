//! One layer of the transformer.

use super::architecture::{Architecture, FeedForward, Norm};
use super::{
    CausalSelfAttention, DropoutRates, ForwardContext, Layer, RotaryEmbedding, SelfAttentionConfig,
    join,
};
use crate::attention::Algorithm;
use crate::ops::Gelu;
use crate::probe::in_module;
use crate::{Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// A pre-norm block: `x + attn(ln1(x))`, then `x + ffn(ln2(x))`; of [`Gemma2`](Architecture::Gemma2)
/// `x + ln1_post(attn(ln1(x)))`, then `x + ln2_post(ffn(ln2(x)))`. Its norms and its feed-forward network are its
/// [architecture](Architecture)'s.
#[derive(Clone, Debug)]
pub struct TransformerBlock {
    ln1: Norm,
    attn: CausalSelfAttention,
    /// The norms of both branches before they are added to the residual stream.
    post: Option<Box<[Norm; 2]>>,
    ln2: Norm,
    ffn: FeedForward,
    /// The probability with which elements of either summand are dropped in training.
    dropout: f64,
}

impl TransformerBlock {
    /// Takes the parameters of `ln1`, `attn`, `ln2` and `ffn` from the builder; `eps` is the norms'. The architecture
    /// is [`Architecture::Llama`].
    ///
    /// # Errors
    /// As the parts'.
    pub fn new(
        d_model: usize,
        num_heads: usize,
        d_ff: usize,
        eps: f64,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let attn = CausalSelfAttention::new(d_model, num_heads, rotary, vb.pp("attn"))?;
        Self::around(attn, Architecture::Llama, d_model, d_ff, eps, vb)
    }

    /// As [`new`](Self::new), of any architecture, with attention of this configuration.
    /// [`Gemma2`](Architecture::Gemma2) takes the parameters of `ln1_post` and `ln2_post` too.
    ///
    /// # Errors
    /// As the parts'.
    pub fn with_config(
        architecture: Architecture,
        attention: &SelfAttentionConfig,
        d_ff: usize,
        eps: f64,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let attn = CausalSelfAttention::with_config(attention, rotary, vb.pp("attn"))?;
        Self::around(attn, architecture, attention.d_model, d_ff, eps, vb)
    }

    fn around(
        attn: CausalSelfAttention,
        architecture: Architecture,
        d_model: usize,
        d_ff: usize,
        eps: f64,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let norm = |name| Norm::new(architecture, d_model, eps, vb.pp(name));
        let post = match architecture {
            Architecture::Gemma2 => Some(Box::new([norm("ln1_post")?, norm("ln2_post")?])),
            Architecture::Llama | Architecture::Gpt2 => None,
        };
        Ok(Self {
            ln1: norm("ln1")?,
            attn,
            post,
            ln2: norm("ln2")?,
            ffn: FeedForward::new(architecture, d_model, d_ff, vb.pp("ffn"))?,
            dropout: 0.0,
        })
    }

    /// The same block, its attention computed by `attention`
    /// ([`CausalSelfAttention::with_attention`]).
    pub fn with_attention(self, attention: Algorithm) -> Self {
        let attn = self.attn.with_attention(attention);
        Self { attn, ..self }
    }

    /// Returns the same block with this GELU in its feed-forward network, if that is a [`GeluMlp`](super::GeluMlp) or
    /// a [`GeGlu`](super::GeGlu).
    pub fn with_gelu(self, gelu: Gelu) -> Self {
        Self {
            ffn: self.ffn.with_gelu(gelu),
            ..self
        }
    }

    /// The same block, which drops what it is told where its [context](ForwardContext) has a key.
    pub fn with_dropout(self, rates: DropoutRates) -> Self {
        Self {
            attn: self.attn.with_dropout(rates.attention),
            dropout: rates.residual,
            ..self
        }
    }

    /// x (B, T, D) to (B, T, D).
    ///
    /// # Errors
    /// As the parts'.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, &ForwardContext::default())
    }

    /// As [`forward`](Self::forward), of documents packed into the sequences, or of a training step: attention drops
    /// probabilities at the site of the key, and the summands are dropped at the next two.
    ///
    /// # Errors
    /// As the parts'.
    pub fn forward_with(&self, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        // Under autocast the second summand is of a lower dtype: the sum is x's, and the residual stream stays f32.
        let x = {
            let normed = in_module("ln1", || self.ln1.forward(x))?;
            let mut branch = in_module("attn", || self.attn.forward_with(&normed, context))?;
            if let Some([post, _]) = self.post.as_deref() {
                branch = in_module("ln1_post", || post.forward(&branch))?;
            }
            ops::add(x, &context.at(1).dropped(branch, self.dropout)?)?
        };
        let normed = in_module("ln2", || self.ln2.forward(&x))?;
        let mut branch = in_module("ffn", || self.ffn.forward(&normed))?;
        if let Some([_, post]) = self.post.as_deref() {
            branch = in_module("ln2_post", || post.forward(&branch))?;
        }
        ops::add(&x, &context.at(2).dropped(branch, self.dropout)?)
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
