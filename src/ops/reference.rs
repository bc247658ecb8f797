//! References: every op that has a kernel, in plain candle ops, which are its specification.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[[1f32, -2.0]], &Device::Cpu)?;
//! assert_eq!(ops::reference::relu(&x)?.to_vec2::<f32>()?, ops::relu(&x)?.to_vec2::<f32>()?);
//! # Ok::<(), tallow::Error>(())
//! ```

pub use super::cross_entropy::reference as cross_entropy;
pub use super::dropout::reference as dropout;
pub use super::embedding::reference as embedding;
pub use super::gated::{geglu_reference as geglu, swiglu_reference as swiglu};
pub use super::gated_linear::{
    geglu_linear_reference as geglu_linear, swiglu_linear_reference as swiglu_linear,
};
pub use super::gelu::reference as gelu;
pub use super::layer_norm::reference as layer_norm;
pub use super::linear::reference as linear;
pub use super::linear_bias::reference as linear_bias;
pub use super::linear_cross_entropy::reference as linear_cross_entropy;
pub use super::log_sigmoid::reference as log_sigmoid;
pub use super::matmul::reference as matmul;
pub use super::relu::reference as relu;
pub use super::repeat_heads::reference as repeat_heads;
pub use super::rms_norm::{offset_reference as offset_rms_norm, reference as rms_norm};
pub use super::rope::{reference as rope, reference_with as rope_with};
pub use super::sigmoid::reference as sigmoid;
pub use super::silu::reference as silu;
pub use super::soft_cap::reference as soft_cap;
pub use super::softmax::reference as softmax;
pub use super::tanh::reference as tanh;
