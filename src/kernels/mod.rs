//! Plain compute, which knows nothing of graphs: inputs in, preallocated outputs out, sizes as arguments.
//!
//! What lives here: what every device shares ([`Mask`], [`attention::Sizes`], [`Activation`], [`Gate`], [`Update`]),
//! and one folder a device ([`cpu`]). What does not: anything that knows a candle `Tensor` or its gradient (that is
//! [`crate::ops`]), or when to compute what.

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
pub use update::Update;
