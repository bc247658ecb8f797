//! GELU, the Gaussian error linear unit.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops::{self, Gelu};
//!
//! let x = Tensor::new(&[-2f32, 0.5, 2.0], &Device::Cpu)?;
//! let (exact, by_tanh) = (ops::gelu(&x, Gelu::Erf)?, ops::gelu(&x, Gelu::Tanh)?);
//! let difference = (exact - by_tanh)?.abs()?.max_all()?.to_scalar::<f32>()?;
//! assert!(difference > 0.0 && difference < 1e-3);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::activation::{self, activate};
use crate::Result;
use crate::kernels::{Activation, Gate};
use candle_core::Tensor;

/// The formula of [`gelu()`]: PyTorch's `approximate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Gelu {
    /// `x Phi(x)` with Phi the standard normal distribution, `(1 + erf(x / sqrt(2))) / 2`: `approximate="none"`.
    #[default]
    Erf,
    /// `x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: `approximate="tanh"`, which GPT-2 was trained
    /// with. In a graph the node is called `gelu_tanh`.
    Tanh,
}

impl Gelu {
    fn activation(self) -> Activation {
        match self {
            Self::Erf => Activation::Gelu,
            Self::Tanh => Activation::GeluTanh,
        }
    }

    pub(super) fn gate(self) -> Gate {
        match self {
            Self::Erf => Gate::Gelu,
            Self::Tanh => Gate::GeluTanh,
        }
    }
}

/// Computes `y = x Phi(x)`, elementwise, exactly or by tanh ([`Gelu`]).
///
/// Backward: `dx = dy (Phi(x) + x phi(x))` with phi the normal density; by tanh, with s = sigmoid(2 u),
/// `dx = dy (s + 2 x s (1 - s) du/dx)`. Saved for backward: x, from which the exponentials are recomputed. Autocast:
/// follows x.
///
/// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, Gelu};
///
/// let x = Tensor::new(&[-1f32, 0.0, 1.0], &Device::Cpu)?;
/// let y = ops::gelu(&x, Gelu::Erf)?.to_vec1::<f32>()?;
/// assert!((y[2] - 0.841345).abs() < 1e-6 && (y[2] + y[0] - 0.682689).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn gelu(x: &Tensor, form: Gelu) -> Result<Tensor> {
    activate(form.activation(), x)
}

/// Computes [`gelu()`] in plain candle ops.
///
/// # Errors
/// Those of [`gelu()`].
pub fn reference(x: &Tensor, form: Gelu) -> Result<Tensor> {
    activation::reference(form.activation(), x)
}
