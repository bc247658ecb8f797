//! Validated lookup of parameters' gradients in a store, and which of them may be overwritten.

use crate::hardware::device_name;
use crate::inplace::{is_supported, storage_address};
use crate::{Error, Result};
use candle_core::{Tensor, Var, backprop::GradStore};
use std::collections::{HashMap, HashSet};

/// Returns `parameters` without repeated variables (tied weights), in order.
pub(crate) fn distinct(parameters: &[(String, Var)]) -> Vec<(String, Var)> {
    let mut seen = HashSet::new();
    let firsts = parameters.iter().filter(|(_, var)| seen.insert(var.id()));
    firsts.cloned().collect()
}

/// Describes parameters for comparison between ranks: names, shapes, dtypes.
pub(crate) fn described<'a>(parameters: impl Iterator<Item = &'a (String, Var)>) -> String {
    let described = parameters.map(|(name, var)| {
        let dtype = var.dtype().as_str();
        format!("{name} {:?} {dtype}", var.dims())
    });
    described.collect::<Vec<_>>().join(", ")
}

/// Returns the gradient of `var`; an error unless it exists, has the shape and device of `var`, and is a float.
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

/// Returns the gradient of `var` like [`gradient_of`], or `None` if there is none.
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

/// Returns the [gradient](gradient_of) of each parameter.
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

/// The number of tensors on each storage, of all gradients of a store and the parameters.
///
/// A tensor that is alone on its storage can be overwritten without changing another.
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

    /// Returns whether a kernel may overwrite this gradient: contiguous, on the CPU, and not shared.
    pub(crate) fn can_overwrite(&self, gradient: &Tensor) -> bool {
        gradient.device().is_cpu()
            && gradient.is_contiguous()
            && self.0.get(&storage_address(gradient)) == Some(&1)
    }
}

/// The treatment of a parameter without a gradient: an expert that no token chose, a branch that was not taken.
///
/// It is set per parameter group, in [`AdamWConfig::missing_gradients`](crate::optim::AdamWConfig::missing_gradients),
/// for eager and [planned](crate::compile::Step) steps, and in [`GradientAccumulator::with_missing`]. Functions that
/// take a list of parameters ([`clip_grad_norm`], [`GradScaler::unscale`], [`check_finite`]) expect those with a
/// gradient, which [`with_gradients`](Self::with_gradients) returns.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::nn::{self, Layer, Linear};
/// use tallow::optim::{AdamWConfig, MissingGradients, Optimizer, clip_grad_norm};
/// use tallow::ops;
///
/// let vb = nn::seeded(0, DType::F32, &Device::Cpu);
/// let experts = [Linear::new(4, 4, vb.pp(0))?, Linear::new(4, 4, vb.pp(1))?];
/// let named = |i: usize| (format!("{i}.weight"), experts[i].parameters()[0].1.clone());
/// let parameters = [named(0), named(1)];
/// let missing_gradients = MissingGradients::Skip;
/// let config = AdamWConfig { missing_gradients, ..Default::default() };
/// let mut optimizer = Optimizer::new(parameters.clone(), config)?;
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
    /// Returns an error that names the parameter, so that no parameter stays untrained unnoticed.
    #[default]
    Error,
    /// Leaves the parameter and its state unchanged, as PyTorch does if `grad` is `None`. Bias correction counts the
    /// updates of each parameter.
    Skip,
    /// Updates the parameter with a gradient of zeros: its moments decay, and weight decay applies, as in PyTorch after
    /// `zero_grad(set_to_none=False)`.
    Zero,
}

impl MissingGradients {
    /// Returns the parameters that have a gradient, in order. With [`Skip`](Self::Skip) and [`Zero`](Self::Zero) the
    /// others are left out.
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

    /// Returns the parameters like [`with_gradients`](Self::with_gradients); errors name `op`.
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
