//! Kernels of rows: norms, softmax, losses, tables, and sums over rows.

pub mod bias;
pub mod cross_entropy;
mod each;
pub mod embedding;
mod half_softmax;
pub mod layer_norm;
pub mod log_softmax;
pub mod residual_norm;
pub mod rms_norm;
pub mod softmax;
