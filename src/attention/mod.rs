//! Scaled dot-product attention on tensors of heads.
//!
//! What lives here: whole attention algorithms, from q, k, v to the output. What does not: the projections around them
//! (that is [`crate::nn::CausalSelfAttention`]) and the single ops they are made of ([`crate::ops`]).

mod algorithm;
pub(crate) mod blocked;
mod computed;
pub(crate) mod cost;
pub mod flash;
pub(crate) mod in_model;
mod lowering;
#[cfg(feature = "cuda")]
mod lowering_gpu;
pub mod naive;
mod nothing;
mod shapes;

pub use crate::kernels::Mask;
pub use algorithm::Algorithm;
pub use flash::{flash, flash_with_lse};
pub use naive::naive;

use crate::graph::Attribute;
#[cfg(feature = "cuda")]
pub(crate) use lowering::planned_flash_sizes;

/// How to attend; it means the same to every algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionConfig {
    /// Which keys a query sees.
    pub mask: Mask,
    /// What the scores are multiplied by; `None` is 1 / sqrt(Dh).
    pub scale: Option<f64>,
}

impl AttentionConfig {
    /// The scale for heads of `head_dim` elements.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt())
    }
}

/// The parameters of a call, as a trace writes them down.
fn attributes(scale: f64, mask: Mask) -> Vec<(&'static str, Attribute)> {
    vec![
        ("scale", Attribute::Number(scale)),
        ("mask", Attribute::Mask(mask)),
    ]
}
