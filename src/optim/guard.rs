//! Numbers that must be finite, checked before they spoil the weights; and the sums of their squares.

#[cfg(feature = "cuda")]
use super::cuda;
use crate::gradients::{distinct, gradients_of};
use crate::inplace::{all_finite, sum_of_squares, to_f64};
use crate::{Error, Result};
use candle_core::{Tensor, Var, backprop::GradStore};

/// What helps where training in `f32` or `bf16` has diverged.
pub(crate) const DIVERGED: &str =
    "lower the learning rate, warm up for longer, or clip gradients; in f16 scale the loss";

/// An error unless the loss and every parameter's gradient are finite; called before the update, it keeps the weights.
/// Returns the loss's value.
///
/// One pass over the gradients, which changes nothing. Who clips them needs it for the loss alone, for
/// [`clip_grad_norm_checked`](super::clip_grad_norm_checked) sees the gradients anyway; who scales the loss does not
/// need it, for [`GradScaler`](super::GradScaler) does the same and skips the step.
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
/// assert!(error.to_string().starts_with("the gradient of parameter weight: expected finite numbers"));
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

/// The operation's name in errors.
const CHECK: &str = "check_finite";

/// An error that says `what` unless the loss is a number.
pub(crate) fn finite_loss(loss: f64, what: impl FnOnce() -> String) -> Result<()> {
    if loss.is_finite() {
        return Ok(());
    }
    Err(Error::data(what(), loss).must_be("a finite number", DIVERGED))
}

/// The name of the first parameter whose gradient is infinite or NaN.
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

/// The sum of the squares of each tensor's elements, in f64 in a fixed order. (Elsewhere than on CPUs and GPUs of
/// NVIDIA's, and of f64 on these, as candle adds up.)
pub(super) fn sums_of_squares(tensors: &[&Tensor]) -> Result<Vec<f64>> {
    #[cfg(feature = "cuda")]
    if let Some(sums) = cuda::sums_of_squares(tensors)? {
        return Ok(sums);
    }
    let sums = tensors.iter().map(|tensor| Ok(sum_of_squares(tensor)?));
    sums.collect()
}

/// Whether no element is infinite or NaN, of each tensor.
pub(super) fn are_finite(tensors: &[&Tensor]) -> Result<Vec<bool>> {
    // The square of the largest f32 is finite in f64, and so is a sum of them.
    #[cfg(feature = "cuda")]
    if let Some(sums) = cuda::sums_of_squares(tensors)? {
        return Ok(sums.into_iter().map(f64::is_finite).collect());
    }
    let finite = tensors.iter().map(|tensor| Ok(all_finite(tensor)?));
    finite.collect()
}
