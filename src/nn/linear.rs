//! y = x W^T.

use super::{Layer, join, variable};
use crate::{Result, ops};
use candle_core::{Tensor, Var};
use candle_nn::{Init, VarBuilder};

/// A linear map without bias, `y = x W^T`, with W (out, in).
///
/// W starts from a normal distribution of variance 2 / (in + out), cut at 3 standard deviations.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Var,
}

impl Linear {
    /// Takes `weight` (d_out, d_in) from the builder.
    ///
    /// # Errors
    /// Whatever the builder answers: a missing or misshapen weight, say.
    pub fn new(d_in: usize, d_out: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = Init::Randn {
            mean: 0.0,
            stdev: (2.0 / (d_in as f64 + d_out as f64)).sqrt(),
        };
        let weight = variable(&vb, "weight", (d_out, d_in), init)?;
        Ok(Self { weight })
    }

    /// W, (out, in).
    pub fn weight(&self) -> &Var {
        &self.weight
    }

    /// x (..., in) to (..., out).
    ///
    /// # Errors
    /// As [`ops::linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::linear(x, &self.weight)
    }
}

impl Layer for Linear {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Var)) {
        visit(join(path, "weight"), &self.weight);
    }
}
