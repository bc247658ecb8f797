//! Kernels: computation on buffers, with preallocated outputs and sizes as arguments, without tensors or graphs.
//!
//! [`Mask`], [`attention::Sizes`], [`Activation`], [`Gate`] and [`Update`] are shared by all devices; [`cpu`] and
//! `cuda` hold the kernels of one. [`crate::ops`] wraps them for candle tensors and adds gradients.

mod activation;
pub mod attention;
pub mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod dropout;
pub(crate) mod limits;
mod mask;
pub(crate) mod norm;
pub(crate) mod normal;
pub(crate) mod philox;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod ptx_cache;
pub(crate) mod stochastic;
pub(crate) mod strided;
mod update;
pub(crate) mod workspace;

pub use activation::{Activation, Gate};
pub use dropout::{Dropout, DropoutMask};
pub use mask::Mask;
pub use norm::Norm;
pub use update::{Coefficients, Update};
