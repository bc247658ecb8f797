//! Tanh, the hyperbolic tangent.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[-0.5f32, 0.0, 0.5], &Device::Cpu)?;
//! let y = ops::tanh(&x)?.to_vec1::<f32>()?;
//! assert!((y[2] - 0.5f32.tanh()).abs() < 1e-6 && y[0] == -y[2]);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::activation::{self, activate};
use crate::Result;
use crate::kernels::Activation;
use candle_core::Tensor;

/// Computes `y = tanh(x)`, elementwise. Backward: `dx = dy (1 - y^2)`, computed from x without cancellation. Saved for
/// backward: x. Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[-100f32, 0.0, 100.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::tanh(&x)?.to_vec1::<f32>()?, [-1.0, 0.0, 1.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn tanh(x: &Tensor) -> Result<Tensor> {
    activate(Activation::Tanh, x)
}

/// Computes [`tanh()`] in plain candle ops.
///
/// # Errors
/// Those of [`tanh()`].
pub fn reference(x: &Tensor) -> Result<Tensor> {
    activation::reference(Activation::Tanh, x)
}
