//! Gradient norms, and clipping by norm and by value.

use super::guard::{first_non_finite, sums_of_squares};
use crate::gradients::{Owners, distinct, gradient_of, gradients_of};
use crate::inplace;
use crate::probe::{self, Kind};
use crate::{Error, Result, ops};
use candle_core::{Tensor, Var, backprop::GradStore};

/// The L2 norm of all of `parameters`' gradients taken as one vector, added up in `f64` in a fixed order.
///
/// A variable given twice (a tied weight) counts once.
///
/// # Errors
/// [`Error::MissingGradient`] names a parameter without a gradient; a gradient of another shape than its parameter's is
/// an error too.
pub fn grad_norm(gradients: &GradStore, parameters: &[(String, Var)]) -> Result<f64> {
    let parameters = distinct(parameters);
    norm("grad_norm", gradients, &parameters)
}

/// Scales `parameters`' gradients so that their common L2 norm is at most `max_norm`. Returns the norm before.
///
/// As PyTorch's `clip_grad_norm_`: all gradients are multiplied by `max_norm / (norm + 1e-6)` where that is under 1.
/// Gradients are overwritten where they lie unless they share their storage with another gradient or a parameter.
/// A variable given twice (a tied weight) counts once, and is scaled once.
///
/// A norm that is not finite is returned, and the gradients are left as they are: check the result, or use
/// [`clip_grad_norm_checked`].
///
/// # Errors
/// As [`grad_norm`]; [`Error::Config`] if `max_norm` is not over 0.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::clip_grad_norm;
///
/// let weight = Var::from_slice(&[3f64, 4.0], 2, &Device::Cpu)?;
/// let mut gradients = (weight.sqr()?.sum_all()? * 0.5)?.backward()?; // the gradient is the weight
/// let norm = clip_grad_norm(&mut gradients, &[("weight".to_string(), weight.clone())], 1.0)?;
/// assert_eq!(norm, 5.0);
/// let clipped = gradients.get(&weight).unwrap().to_vec1::<f64>()?;
/// assert!((clipped[0] - 0.6).abs() < 1e-6 && (clipped[1] - 0.8).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn clip_grad_norm(
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    max_norm: f64,
) -> Result<f64> {
    let range = probe::op(Kind::Op, CLIP, probe::op_path(CLIP));
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::config(CLIP, "max_norm", max_norm).must_be(
            "over 0",
            "1.0 is usual; grad_norm measures without clipping",
        ));
    }
    let parameters = distinct(parameters);
    let norm = norm(CLIP, gradients, &parameters)?;
    let factor = max_norm / (norm + 1e-6);
    if !norm.is_finite() || factor >= 1.0 {
        return Ok(norm);
    }
    let in_place = |gradient: &Tensor| inplace::scale(gradient, factor);
    change_all(CLIP, gradients, &parameters, in_place, |gradient| {
        Ok((gradient * factor)?)
    })?;
    leave(range, &parameters);
    Ok(norm)
}

/// As [`clip_grad_norm`], where gradients that are infinite or NaN are an error that names the first such parameter.
///
/// # Errors
/// As [`clip_grad_norm`]; [`Error::Data`] if the norm is not finite.
pub fn clip_grad_norm_checked(
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    max_norm: f64,
) -> Result<f64> {
    let norm = clip_grad_norm(gradients, parameters, max_norm)?;
    if norm.is_finite() {
        return Ok(norm);
    }
    let culprit = match first_non_finite(CLIP, gradients, &distinct(parameters))? {
        Some(name) => format!("the gradient of parameter {name}"),
        None => "all gradients together".to_string(),
    };
    Err(Error::data(culprit, format!("a norm of {norm}")).must_be(
        "finite numbers",
        "lower the learning rate, skip this batch, or scale the loss if it is half precision",
    ))
}

/// Clips each element of `parameters`' gradients: `g = min(max(g, -max_value), max_value)`. NaN stays.
///
/// As PyTorch's `clip_grad_value_`. Gradients are overwritten where they lie unless they share their storage with
/// another gradient or a parameter.
///
/// # Errors
/// As [`grad_norm`]; [`Error::Config`] if `max_value` is not over 0.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::clip_grad_value;
///
/// let weight = Var::from_slice(&[3f64, -0.5, -4.0], 3, &Device::Cpu)?;
/// let mut gradients = (weight.sqr()?.sum_all()? * 0.5)?.backward()?; // the gradient is the weight
/// clip_grad_value(&mut gradients, &[("weight".to_string(), weight.clone())], 1.0)?;
/// assert_eq!(gradients.get(&weight).unwrap().to_vec1::<f64>()?, [1.0, -0.5, -1.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn clip_grad_value(
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    max_value: f64,
) -> Result<()> {
    let range = probe::op(Kind::Op, CLIP_VALUE, probe::op_path(CLIP_VALUE));
    if max_value.is_nan() || max_value <= 0.0 {
        return Err(Error::config(CLIP_VALUE, "max_value", max_value)
            .must_be("over 0", "each element of a gradient is clipped to it"));
    }
    let parameters = distinct(parameters);
    gradients_of(CLIP_VALUE, gradients, &parameters)?;
    let in_place = |gradient: &Tensor| inplace::clamp(gradient, max_value);
    change_all(CLIP_VALUE, gradients, &parameters, in_place, |gradient| {
        let bound = (gradient.ones_like()? * max_value)?;
        let low = (&bound * -1.0)?;
        let clipped = gradient.gt(&bound)?.where_cond(&bound, gradient)?;
        Ok(clipped.lt(&low)?.where_cond(&low, &clipped)?) // NaN is neither
    })?;
    leave(range, &parameters);
    Ok(())
}

/// The operations' names in errors.
const CLIP: &str = "clip_grad_norm";
const CLIP_VALUE: &str = "clip_grad_value";

fn norm(op: &'static str, gradients: &GradStore, parameters: &[(String, Var)]) -> Result<f64> {
    let gradients = gradients_of(op, gradients, parameters)?;
    let sum: f64 = sums_of_squares(&gradients)?.iter().sum();
    Ok(sum.sqrt())
}

/// Changes each gradient: on the CPU by `in_place`, elsewhere to what `changed` returns of it in the type that is
/// computed in.
fn change_all(
    op: &'static str,
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    in_place: impl Fn(&Tensor) -> candle_core::Result<()>,
    changed: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let owners = Owners::new(gradients, parameters);
    for (name, var) in parameters {
        let gradient = gradient_of(op, gradients, name, var)?;
        if owners.is_alone(gradient) {
            in_place(gradient)?;
            continue;
        }
        let (gradient, dtype) = (gradient.detach(), gradient.dtype());
        let replacement = if gradient.device().is_cpu() {
            ops::check_granted_on(gradient.device(), gradient.dims(), dtype)?;
            let copy = gradient.force_contiguous()?;
            in_place(&copy)?;
            copy
        } else {
            // candle rounds a factor to the tensor's dtype.
            changed(&gradient.to_dtype(inplace::wide(dtype))?)?.to_dtype(dtype)?
        };
        gradients.insert(var, replacement);
    }
    Ok(())
}

/// Tells who listens what has been done to the parameters' gradients.
fn leave(range: probe::RangeGuard, parameters: &[(String, Var)]) {
    if let (true, Some((_, first))) = (probe::is_listening(), parameters.first()) {
        let elements = parameters.iter().map(|(_, var)| var.elem_count()).sum();
        range.leave_flat(elements, first.dtype());
    }
}
