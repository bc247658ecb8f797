//! Parameters' gradients out of a store, checked, and which of them may be written where they lie.

mod missing;

pub use missing::MissingGradients;

use crate::hardware::device_name;
use crate::inplace::{is_supported, storage_address};
use crate::{Error, Result};
use candle_core::{Tensor, Var, backprop::GradStore};
use std::collections::{HashMap, HashSet};

/// `parameters` without repetitions of a variable (tied weights), in order.
pub(crate) fn distinct(parameters: impl IntoIterator<Item = (String, Var)>) -> Vec<(String, Var)> {
    let mut seen = HashSet::new();
    parameters
        .into_iter()
        .filter(|(_, var)| seen.insert(var.id()))
        .collect()
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

/// The error that a parameter has no gradient.
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
