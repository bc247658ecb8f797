//! How many elements the tensors of a model have, with their letters.

use super::Workload;
use crate::attention::Mask;
use crate::memory::{AttentionWorkload, Kernels};
use crate::model::TransformerConfig;

/// A number of elements, and how it is written in letters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::memory) struct Size {
    pub formula: &'static str,
    pub elements: f64,
}

impl Size {
    pub fn new(formula: &'static str, elements: f64) -> Self {
        Self { formula, elements }
    }
}

/// The sizes of one pass.
pub(super) struct Sizes {
    /// What the letters stand for.
    pub letters: String,
    /// The sizes of attention.
    pub attention: AttentionWorkload,
    /// B T.
    pub rows: Size,
    /// (B, T, D), and as heads.
    pub stream: Size,
    /// (B, T, F).
    pub hidden: Size,
    /// (B, T, V).
    pub logits: Size,
    /// (B, H, T, T).
    pub scores: Size,
    /// (B, H, T).
    pub head_rows: Size,
    /// (T, Dh/2), twice: cos and sin.
    pub angles: Size,
    /// D.
    pub norm_weight: Size,
    /// (D, D).
    pub projection: Size,
    /// (F, D).
    pub feed_forward: Size,
    /// (V, D).
    pub vocabulary: Size,
    /// All weights.
    pub parameters: Size,
    /// B T, D, F, V, as products have them.
    pub counts: Counts,
}

/// Whole numbers, that stay at the largest where they overflow.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    pub rows: usize,
    pub d_model: usize,
    pub d_ff: usize,
    pub vocab_size: usize,
}

impl Sizes {
    pub fn new(config: &TransformerConfig, workload: &Workload) -> Self {
        let [b, t, d, f, h, v, l] = [
            workload.batch_size,
            workload.sequence_length,
            config.d_model,
            config.d_ff,
            config.num_heads,
            config.vocab_size,
            config.num_layers,
        ];
        let place = match workload.kernels {
            Kernels::Cpu => format!("{} threads", rayon::current_num_threads()),
            Kernels::Cuda => "on a card".into(),
        };
        let letters = format!("B {b}, T {t}, D {d}, F {f}, H {h}, V {v}, L {l}; {place}");
        let counts = Counts {
            rows: b.saturating_mul(t),
            d_model: d,
            d_ff: f,
            vocab_size: v,
        };
        let attention = AttentionWorkload {
            algorithm: workload.attention,
            batch_size: b,
            heads: h,
            sequence_length: t,
            head_dim: config.head_dim(),
            mask: Mask::Causal,
            dtype: workload.precision.dtype(),
        };
        let [b, t, d, f, h, v] = [b, t, d, f, h, v].map(|size| size as f64);
        Self {
            letters,
            attention,
            rows: Size::new("BT", b * t),
            stream: Size::new("BTD", b * t * d),
            hidden: Size::new("BTF", b * t * f),
            logits: Size::new("BTV", b * t * v),
            scores: Size::new("BHT^2", b * h * t * t),
            head_rows: Size::new("BHT", b * h * t),
            angles: Size::new("TD/H", t * config.head_dim() as f64),
            norm_weight: Size::new("D", d),
            projection: Size::new("D^2", d * d),
            feed_forward: Size::new("FD", f * d),
            vocabulary: Size::new("VD", v * d),
            parameters: Size::new(
                "2VD + L(4D^2 + 3FD + 2D) + D",
                config.num_parameters() as f64,
            ),
            counts,
        }
    }

    /// The model's own cos and sin, for every position that it takes.
    pub fn rotary_tables(&self, config: &TransformerConfig) -> Size {
        let positions = config.context_length.max(self.attention.sequence_length);
        let elements = positions as f64 * self.attention.head_dim as f64;
        Size::new("context_length D/H", elements)
    }
}
