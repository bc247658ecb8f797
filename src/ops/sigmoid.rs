//! Sigmoid, the logistic function.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[-2f32, 0.0, 2.0], &Device::Cpu)?;
//! let y = ops::sigmoid(&x)?.to_vec1::<f32>()?;
//! assert!((y[0] + y[2] - 1.0).abs() < 1e-6 && y[1] == 0.5);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::activation::{self, activate};
use crate::Result;
use crate::kernels::Activation;
use candle_core::Tensor;

/// Computes `y = 1 / (1 + exp(-x))`, elementwise. Backward: `dx = dy y (1 - y)`, computed from x without cancellation.
/// Saved for backward: x. Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[-1000f32, 0.0, 1000.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::sigmoid(&x)?.to_vec1::<f32>()?, [0.0, 0.5, 1.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    activate(Activation::Sigmoid, x)
}

/// Computes [`sigmoid()`] in plain candle ops.
///
/// # Errors
/// Those of [`sigmoid()`].
pub fn reference(x: &Tensor) -> Result<Tensor> {
    activation::reference(Activation::Sigmoid, x)
}
