//! Log-sum-exp and variance over some dimensions, composed of other ops.

use super::arithmetic::{add, mul, sub};
use super::cast::{cast, cast_for};
use super::elementwise::{affine, clamp, exp, log};
use super::extremes::max_keepdim;
use super::operand::{check_supported, is_half};
use super::reduce::{mean_keepdim, some_dims, sum_keepdim};
use crate::grad::no_grad;
use crate::{Error, Result};
use candle_core::shape::Dims;
use candle_core::{DType, Tensor};

/// Computes `y = log(sum(exp(x)))` over the dimensions `dims`, which the output lacks: x (N, V) over 1 is (N).
///
/// `dims` are those of [`sum_over`](super::sum_over). The largest element is subtracted before `exp`, so nothing
/// overflows; of no elements, or of elements that are all `-inf`, it is `-inf`. It is composed of [`max_keepdim`],
/// [`sub`], [`exp`], [`sum_keepdim`] and [`log()`], which a planned step plans one by one. Half precision is computed in
/// f32 and rounded once. Backward: `dx = dy softmax(x)`. Saved for backward: what these ops save, three times the size
/// of x. Autocast: f32 under CUDA's policy; under the CPU's it follows x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[0f32, 0.0], [1000.0, 0.0]], &Device::Cpu)?; // (N, V)
/// let y = tallow::ops::logsumexp(&x, 1)?.to_vec1::<f32>()?;
/// assert!((y[0] - std::f32::consts::LN_2).abs() < 1e-6);
/// assert_eq!(y[1], 1000.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`sum_over`](super::sum_over).
pub fn logsumexp(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    let dims = some_dims("logsumexp", x, dims)?;
    without(&log_of_sums(x, &dims)?, &dims)
}

/// Computes [`logsumexp`] with the dimensions `dims` kept, of size 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::new(&[[0f32, 0.0], [3.0, 3.0]], &Device::Cpu)?;
/// let log_p = ops::sub(&x, &ops::logsumexp_keepdim(&x, 0)?)?; // log_softmax over dimension 0
/// assert!((log_p.to_vec2::<f32>()?[1][0] + 0.0485873).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`logsumexp`].
pub fn logsumexp_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    log_of_sums(x, &some_dims("logsumexp", x, dims)?)
}

/// Computes the variance over the dimensions `dims`, which the output lacks: the sum of `(x - mean)^2`, divided by
/// `n - correction`, with n elements in each.
///
/// `correction` 1 is the unbiased estimate, PyTorch's default; 0 is the mean square. `dims` are those of
/// [`sum_over`](super::sum_over). It is composed of [`mean_keepdim`], [`sub`], [`mul`], [`sum_keepdim`] and [`affine`],
/// which a planned step plans one by one. Half precision is computed in f32 and rounded once. The standard deviation is
/// [`sqrt`](super::sqrt) of it. Backward: `dx = 2 dy (x - mean) / (n - correction)`. Saved for backward: `x - mean`.
/// Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::new(&[[1f32, 3.0], [2.0, 6.0]], &Device::Cpu)?;
/// assert_eq!(ops::var(&x, 1, 1)?.to_vec1::<f32>()?, [2.0, 8.0]);
/// assert_eq!(ops::var(&x, 1, 0)?.to_vec1::<f32>()?, [1.0, 4.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`sum_over`](super::sum_over); no more elements than `correction` in each variance.
pub fn var(x: &Tensor, dims: impl Dims, correction: usize) -> Result<Tensor> {
    let dims = some_dims("var", x, dims)?;
    without(&variance(x, &dims, correction)?, &dims)
}

/// Computes [`var`] with the dimensions `dims` kept, of size 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 3.0], [2.0, 6.0]], &Device::Cpu)?;
/// assert_eq!(tallow::ops::var_keepdim(&x, 1, 0)?.to_vec2::<f32>()?, [[1.0], [4.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`var`].
pub fn var_keepdim(x: &Tensor, dims: impl Dims, correction: usize) -> Result<Tensor> {
    variance(x, &some_dims("var", x, dims)?, correction)
}

fn log_of_sums(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    check_supported("logsumexp", x)?;
    let [x] = &cast_for("logsumexp", [x])?;
    let wide = &widened(x)?;
    if dims.iter().any(|dim| x.dims()[*dim] == 0) {
        return cast(&log(&sum_keepdim(wide, dims)?)?, x.dtype()); // there is no maximum
    }
    let finite = match wide.dtype() {
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    // Its gradients cancel. It is finite, because the difference of infinities is NaN.
    let top = no_grad(|| clamp(&max_keepdim(wide, dims)?, -finite, finite))?;
    let total = sum_keepdim(&exp(&sub(wide, &top)?)?, dims)?;
    cast(&add(&log(&total)?, &top)?, x.dtype())
}

fn variance(x: &Tensor, dims: &[usize], correction: usize) -> Result<Tensor> {
    check_supported("var", x)?;
    let [x] = &cast_for("var", [x])?;
    let n = dims.iter().map(|dim| x.dims()[*dim]).product::<usize>();
    if n <= correction {
        return Err(
            Error::shape("var", format!("{:?}, {n} elements", x.dims())).must_be(
                format!("more than {correction} elements in each variance"),
                "the sum of squares is divided by their number less the correction",
            ),
        );
    }
    let wide = &widened(x)?;
    let centred = sub(wide, &mean_keepdim(wide, dims)?)?;
    let squares = sum_keepdim(&mul(&centred, &centred)?, dims)?;
    cast(
        &affine(&squares, 1.0 / (n - correction) as f64, 0.0)?,
        x.dtype(),
    )
}

fn widened(x: &Tensor) -> Result<Tensor> {
    match is_half(x.dtype()) {
        true => cast(x, DType::F32),
        false => Ok(x.clone()),
    }
}

/// Removes `dims`, which have size 1.
fn without(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let kept = (0..x.rank()).filter(|dim| !dims.contains(dim));
    let shape: Vec<usize> = kept.map(|dim| x.dims()[dim]).collect();
    Ok(x.reshape(shape)?)
}
