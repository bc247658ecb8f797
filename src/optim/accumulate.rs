//! Gradient accumulation.

use super::MissingGradients;
use crate::backward::empty_store;
use crate::gradients::{Owners, distinct, find_gradient, missing};
use crate::inplace;
use crate::{Error, Result};
use candle_core::{Tensor, Var, backprop::GradStore};

/// Accumulates gradients over several backward passes and returns their mean or sum.
///
/// If losses are means over micro-batches of equal size, the mean of their gradients is the gradient of the whole
/// batch. For micro-batches of different sizes use [`GradientAccumulator::add_weighted`] with the number of targets.
///
/// Sums are stored in place of the first gradients, or in f32 if gradients are f16 or bf16. Other gradients than those
/// of the parameters, which `loss.backward()` keeps too, are freed with each store.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::optim::GradientAccumulator;
///
/// let weight = Var::from_slice(&[2f64], 1, &Device::Cpu)?;
/// let mut accumulator = GradientAccumulator::new([("weight".to_string(), weight.clone())]);
/// for x in [1.0, 2.0, 6.0] {
///     let loss = (weight.as_tensor() * x)?.sum_all()?; // the gradient is x
///     accumulator.add(loss.backward()?)?;
/// }
/// let gradients = accumulator.mean()?;
/// assert_eq!(gradients.get(&weight).unwrap().to_vec1::<f64>()?, [3.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientAccumulator {
    parameters: Vec<(String, Var)>,
    /// The sum of each parameter; `None` before the first gradient.
    sums: Vec<Option<Tensor>>,
    total_weight: f64,
    missing: MissingGradients,
}

impl GradientAccumulator {
    /// Creates an empty accumulator. A variable that occurs twice counts once.
    pub fn new(parameters: impl IntoIterator<Item = (String, Var)>) -> Self {
        let parameters = distinct(&Vec::from_iter(parameters));
        Self {
            sums: vec![None; parameters.len()],
            parameters,
            total_weight: 0.0,
            missing: MissingGradients::Error,
        }
    }

    /// Sets how a missing gradient is treated. With [`MissingGradients::Skip`] and [`MissingGradients::Zero`] a
    /// micro-batch without a gradient adds nothing to the sum but counts in the mean. A parameter without a gradient in
    /// all of them has none in the result (`Skip`), or zeros (`Zero`).
    pub fn with_missing(self, missing: MissingGradients) -> Self {
        Self { missing, ..self }
    }

    /// Adds the gradients of a micro-batch.
    ///
    /// # Errors
    /// [`Error::MissingGradient`] names a parameter without a gradient, unless [`with_missing`](Self::with_missing)
    /// allows it; nothing is added then.
    pub fn add(&mut self, gradients: GradStore) -> Result<()> {
        self.add_weighted(gradients, 1.0)
    }

    /// Adds the gradients of a micro-batch with a weight.
    ///
    /// # Errors
    /// Those of [`GradientAccumulator::add`]; [`Error::Config`] if `weight` is not positive and finite.
    pub fn add_weighted(&mut self, gradients: GradStore, weight: f64) -> Result<()> {
        if !(weight.is_finite() && weight > 0.0) {
            return Err(Error::config(OP, "weight", weight).must_be(
                "finite and over 0",
                "use the number of targets in this part of the batch",
            ));
        }
        let parts = self
            .parameters
            .iter()
            .map(
                |(name, var)| match find_gradient(OP, &gradients, name, var)? {
                    None if self.missing == MissingGradients::Error => Err(missing(OP, name)),
                    gradient => Ok(gradient.map(Tensor::detach)),
                },
            )
            .collect::<Result<Vec<_>>>()?;
        let owners = Owners::new(&gradients, &self.parameters);
        let sums = self.sums.iter().zip(&parts);
        let sums = sums.map(|(sum, part)| match (sum, part) {
            (sum, None) => Ok(sum.clone()),
            (None, Some(part)) => first_sum(part, weight, &owners).map(Some),
            (Some(sum), Some(part)) => next_sum(sum, part, weight).map(Some),
        });
        self.sums = sums.collect::<Result<_>>()?;
        self.total_weight += weight;
        Ok(())
    }

    /// Returns the sum of the weights; [`GradientAccumulator::add`] has a weight of 1.
    pub fn total_weight(&self) -> f64 {
        self.total_weight
    }

    /// Returns the weighted mean and empties the accumulator.
    ///
    /// # Errors
    /// [`Error::Data`] if nothing was added.
    pub fn mean(&mut self) -> Result<GradStore> {
        let factor = 1.0 / self.total_weight;
        self.take(factor)
    }

    /// Returns the weighted sum, for losses that were divided beforehand, and empties the accumulator.
    ///
    /// # Errors
    /// [`Error::Data`] if nothing was added.
    pub fn sum(&mut self) -> Result<GradStore> {
        self.take(1.0)
    }

    fn take(&mut self, factor: f64) -> Result<GradStore> {
        if self.total_weight == 0.0 {
            return Err(Error::data("the gradients of a batch", "none").must_be(
                "those of one part at least",
                "call add after each part's backward",
            ));
        }
        self.total_weight = 0.0;
        let mut store = empty_store()?;
        for ((_, var), sum) in self.parameters.iter().zip(&mut self.sums) {
            let sum = match (sum.take(), self.missing) {
                (Some(sum), _) => sum,
                (None, MissingGradients::Zero) => {
                    let dtype = inplace::wide(var.dtype());
                    Tensor::zeros(var.shape(), dtype, var.device())?
                }
                (None, _) => continue, // it has none
            };
            let sum = if factor == 1.0 {
                sum
            } else if sum.device().is_cpu() {
                inplace::scale(&sum, factor)?;
                sum
            } else {
                (sum * factor)?
            };
            store.insert(var, sum);
        }
        Ok(store)
    }
}

const OP: &str = "GradientAccumulator";

/// Computes `weight * part` in the dtype of sums, in place if the storage of `part` is not shared.
fn first_sum(part: &Tensor, weight: f64, owners: &Owners) -> Result<Tensor> {
    let wide = part.to_dtype(inplace::wide(part.dtype()))?;
    if !part.device().is_cpu() {
        return Ok((wide * weight)?);
    }
    let fresh = wide.dtype() != part.dtype() && wide.is_contiguous();
    let sum = if fresh || owners.can_overwrite(part) {
        wide
    } else {
        wide.force_contiguous()?
    };
    if weight != 1.0 {
        inplace::scale(&sum, weight)?;
    }
    Ok(sum)
}

/// Computes `sum + weight * part`, in place on the CPU.
fn next_sum(sum: &Tensor, part: &Tensor, weight: f64) -> Result<Tensor> {
    if !sum.device().is_cpu() {
        let part = (part.to_dtype(sum.dtype())? * weight)?;
        return Ok((sum + part)?);
    }
    // Kernels widen half precision themselves; any other mixture is converted first.
    let part = if inplace::wide(part.dtype()) == sum.dtype() {
        part.contiguous()?
    } else {
        part.to_dtype(sum.dtype())?.contiguous()?
    };
    inplace::add_scaled(sum, &part, weight)?;
    Ok(sum.clone())
}
