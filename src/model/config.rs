//! The configuration of a transformer language model.

use super::transformer::HEAD;
use crate::nn::{Architecture, DropoutRates, RopeScaling, SelfAttentionConfig};
use crate::ops::{Gelu, RotaryPairs};
use crate::{Error, Result};
use candle_core::Shape;
use std::num::NonZeroUsize;

/// The configuration of a [`TransformerLM`](super::TransformerLM).
///
/// The [presets](Self::preset) are CS336's model. The fields from `num_kv_heads` on describe other families: Llama 3
/// (grouped heads, rotary pairs by halves, scaled frequencies), Qwen2 (biases), Qwen3 (norms of q and k, a separate
/// head dimension), Mistral (a sliding window). GPT-2 and Gemma 2 are other [architectures](Architecture). A field that
/// a serialized configuration leaves out has the value of the presets.
///
/// The presets share a vocabulary of 10,000 and a context of 256; set what differs:
///
/// ```
/// use tallow::model::TransformerConfig;
/// let config = TransformerConfig { context_length: 1024, ..TransformerConfig::preset("small")? };
/// assert_eq!(config.num_parameters(), 128_625_408);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TransformerConfig {
    /// V: the number of token ids.
    pub vocab_size: usize,
    /// The longest sequence that the model accepts; for GPT-2 the number of position embeddings.
    pub context_length: usize,
    /// D: the width of the residual stream.
    pub d_model: usize,
    /// L: the number of blocks.
    pub num_layers: usize,
    /// H: the number of attention heads.
    pub num_heads: usize,
    /// F: the width of the feed-forward network.
    pub d_ff: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// The eps of RMSNorm or LayerNorm.
    #[cfg_attr(feature = "serde", serde(alias = "rms_norm_eps"))]
    pub norm_eps: f64,
    /// Hkv: the number of heads of k and v, each of which serves H / Hkv heads of q; `None` for H.
    #[cfg_attr(feature = "serde", serde(default))]
    pub num_kv_heads: Option<usize>,
    /// Dh: the dimension of a head; `None` for D / H.
    #[cfg_attr(feature = "serde", serde(default))]
    pub head_dim: Option<usize>,
    /// Whether the projections to q, k and v have biases.
    #[cfg_attr(feature = "serde", serde(default))]
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    #[cfg_attr(feature = "serde", serde(default))]
    pub output_bias: bool,
    /// Whether each head of q and k has an RMSNorm, with a weight (Dh), before rotary embedding.
    #[cfg_attr(feature = "serde", serde(default))]
    pub qk_norm: bool,
    /// Whether the output head shares the weight of the token embedding.
    #[cfg_attr(feature = "serde", serde(default))]
    pub tie_embeddings: bool,
    /// The elements of a head that form a rotary pair.
    #[cfg_attr(feature = "serde", serde(default))]
    pub rope_pairs: RotaryPairs,
    /// The scaling of rotary frequencies for longer contexts.
    #[cfg_attr(feature = "serde", serde(default))]
    pub rope_scaling: RopeScaling,
    /// The number of tokens that each attends to, up to its own; `None` for all. In Gemma 2 it applies to blocks 0, 2,
    /// 4 and so on.
    #[cfg_attr(feature = "serde", serde(default))]
    pub sliding_window: Option<NonZeroUsize>,
    /// The factor of the attention scores; `None` for 1 / sqrt(Dh).
    #[cfg_attr(feature = "serde", serde(default))]
    pub attention_scale: Option<f64>,
    /// The [soft cap](crate::attention::AttentionConfig::soft_cap) of the attention scores; `None` for no cap.
    #[cfg_attr(feature = "serde", serde(default))]
    pub attention_soft_cap: Option<f64>,
    /// The [soft cap](crate::ops::soft_cap()) of the logits; `None` for no cap. With a cap, head and loss are three
    /// ops, which save 2 B T V elements for backward.
    #[cfg_attr(feature = "serde", serde(default))]
    pub logit_soft_cap: Option<f64>,
    /// The dropout rates; they apply in a forward with a [dropout key](crate::nn::ForwardContext::dropout).
    #[cfg_attr(feature = "serde", serde(default))]
    pub dropout: DropoutRates,
    /// The padding token, whose row gets no gradient from the embedding (PyTorch's `padding_idx`); with `None` every
    /// row is trained. A tied head adds its gradient to that row nevertheless.
    #[cfg_attr(feature = "serde", serde(default))]
    pub padding_id: Option<u32>,
    /// The GELU of the feed-forward networks of GPT-2 and Gemma 2.
    #[cfg_attr(feature = "serde", serde(default = "tanh"))]
    pub gelu: Gelu,
    /// The architecture. [`Architecture::Gpt2`] requires the presets' values in the fields of rotary embedding, in the
    /// biases, in `qk_norm` and in `padding_id`, with Hkv = H and Dh = D / H.
    #[cfg_attr(feature = "serde", serde(default))]
    pub architecture: Architecture,
}

/// Returns the GELU of a serialized configuration that names none.
#[cfg(feature = "serde")]
fn tanh() -> Gelu {
    Gelu::Tanh
}

impl Default for TransformerConfig {
    /// The [preset](TransformerConfig::preset) `tiny`.
    fn default() -> Self {
        Self::TINY
    }
}

impl TransformerConfig {
    /// The names of the presets, from the smallest model to the largest.
    pub const PRESETS: [&'static str; 8] = [
        "tiny", "small", "medium", "large", "xl", "wide", "2.7b", "10b",
    ];

    const fn sized(d_model: usize, d_ff: usize, num_layers: usize, num_heads: usize) -> Self {
        Self {
            vocab_size: 10_000,
            context_length: 256,
            d_model,
            num_layers,
            num_heads,
            d_ff,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            num_kv_heads: None,
            head_dim: None,
            qkv_bias: false,
            output_bias: false,
            qk_norm: false,
            tie_embeddings: false,
            rope_pairs: RotaryPairs::Adjacent,
            rope_scaling: RopeScaling::None,
            sliding_window: None,
            attention_scale: None,
            attention_soft_cap: None,
            logit_soft_cap: None,
            dropout: DropoutRates::all(0.0),
            padding_id: None,
            gelu: Gelu::Tanh,
            architecture: Architecture::Llama,
        }
    }

    const TINY: Self = Self::sized(512, 1344, 4, 16);

    /// Returns a preset by name, in lower or upper case. The presets are CS336's sizes of the model.
    ///
    /// | Name | Parameters | D | F | Layers | Heads |
    /// |---|---|---|---|---|---|
    /// | `tiny`, the default | 22.7 M | 512 | 1344 | 4 | 16 |
    /// | `small` | 128.6 M | 768 | 3072 | 12 | 12 |
    /// | `medium` | 423.2 M | 1024 | 4096 | 24 | 16 |
    /// | `large` | 969.4 M | 1280 | 5120 | 36 | 20 |
    /// | `xl` | 2.0 G | 1600 | 6400 | 48 | 25 |
    /// | `wide`, few and wide layers | 2.4 G | 3200 | 25600 | 8 | 4 |
    /// | `2.7b`, as CS336's handout calls it | 3.4 G | 2560 | 10240 | 32 | 32 |
    /// | `10b` | 12.8 G | 4608 | 12288 | 50 | 36 |
    ///
    /// # Errors
    /// A name that is not in [`PRESETS`](Self::PRESETS).
    pub fn preset(name: &str) -> Result<Self> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "tiny" => Self::TINY,
            "small" => Self::sized(768, 3072, 12, 12),
            "medium" => Self::sized(1024, 4096, 24, 16),
            "large" => Self::sized(1280, 5120, 36, 20),
            "xl" => Self::sized(1600, 6400, 48, 25),
            "wide" => Self::sized(3200, 25600, 8, 4),
            "2.7b" => Self::sized(2560, 10240, 32, 32),
            "10b" => Self::sized(4608, 12288, 50, 36),
            _ => {
                return Err(
                    Error::config("TransformerConfig", "preset", format!("{name:?}")).must_be(
                        format!("one of {}", Self::PRESETS.join(", ")),
                        "or give the sizes one by one",
                    ),
                );
            }
        })
    }

    /// Returns Dh: `head_dim`, or D / H.
    pub fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.d_model / self.num_heads.max(1))
    }

    /// Returns the number of elements of the rotary tables: cosines and sines, (positions, Dh/2) each.
    pub(crate) fn angle_elements(&self, positions: usize) -> usize {
        match self.architecture {
            Architecture::Llama | Architecture::Gemma2 => positions.saturating_mul(self.head_dim()),
            Architecture::Gpt2 => 0,
        }
    }

    /// Returns Hkv: `num_kv_heads`, or H.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    pub(crate) fn is_gpt2(&self) -> bool {
        self.architecture == Architecture::Gpt2
    }

    /// Returns the number of weights of D F elements in a block: 3 in a gated feed-forward network, 2 in that of GPT-2.
    pub fn feed_forward_maps(&self) -> usize {
        match self.architecture {
            Architecture::Llama | Architecture::Gemma2 => 3,
            Architecture::Gpt2 => 2,
        }
    }

    /// Returns the width of q and of the merged heads, H Dh, and that of k and v, Hkv Dh.
    pub(crate) fn attention_widths(&self) -> [usize; 2] {
        [self.num_heads, self.num_kv_heads()].map(|heads| heads.saturating_mul(self.head_dim()))
    }

    /// Returns the attention configuration of block `i`.
    pub(crate) fn self_attention(&self, i: usize) -> SelfAttentionConfig {
        let has_window = self.architecture != Architecture::Gemma2 || i.is_multiple_of(2);
        SelfAttentionConfig {
            d_model: self.d_model,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads(),
            head_dim: self.head_dim(),
            qkv_bias: self.qkv_bias || self.is_gpt2(),
            output_bias: self.output_bias || self.is_gpt2(),
            qk_norm_eps: self.qk_norm.then_some(self.norm_eps),
            sliding_window: self.sliding_window.filter(|_| has_window),
            scale: self.attention_scale,
            soft_cap: self.attention_soft_cap,
        }
    }

    /// Returns the name and shape of each parameter, in the model's order; linear weights are (out, in).
    pub fn parameter_shapes(&self) -> Vec<(String, Shape)> {
        let (vocab, d, f) = (self.vocab_size, self.d_model, self.d_ff);
        let [q, kv] = self.attention_widths();
        let is_gpt2 = self.is_gpt2();
        let is_gemma2 = self.architecture == Architecture::Gemma2;
        let SelfAttentionConfig {
            qkv_bias,
            output_bias,
            ..
        } = self.self_attention(0);
        let mut shapes = Vec::new();
        let mut add = |layer: &str, shape: &[usize], has_bias: bool| {
            shapes.push((format!("{layer}.weight"), shape.into()));
            if has_bias {
                shapes.push((format!("{layer}.bias"), shape[0].into()));
            }
        };
        add("token_embeddings", &[vocab, d], false);
        if is_gpt2 {
            add("position_embeddings", &[self.context_length, d], false);
        }
        for i in 0..self.num_layers {
            let mut add = |part: &str, shape: &[usize], has_bias: bool| {
                add(&format!("layers.{i}.{part}"), shape, has_bias);
            };
            add("ln1", &[d], is_gpt2);
            for (name, width) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
                add(&format!("attn.{name}"), &[width, d], qkv_bias);
            }
            add("attn.output_proj", &[d, q], output_bias);
            if self.qk_norm {
                add("attn.q_norm", &[self.head_dim()], false);
                add("attn.k_norm", &[self.head_dim()], false);
            }
            if is_gemma2 {
                add("ln1_post", &[d], false);
                add("ln2_post", &[d], false);
            }
            add("ln2", &[d], is_gpt2);
            add("ffn.w1", &[f, d], is_gpt2);
            add("ffn.w2", &[d, f], is_gpt2);
            if !is_gpt2 {
                add("ffn.w3", &[f, d], false);
            }
        }
        add("ln_final", &[d], is_gpt2);
        if !self.tie_embeddings {
            add(HEAD, &[vocab, d], false);
        }
        shapes
    }

    /// Returns the shapes of the parameters and how many have each; a block's are listed once for all `num_layers`
    /// blocks.
    pub(crate) fn parameter_counts(&self) -> impl Iterator<Item = (Shape, usize)> + use<> {
        let block = Self {
            num_layers: self.num_layers.min(1),
            ..self.clone()
        };
        let layers = self.num_layers;
        let shapes = block.parameter_shapes().into_iter();
        shapes.map(move |(name, shape)| match name.starts_with("layers.") {
            true => (shape, layers),
            false => (shape, 1),
        })
    }

    /// Returns the number of parameters: `2 V D + L (2 D (H + Hkv) Dh + 3 D F + 2 D) + D`, plus biases and norms of q
    /// and k if configured; a tied head makes `2 V D` `V D`. For the presets it is
    /// `2 V D + L (4 D^2 + 3 D F + 2 D) + D`; for GPT-2 with a tied head
    /// `V D + context_length D + L (4 D^2 + 2 D F + 9 D + F) + 2 D`; for Gemma 2 `2 D` in a block becomes `4 D`.
    /// Saturates instead of overflowing.
    pub fn num_parameters(&self) -> usize {
        let [vocab, d, f, layers] =
            [self.vocab_size, self.d_model, self.d_ff, self.num_layers].map(|size| size as u128);
        let [q, kv] = self.attention_widths().map(|width| width as u128);
        let attention = self.self_attention(0);
        let qkv_biases = if attention.qkv_bias { q + 2 * kv } else { 0 };
        let output_bias = if attention.output_bias { d } else { 0 };
        let biases = qkv_biases + output_bias;
        let norms = if self.qk_norm { 2 * self.head_dim() } else { 0 };
        // GPT-2: the biases of w1, w2 and the norms, in a block and at the end. Gemma 2: the additional norms.
        let [in_block, after, positions] = match self.architecture {
            Architecture::Llama => [0; 3],
            Architecture::Gpt2 => [3 * d + f, d, self.context_length as u128],
            Architecture::Gemma2 => [2 * d, 0, 0],
        };
        let maps = self.feed_forward_maps() as u128;
        let layer = d.saturating_mul(2 * (q + kv) + maps * f + 2);
        let layer = layer.saturating_add(biases + norms as u128 + in_block);
        let tables = if self.tie_embeddings {
            vocab
        } else {
            2 * vocab
        };
        let total = d
            .saturating_mul(tables + positions + 1)
            .saturating_add(after)
            .saturating_add(layers.saturating_mul(layer));
        usize::try_from(total).unwrap_or(usize::MAX)
    }

    /// Returns the formula of [`num_parameters`](Self::num_parameters), in letters if the model is like the presets.
    pub(crate) fn parameters_formula(&self) -> &'static str {
        let is_square = self.attention_widths() == [self.d_model; 2];
        let has_biases = self.qkv_bias || self.output_bias || self.is_gpt2();
        let has_more = has_biases
            || self.qk_norm
            || self.tie_embeddings
            || self.architecture == Architecture::Gemma2;
        match is_square && !has_more {
            true => "2VD + L(4D^2 + 3FD + 2D) + D",
            false => "all weights",
        }
    }
}
