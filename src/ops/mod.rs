//! Differentiable operations on candle tensors.
//!
//! Each op has a file with the public function, a custom op that connects the crate's kernel to candle's autograd with
//! a hand-written backward, and its [`reference`](mod@reference). The reference is the same formula in plain candle
//! ops. It is the specification: tests compare the kernel with it, and it runs where there is no kernel (see
//! [`KernelPolicy`]). Layers with parameters are in [`nn`](crate::nn), attention is in [`attention`](crate::attention).
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use tallow::ops;
//!
//! let logits = Var::new(&[[2f32, 0.0, 0.0]], &Device::Cpu)?; // (N, V)
//! let targets = Tensor::new(&[0u32], &Device::Cpu)?; // (N)
//! let loss = ops::cross_entropy(&logits, &targets)?;
//! let reference = ops::reference::cross_entropy(&logits, &targets, None)?;
//! assert!((loss.to_scalar::<f32>()? - reference.to_scalar::<f32>()?).abs() < 1e-6);
//! let gradients = tallow::backward(loss)?;
//! // softmax(logits) - one_hot(targets)
//! let gradient = gradients.get(&logits).unwrap().to_vec2::<f32>()?;
//! assert!(gradient[0][0] < 0.0 && gradient[0][1] > 0.0);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! The ops are tested with the samples of PyTorch's own operator tests, in f64, f32 and bf16.
//! `fixtures/opinfo/README.md` lists the samples that they cannot express, for example a power whose exponent is a
//! tensor.
//!
//! Shapes are written as in the crate's legend; `...` stands for any leading dimensions. Every op accepts any strides
//! and returns a contiguous tensor. Mixed devices are an error, and so are mixed dtypes unless an op documents them.
//!
//! In an [autocast](crate::autocast()) region every op first casts its inputs by the policy ([`cast_for`]); ops that
//! follow their inputs promote mixed ones. Outside of a region only [`add`], [`sub`], [`mul`], [`div`] and
//! [`add_scaled`] promote.

mod activation;
pub(crate) mod arithmetic;
mod bias;
pub(crate) mod cast;
mod compare;
mod concat;
mod contiguous;
pub(crate) mod cost;
pub(crate) mod cpu;
pub(crate) mod cross_entropy;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod dispatch;
pub(crate) mod dropout;
mod elementwise;
pub(crate) mod embedding;
mod extremes;
pub(crate) mod gated;
pub(crate) mod gated_linear;
pub(crate) mod gelu;
pub(crate) mod head_loss;
pub(crate) mod heads;
mod index;
pub(crate) mod info;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod linear_bias;
pub(crate) mod linear_cross_entropy;
pub(crate) mod log_sigmoid;
mod loss;
pub(crate) mod lowering;
pub(crate) mod matmul;
pub(crate) mod matmul_kernel;
pub(crate) mod norm;
mod operand;
pub(crate) mod record;
pub(crate) mod reduce;
pub mod reference;
pub(crate) mod relu;
pub(crate) mod repeat_heads;
pub(crate) mod rms_norm;
pub(crate) mod rope;
mod select;
pub(crate) mod sigmoid;
pub(crate) mod silu;
pub(crate) mod soft_cap;
pub(crate) mod softmax;
mod statistics;
pub(crate) mod strided;
pub(crate) mod table;
pub(crate) mod tanh;
pub(crate) mod topk;
mod weight;

pub use arithmetic::{add, add_scaled, div, mul, sub};
pub(crate) use cast::operand;
pub(crate) use cast::{WEIGHT_CAST, clear_cached_casts};
pub use cast::{cast, cast_for};
pub use compare::{eq, ge, gt, le, lt, ne};
pub use concat::{concat, stack};
pub use contiguous::contiguous;
pub(crate) use cpu::reserve_scratch;
pub(crate) use cross_entropy::is_cross_entropy;
pub use cross_entropy::{
    CrossEntropyConfig, cross_entropy, cross_entropy_ignoring, cross_entropy_with,
};
#[cfg(feature = "cuda")]
pub(crate) use dispatch::choose_where;
pub use dispatch::{Fallback, KernelPolicy, fallbacks, with_kernel_policy};
pub(crate) use dispatch::{Path, check_same, check_same_or_f32, choose, current_kernel_policy};
pub(crate) use dropout::check_probability;
pub use dropout::{Dropout, DropoutKey, dropout};
pub use elementwise::{abs, affine, clamp, exp, log, pow, rsqrt, sqrt};
pub use embedding::{embedding, embedding_with_padding};
pub use extremes::{max_keepdim, max_over, min_keepdim, min_over};
pub use gated::{geglu, swiglu};
pub use gated_linear::{geglu_linear, swiglu_linear};
pub use gelu::{Gelu, gelu};
pub use heads::{merge_heads, split_heads};
pub use index::{gather, index_add, index_select, one_hot, scatter_add};
pub use layer_norm::layer_norm;
pub(crate) use linear::LINEAR;
pub use linear::linear;
pub(crate) use linear::with_last_dim;
pub use linear_bias::linear_bias;
pub use linear_cross_entropy::{
    linear_cross_entropy, linear_cross_entropy_ignoring, linear_cross_entropy_with,
};
pub use log_sigmoid::log_sigmoid;
pub use loss::{BceWeights, KlTarget, Reduction, bce_with_logits, kl_div, l1_loss, mse_loss};
pub use matmul::{matmul, matmul_transposed};
pub(crate) use operand::{
    check_fits_memory, check_float, check_granted, check_granted_on, check_size, inside_storage,
    try_contiguous, variable_of, zeros,
};
pub use reduce::{log_softmax, mean, mean_keepdim, mean_over, sum, sum_keepdim, sum_over};
pub use relu::relu;
pub use repeat_heads::repeat_heads;
pub use rms_norm::{offset_rms_norm, rms_norm};
pub use rope::{RotaryPairs, rope, rope_with};
pub use select::{masked_fill, where_cond};
pub use sigmoid::sigmoid;
pub use silu::silu;
pub use soft_cap::soft_cap;
pub use softmax::softmax;
pub use statistics::{logsumexp, logsumexp_keepdim, var, var_keepdim};
pub use tanh::tanh;
pub use topk::{argmax, argmin, topk};
