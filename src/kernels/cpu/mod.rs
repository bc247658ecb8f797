//! The CPU kernels: functions on slices, parallel over rows and vectorised for the CPU that runs them.
//!
//! Every kernel gives the same bits for any number of threads: work is divided by shape alone, a row is computed by one
//! task, and sums across rows are computed in blocks of fixed size, added in a fixed order. Kernels are generic over
//! the stored type, [`Stored`] (`f16`, `bf16`, `f32`, `f64`), and compute in [`Real`] (`f32` or `f64`). Half precision
//! is widened a block at a time and rounded once at the end, except for bf16 matmuls on processors that multiply bf16
//! directly ([`gemm`]). Slices of the wrong length are a bug of the caller, and panic.

pub mod activation;
pub mod arithmetic;
pub mod attention;
pub mod cast;
pub mod dropout;
mod elementwise;
pub mod extremes;
pub mod gated;
pub mod gemm;
pub mod half_arithmetic;
pub mod heads;
pub mod index;
pub mod normal;
pub mod parallel;
pub mod reduce;
pub mod relu;
pub mod repeat;
pub mod rope;
pub mod rows;
pub mod select;
pub mod simd;
pub mod soft_cap;
pub mod sums;
pub mod unscale;
pub mod update;

use simd::Blocks;
pub use simd::{Lanes, Real, Stored};
