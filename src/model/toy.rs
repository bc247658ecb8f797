//! A small network with an op of each autocast class.

use crate::Result;
use crate::nn::{Layer, LayerNorm, Linear, join};
use crate::ops;
use candle_core::{Module, Tensor, Var};
use candle_nn::VarBuilder;

/// The network of Stanford CS336's questions on mixed precision: `fc2(ln(relu(fc1(x))))`. Only the norm has a bias.
///
/// It has an op that autocast lowers (linear), one that autocast computes in f32 (layer norm), and one that keeps the
/// dtype of its input (ReLU).
///
/// Weight names: `fc1.weight` (10, in), `ln.weight` and `ln.bias` (10), `fc2.weight` (out, 10).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::model::ToyModel;
/// use tallow::{autocast, nn, precision::Autocast};
///
/// let model = ToyModel::new(20, 5, nn::seeded(0, DType::F32, &Device::Cpu))?;
/// let x = Tensor::ones((3, 20), DType::F32, &Device::Cpu)?;
/// let activations = autocast(Autocast::cuda(DType::F16), || model.activations(&x))?;
/// assert_eq!(activations.relu.dtype(), DType::F16);
/// assert_eq!(activations.ln.dtype(), DType::F32);
/// assert_eq!(activations.logits.dims(), [3, 5]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ToyModel {
    fc1: Linear,
    ln: LayerNorm,
    fc2: Linear,
}

/// The activations of a [`ToyModel`], in order.
#[derive(Clone, Debug)]
pub struct ToyActivations {
    /// The output of the first linear layer, (..., 10).
    pub fc1: Tensor,
    /// The output of the ReLU, (..., 10).
    pub relu: Tensor,
    /// The output of the layer norm, (..., 10).
    pub ln: Tensor,
    /// The output of the second linear layer and of the model, (..., out).
    pub logits: Tensor,
}

impl ToyModel {
    /// The width of the hidden layer.
    pub const HIDDEN: usize = 10;

    /// The eps of the layer norm; PyTorch's default.
    pub const EPS: f64 = 1e-5;

    /// Creates a model with weights from the builder.
    ///
    /// # Errors
    /// Errors of the builder, such as a missing weight or one of another shape.
    pub fn new(d_in: usize, d_out: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            fc1: Linear::new(d_in, Self::HIDDEN, vb.pp("fc1"))?,
            ln: LayerNorm::new(Self::HIDDEN, Self::EPS, vb.pp("ln"))?,
            fc2: Linear::new(Self::HIDDEN, d_out, vb.pp("fc2"))?,
        })
    }

    /// Maps x (..., in) to logits (..., out).
    ///
    /// # Errors
    /// Those of [`ops::linear()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.activations(x)?.logits)
    }

    /// Maps x (..., in) to logits and returns all activations.
    ///
    /// # Errors
    /// Those of [`ops::linear()`].
    pub fn activations(&self, x: &Tensor) -> Result<ToyActivations> {
        let fc1 = self.fc1.forward(x)?;
        let relu = ops::relu(&fc1)?;
        let ln = self.ln.forward(&relu)?;
        let logits = self.fc2.forward(&ln)?;
        Ok(ToyActivations {
            fc1,
            relu,
            ln,
            logits,
        })
    }

    /// Returns every parameter with its name, in the order of use.
    pub fn parameters(&self) -> Vec<(String, Var)> {
        Layer::parameters(self)
    }
}

impl Layer for ToyModel {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.fc1.visit(&join(path, "fc1"), visit);
        self.ln.visit(&join(path, "ln"), visit);
        self.fc2.visit(&join(path, "fc2"), visit);
    }
}

impl Module for ToyModel {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(ToyModel::forward(self, x)?)
    }
}
