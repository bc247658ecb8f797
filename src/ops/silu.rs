//! SiLU, the sigmoid linear unit, x sigmoid(x).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[-1f32, 0.0, 3.0], &Device::Cpu)?;
//! let difference = (ops::silu(&x)? - (&x * ops::sigmoid(&x)?)?)?;
//! assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::activation::{self, activate};
use crate::Result;
use crate::kernels::Activation;
use candle_core::Tensor;

/// Computes `y = x sigmoid(x)`, elementwise; [`swiglu`](super::swiglu()) fuses it with the product of a gate.
///
/// Backward, with s = sigmoid(x): `dx = dy s (1 + x (1 - s))`. Saved for backward: x. Autocast: follows x.
///
/// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[-1000f32, 0.0, 1000.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::silu(&x)?.to_vec1::<f32>()?, [0.0, 0.0, 1000.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    activate(Activation::Silu, x)
}

/// Computes [`silu()`] in plain candle ops.
///
/// # Errors
/// Those of [`silu()`].
pub fn reference(x: &Tensor) -> Result<Tensor> {
    activation::reference(Activation::Silu, x)
}
