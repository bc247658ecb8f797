//! The sizes of a transformer language model.

use crate::attention::{Algorithm, flash};
use crate::nn::{Checkpointing, check_eps};
use crate::{Error, Result};
use candle_core::Shape;

/// [`TransformerConfig::num_parameters`], in letters.
pub(crate) const PARAMETERS_FORMULA: &str = "2VD + L(4D^2 + 3FD + 2D) + D";

/// The sizes of a [`TransformerLM`](super::TransformerLM).
///
/// The presets share a vocabulary of 10,000 and a context of 256; set what differs:
///
/// ```
/// use tallow::model::TransformerConfig;
/// let config = TransformerConfig { context_length: 1024, ..TransformerConfig::small() };
/// assert_eq!(config.num_parameters(), 128_625_408);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TransformerConfig {
    /// V: how many token ids there are.
    pub vocab_size: usize,
    /// The longest sequence that can be run.
    pub context_length: usize,
    /// D: the width of the residual stream.
    pub d_model: usize,
    /// L: how many blocks.
    pub num_layers: usize,
    /// H: attention heads; each has D / H elements.
    pub num_heads: usize,
    /// F: the width of the feed-forward network.
    pub d_ff: usize,
    /// The base of the rotary angles.
    pub rope_theta: f64,
    /// What the norms add under the root.
    pub rms_norm_eps: f64,
    /// What computes attention; naive where a serialized configuration says nothing. The weights do not depend on it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub attention: Algorithm,
    /// What the blocks leave for backward; the whole graph where a serialized configuration says nothing. No result
    /// depends on it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub checkpointing: Checkpointing,
}

impl Default for TransformerConfig {
    /// [`TransformerConfig::tiny`].
    fn default() -> Self {
        Self::tiny()
    }
}

impl TransformerConfig {
    /// The presets' names, smallest model first.
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
            rms_norm_eps: 1e-5,
            attention: Algorithm::Naive,
            checkpointing: Checkpointing::None,
        }
    }

    /// 22.7 M parameters: D 512, F 1344, 4 layers, 16 heads.
    pub const fn tiny() -> Self {
        Self::sized(512, 1344, 4, 16)
    }

    /// 128.6 M parameters: D 768, F 3072, 12 layers, 12 heads.
    pub const fn small() -> Self {
        Self::sized(768, 3072, 12, 12)
    }

    /// 423.2 M parameters: D 1024, F 4096, 24 layers, 16 heads.
    pub const fn medium() -> Self {
        Self::sized(1024, 4096, 24, 16)
    }

    /// 969.4 M parameters: D 1280, F 5120, 36 layers, 20 heads.
    pub const fn large() -> Self {
        Self::sized(1280, 5120, 36, 20)
    }

    /// 2.0 G parameters: D 1600, F 6400, 48 layers, 25 heads.
    pub const fn xl() -> Self {
        Self::sized(1600, 6400, 48, 25)
    }

    /// 3.4 G parameters, the CS336 handout's "2.7B": D 2560, F 10240, 32 layers, 32 heads.
    pub const fn b2_7() -> Self {
        Self::sized(2560, 10240, 32, 32)
    }

    /// 2.4 G parameters in few, wide layers: D 3200, F 25600, 8 layers, 4 heads.
    pub const fn wide() -> Self {
        Self::sized(3200, 25600, 8, 4)
    }

    /// 12.8 G parameters: D 4608, F 12288, 50 layers, 36 heads.
    pub const fn b10() -> Self {
        Self::sized(4608, 12288, 50, 36)
    }

    /// The preset called `name`, in any case (`2.7B` and `2.7b`).
    ///
    /// # Errors
    /// A name that is not in [`PRESETS`](Self::PRESETS).
    pub fn preset(name: &str) -> Result<Self> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "tiny" => Self::tiny(),
            "small" => Self::small(),
            "medium" => Self::medium(),
            "large" => Self::large(),
            "xl" => Self::xl(),
            "wide" => Self::wide(),
            "2.7b" => Self::b2_7(),
            "10b" => Self::b10(),
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

    /// Dh = D / H.
    pub fn head_dim(&self) -> usize {
        self.d_model / self.num_heads.max(1)
    }

    /// Every parameter's name and shape, in the model's order; linear weights are (out, in).
    pub fn parameter_shapes(&self) -> Vec<(String, Shape)> {
        let (vocab, d, f) = (self.vocab_size, self.d_model, self.d_ff);
        let mut shapes: Vec<(String, Shape)> =
            vec![("token_embeddings.weight".into(), (vocab, d).into())];
        for layer in 0..self.num_layers {
            let parts: [(&str, Shape); 9] = [
                ("ln1", d.into()),
                ("attn.q_proj", (d, d).into()),
                ("attn.k_proj", (d, d).into()),
                ("attn.v_proj", (d, d).into()),
                ("attn.output_proj", (d, d).into()),
                ("ln2", d.into()),
                ("ffn.w1", (f, d).into()),
                ("ffn.w2", (d, f).into()),
                ("ffn.w3", (f, d).into()),
            ];
            for (part, shape) in parts {
                shapes.push((format!("layers.{layer}.{part}.weight"), shape));
            }
        }
        shapes.push(("ln_final.weight".into(), d.into()));
        shapes.push(("lm_head.weight".into(), (vocab, d).into()));
        shapes
    }

    /// How many parameters: `2 V D + L (4 D^2 + 3 D F + 2 D) + D`. Saturates rather than overflows.
    pub fn num_parameters(&self) -> usize {
        let [vocab, d, f, layers] =
            [self.vocab_size, self.d_model, self.d_ff, self.num_layers].map(|size| size as u128);
        let layer = d.saturating_mul(4 * d + 3 * f + 2);
        let total = d
            .saturating_mul(2 * vocab + 1)
            .saturating_add(layers.saturating_mul(layer));
        usize::try_from(total).unwrap_or(usize::MAX)
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// A zero size, a d_model that num_heads does not divide, an odd head dimension (rotary positions turn pairs), a
    /// theta or eps that is not positive (or an eps that is 0 in f32), sizes whose parameters cannot be counted, heads
    /// too large for flash attention; each names its field.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String, hint: &str| {
            Err(Error::config("TransformerConfig", field, got).must_be(expected, hint))
        };
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("context_length", self.context_length),
            ("d_model", self.d_model),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("d_ff", self.d_ff),
        ];
        for (field, size) in sizes {
            if size == 0 {
                return refuse(field, "positive", "0".into(), "every size counts something");
            }
            if size > u32::MAX as usize {
                return refuse(
                    field,
                    "under 2^32",
                    size.to_string(),
                    "no memory holds that",
                );
            }
        }
        if self.num_parameters() > isize::MAX as usize / size_of::<f64>() {
            return refuse(
                "d_model",
                "such that all parameters have an address",
                format!("{} parameters or more", self.num_parameters()),
                "no memory holds that",
            );
        }
        if !self.d_model.is_multiple_of(self.num_heads) {
            return refuse(
                "d_model",
                &format!("divisible by num_heads {}", self.num_heads),
                self.d_model.to_string(),
                "each head gets d_model / num_heads elements",
            );
        }
        if !self.head_dim().is_multiple_of(2) {
            return refuse(
                "num_heads",
                "such that d_model / num_heads is even",
                format!("a head dimension of {}", self.head_dim()),
                "rotary positions turn pairs of elements",
            );
        }
        if self.attention == Algorithm::Flash && self.head_dim() > flash::MAX_HEAD_DIM {
            return refuse(
                "attention",
                &format!(
                    "naive where a head has more than {} elements",
                    flash::MAX_HEAD_DIM
                ),
                format!("flash for heads of {}", self.head_dim()),
                "choose naive, or more heads",
            );
        }
        if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            return refuse(
                "rope_theta",
                "positive and finite",
                self.rope_theta.to_string(),
                "the presets use 10000",
            );
        }
        check_eps("TransformerConfig", "rms_norm_eps", self.rms_norm_eps)
    }
}
