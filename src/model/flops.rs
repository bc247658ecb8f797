//! How many floating-point operations a pass of [`TransformerLM`](super::TransformerLM) takes, by part of the model.
//!
//! ```
//! use tallow::model::{TransformerConfig, flops};
//!
//! let config = TransformerConfig::small();
//! let step = flops::forward_backward(&config, 4, 256); // batch, sequence
//! assert_eq!(step.total(), 3.0 * flops::forward(&config, 4, 256).total());
//! println!("{:.1} TFLOP, of which attention {:.1}%", step.total() / 1e12, 100.0 * step.attention / step.total());
//! ```

use super::TransformerConfig;

/// FLOPs of one pass over a batch: 2 for each multiply-add of every matrix product, nothing else.
///
/// It is the model's work, whatever computes it: that flash attention takes q k^T once more in its backward is not
/// counted, and what it skips under the causal mask is. So rates and MFU of two algorithms compare as their times do,
/// and say nothing of how busy the processor was.
///
/// Left out: norms, softmax, the gate, the optimizer, and the embedding, which multiplies nothing; they are under 1% of
/// a step for the presets, and their cost is memory traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Flops {
    /// The token embedding: 0, a lookup.
    pub embedding: f64,
    /// q, k, v and output projections: `2 B T L 2 D (H + Hkv) Dh`, in the presets `2 B T L 4 D^2`.
    pub projections: f64,
    /// q k^T and p v, in full (neither a causal mask nor a window saves anything): `4 B L T^2 H Dh`, in the presets
    /// `4 B L T^2 D`.
    pub attention: f64,
    /// w1, w2 and w3: `2 B T L 3 D F`; of GPT-2, which has no w3, `2 B T L 2 D F`.
    pub feed_forward: f64,
    /// The output head: `2 B T D V`.
    pub head: f64,
}

impl Flops {
    /// The sum of the parts.
    pub fn total(&self) -> f64 {
        self.embedding + self.projections + self.attention + self.feed_forward + self.head
    }

    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self {
            embedding: f(self.embedding),
            projections: f(self.projections),
            attention: f(self.attention),
            feed_forward: f(self.feed_forward),
            head: f(self.head),
        }
    }
}

/// What the reports print beside a FLOP count.
pub const FORMULA: &str =
    "forward 2BT(L(4D^2 + 3DF) + DV) + 4BLT^2D (GPT-2: 2DF for 3DF), backward twice that";

/// A forward pass over `batch_size` sequences of `sequence_length` tokens.
///
/// ```
/// use tallow::model::{TransformerConfig, flops};
/// let forward = flops::forward(&TransformerConfig::tiny(), 4, 256);
/// assert_eq!(forward.head, 2.0 * 4.0 * 256.0 * 512.0 * 10_000.0);
/// ```
pub fn forward(config: &TransformerConfig, batch_size: usize, sequence_length: usize) -> Flops {
    // In f64: exact to 2^53, and no overflow beyond.
    let [b, t, layers] = [batch_size, sequence_length, config.num_layers].map(|n| n as f64);
    let [d, f, v] = [config.d_model, config.d_ff, config.vocab_size].map(|n| n as f64);
    let [q, kv] = config.attention_widths().map(|n| n as f64);
    let maps = config.feed_forward_maps() as f64;
    Flops {
        embedding: 0.0,
        projections: 2.0 * b * t * layers * 2.0 * d * (q + kv),
        attention: 4.0 * b * layers * t * t * q,
        feed_forward: 2.0 * b * t * layers * maps * d * f,
        head: 2.0 * b * t * d * v,
    }
}

/// A backward pass: twice the forward, one product for the input's gradient and one for the weight's (for q k^T and p
/// v, one for each factor).
pub fn backward(config: &TransformerConfig, batch_size: usize, sequence_length: usize) -> Flops {
    forward(config, batch_size, sequence_length).map(|part| 2.0 * part)
}

/// Forward and backward: what a training step costs, the optimizer left out.
pub fn forward_backward(
    config: &TransformerConfig,
    batch_size: usize,
    sequence_length: usize,
) -> Flops {
    forward(config, batch_size, sequence_length).map(|part| 3.0 * part)
}
