//! Gradient norms, clipping by norm and by value, and the check that loss and gradients are finite.

#[cfg(feature = "cuda")]
use super::cuda;
use crate::gradients::{Owners, distinct, gradient_of, gradients_of};
use crate::inplace::{self, all_finite, sum_of_squares, to_f64};
use crate::probe::{self, Kind};
use crate::{Error, Result, ops};
use candle_core::{Tensor, Var, backprop::GradStore};

/// Returns the L2 norm of all gradients of `parameters` as one vector, summed in f64 in a fixed order.
///
/// A variable that occurs twice (a tied weight) counts once.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::grad_norm;
///
/// let weight = Var::from_slice(&[3f64, 4.0], 2, &Device::Cpu)?;
/// let gradients = (weight.sqr()?.sum_all()? * 0.5)?.backward()?; // the gradient is the weight
/// assert_eq!(grad_norm(&gradients, &[("weight".to_string(), weight)])?, 5.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::MissingGradient`] names a parameter without a gradient; a gradient of another shape than its parameter.
pub fn grad_norm(gradients: &GradStore, parameters: &[(String, Var)]) -> Result<f64> {
    let parameters = distinct(parameters);
    norm("grad_norm", gradients, &parameters)
}

/// Scales the gradients of `parameters` so that their common L2 norm is at most `max_norm`; returns the norm before.
///
/// All gradients are multiplied by `max_norm / (norm + 1e-6)` if that is under 1, as by PyTorch's `clip_grad_norm_`.
/// They are overwritten in place unless they share their storage with another gradient or a parameter. A variable that
/// occurs twice (a tied weight) is counted and scaled once.
///
/// If the norm is not finite, the gradients are unchanged: check the result, or use [`clip_grad_norm_checked`].
///
/// # Errors
/// Those of [`grad_norm`]; [`Error::Config`] if `max_norm` is not positive.
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
    update_gradients(CLIP, gradients, &parameters, in_place, |gradient| {
        Ok((gradient * factor)?)
    })?;
    leave(range, &parameters);
    Ok(norm)
}

/// Clips by norm like [`clip_grad_norm`], and returns an error if a gradient is infinite or NaN.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::clip_grad_norm_checked;
///
/// let weight = Var::from_slice(&[0f32, 4.0], 2, &Device::Cpu)?;
/// let parameters = [("weight".to_string(), weight.clone())];
/// let mut gradients = weight.sqrt()?.sum_all()?.backward()?; // infinite at 0
/// let error = clip_grad_norm_checked(&mut gradients, &parameters, 1.0).unwrap_err();
/// assert!(error.to_string().contains("weight"));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`clip_grad_norm`]; [`Error::Data`] names the first parameter whose gradient is not finite.
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

/// Clips each element of the gradients of `parameters`: `g = min(max(g, -max_value), max_value)`. NaN stays NaN.
///
/// It corresponds to PyTorch's `clip_grad_value_`. Gradients are overwritten in place unless they share their storage
/// with another gradient or a parameter.
///
/// # Errors
/// Those of [`grad_norm`]; [`Error::Config`] if `max_value` is not positive.
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
    update_gradients(CLIP_VALUE, gradients, &parameters, in_place, |gradient| {
        let bound = (gradient.ones_like()? * max_value)?;
        let low = (&bound * -1.0)?;
        let clipped = gradient.gt(&bound)?.where_cond(&bound, gradient)?;
        Ok(clipped.lt(&low)?.where_cond(&low, &clipped)?) // NaN is neither
    })?;
    leave(range, &parameters);
    Ok(())
}

const CLIP: &str = "clip_grad_norm";
const CLIP_VALUE: &str = "clip_grad_value";

fn norm(op: &'static str, gradients: &GradStore, parameters: &[(String, Var)]) -> Result<f64> {
    let gradients = gradients_of(op, gradients, parameters)?;
    let sum: f64 = sums_of_squares(&gradients)?.iter().sum();
    Ok(sum.sqrt())
}

/// Changes each gradient: on the CPU by `in_place`, elsewhere by `changed`, in the dtype of the computation.
fn update_gradients(
    op: &'static str,
    gradients: &mut GradStore,
    parameters: &[(String, Var)],
    in_place: impl Fn(&Tensor) -> candle_core::Result<()>,
    changed: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let owners = Owners::new(gradients, parameters);
    for (name, var) in parameters {
        let gradient = gradient_of(op, gradients, name, var)?;
        if owners.can_overwrite(gradient) {
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

/// Ends a profiling range over the gradients of these parameters.
pub(super) fn leave(range: probe::RangeGuard, parameters: &[(String, Var)]) {
    if let (true, Some((_, first))) = (probe::is_listening(), parameters.first()) {
        let elements = parameters.iter().map(|(_, var)| var.elem_count()).sum();
        range.leave_flat(elements, first.dtype());
    }
}

/// The hint in errors about training in f32 or bf16 that has diverged.
pub(crate) const DIVERGED: &str =
    "lower the learning rate, warm up for longer, or clip gradients; in f16 scale the loss";

/// Checks that the loss and all gradients are finite; returns the loss. Call it before the update to protect the
/// weights.
///
/// It is one pass over the gradients, which does not change them. With
/// [`clip_grad_norm_checked`](super::clip_grad_norm_checked), which checks the gradients, it is needed only for the
/// loss. With [`GradScaler`](super::GradScaler), which checks them and skips the step, it is not needed.
///
/// # Errors
/// [`Error::Data`] naming the loss or the first parameter whose gradient is infinite or NaN;
/// [`Error::MissingGradient`] names a parameter without a gradient; [`Error::Shape`] for a loss that is not a scalar.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::check_finite;
///
/// let weight = Var::from_slice(&[0f32, 1.0], 2, &Device::Cpu)?;
/// let parameters = || [("weight".to_string(), weight.clone())];
/// let loss = weight.sqrt()?.sum_all()?; // finite, but its slope at 0 is not
/// let gradients = loss.backward()?;
/// let error = check_finite(&loss, &gradients, &parameters()).unwrap_err();
/// assert!(
///     error.to_string().starts_with("the gradient of parameter weight: expected finite numbers")
/// );
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn check_finite(
    loss: &Tensor,
    gradients: &GradStore,
    parameters: &[(String, Var)],
) -> Result<f64> {
    if loss.rank() != 0 {
        return Err(Error::shape(CHECK, format!("{:?}", loss.dims()))
            .must_be("a scalar loss", "take its mean or its sum"));
    }
    let value = to_f64(loss)?;
    finite_loss(value, || "the loss".into())?;
    let parameters = distinct(parameters);
    match first_non_finite(CHECK, gradients, &parameters)? {
        None => Ok(value),
        Some(name) => Err(Error::data(
            format!("the gradient of parameter {name}"),
            "infinity or NaN",
        )
        .must_be("finite numbers", DIVERGED)),
    }
}

const CHECK: &str = "check_finite";

/// Checks that the loss is finite; `what` names it in the error.
pub(crate) fn finite_loss(loss: f64, what: impl FnOnce() -> String) -> Result<()> {
    if loss.is_finite() {
        return Ok(());
    }
    Err(Error::data(what(), loss).must_be("a finite number", DIVERGED))
}

/// Returns the name of the first parameter whose gradient is infinite or NaN.
pub(super) fn first_non_finite<'a>(
    op: &'static str,
    gradients: &GradStore,
    parameters: &'a [(String, Var)],
) -> Result<Option<&'a str>> {
    let finite = are_finite(&gradients_of(op, gradients, parameters)?)?;
    let mut checked = parameters.iter().zip(finite);
    let culprit = checked.find(|(_, is_finite)| !is_finite);
    Ok(culprit.map(|((name, _), _)| name.as_str()))
}

/// Returns the sum of squares of each tensor, in f64 in a fixed order. (On other devices than CPUs and NVIDIA GPUs, and
/// for f64 on GPUs, candle computes it.)
pub(super) fn sums_of_squares(tensors: &[&Tensor]) -> Result<Vec<f64>> {
    #[cfg(feature = "cuda")]
    if let Some(sums) = cuda::sums_of_squares(tensors)? {
        return Ok(sums);
    }
    let sums = tensors.iter().map(|tensor| Ok(sum_of_squares(tensor)?));
    sums.collect()
}

/// Returns whether each tensor is finite.
pub(super) fn are_finite(tensors: &[&Tensor]) -> Result<Vec<bool>> {
    // The square of the largest f32 is finite in f64, and so is a sum of them.
    #[cfg(feature = "cuda")]
    if let Some(sums) = cuda::sums_of_squares(tensors)? {
        return Ok(sums.into_iter().map(f64::is_finite).collect());
    }
    let finite = tensors.iter().map(|tensor| Ok(all_finite(tensor)?));
    finite.collect()
}
