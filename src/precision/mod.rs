//! Mixed precision: autocast policies.
//!
//! [`Autocast`] is a policy: a lower dtype and a class for each op, as in PyTorch's autocast. [`autocast()`] runs a
//! closure under a policy. [`ops::cast_for`](crate::ops::cast_for) casts operands and caches cast weights.
//! [`accumulate`] has experiments with sums in half precision.
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
//! let gradients = tallow::backward(loss)?; // outside of the region, which is for forward and loss
//! assert_eq!(gradients.get(&w).map(|g| g.dtype()), Some(DType::F32));
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # What a region does
//!
//! - It applies to this crate's ops and layers, on the calling thread. candle's own ops and the layers of
//!   `candle_nn` ignore it and fail on mixed dtypes; the error of [`autocast()`] names the op or layer to use instead.
//!   [`ops::cast_for`](crate::ops::cast_for) casts operands for candle's ops; [`nn::Linear`](crate::nn::Linear),
//!   [`nn::Embedding`](crate::nn::Embedding) and the norms convert those of `candle_nn` by `try_from`.
//! - Parameters keep their dtype. A cast is part of the graph: tensors are saved for backward in the lower dtype, and
//!   gradients have the dtype of the parameters. A linear layer sums the weight's gradient in f32 and returns it in
//!   f32; PyTorch rounds it to the lower dtype in between.
//! - A weight is cast once, and the copy is cached until the outermost region ends. If a weight is changed inside of a
//!   region (other than by this crate's optimizer), the region still reads the old value.
//! - f64 and integers are never cast.
//! - Regions may be nested; the innermost applies. [`Autocast::disabled`] disables casts inside. A region ends with its
//!   closure or guard, also on errors and panics.
//!
//! Dtypes are those of PyTorch. Rounding differs in fused ops: attention, RoPE and the gate of SwiGLU compute in f32
//! and round their result once, whereas PyTorch's composed ops round scaled scores, probabilities and products in
//! between. Over a whole model in bf16, the difference to PyTorch is as large as PyTorch's difference to f32.
//!
//! Policies do not depend on the device: `Autocast::cuda` on a CPU computes in the dtypes of PyTorch on a GPU.

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
