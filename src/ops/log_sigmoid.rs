//! The logarithm of the sigmoid.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let margin = Tensor::new(&[0f32, 200.0, -200.0], &Device::Cpu)?;
//! let y = ops::log_sigmoid(&margin)?.to_vec1::<f32>()?;
//! assert!((y[0] + std::f32::consts::LN_2).abs() < 1e-6);
//! assert_eq!(y[1..], [0.0, -200.0]);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::activation::{self, activate};
use crate::Result;
use crate::kernels::Activation;
use candle_core::Tensor;

/// Computes `y = log(1 / (1 + exp(-x)))`, elementwise, as `min(x, 0) - log(1 + exp(-|x|))`, which does not overflow and
/// keeps the digits of small results. PyTorch's `logsigmoid`. Backward: `dx = dy sigmoid(-x)`. Saved for backward: x.
/// Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[0f32, 50.0, -50.0], &Device::Cpu)?;
/// let gradients = tallow::backward(ops::sum(&ops::log_sigmoid(&x)?)?)?;
/// let dx = gradients.get(&x).unwrap().to_vec1::<f32>()?;
/// assert!(dx[0] == 0.5 && dx[1] < 1e-20 && dx[2] == 1.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn log_sigmoid(x: &Tensor) -> Result<Tensor> {
    activate(Activation::LogSigmoid, x)
}

/// Computes [`log_sigmoid()`] in plain candle ops.
///
/// # Errors
/// Those of [`log_sigmoid()`].
pub fn reference(x: &Tensor) -> Result<Tensor> {
    activation::reference(Activation::LogSigmoid, x)
}
