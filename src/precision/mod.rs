//! Mixed precision: in which dtype an op computes.
//!
//! [`Autocast`] is a policy: a class for each op, as PyTorch's autocast has them, and the lower dtype. [`autocast()`]
//! runs a closure under a policy. The casts themselves, and the cache of cast weights, are in
//! [`ops::cast_for`](crate::ops::cast_for). [`accumulate`] shows on plain numbers what a sum in half precision loses.
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
//! let gradients = tallow::backward(loss)?; // outside of the region: it covers forward and loss
//! assert_eq!(gradients.get(&w).map(|g| g.dtype()), Some(DType::F32));
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # What a region does
//!
//! - It applies to this crate's ops and layers, on the calling thread. Plain candle ops do not see it, and fail on
//!   mixed dtypes; [`ops::cast_for`](crate::ops::cast_for) casts operands for them as it does for this crate's ops.
//! - Parameters keep their dtype. A cast is part of the graph, so what backward needs is kept in the lower dtype, and
//!   gradients have the parameters' own dtype. Linear maps have the weight in the graph and its copy beside it: the
//!   weight's gradient is summed and returned in f32, where PyTorch rounds it to the lower dtype on its way.
//! - A weight is cast once: its copy is kept until the outermost region ends. A weight that is changed inside of a
//!   region (other than by this crate's optimizer) is read there as it was.
//! - f64 is never cast, nor are integers.
//! - Regions nest, and the innermost applies; [`Autocast::disabled`] switches casting off inside. A region ends with
//!   its closure or guard, on error and panic too.
//!
//! Dtypes are PyTorch's; where results are rounded is not always. Attention, RoPE and the gate of SwiGLU are one op
//! each here: they compute in f32 and round their result once, where a composition of PyTorch's ops rounds scaled
//! scores, probabilities and products in between. Over a whole model, results differ from PyTorch's in bf16 by as much
//! as those differ from f32.
//!
//! The policies do not depend on the device: `Autocast::cuda` on a CPU computes in the dtypes that PyTorch would on a
//! GPU.

pub mod accumulate;
mod lists;
mod named;
mod policy;
mod region;

pub use named::{Precision, Regime};
pub use policy::{Autocast, OpClass};
pub use region::{AutocastGuard, autocast, current};

pub(crate) use policy::{is_castable, promoted};
pub(crate) use region::{
    caches_weights, decide, is_enabled, on_outermost_end, outside, without_autocast,
};
