//! A weight outside of a layer.

use super::{Layer, variable};
use crate::{Error, Result};
use candle_core::{Shape, Tensor};
use candle_nn::{Init, VarBuilder};

/// A single named weight, for custom layers: a class token, a scale, the factors of a LoRA.
///
/// Its name is the builder's prefix: `vb.pp("class_token")` creates the parameter `class_token`. A custom layer visits
/// it under that name, as it visits the layers that it contains.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Init, VarBuilder};
/// use tallow::nn::{self, Layer, Linear, Parameter};
/// use tallow::{Result, ops};
///
/// /// y = x W^T + x A^T B^T: W is frozen, A and B are trained (LoRA).
/// struct Adapted {
///     frozen: Linear,
///     a: Parameter,
///     b: Parameter,
/// }
///
/// impl Adapted {
///     fn new(frozen: &Linear, rank: usize, vb: VarBuilder<'_>) -> Result<Self> {
///         let (d_out, d_in) = frozen.weight().dims2()?;
///         let normal = Init::Randn { mean: 0.0, stdev: 0.02 };
///         Ok(Self {
///             frozen: Linear::from_weights(frozen.weight().detach(), None)?,
///             a: Parameter::new((rank, d_in), normal, vb.pp("a"))?,
///             b: Parameter::new((d_out, rank), Init::Const(0.0), vb.pp("b"))?,
///         })
///     }
///
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         let narrow = ops::linear(x, self.a.weight())?; // (..., rank)
///         ops::add(&self.frozen.forward(x)?, &ops::linear(&narrow, self.b.weight())?)
///     }
/// }
///
/// impl Layer for Adapted {
///     fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
///         self.frozen.visit(&nn::join(path, "frozen"), visit);
///         self.a.visit(&nn::join(path, "a"), visit);
///         self.b.visit(&nn::join(path, "b"), visit);
///     }
/// }
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let linear = Linear::new(8, 4, vb.pp("linear"))?;
/// let adapted = Adapted::new(&linear, 2, vb.pp("adapted"))?;
/// let names: Vec<String> = adapted.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["a", "b"]);
/// let y = adapted.forward(&Tensor::ones((3, 8), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [3, 4]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Parameter {
    name: String,
    weight: Tensor,
}

impl Parameter {
    /// Creates a parameter of this shape, named by the builder's prefix. `init` is passed to the builder;
    /// [`seeded`](super::seeded()) supports `Init::Randn` and `Init::Const`.
    ///
    /// # Errors
    /// A builder without a prefix; errors of the builder, such as a missing weight or one of another shape.
    pub fn new(shape: impl Into<Shape>, init: Init, vb: VarBuilder<'_>) -> Result<Self> {
        let path = vb.prefix();
        let Some(name) = path.rsplit('.').next().filter(|name| !name.is_empty()) else {
            return Err(
                Error::config("nn::Parameter", "vb", "a builder without a prefix").must_be(
                    "a builder whose prefix is the parameter's name",
                    "pass vb.pp(\"class_token\"), for example",
                ),
            );
        };
        Ok(Self {
            weight: variable(&vb.root(), &path, shape, init)?,
            name: name.into(),
        })
    }

    /// Returns the weight, the tensor of a variable.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Layer for Parameter {
    /// Visits the weight as `path`, or if that is empty under the last part of the builder's prefix.
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        let name = match path {
            "" => self.name.clone(),
            path => path.to_string(),
        };
        visit(name, &self.weight);
    }
}
