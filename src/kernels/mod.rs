//! Plain compute, which knows nothing of graphs: inputs in, preallocated outputs out, sizes as arguments.
//!
//! What lives here: [`Mask`] and whatever else every device shares, and one folder a device ([`cpu`]). What does not:
//! anything that knows a candle `Tensor` or its gradient (that is [`crate::ops`]), or when to compute what.

pub mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod limits;
mod mask;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod ptx_cache;
pub(crate) mod strided;
pub(crate) mod workspace;

pub use mask::Mask;
