//! Multi-head self-attention.

use super::{ForwardContext, Layer, Linear, RmsNorm, RotaryEmbedding, join};
use crate::attention::{Algorithm, AttentionConfig, Mask};
use crate::ops::soft_cap::check_cap;
use crate::probe::in_module;
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use std::num::NonZeroUsize;

/// The configuration of [`CausalSelfAttention`].
///
/// Four heads of q share two heads of k and v:
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::nn::{self, CausalSelfAttention, Layer, SelfAttentionConfig};
///
/// let config = SelfAttentionConfig {
///     d_model: 16, num_heads: 4, num_kv_heads: 2, head_dim: 4,
///     qkv_bias: false, output_bias: false, qk_norm_eps: None,
///     sliding_window: None, scale: None, soft_cap: None,
/// };
/// let layer = CausalSelfAttention::with_config(&config, None, nn::seeded(0, DType::F32, &Device::Cpu))?;
/// let (name, k_proj) = &layer.weights()[1];
/// assert_eq!((name.as_str(), k_proj.dims()), ("k_proj.weight", &[8, 16][..]));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SelfAttentionConfig {
    /// D, the width of inputs and outputs.
    pub d_model: usize,
    /// H, the number of heads of q.
    pub num_heads: usize,
    /// Hkv, the number of heads of k and v; it divides H.
    pub num_kv_heads: usize,
    /// Dh, the dimension of a head.
    pub head_dim: usize,
    /// Whether the projections of q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// The eps of RMSNorm on each head of q and k, before rotary embedding; `None` for no norm.
    pub qk_norm_eps: Option<f64>,
    /// The number of positions that each attends to, up to its own; `None` for all.
    pub sliding_window: Option<NonZeroUsize>,
    /// The factor of the scores; `None` for 1 / sqrt(Dh).
    pub scale: Option<f64>,
    /// The [soft cap](AttentionConfig::soft_cap) of the scaled scores; `None` for no cap.
    pub soft_cap: Option<f64>,
}

/// Causal multi-head self-attention: projections to q, k and v, rotary embedding of q and k, attention in H heads, and
/// an output projection.
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
    /// The norms of q and k.
    norms: Option<Box<[RmsNorm; 2]>>,
    rotary: Option<RotaryEmbedding>,
    num_heads: usize,
    num_kv_heads: usize,
    mask: Mask,
    scale: Option<f64>,
    soft_cap: Option<f64>,
    attention: Algorithm,
    /// The dropout rate of the attention probabilities.
    dropout: f64,
}

impl CausalSelfAttention {
    /// Creates a layer of H heads with Dh = D / H, without biases and norms; see [`with_config`](Self::with_config).
    ///
    /// # Errors
    /// A d_model that num_heads does not divide; errors of the builder.
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
        let config = SelfAttentionConfig {
            d_model,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: d_model / num_heads,
            qkv_bias: false,
            output_bias: false,
            qk_norm_eps: None,
            sliding_window: None,
            scale: None,
            soft_cap: None,
        };
        Self::with_config(&config, rotary, vb)
    }

    /// Creates a layer with weights from the builder: `q_proj.weight` (H Dh, D), `k_proj.weight` and `v_proj.weight`
    /// (Hkv Dh, D), `output_proj.weight` (D, H Dh), and if configured `q_proj.bias`, `k_proj.bias`, `v_proj.bias`,
    /// `output_proj.bias`, `q_norm.weight` and `k_norm.weight` (Dh). Without `rotary` positions are not encoded. The
    /// algorithm is [`Algorithm::Naive`].
    ///
    /// # Errors
    /// A num_heads that num_kv_heads does not divide; a size that is 0 or overflows; a scale or a soft cap that is not
    /// positive and finite; errors of the builder.
    pub fn with_config(
        config: &SelfAttentionConfig,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let (width, head_dim) = (config.d_model, config.head_dim);
        let [heads, kv_heads] = [config.num_heads, config.num_kv_heads];
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(
                Error::config("CausalSelfAttention", "num_heads", heads).must_be(
                    format!("divisible by num_kv_heads {kv_heads}, which is not 0"),
                    "each head of k and v serves as many heads of q",
                ),
            );
        }
        if let Some(cap) = config.soft_cap {
            check_cap("CausalSelfAttention", "soft_cap", cap)?;
        }
        if let Some(scale) = config.scale
            && !(scale > 0.0 && scale.is_finite())
        {
            return Err(Error::config("CausalSelfAttention", "scale", scale)
                .must_be("positive and finite", "leave it out for 1 / sqrt(head_dim)"));
        }
        let Some(q_width) = heads.checked_mul(head_dim).filter(|width| *width > 0) else {
            return Err(
                Error::config("CausalSelfAttention", "head_dim", head_dim).must_be(
                    format!("more than 0 elements for each of num_heads {heads}, which is not 0"),
                    "q has num_heads * head_dim elements a token",
                ),
            );
        };
        let kv_width = kv_heads * head_dim; // Hkv <= H: no overflow
        let map = |from: usize, to: usize, has_bias: bool, name: &str| match has_bias {
            true => Linear::with_bias(from, to, vb.pp(name)),
            false => Linear::new(from, to, vb.pp(name)),
        };
        let projection = |to: usize, name: &str| map(width, to, config.qkv_bias, name);
        let norm = |eps, name: &str| RmsNorm::new(head_dim, eps, vb.pp(name));
        let norms = config
            .qk_norm_eps
            .map(|eps| Result::Ok(Box::new([norm(eps, "q_norm")?, norm(eps, "k_norm")?])));
        Ok(Self {
            q_proj: projection(q_width, "q_proj")?,
            k_proj: projection(kv_width, "k_proj")?,
            v_proj: projection(kv_width, "v_proj")?,
            output_proj: map(q_width, width, config.output_bias, "output_proj")?,
            norms: norms.transpose()?,
            rotary,
            num_heads: heads,
            num_kv_heads: kv_heads,
            mask: config.sliding_window.map_or(Mask::Causal, Mask::Window),
            scale: config.scale,
            soft_cap: config.soft_cap,
            attention: Algorithm::default(),
            dropout: 0.0,
        })
    }

    /// Sets the algorithm of attention. The parameters do not depend on it.
    pub fn with_attention(self, attention: Algorithm) -> Self {
        Self { attention, ..self }
    }

    /// Sets the dropout rate of the attention probabilities. It applies if the [context](ForwardContext) has a dropout
    /// key.
    pub fn with_dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    /// Maps x (B, T, D) to (B, T, D).
    ///
    /// # Errors
    /// Another rank or width; a T beyond the rotary tables; errors of the algorithm
    /// ([`flash`](crate::attention::flash()) has a largest Dh).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, &ForwardContext::default())
    }

    /// Maps x (B, T, D) to (B, T, D) with packed documents or dropout.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward); first keys of another shape; a dropout rate outside [0, 1).
    pub fn forward_with(&self, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let [x] = &ops::cast_for("linear", [x])?; // once for q, k and v
        let [q_norm, k_norm] = match self.norms.as_deref() {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        let kv_heads = self.num_kv_heads;
        let q = || self.rotated(heads(&self.q_proj, x, self.num_heads, q_norm)?);
        let k = || self.rotated(heads(&self.k_proj, x, kv_heads, k_norm)?);
        let q = in_module("q_proj", q)?; // (B, H, T, Dh)
        let k = in_module("k_proj", k)?; // (B, Hkv, T, Dh)
        let v = in_module("v_proj", || heads(&self.v_proj, x, kv_heads, None))?; // (B, Hkv, T, Dh)
        let config = AttentionConfig {
            mask: self.mask,
            scale: self.scale,
            soft_cap: self.soft_cap,
            first_keys: context.first_keys.clone(),
            dropout: context.layer_dropout(self.dropout),
            ..Default::default()
        };
        let out = self.attention.attend(&q, &k, &v, &config)?; // (B, H, T, Dh)
        let merged = ops::merge_heads(&out)?;
        in_module("output_proj", || self.output_proj.forward(&merged))
    }

    /// Applies the rotary embedding, if there is one.
    fn rotated(&self, heads: Tensor) -> Result<Tensor> {
        match &self.rotary {
            Some(rotary) => rotary.forward(&heads, 0),
            None => Ok(heads),
        }
    }
}

/// Projects x and splits it into heads, (B, heads, T, Dh). The norm precedes the split, which plans then leave out.
fn heads(projection: &Linear, x: &Tensor, heads: usize, norm: Option<&RmsNorm>) -> Result<Tensor> {
    let mut rows = projection.forward(x)?; // (B, T, heads Dh)
    if let (Some(norm), &[batch, length, width]) = (norm, rows.dims()) {
        let apart = rows.reshape((batch, length, heads, width / heads))?;
        rows = norm.forward(&apart)?.reshape((batch, length, width))?;
    }
    ops::split_heads(&rows, heads)
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
        if let Some([q, k]) = self.norms.as_deref() {
            q.visit(&join(path, "q_norm"), visit);
            k.visit(&join(path, "k_norm"), visit);
        }
    }
}
