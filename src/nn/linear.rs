//! Linear layers.

use super::{Layer, check_weight, join, variable};
use crate::{Error, Result, ops};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};

/// A linear layer: `y = x W^T` with W (out, in), or `y = x W^T + b` with b (out).
///
/// Initial values of W are normal with variance 2 / (in + out), truncated at 3 standard deviations; those of b are 0.
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::nn::{self, Embedding, Layer, Linear};
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let table = Embedding::new(100, 16, vb.pp("table"))?;
/// let head = Linear::from_weights(table.weight().clone(), None)?; // tied
/// assert!(head.parameters()[0].1.id() == table.parameters()[0].1.id());
/// let frozen = Linear::from_weights(table.weight().detach(), None)?;
/// assert!(frozen.parameters().is_empty());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Creates a layer with `weight` (d_out, d_in) from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(d_in: usize, d_out: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = Init::Randn {
            mean: 0.0,
            stdev: (2.0 / (d_in as f64 + d_out as f64)).sqrt(),
        };
        let weight = variable(&vb, "weight", (d_out, d_in), init)?;
        Ok(Self { weight, bias: None })
    }

    /// Creates a layer with `weight` (d_out, d_in) and `bias` (d_out) from the builder.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_bias(d_in: usize, d_out: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let bias = variable(&vb, "bias", d_out, Init::Const(0.0))?;
        Ok(Self {
            bias: Some(bias),
            ..Self::new(d_in, d_out, vb)?
        })
    }

    /// Creates a layer from W (out, in) and b (out). A weight is trained if it is a variable's tensor, else frozen; one
    /// that another layer holds is tied.
    ///
    /// # Errors
    /// A weight that is not a matrix; a bias of another length.
    pub fn from_weights(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        check_weight(
            "nn::Linear",
            "weight (out, in)",
            &weight,
            weight.rank() == 2,
        )?;
        if let Some(bias) = &bias {
            let fits = bias.dims() == &weight.dims()[..1];
            let wanted = format!("bias ({},)", weight.dims()[0]);
            check_weight("nn::Linear", &wanted, bias, fits)?;
        }
        Ok(Self { weight, bias })
    }

    /// Returns W (out, in).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns b (out).
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Maps x (..., in) to (..., out).
    ///
    /// # Errors
    /// Those of [`ops::linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => ops::linear_bias(x, &self.weight, bias),
            None => ops::linear(x, &self.weight),
        }
    }
}

/// Shares the weights of a `candle_nn::Linear`; variables stay variables. Unlike candle's layer, this one can be
/// planned, and it runs in [autocast](crate::autocast()) regions.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::nn::{Layer, Linear};
///
/// let weights = VarMap::new();
/// let candles =
///     candle_nn::linear(8, 4, VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu))?;
/// let layer = Linear::try_from(candles)?;
/// assert_eq!(layer.parameters().len(), 2); // the variables of the map
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`Linear::from_weights`].
impl TryFrom<candle_nn::Linear> for Linear {
    type Error = Error;

    fn try_from(layer: candle_nn::Linear) -> Result<Self> {
        Self::from_weights(layer.weight().clone(), layer.bias().cloned())
    }
}

impl Layer for Linear {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        visit(join(path, "weight"), &self.weight);
        if let Some(bias) = &self.bias {
            visit(join(path, "bias"), bias);
        }
    }
}
