//! Normalisation layers.

use super::{Layer, check_weight, join, variable};
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

/// The smallest eps that is not 0 in f32, the smallest normal one.
const MIN_EPS: f64 = f32::MIN_POSITIVE as f64;

/// Refuses an eps with which a row of zeros (or, in layer norm, of equal elements) is 0 / 0.
pub(crate) fn check_eps(config: &'static str, field: &'static str, eps: f64) -> Result<()> {
    if eps >= MIN_EPS && eps.is_finite() {
        return Ok(());
    }
    Err(Error::config(config, field, eps).must_be(
        format!("positive and finite, at least {MIN_EPS:e}"),
        "with 0, a row of zeros becomes 0 / 0; the usual value is 1e-5",
    ))
}

/// Root mean square normalisation with a weight, which starts at 1, or at 0 and is [counted from
/// 1](Self::with_unit_offset).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    /// Whether 1 is added to the weight.
    has_offset: bool,
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
        Self::from_weight(weight, eps)
    }

    /// As [`new`](Self::new), but multiplies by `1 + weight`, which starts at 0, as Gemma's norms do.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_unit_offset(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        check_eps("RmsNorm", "eps", eps)?;
        let weight = variable(&vb, "weight", d_model, Init::Const(0.0))?;
        Ok(Self {
            weight,
            has_offset: true,
            eps,
        })
    }

    /// The layer of this weight, (D): a variable's tensor is trained, a plain one is not.
    ///
    /// # Errors
    /// A weight of another rank, an eps as in [`new`](Self::new).
    pub fn from_weight(weight: Tensor, eps: f64) -> Result<Self> {
        check_eps("RmsNorm", "eps", eps)?;
        check_weight("nn::RmsNorm", "weight (D,)", &weight, weight.rank() == 1)?;
        Ok(Self {
            weight,
            has_offset: false,
            eps,
        })
    }

    /// The weight, (D), without an offset.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// x (..., D) to (..., D).
    ///
    /// # Errors
    /// As [`ops::rms_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.has_offset {
            false => ops::rms_norm(x, &self.weight, self.eps),
            true => ops::offset_rms_norm(x, &self.weight, self.eps),
        }
    }
}

impl Layer for RmsNorm {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        visit(join(path, "weight"), &self.weight);
    }
}

/// Layer normalisation with a weight, which starts at 1, and a bias, which starts at 0, or without a bias.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Bias,
    eps: f64,
}

#[derive(Clone, Debug)]
enum Bias {
    Own(Tensor),
    /// None: what the op is given for it.
    Zeros(Tensor),
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
        let bias = Bias::Own(variable(&vb, "bias", d_model, Init::Const(0.0))?);
        Ok(Self { weight, bias, eps })
    }

    /// Takes `weight` (d_model) alone from the builder.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn without_bias(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = variable(&vb, "weight", d_model, Init::Const(1.0))?;
        Self::from_weights(weight, None, eps)
    }

    /// The layer of these weights, (D) each: a variable's tensor is trained, a plain one is not.
    ///
    /// # Errors
    /// A weight of another rank, a bias of another length, an eps as in [`new`](Self::new).
    pub fn from_weights(weight: Tensor, bias: Option<Tensor>, eps: f64) -> Result<Self> {
        check_eps("LayerNorm", "eps", eps)?;
        check_weight("nn::LayerNorm", "weight (D,)", &weight, weight.rank() == 1)?;
        let bias = match bias {
            Some(bias) => {
                let wanted = format!("bias {:?}", weight.dims());
                check_weight(
                    "nn::LayerNorm",
                    &wanted,
                    &bias,
                    bias.dims() == weight.dims(),
                )?;
                Bias::Own(bias)
            }
            // Not zeros_like, which would be hollow with the weight.
            None => Bias::Zeros(Tensor::zeros(
                weight.dims(),
                weight.dtype(),
                weight.device(),
            )?),
        };
        Ok(Self { weight, bias, eps })
    }

    /// The weight, (D).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, (D).
    pub fn bias(&self) -> Option<&Tensor> {
        match &self.bias {
            Bias::Own(bias) => Some(bias),
            Bias::Zeros(_) => None,
        }
    }

    /// x (..., D) to (..., D).
    ///
    /// # Errors
    /// As [`ops::layer_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (Bias::Own(bias) | Bias::Zeros(bias)) = &self.bias;
        ops::layer_norm(x, &self.weight, bias, self.eps)
    }
}

impl Layer for LayerNorm {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        visit(join(path, "weight"), &self.weight);
        if let Some(bias) = self.bias() {
            visit(join(path, "bias"), bias);
        }
    }
}
