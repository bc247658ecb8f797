//! Normalization layers.

use super::{Layer, check_weight, join, variable};
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

/// The smallest eps: the smallest normal f32.
const MIN_EPS: f64 = f32::MIN_POSITIVE as f64;

/// Checks that eps keeps a row of zeros (in LayerNorm, of equal elements) from becoming 0 / 0.
pub(crate) fn check_eps(config: &'static str, field: &'static str, eps: f64) -> Result<()> {
    if eps >= MIN_EPS && eps.is_finite() {
        return Ok(());
    }
    Err(Error::config(config, field, eps).must_be(
        format!("positive and finite, at least {MIN_EPS:e}"),
        "with 0, a row of zeros becomes 0 / 0; the usual value is 1e-5",
    ))
}

/// RMSNorm: `y = x / sqrt(mean(x^2) + eps) * weight`, where weight (D) starts at 1.
///
/// [With unit offset](Self::with_unit_offset) the factor is `1 + weight`, where weight starts at 0.
///
/// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, RmsNorm};
///
/// let norm = RmsNorm::new(4, 1e-5, nn::seeded(0, DType::F32, &Device::Cpu).pp("norm"))?;
/// let x = Tensor::new(&[[3f32, 4.0, 0.0, 0.0]], &Device::Cpu)?; // (..., D), of mean square 6.25
/// let y = norm.forward(&x)?.to_vec2::<f32>()?;
/// assert!((y[0][0] - 1.2).abs() < 1e-4 && (y[0][1] - 1.6).abs() < 1e-4);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    /// Whether 1 is added to the weight.
    has_offset: bool,
    eps: f64,
}

impl RmsNorm {
    /// Creates a layer with `weight` (d_model) from the builder.
    ///
    /// # Errors
    /// An eps that is not finite or below the smallest normal f32 ([`ops::rms_norm()`] accepts any); errors of the
    /// builder, such as a missing weight or one of another shape.
    pub fn new(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        check_eps("RmsNorm", "eps", eps)?;
        let weight = variable(&vb, "weight", d_model, Init::Const(1.0))?;
        Self::from_weight(weight, eps)
    }

    /// Creates a layer that multiplies by `1 + weight`, as Gemma's norms do; weight starts at 0.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_unit_offset(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        check_eps("RmsNorm", "eps", eps)?;
        let weight = variable(&vb, "weight", d_model, Init::Const(0.0))?;
        Ok(Self {
            weight,
            has_offset: true,
            eps,
        })
    }

    /// Creates a layer from a weight (D). It is trained if it is a variable's tensor, else frozen.
    ///
    /// # Errors
    /// A weight of another rank; an eps that [`new`](Self::new) refuses.
    pub fn from_weight(weight: Tensor, eps: f64) -> Result<Self> {
        check_eps("RmsNorm", "eps", eps)?;
        check_weight("nn::RmsNorm", "weight (D,)", &weight, weight.rank() == 1)?;
        Ok(Self {
            weight,
            has_offset: false,
            eps,
        })
    }

    /// Returns the weight (D), without the offset.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Maps x (..., D) to (..., D).
    ///
    /// # Errors
    /// Those of [`ops::rms_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.has_offset {
            false => ops::rms_norm(x, &self.weight, self.eps),
            true => ops::offset_rms_norm(x, &self.weight, self.eps),
        }
    }
}

/// Shares the weight of a `candle_nn::RmsNorm`; a variable stays one.
///
/// # Errors
/// Those of [`RmsNorm::from_weight`].
impl TryFrom<candle_nn::RmsNorm> for RmsNorm {
    type Error = Error;

    fn try_from(layer: candle_nn::RmsNorm) -> Result<Self> {
        Self::from_weight(layer.weight().clone(), layer.eps())
    }
}

impl Layer for RmsNorm {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        visit(join(path, "weight"), &self.weight);
    }
}

/// LayerNorm: `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`. weight (D) starts at 1, bias (D) at 0; the bias
/// is optional.
///
/// Ba, Kiros and Hinton, "Layer Normalization", 2016, equation 4.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, LayerNorm};
///
/// let norm = LayerNorm::new(2, 1e-5, nn::seeded(0, DType::F32, &Device::Cpu).pp("norm"))?;
/// let x = Tensor::new(&[[5f32, 7.0]], &Device::Cpu)?; // (..., D)
/// let y = norm.forward(&x)?.to_vec2::<f32>()?;
/// assert!((y[0][0] + 1.0).abs() < 1e-4 && (y[0][1] - 1.0).abs() < 1e-4);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Bias,
    eps: f64,
}

#[derive(Clone, Debug)]
enum Bias {
    Trained(Tensor),
    /// Zeros that the op reads if the layer has no bias.
    Zeros(Tensor),
}

impl LayerNorm {
    /// Creates a layer with `weight` and `bias` (d_model) from the builder.
    ///
    /// # Errors
    /// An eps that is not finite or below the smallest normal f32 ([`ops::layer_norm()`] accepts any); errors of the
    /// builder, such as a missing weight or one of another shape.
    pub fn new(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        check_eps("LayerNorm", "eps", eps)?;
        let weight = variable(&vb, "weight", d_model, Init::Const(1.0))?;
        let bias = Bias::Trained(variable(&vb, "bias", d_model, Init::Const(0.0))?);
        Ok(Self { weight, bias, eps })
    }

    /// Creates a layer without a bias, with `weight` (d_model) from the builder.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn without_bias(d_model: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = variable(&vb, "weight", d_model, Init::Const(1.0))?;
        Self::from_weights(weight, None, eps)
    }

    /// Creates a layer from a weight (D) and a bias (D). Each is trained if it is a variable's tensor, else frozen.
    ///
    /// # Errors
    /// A weight of another rank; a bias of another length; an eps that [`new`](Self::new) refuses.
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
                Bias::Trained(bias)
            }
            // Not zeros_like: zeros like a meta tensor are one.
            None => Bias::Zeros(Tensor::zeros(
                weight.dims(),
                weight.dtype(),
                weight.device(),
            )?),
        };
        Ok(Self { weight, bias, eps })
    }

    /// Returns the weight (D).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias (D), if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        match &self.bias {
            Bias::Trained(bias) => Some(bias),
            Bias::Zeros(_) => None,
        }
    }

    /// Maps x (..., D) to (..., D).
    ///
    /// # Errors
    /// Those of [`ops::layer_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (Bias::Trained(bias) | Bias::Zeros(bias)) = &self.bias;
        ops::layer_norm(x, &self.weight, bias, self.eps)
    }
}

/// Shares the weights of a `candle_nn::LayerNorm`; variables stay variables.
///
/// # Errors
/// A layer that does not subtract the mean; those of [`LayerNorm::from_weights`].
impl TryFrom<candle_nn::LayerNorm> for LayerNorm {
    type Error = Error;

    fn try_from(layer: candle_nn::LayerNorm) -> Result<Self> {
        if !layer.remove_mean() {
            return Err(Error::config("LayerNorm", "remove_mean", false)
                .must_be("true", "without it the layer is a nn::RmsNorm"));
        }
        Self::from_weights(layer.weight().clone(), layer.bias().cloned(), layer.eps())
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
