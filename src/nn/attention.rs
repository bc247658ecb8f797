//! Multi-head self-attention.

use super::{Layer, Linear, RotaryEmbedding, join};
use crate::attention::{Algorithm, AttentionConfig, Mask};
use crate::probe::in_module;
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// Causal multi-head self-attention: projections to q, k and v, rotary positions on q and k, attention in H heads of
/// Dh = D / H, and an output projection; no biases.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::attention::Algorithm;
/// use tallow::nn::{self, CausalSelfAttention};
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let layer = CausalSelfAttention::new(16, 2, None, vb)?.with_attention(Algorithm::Flash);
/// let x = Tensor::randn(0f32, 1.0, (3, 5, 16), &Device::Cpu)?; // (B, T, D)
/// assert_eq!(layer.forward(&x)?.dims(), [3, 5, 16]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalSelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    output_proj: Linear,
    rotary: Option<RotaryEmbedding>,
    num_heads: usize,
    attention: Algorithm,
}

impl CausalSelfAttention {
    /// Takes `q_proj.weight`, `k_proj.weight`, `v_proj.weight` and `output_proj.weight`, (D, D) each, from the builder.
    /// Without `rotary` the layer knows no positions. Its attention is [`Algorithm::Naive`].
    ///
    /// # Errors
    /// A d_model that num_heads does not divide, and whatever the builder answers.
    pub fn new(
        d_model: usize,
        num_heads: usize,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        if num_heads == 0 || !d_model.is_multiple_of(num_heads) {
            return Err(
                Error::config("CausalSelfAttention", "d_model", d_model).must_be(
                    format!("divisible by num_heads {num_heads}, which is not 0"),
                    "each head gets d_model / num_heads elements",
                ),
            );
        }
        Ok(Self {
            q_proj: Linear::new(d_model, d_model, vb.pp("q_proj"))?,
            k_proj: Linear::new(d_model, d_model, vb.pp("k_proj"))?,
            v_proj: Linear::new(d_model, d_model, vb.pp("v_proj"))?,
            output_proj: Linear::new(d_model, d_model, vb.pp("output_proj"))?,
            rotary,
            num_heads,
            attention: Algorithm::default(),
        })
    }

    /// The same layer, its attention computed by `attention`. The parameters do not depend on it.
    pub fn with_attention(self, attention: Algorithm) -> Self {
        Self { attention, ..self }
    }

    /// x (B, T, D) to (B, T, D).
    ///
    /// # Errors
    /// Another rank or width, a T beyond the rotary tables, heads that the attention does not take
    /// ([`flash`](crate::attention::flash()) has a largest Dh).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [x] = &ops::cast_for("linear", [x])?; // once for the three of them
        let q = in_module("q_proj", || self.positioned(&self.q_proj, x))?; // (B, H, T, Dh)
        let k = in_module("k_proj", || self.positioned(&self.k_proj, x))?; // (B, H, T, Dh)
        let v = in_module("v_proj", || self.heads(&self.v_proj, x))?; // (B, H, T, Dh)
        let config = AttentionConfig {
            mask: Mask::Causal,
            scale: None,
        };
        let out = self.attention.attend(&q, &k, &v, &config)?; // (B, H, T, Dh)
        let merged = ops::merge_heads(&out)?;
        in_module("output_proj", || self.output_proj.forward(&merged))
    }

    /// x projected and cut into heads: (B, H, T, Dh).
    fn heads(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        ops::split_heads(&projection.forward(x)?, self.num_heads)
    }

    /// As [`heads`](Self::heads), rotated.
    fn positioned(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        let heads = self.heads(projection, x)?;
        match &self.rotary {
            Some(rotary) => rotary.forward(&heads, 0),
            None => Ok(heads),
        }
    }
}

impl Layer for CausalSelfAttention {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        let layers = [
            ("q_proj", &self.q_proj),
            ("k_proj", &self.k_proj),
            ("v_proj", &self.v_proj),
            ("output_proj", &self.output_proj),
        ];
        for (name, layer) in layers {
            layer.visit(&join(path, name), visit);
        }
    }
}
