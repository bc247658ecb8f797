//! Builders of existing and of frozen weights.

use crate::{Error, graph};
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use std::collections::HashMap;

/// Returns a builder of existing weights, for any layer or model: each weight is the tensor of its name itself.
///
/// A weight is trained if it is a variable's tensor, else frozen, and tied if another layer holds it. The dtype and the
/// device of the builder are those of the first tensor.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, Layer, SwiGlu};
///
/// let other = SwiGlu::new(8, 32, nn::seeded(0, DType::F32, &Device::Cpu))?;
/// let w3 = Tensor::ones((32, 8), DType::F32, &Device::Cpu)?;
/// let mut weights = other.weights(); // w1.weight, w2.weight, w3.weight
/// weights[2].1 = w3; // a plain tensor
///
/// let layer = SwiGlu::new(8, 32, nn::from_weights(weights))?;
/// let names: Vec<String> = layer.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["w1.weight", "w2.weight"]); // the variables of the other layer
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn from_weights<N: Into<String>>(
    weights: impl IntoIterator<Item = (N, Tensor)>,
) -> VarBuilder<'static> {
    let weights = weights.into_iter().map(|(name, x)| (name.into(), x));
    let mut weights = weights.peekable();
    let (dtype, device) = match weights.peek() {
        Some((_, first)) => (first.dtype(), first.device().clone()),
        None => (DType::F32, Device::Cpu),
    };
    let weights = Existing(weights.collect());
    VarBuilder::from_backend(Box::new(weights), dtype, device)
}

/// Returns a builder of the weights of `vb`, of which those that `is_frozen` selects by their full names are frozen.
///
/// A frozen weight is a plain tensor, not a variable: it shares the storage of the builder's variable and has no
/// gradient. [`Layer::parameters`](super::Layer::parameters) leaves it out, and so do optimizers, planned steps and
/// estimates; ops save no activation that only its gradient would need. [`Layer::weights`](super::Layer::weights),
/// [`save`](super::save()) and [`load`](super::load()) include it. Any builder can be frozen in part: [`seeded`], a
/// file, [`from_weights`] of an existing model, and [`graph::weights`](crate::graph::weights()) for estimates.
/// [`TransformerLM::freeze`](crate::model::TransformerLM::freeze) does it to a loaded model. Weights of a
/// [`FullyShard`](crate::distributed::FullyShard) cannot be frozen: the layer's constructor returns an error.
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::nn::{self, Layer, Linear, Mlp};
///
/// struct Classifier {
///     body: Mlp,
///     head: Linear,
/// }
///
/// impl Layer for Classifier {
///     fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &candle_core::Tensor)) {
///         self.body.visit(&nn::join(path, "body"), visit);
///         self.head.visit(&nn::join(path, "head"), visit);
///     }
/// }
///
/// let vb = nn::freeze(nn::seeded(0, DType::F32, &Device::Cpu), |name| !name.starts_with("head."));
/// let model = Classifier {
///     body: Mlp::new(8, 32, vb.pp("body"))?,
///     head: Linear::new(8, 3, vb.pp("head"))?,
/// };
/// assert_eq!(model.weights().len(), 5);
/// assert_eq!(model.parameters().len(), 1); // head.weight
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// [`seeded`]: super::seeded()
pub fn freeze<'v>(
    vb: VarBuilder<'v>,
    is_frozen: impl Fn(&str) -> bool + Send + Sync + 'v,
) -> VarBuilder<'v> {
    let (dtype, device, prefix) = (vb.dtype(), vb.device().clone(), vb.prefix());
    let freezing = Freezing {
        vb: vb.root(),
        is_frozen: Box::new(is_frozen),
    };
    let frozen = VarBuilder::from_backend(Box::new(freezing), dtype, device);
    match prefix.is_empty() {
        true => frozen,
        false => frozen.pp(prefix),
    }
}

/// Returns whether a builder decides itself that a weight is frozen if it is not a variable. Of other builders, such as
/// those of files, weights become variables.
pub(crate) fn keeps_frozen(vb: &VarBuilder<'_>, name: &str) -> bool {
    let answer = vb.get_unchecked(&format!("{PROBE}{name}"));
    answer.is_ok_and(|x| x.rank() == 0 && x.dtype() == DType::U8)
}

/// No weight has it in its name; [`keeps_frozen`] asks the builder with it.
const PROBE: &str = "\u{0}frozen?";

/// Returns the name that [`keeps_frozen`] asks for.
fn probed(name: &str) -> Option<String> {
    let (path, name) = name.split_once(PROBE)?;
    Some(format!("{path}{name}"))
}

/// The answer to [`keeps_frozen`].
fn yes() -> Result<Tensor> {
    Tensor::new(1u8, &Device::Cpu)
}

struct Existing(HashMap<String, Tensor>);

impl SimpleBackend for Existing {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let weight = self.get_unchecked(name, dtype, device)?;
        match weight.shape() == &s {
            true => Ok(weight),
            false => Err(candle_core::Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected: s,
                got: weight.shape().clone(),
            }),
        }
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        if probed(name).is_some() {
            return yes();
        }
        let path = || name.to_string();
        let weight = self.0.get(name).cloned();
        weight.ok_or_else(|| candle_core::Error::CannotFindTensor { path: path() })
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

struct Freezing<'v> {
    /// At the root.
    vb: VarBuilder<'v>,
    is_frozen: Box<dyn Fn(&str) -> bool + Send + Sync + 'v>,
}

impl Freezing<'_> {
    fn frozen(&self, name: &str, weight: Tensor) -> Result<Tensor> {
        if !(self.is_frozen)(name) {
            return Ok(weight);
        }
        match graph::is_meta(&weight) {
            false => Ok(weight.detach()),
            true if graph::builds_meta(&self.vb) => {
                graph::constant(weight.shape().clone(), weight.dtype())
            }
            true => Err(Error::order(
                "nn::freeze",
                format!("{name} is sharded"),
                "sharded weights are trained: freeze none of them",
            )
            .into()),
        }
    }
}

impl SimpleBackend for Freezing<'_> {
    fn get(&self, s: Shape, name: &str, h: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let vb = self.vb.clone().set_device(device.clone());
        self.frozen(name, vb.get_with_hints_dtype(s, name, h, dtype)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let vb = self.vb.clone().set_device(device.clone());
        match probed(name) {
            Some(asked) if (self.is_frozen)(&asked) => yes(),
            // The same question to the builder inside, or whether it builds meta tensors.
            Some(_) => vb.get_unchecked_dtype(name, dtype),
            None => self.frozen(name, vb.get_unchecked_dtype(name, dtype)?),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vb.contains_tensor(name)
    }
}
