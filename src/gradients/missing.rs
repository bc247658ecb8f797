//! Parameters that have no gradient.

use super::{find_gradient, missing};
use crate::Result;
use candle_core::{Var, backprop::GradStore};

/// What happens to a parameter that has no gradient: an expert that no token chose, a branch that was not taken.
///
/// It is set per parameter group, in [`AdamWConfig::missing_gradients`](crate::optim::AdamWConfig::missing_gradients),
/// for eager and [planned](crate::compile::Step) steps. What takes a list of parameters ([`clip_grad_norm`],
/// [`GradScaler::unscale`], [`check_finite`]) is given those that have a gradient, by
/// [`with_gradients`](Self::with_gradients). [`GradientAccumulator::with_missing`] has it too.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, Layer, Linear};
/// use tallow::optim::{AdamW, AdamWConfig, MissingGradients, clip_grad_norm};
/// use tallow::ops;
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let experts = [Linear::new(4, 4, vb.pp(0))?, Linear::new(4, 4, vb.pp(1))?];
/// let named = |i: usize| (format!("{i}.weight"), experts[i].parameters()[0].1.clone());
/// let parameters = [named(0), named(1)];
/// let missing_gradients = MissingGradients::Skip;
/// let config = AdamWConfig { missing_gradients, ..Default::default() };
/// let mut optimizer = AdamW::new(parameters.clone(), config)?;
///
/// let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
/// let loss = ops::mean(&experts[1].forward(&x)?)?; // the first expert is idle
/// let before = experts[0].weight().to_vec2::<f32>()?;
/// let mut gradients = tallow::backward(loss)?;
/// let present = missing_gradients.with_gradients(&gradients, &parameters)?;
/// clip_grad_norm(&mut gradients, &present, 1.0)?;
/// optimizer.step(&gradients)?;
/// assert_eq!(experts[0].weight().to_vec2::<f32>()?, before);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// [`clip_grad_norm`]: crate::optim::clip_grad_norm()
/// [`check_finite`]: crate::optim::check_finite()
/// [`GradScaler::unscale`]: crate::optim::GradScaler::unscale
/// [`GradientAccumulator::with_missing`]: crate::optim::GradientAccumulator::with_missing
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum MissingGradients {
    /// An error that names the parameter: nothing is left untrained unnoticed.
    #[default]
    Error,
    /// The parameter and its state are left as they are, as PyTorch leaves those whose `grad` is `None`. Bias
    /// correction counts the updates of each parameter.
    Skip,
    /// The parameter is updated with a gradient of zeros: its moments decay, and weight decay applies. PyTorch does
    /// this after `zero_grad(set_to_none=False)`.
    Zero,
}

impl MissingGradients {
    /// Returns the parameters that have a gradient, in order. Those without one add nothing to a norm, and there is
    /// nothing to unscale: with [`Skip`](Self::Skip) and [`Zero`](Self::Zero) they are left out.
    ///
    /// # Errors
    /// With [`Error`](Self::Error), [`Error::MissingGradient`](crate::Error::MissingGradient) names the first parameter
    /// without a gradient; a gradient of another shape, an unsupported dtype or another device than its parameter's.
    pub fn with_gradients(
        self,
        gradients: &GradStore,
        parameters: &[(String, Var)],
    ) -> Result<Vec<(String, Var)>> {
        self.present("MissingGradients::with_gradients", gradients, parameters)
    }

    /// As [`with_gradients`](Self::with_gradients); errors name `op`.
    pub(crate) fn present(
        self,
        op: &'static str,
        gradients: &GradStore,
        parameters: &[(String, Var)],
    ) -> Result<Vec<(String, Var)>> {
        let mut present = Vec::new();
        for (name, var) in parameters {
            match (find_gradient(op, gradients, name, var)?, self) {
                (Some(_), _) => present.push((name.clone(), var.clone())),
                (None, Self::Error) => return Err(missing(op, name)),
                (None, Self::Skip | Self::Zero) => {}
            }
        }
        Ok(present)
    }
}
