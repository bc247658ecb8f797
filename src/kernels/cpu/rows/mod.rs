//! Kernels of rows: norms, softmax, losses, tables, and sums over rows.

pub mod bias;
pub mod cross_entropy;
pub mod embedding;
mod half_softmax;
pub mod log_softmax;
pub mod norm;
pub mod softmax;
