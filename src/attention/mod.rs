//! Scaled dot-product attention of queries, keys and values that are split into heads already.
//!
//! Two algorithms compute the same result: [`naive()`] keeps the probabilities in memory, [`flash()`] computes them
//! tile by tile and recomputes them in backward. Both take the same [`AttentionConfig`]; [`Algorithm`] chooses between
//! them at run time. The projections around attention are in
//! [`nn::CausalSelfAttention`](crate::nn::CausalSelfAttention), the single ops in [`ops`](crate::ops).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::{self, AttentionConfig, Mask};
//!
//! let q = Tensor::randn(0f32, 1.0, (2, 4, 16, 8), &Device::Cpu)?; // (B, H, Tq, Dh)
//! let k = Tensor::randn(0f32, 1.0, (2, 2, 16, 8), &Device::Cpu)?; // (B, Hkv, Tk, Dh): two heads of q share one
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
pub(crate) mod in_rows;
pub(crate) mod lowering;
pub(crate) mod naive;
mod nothing;
pub mod reference;
mod shapes;

pub use crate::kernels::Mask;
use crate::ops::info::OpInfo;
pub use algorithm::Algorithm;
pub use first_keys::FirstKeys;
pub use flash::{MAX_HEAD_DIM as FLASH_MAX_HEAD_DIM, flash, flash_with_lse};
pub use naive::{naive, naive_with_lse};

pub(crate) const INFOS: &[OpInfo] = &[naive::INFO, flash::INFO];

use crate::graph::Attribute;
use crate::kernels::{self, attention::Sizes};
use crate::ops::{Dropout, dropout};
use candle_core::Tensor;
#[cfg(feature = "cuda")]
pub(crate) use flash::lowering::planned_flash_sizes;

/// How to attend; it means the same to every algorithm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionConfig {
    /// Which keys a query sees.
    pub mask: Mask,
    /// What the scores are multiplied by; `None` is 1 / sqrt(Dh).
    pub scale: Option<f64>,
    /// The soft cap C of the scaled scores: each score becomes `C tanh(score / C)`, as by
    /// [`ops::soft_cap`](crate::ops::soft_cap()). `None` is no cap.
    pub soft_cap: Option<f64>,
    /// The first key that each query sees, of those that the mask leaves; `None` is the first of all.
    pub first_keys: Option<FirstKeys>,
    /// Which probabilities are dropped, in training, after their softmax: those of a query and a key as
    /// [`dropout`](crate::ops::dropout()) has them of a tensor (..., H, Tq, Tk), by every algorithm. `None` drops none.
    pub dropout: Option<Dropout>,
}

impl AttentionConfig {
    /// The scale for heads of `head_dim` elements.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt())
    }

    /// What ops read beside q, k and v: first keys, and then the key of dropout.
    fn reads(&self) -> Vec<Tensor> {
        let first_keys = self.first_keys.iter().map(FirstKeys::tensor);
        let keys = self.dropout.iter().map(|dropout| dropout.key.tensor());
        first_keys.chain(keys).cloned().collect()
    }

    /// The parameters of a call of these sizes, as a trace writes them down.
    fn attributes(&self, sizes: &Sizes) -> Vec<(&'static str, Attribute)> {
        attributes(sizes, self.dropout.as_ref().map(Dropout::kernel))
    }
}

/// The parameters of a call, as a trace writes them down.
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

/// The attribute of calls whose scores are capped.
pub(crate) const SOFT_CAP: &str = "soft_cap";
