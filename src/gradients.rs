//! Parameters' gradients out of a store, checked, and which of them may be written where they lie.

use crate::hardware::device_name;
use crate::inplace::{is_supported, storage_address};
use crate::{Error, Result};
use candle_core::{Tensor, Var, backprop::GradStore};
use std::collections::{HashMap, HashSet};

/// `parameters` without repetitions of a variable (tied weights), in order.
pub(crate) fn distinct(parameters: &[(String, Var)]) -> Vec<(String, Var)> {
    let mut seen = HashSet::new();
    let firsts = parameters.iter().filter(|(_, var)| seen.insert(var.id()));
    firsts.cloned().collect()
}

/// Parameters as ranks compare them: names, shapes, dtypes.
pub(crate) fn described<'a>(parameters: impl Iterator<Item = &'a (String, Var)>) -> String {
    let described = parameters.map(|(name, var)| {
        let dtype = var.dtype().as_str();
        format!("{name} {:?} {dtype}", var.dims())
    });
    described.collect::<Vec<_>>().join(", ")
}

/// The gradient of `var`: there, of its shape, of a float dtype, on its device.
pub(crate) fn gradient_of<'a>(
    op: &'static str,
    gradients: &'a GradStore,
    name: &str,
    var: &Var,
) -> Result<&'a Tensor> {
    find_gradient(op, gradients, name, var)?.ok_or_else(|| missing(op, name))
}

pub(crate) fn missing(op: &'static str, name: &str) -> Error {
    Error::MissingGradient {
        op,
        parameter: name.to_string(),
    }
}

/// As [`gradient_of`], `None` where there is no gradient.
pub(crate) fn find_gradient<'a>(
    op: &'static str,
    gradients: &'a GradStore,
    name: &str,
    var: &Var,
) -> Result<Option<&'a Tensor>> {
    let Some(gradient) = gradients.get(var) else {
        return Ok(None);
    };
    if gradient.shape() != var.shape() {
        return Err(Error::shape(op, format!("{:?}", gradient.dims())).must_be(
            format!("a gradient of parameter {name}'s shape {:?}", var.dims()),
            "a gradient put into the store by hand must have its parameter's shape",
        ));
    }
    if !is_supported(gradient.dtype()) {
        return Err(Error::dtype(op, gradient.dtype().as_str()).must_be(
            format!("a gradient of parameter {name} in f16, bf16, f32 or f64"),
            "convert it with to_dtype",
        ));
    }
    if var.device().location() != gradient.device().location() {
        return Err(Error::Placement {
            op,
            expected: format!(
                "the gradient of parameter {name} on {}",
                device_name(var.device())
            ),
            got: device_name(gradient.device()),
            hint: "move it with to_device".into(),
        });
    }
    Ok(Some(gradient))
}

/// The [gradient](gradient_of) of each parameter.
pub(crate) fn gradients_of<'a>(
    op: &'static str,
    gradients: &'a GradStore,
    parameters: &[(String, Var)],
) -> Result<Vec<&'a Tensor>> {
    let parameters = parameters.iter();
    parameters
        .map(|(name, var)| gradient_of(op, gradients, name, var))
        .collect()
}

/// How many tensors lie on each storage: every gradient of a store, and the parameters themselves.
///
/// What is alone on its storage can be overwritten without changing another.
pub(crate) struct Owners(HashMap<usize, usize>);

impl Owners {
    pub(crate) fn new(gradients: &GradStore, parameters: &[(String, Var)]) -> Self {
        let mut owners = HashMap::new();
        let gradients = gradients.get_ids().filter_map(|id| gradients.get_id(*id));
        for tensor in gradients.chain(parameters.iter().map(|(_, var)| var.as_tensor())) {
            *owners.entry(storage_address(tensor)).or_insert(0) += 1;
        }
        Self(owners)
    }

    /// Whether a kernel may overwrite this gradient: contiguous, on the CPU, and not shared.
    pub(crate) fn is_alone(&self, gradient: &Tensor) -> bool {
        gradient.device().is_cpu()
            && gradient.is_contiguous()
            && self.0.get(&storage_address(gradient)) == Some(&1)
    }
}

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
