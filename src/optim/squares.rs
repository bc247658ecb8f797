//! Sums of the squares of gradients, and whether they are finite.

#[cfg(feature = "cuda")]
use super::cuda;
use crate::Result;
use crate::inplace::{all_finite, sum_of_squares};
use candle_core::Tensor;

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
