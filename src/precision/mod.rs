//! Mixed precision: in which dtype an op computes.
//!
//! What lives here: the policies ([`Autocast`]: a class for each op, as PyTorch's autocast has them, and the lower
//! dtype) and the regions in which they hold ([`autocast()`]). What does not: the casts themselves, and the cache of
//! cast weights; those are [`ops::cast_for`](crate::ops::cast_for)'s. Nothing here touches a tensor; [`accumulate`]
//! shows on plain numbers what a sum in half precision loses.
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use tallow::precision::Autocast;
//! use tallow::{autocast, ops};
//!
//! let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
//! let w = Var::ones((5, 3), DType::F32, &Device::Cpu)?; // stays f32
//! let loss = autocast(Autocast::cuda(DType::BF16), || {
//!     let y = ops::linear(&x, &w)?;
//!     assert_eq!(y.dtype(), DType::BF16);
//!     ops::sum(&y)
//! })?;
//! assert_eq!(loss.dtype(), DType::F32);
//! let gradients = loss.backward()?; // outside of the region: it covers forward and loss
//! assert_eq!(gradients.get(&w).map(|g| g.dtype()), Some(DType::F32));
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # What a region does
//!
//! - It holds for this crate's ops and layers, on the calling thread. Plain candle ops know nothing of it, and fail on
//!   mixed dtypes; [`ops::cast_for`](crate::ops::cast_for) gives them what ours get.
//! - Parameters stay as they are. A cast is part of the graph, so what backward needs is kept in the lower dtype, and
//!   gradients come back in the parameters' own. Linear maps have the weight in the graph and its copy beside it: the
//!   weight's gradient is summed and returned in f32, where PyTorch rounds it to the lower dtype on its way.
//! - A weight is cast once: its copy is kept until the outermost region ends. Whoever changes a weight inside of a
//!   region (other than by this crate's optimizer) will not see the change in there.
//! - f64 is never cast, nor are integers.
//! - Regions nest, and the innermost holds; [`Autocast::disabled`] switches casting off inside. They end with their
//!   closure or guard, on error and panic too.
//!
//! Dtypes are PyTorch's; where results are rounded is not always. Attention, RoPE and the gate of SwiGLU are one op
//! each here: they compute in f32 and round their result once, where a composition of PyTorch's ops rounds scaled
//! scores, probabilities and products in between. Seen over a whole model, results differ from PyTorch's in bf16 by as
//! much as those do from f32.
//!
//! The policies do not depend on the device: `Autocast::cuda` on a CPU computes in the dtypes that PyTorch would on a
//! GPU.

pub mod accumulate;
mod lists;
mod named;
mod policy;
mod promote;
mod region;

pub use named::{Precision, Regime};
pub use policy::{Autocast, OpClass};
pub use region::{AutocastGuard, autocast, current};

pub(crate) use promote::{Operand, is_castable, promoted};
pub(crate) use region::{
    caches_weights, decide, is_enabled, on_outermost_end, outside, without_autocast,
};
