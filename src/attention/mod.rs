//! Scaled dot-product attention on queries, keys and values that are already split into heads.
//!
//! Two algorithms compute the same result. [`naive()`] saves the probabilities for backward; [`flash()`] computes them
//! tile by tile and recomputes them in backward. Both take an [`AttentionConfig`]; [`Algorithm`] selects one at run
//! time. [`nn::Attention`](crate::nn::Attention) adds the projections.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::{self, AttentionConfig, Mask};
//!
//! let q = Tensor::randn(0f32, 1.0, (2, 4, 16, 8), &Device::Cpu)?; // (B, H, Tq, Dh)
//! // Two heads of q share one of k.
//! let k = Tensor::randn(0f32, 1.0, (2, 2, 16, 8), &Device::Cpu)?; // (B, Hkv, Tk, Dh)
//! let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
//! let naive = attention::naive(&q, &k, &k, &config)?;
//! let flash = attention::flash(&q, &k, &k, &config)?;
//! let difference = (naive - flash)?.abs()?.max_all()?.to_scalar::<f32>()?;
//! assert!(difference < 1e-5);
//! # Ok::<(), tallow::Error>(())
//! ```

mod algorithm;
mod computed;
pub(crate) mod cost;
pub(crate) mod first_keys;
pub(crate) mod flash;
mod host_seen;
pub(crate) mod in_rows;
pub(crate) mod lowering;
mod masks;
pub(crate) mod naive;
mod nothing;
pub mod reference;
mod shapes;

pub use crate::kernels::Mask;
use crate::ops::info::OpInfo;
pub use algorithm::Algorithm;
pub use first_keys::FirstKeys;
pub use flash::{MAX_HEAD_DIM as FLASH_MAX_HEAD_DIM, flash, flash_with_lse};
pub use masks::{KeyMask, ScoreBias};
pub use naive::{naive, naive_with_lse};

pub(crate) const INFOS: &[OpInfo] = &[naive::INFO, flash::INFO];

use crate::graph::Attribute;
use crate::kernels::{self, attention::Sizes};
use crate::ops::{Dropout, dropout};
use candle_core::Tensor;
#[cfg(feature = "cuda")]
pub(crate) use flash::lowering::planned_flash_sizes;
use masks::MaskTensors;

/// The configuration of an attention call: masks, scale, soft cap, bias and dropout.
///
/// The scores are `scale q k^T`, soft-capped, plus the bias. A pair is visible if the mask, the first keys and the key
/// mask all show it. The probabilities are the softmax of the visible scores.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, Mask};
///
/// let q = Tensor::ones((1, 2, 4, 16), DType::F32, &Device::Cpu)?; // (B, H, T, Dh)
/// let config = AttentionConfig { mask: Mask::Causal, soft_cap: Some(50.0), ..Default::default() };
/// assert_eq!(config.scale_for(16), 0.25);
/// assert_eq!(attention::flash(&q, &q, &q, &config)?.dims(), q.dims());
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// An encoder has no causal mask, and sequences that are padded to one length:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, KeyMask};
///
/// let x = Tensor::randn(0f32, 1.0, (3, 2, 7, 16), &Device::Cpu)?; // (B, H, T, Dh)
/// let key_mask = Some(KeyMask::of_lengths(&[7, 4, 5], 7)?);
/// let config = AttentionConfig { key_mask, ..Default::default() };
/// let out = attention::flash(&x, &x, &x, &config)?; // the loss ignores the rows of padding
/// assert_eq!(out.dims(), x.dims());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionConfig {
    /// The mask: the keys that each query attends to.
    pub mask: Mask,
    /// The factor of the scores q k^T; `None` means 1 / sqrt(Dh).
    pub scale: Option<f64>,
    /// The soft cap C: each scaled score becomes `C tanh(score / C)`, as in
    /// [`ops::soft_cap`](crate::ops::soft_cap()). `None` means no cap.
    pub soft_cap: Option<f64>,
    /// The first key that each query attends to, in addition to the mask; `None` means key 0.
    pub first_keys: Option<FirstKeys>,
    /// The keys that queries may attend to, in addition to the mask and the first keys: padding, or any pairs. `None`
    /// hides none.
    pub key_mask: Option<KeyMask>,
    /// Terms that are added to the scores, after scale and soft cap. `None` adds nothing.
    pub bias: Option<ScoreBias>,
    /// Dropout of the probabilities, after the softmax. All algorithms drop the same elements: those that
    /// [`ops::dropout`](crate::ops::dropout()) would drop, with the same key, in a tensor (..., H, Tq, Tk). `None`
    /// drops none.
    pub dropout: Option<Dropout>,
}

impl AttentionConfig {
    /// Returns the scale for heads of dimension `head_dim`.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt())
    }

    /// Returns the extra inputs of a call: the first keys, the key mask (B or 1, H or 1, Tq or 1, Tk or 1), then the
    /// dropout key.
    fn reads(&self, masks: &MaskTensors) -> Vec<Tensor> {
        let first_keys = self.first_keys.iter().map(FirstKeys::tensor);
        let keys = self.dropout.iter().map(|dropout| dropout.key.tensor());
        first_keys
            .chain(&masks.visible)
            .chain(keys)
            .cloned()
            .collect()
    }

    /// Returns the attributes that a trace records for a call.
    fn attributes(&self, sizes: &Sizes) -> Vec<(&'static str, Attribute)> {
        attributes(sizes, self.dropout.as_ref().map(Dropout::kernel))
    }
}

/// Returns the attributes that a trace records for a call.
fn attributes(sizes: &Sizes, dropout: Option<kernels::Dropout>) -> Vec<(&'static str, Attribute)> {
    let attributes = [
        ("scale", Attribute::Number(sizes.scale)),
        ("mask", Attribute::Mask(sizes.mask)),
    ];
    let cap = sizes.soft_cap.map(|cap| (SOFT_CAP, Attribute::Number(cap)));
    let of_dropout = dropout.into_iter().flat_map(dropout::attributes);
    attributes
        .into_iter()
        .chain(cap)
        .chain(of_dropout)
        .collect()
}

/// The attribute that holds the soft cap.
pub(crate) const SOFT_CAP: &str = "soft_cap";
