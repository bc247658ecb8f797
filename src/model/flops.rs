//! Floating-point operations of a pass of [`TransformerLM`](super::TransformerLM), by part of the model.
//!
//! ```
//! use tallow::model::{TransformerConfig, flops};
//!
//! let config = TransformerConfig::preset("small")?;
//! let step = flops::forward_backward(&config, 4, 256); // batch, sequence
//! assert_eq!(step.total(), 3.0 * flops::forward(&config, 4, 256).total());
//! println!(
//!     "{:.1} TFLOP, of which attention {:.1}%",
//!     step.total() / 1e12,
//!     100.0 * step.attention / step.total()
//! );
//! # Ok::<(), tallow::Error>(())
//! ```

use super::TransformerConfig;

/// The FLOPs of a pass over a batch: 2 for each multiply-add of the matmuls.
///
/// These are FLOPs of the model, not of an algorithm. Tiles that flash attention skips under a causal mask are counted;
/// the matmul q k^T that its backward repeats is not. So MFU of two algorithms compares like their times. It does not
/// measure how busy the processor was.
///
/// Norms, softmax, gates, embedding and optimizer are not counted. For the presets they are under 1% of a step, and
/// they are bound by memory traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Flops {
    /// The token embedding: 0, since it is a lookup.
    pub embedding: f64,
    /// The projections of q, k, v and the output: `2 B T L 2 D (H + Hkv) Dh`; for the presets `2 B T L 4 D^2`.
    pub projections: f64,
    /// The matmuls q k^T and p v without a mask: `4 B L T^2 H Dh`; for the presets `4 B L T^2 D`.
    pub attention: f64,
    /// w1, w2 and w3: `2 B T L 3 D F`; for GPT-2, without w3, `2 B T L 2 D F`.
    pub feed_forward: f64,
    /// The output head: `2 B T D V`.
    pub head: f64,
}

impl Flops {
    /// Returns the sum of the parts.
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

/// The formula of a pass, which reports print with its FLOPs.
pub const FORMULA: &str =
    "forward 2BT(L(4D^2 + 3DF) + DV) + 4BLT^2D (GPT-2: 2DF for 3DF), backward twice that";

/// Returns the FLOPs of a forward pass over `batch_size` sequences of `sequence_length` tokens.
///
/// ```
/// use tallow::model::{TransformerConfig, flops};
/// let forward = flops::forward(&TransformerConfig::default(), 4, 256);
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

/// Returns the FLOPs of a backward pass: twice those of forward, since each matmul has two gradients.
pub fn backward(config: &TransformerConfig, batch_size: usize, sequence_length: usize) -> Flops {
    forward(config, batch_size, sequence_length).map(|part| 2.0 * part)
}

/// Returns the FLOPs of forward and backward.
pub fn forward_backward(
    config: &TransformerConfig,
    batch_size: usize,
    sequence_length: usize,
) -> Flops {
    forward(config, batch_size, sequence_length).map(|part| 3.0 * part)
}
