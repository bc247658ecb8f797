//! Kernels on rows: norms, softmax, losses, embedding tables and bias.

pub mod bias;
pub mod cross_entropy;
pub mod embedding;
mod half_softmax;
pub mod log_softmax;
pub mod norm;
pub mod softmax;
