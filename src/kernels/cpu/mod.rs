//! The CPU kernels: slices in, slices out, parallel over rows, vectorised for the CPU that runs them.
//!
//! Every kernel gives the same bits for any number of threads: work is cut by shape alone, a row is computed by one
//! task, and sums across rows are taken in blocks of fixed size, added in a fixed order. The kernels are generic over
//! what they read and write, [`Stored`] (`f16`, `bf16`, `f32`, `f64`), and compute in [`Real`] (`f32` and `f64`): half
//! precision is widened a block at a time and rounded once, at the end. Slices of the wrong length are a bug of the
//! caller, and panic.

pub mod activation;
pub mod adamw;
pub mod arithmetic;
pub mod bias;
pub mod blocked_attention;
mod blocks;
pub mod cast;
pub mod cross_entropy;
pub mod embedding;
mod f16_convert;
pub mod flash_attention;
pub mod gemm;
mod half_softmax;
pub mod heads;
mod lanes;
pub mod layer_norm;
pub mod log_softmax;
pub mod naive_attention;
pub mod parallel;
mod real;
pub mod reduce;
pub mod relu;
pub mod repeat;
pub mod residual_norm;
pub mod rms_norm;
pub mod rope;
pub mod rotary_attention;
pub mod rotary_heads;
pub mod simd;
pub mod softmax;
pub mod stored;
pub mod swiglu;
pub mod unscale;

use blocks::Blocks;
pub use lanes::Lanes;
pub use real::Real;
pub use stored::Stored;
