//! Multi-head attention.

use super::{ForwardContext, Layer, Linear, RmsNorm, RotaryEmbedding, join};
use crate::attention::{Algorithm, AttentionConfig, Mask};
use crate::ops::soft_cap::check_cap;
use crate::probe::in_module;
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::VarBuilder;

/// The configuration of [`Attention`]. The default is the base model of Vaswani et al., 2017: D = 512, 8 heads, no
/// mask.
///
/// Causal attention in which four heads of q share two heads of k and v:
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::attention::Mask;
/// use tallow::nn::{self, Attention, AttentionLayerConfig, Layer};
///
/// let config = AttentionLayerConfig {
///     d_model: 16, num_heads: 4, num_kv_heads: Some(2), mask: Mask::Causal,
///     ..Default::default()
/// };
/// let layer = Attention::new(&config, None, nn::seeded(0, DType::F32, &Device::Cpu))?;
/// let (name, k_proj) = &layer.weights()[1];
/// assert_eq!((name.as_str(), k_proj.dims()), ("k_proj.weight", &[8, 16][..]));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionLayerConfig {
    /// D, the width of x and of the output.
    pub d_model: usize,
    /// Dkv, the width of the sequence that k and v are projected from; `None` for D.
    pub kv_dim: Option<usize>,
    /// H, the number of heads of q.
    pub num_heads: usize,
    /// Hkv, the number of heads of k and v, which divides H; `None` for H.
    pub num_kv_heads: Option<usize>,
    /// Dh, the dimension of a head of q and k; `None` for D / H.
    pub head_dim: Option<usize>,
    /// Dv, the dimension of a head of v; `None` for Dh.
    pub value_dim: Option<usize>,
    /// The positions that each attends to: all, those up to its own, or a window of them.
    pub mask: Mask,
    /// Whether the projections of q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// The eps of RMSNorm on each head of q and k, before rotary embedding; `None` for no norm.
    pub qk_norm_eps: Option<f64>,
    /// The factor of the scores; `None` for 1 / sqrt(Dh).
    pub scale: Option<f64>,
    /// The [soft cap](AttentionConfig::soft_cap) of the scaled scores; `None` for no cap.
    pub soft_cap: Option<f64>,
}

impl Default for AttentionLayerConfig {
    fn default() -> Self {
        Self {
            d_model: 512,
            kv_dim: None,
            num_heads: 8,
            num_kv_heads: None,
            head_dim: None,
            value_dim: None,
            mask: Mask::Full,
            qkv_bias: false,
            output_bias: false,
            qk_norm_eps: None,
            scale: None,
            soft_cap: None,
        }
    }
}

impl AttentionLayerConfig {
    /// Returns Hkv, Dh and Dv.
    ///
    /// # Errors
    /// A number of heads that is 0 or does not divide what it must; a head without elements.
    fn heads(&self) -> Result<[usize; 3]> {
        let refuse = |field, got: usize, expected: String, hint: &str| {
            Err(Error::config(CONFIG, field, got).must_be(expected, hint))
        };
        let (width, heads) = (self.d_model, self.num_heads);
        if self.head_dim.is_none() && (heads == 0 || !width.is_multiple_of(heads)) {
            return refuse(
                "d_model",
                width,
                format!("divisible by num_heads {heads}, which is not 0"),
                "each head gets d_model / num_heads elements; or set head_dim",
            );
        }
        let kv_heads = self.num_kv_heads.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refuse(
                "num_heads",
                heads,
                format!("divisible by num_kv_heads {kv_heads}, which is not 0"),
                "each head of k and v serves as many heads of q",
            );
        }
        let head_dim = self.head_dim.unwrap_or_else(|| width / heads);
        let value_dim = self.value_dim.unwrap_or(head_dim);
        for (field, dim, of_token) in [
            ("head_dim", head_dim, "q has num_heads * head_dim"),
            (
                "value_dim",
                value_dim,
                "the output projection reads num_heads * value_dim",
            ),
        ] {
            if let None | Some(0) = heads.checked_mul(dim) {
                return refuse(
                    field,
                    dim,
                    format!("more than 0 elements for each of num_heads {heads}, which is not 0"),
                    &format!("{of_token} elements a token"),
                );
            }
        }
        Ok([kv_heads, head_dim, value_dim])
    }
}

const CONFIG: &str = "AttentionLayerConfig";

/// Multi-head attention: projections to q, k and v, rotary embedding of q and k, attention in H heads, and an output
/// projection.
///
/// [`forward`](Self::forward) is self-attention: q, k and v are projected from x. [`cross`](Self::cross) is
/// cross-attention: k and v are projected from another sequence, of any length and of width Dkv. Each head computes
/// `softmax(scale q k^T + bias) v` over the keys that the [mask](AttentionLayerConfig::mask) and the call's
/// [context](ForwardContext) show.
///
/// Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::attention::{Algorithm, KeyMask};
/// use tallow::nn::{self, Attention, AttentionLayerConfig, ForwardContext};
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let config = AttentionLayerConfig { d_model: 16, num_heads: 2, ..Default::default() };
/// let encoder = Attention::new(&config, None, vb.pp("encoder"))?.with_attention(Algorithm::Flash);
/// let decoder = Attention::new(&config, None, vb.pp("decoder"))?.with_attention(Algorithm::Flash);
///
/// let x = Tensor::randn(0f32, 1.0, (3, 5, 16), &Device::Cpu)?; // (B, T, D)
/// let padding = ForwardContext::padded(KeyMask::of_lengths(&[5, 2, 4], 5)?);
/// let memory = encoder.forward_with(&x, &padding)?;
/// let y = Tensor::randn(0f32, 1.0, (3, 7, 16), &Device::Cpu)?;
/// assert_eq!(decoder.cross(&y, &memory, &padding)?.dims(), [3, 7, 16]); // 7 queries, 5 keys
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
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

impl Attention {
    /// Creates a layer with weights from the builder: `q_proj.weight` (H Dh, D), `k_proj.weight` (Hkv Dh, Dkv),
    /// `v_proj.weight` (Hkv Dv, Dkv), `output_proj.weight` (D, H Dv), and if configured `q_proj.bias`, `k_proj.bias`,
    /// `v_proj.bias`, `output_proj.bias`, `q_norm.weight` and `k_norm.weight` (Dh). Without `rotary` positions are not
    /// encoded. The algorithm is [`Algorithm::Naive`].
    ///
    /// # Errors
    /// A num_heads that num_kv_heads does not divide; without head_dim, a d_model that num_heads does not divide; a
    /// size that is 0 or overflows; a scale or a soft cap that is not positive and finite; errors of the builder.
    pub fn new(
        config: &AttentionLayerConfig,
        rotary: Option<RotaryEmbedding>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let [kv_heads, head_dim, value_dim] = config.heads()?;
        if let Some(cap) = config.soft_cap {
            check_cap(CONFIG, "soft_cap", cap)?;
        }
        if let Some(scale) = config.scale
            && !(scale > 0.0 && scale.is_finite())
        {
            return Err(Error::config(CONFIG, "scale", scale)
                .must_be("positive and finite", "leave it out for 1 / sqrt(head_dim)"));
        }
        let map = |from: usize, to: usize, has_bias: bool, name: &str| match has_bias {
            true => Linear::with_bias(from, to, vb.pp(name)),
            false => Linear::new(from, to, vb.pp(name)),
        };
        let (width, heads) = (config.d_model, config.num_heads);
        let kv = |dim, name| {
            let from = config.kv_dim.unwrap_or(width);
            map(from, kv_heads * dim, config.qkv_bias, name)
        };
        let norm = |eps, name: &str| RmsNorm::new(head_dim, eps, vb.pp(name));
        let norms = config
            .qk_norm_eps
            .map(|eps| Result::Ok(Box::new([norm(eps, "q_norm")?, norm(eps, "k_norm")?])));
        Ok(Self {
            q_proj: map(width, heads * head_dim, config.qkv_bias, "q_proj")?,
            k_proj: kv(head_dim, "k_proj")?,
            v_proj: kv(value_dim, "v_proj")?,
            output_proj: map(heads * value_dim, width, config.output_bias, "output_proj")?,
            norms: norms.transpose()?,
            rotary,
            num_heads: heads,
            num_kv_heads: kv_heads,
            mask: config.mask,
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

    /// Maps x (B, T, D) to (B, T, D) by self-attention.
    ///
    /// # Errors
    /// Another rank or width; a layer whose Dkv is not D; a T beyond the rotary tables; errors of the algorithm
    /// ([`flash`](crate::attention::flash()) has a largest Dh and Dv).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, &ForwardContext::default())
    }

    /// Maps x (B, T, D) to (B, T, D) by self-attention with padding, score bias, packed documents or dropout.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward); first keys, a key mask or a score bias of another shape; a dropout rate
    /// outside [0, 1).
    pub fn forward_with(&self, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let [from_x, from_memory] = [&self.q_proj, &self.k_proj].map(|map| map.weight().dims()[1]);
        if from_x != from_memory {
            return Err(Error::order(
                "nn::Attention",
                format!(
                    "self-attention of width {from_x}, but k and v are projected from width {from_memory}"
                ),
                "call cross with the sequence of that width",
            ));
        }
        let [x] = &ops::cast_for("linear", [x])?; // once for q, k and v
        self.attend(x, x, context)
    }

    /// Maps x (B, Tq, D) to (B, Tq, D) by cross-attention: k and v are projected from `memory` (B, Tk, Dkv). The
    /// context's key mask and first keys are of the keys of `memory`. A causal [mask](AttentionLayerConfig::mask) shows
    /// query i the keys up to i. A rotary embedding counts the positions of both sequences from 0.
    ///
    /// # Errors
    /// Those of [`forward_with`](Self::forward_with), for both sequences.
    pub fn cross(&self, x: &Tensor, memory: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let [x, memory] = &ops::cast_for("linear", [x, memory])?;
        self.attend(x, memory, context)
    }

    fn attend(&self, x: &Tensor, memory: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let [q_norm, k_norm] = match self.norms.as_deref() {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        let kv_heads = self.num_kv_heads;
        let q = || self.rotated(heads(&self.q_proj, x, self.num_heads, q_norm)?);
        let k = || self.rotated(heads(&self.k_proj, memory, kv_heads, k_norm)?);
        let q = in_module("q_proj", q)?; // (B, H, Tq, Dh)
        let k = in_module("k_proj", k)?; // (B, Hkv, Tk, Dh)
        let v = in_module("v_proj", || heads(&self.v_proj, memory, kv_heads, None))?; // (B, Hkv, Tk, Dv)
        let config = AttentionConfig {
            mask: self.mask,
            scale: self.scale,
            soft_cap: self.soft_cap,
            first_keys: context.first_keys.clone(),
            key_mask: context.key_mask.clone(),
            bias: context.bias.clone(),
            dropout: context.layer_dropout(self.dropout),
        };
        let out = self.attention.attend(&q, &k, &v, &config)?; // (B, H, Tq, Dv)
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

/// Projects x and splits it into heads, (B, heads, T, Dh or Dv). The norm precedes the split, which plans then leave
/// out.
fn heads(projection: &Linear, x: &Tensor, heads: usize, norm: Option<&RmsNorm>) -> Result<Tensor> {
    let mut rows = projection.forward(x)?; // (B, T, heads Dh or Dv)
    if let (Some(norm), &[batch, length, width]) = (norm, rows.dims()) {
        let apart = rows.reshape((batch, length, heads, width / heads))?;
        rows = norm.forward(&apart)?.reshape((batch, length, width))?;
    }
    ops::split_heads(&rows, heads)
}

impl Layer for Attention {
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
