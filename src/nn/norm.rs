//! Normalisation layers.

use super::{Layer, join, variable};
use crate::{Error, Result, ops};
use candle_core::{Tensor, Var};
use candle_nn::{Init, VarBuilder};

/// The smallest eps that is not 0 in f32, the smallest normal one.
const MIN_EPS: f64 = f32::MIN_POSITIVE as f64;

/// Refuses an eps with which a row of zeros (or, in layer norm, of equal elements) is 0 / 0.
pub(crate) fn check_eps(config: &'static str, field: &'static str, eps: f64) -> Result<()> {
    if eps >= MIN_EPS && eps.is_finite() {
        return Ok(());
    }
    Err(Error::Config {
        config,
        field,
        expected: format!("positive and finite, at least {MIN_EPS:e}"),
        got: eps.to_string(),
        hint: "with 0, a row of zeros becomes 0 / 0; the usual value is 1e-5".into(),
    })
}

/// Root mean square normalisation with a weight, which starts at 1.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Var,
    eps: f64,
}

impl RmsNorm {
    /// Takes `weight` (d_model) from the builder.
    ///
    /// # Errors
    /// An eps that is 0 in f32, negative or not finite ([`ops::rms_norm()`] takes any), and whatever the builder
    /// answers: a missing or misshapen weight, say.
    pub fn new(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        check_eps("RmsNorm", "eps", eps)?;
        let weight = variable(&vb, "weight", d_model, Init::Const(1.0))?;
        Ok(Self { weight, eps })
    }

    /// The weight, (D).
    pub fn weight(&self) -> &Var {
        &self.weight
    }

    /// x (..., D) to (..., D).
    ///
    /// # Errors
    /// As [`ops::rms_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, &self.weight, self.eps)
    }
}

impl Layer for RmsNorm {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Var)) {
        visit(join(path, "weight"), &self.weight);
    }
}

/// Layer normalisation with a weight, which starts at 1, and a bias, which starts at 0.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Var,
    bias: Var,
    eps: f64,
}

impl LayerNorm {
    /// Takes `weight` and `bias` (d_model) from the builder.
    ///
    /// # Errors
    /// An eps that is 0 in f32, negative or not finite ([`ops::layer_norm()`] takes any), and whatever the builder
    /// answers: a missing or misshapen weight, say.
    pub fn new(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        check_eps("LayerNorm", "eps", eps)?;
        let weight = variable(&vb, "weight", d_model, Init::Const(1.0))?;
        let bias = variable(&vb, "bias", d_model, Init::Const(0.0))?;
        Ok(Self { weight, bias, eps })
    }

    /// The weight, (D).
    pub fn weight(&self) -> &Var {
        &self.weight
    }

    /// The bias, (D).
    pub fn bias(&self) -> &Var {
        &self.bias
    }

    /// x (..., D) to (..., D).
    ///
    /// # Errors
    /// As [`ops::layer_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

impl Layer for LayerNorm {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Var)) {
        visit(join(path, "weight"), &self.weight);
        visit(join(path, "bias"), &self.bias);
    }
}
