//! Maxima and minima over some dimensions.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[[1f32, 5.0, 2.0], [7.0, 0.0, 3.0]], &Device::Cpu)?;
//! assert_eq!(ops::max_over(&x, 1)?.to_vec1::<f32>()?, [5.0, 7.0]);
//! assert_eq!(ops::min_over(&x, 0)?.to_vec1::<f32>()?, [1.0, 0.0, 2.0]);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::info::OpInfo;
use super::lowering::{Calls, Lowering, Signature, Slot, kernel, on_gpu};
use super::reduce::{Reduction, sizes};
use crate::Result;
use crate::kernels::cpu::extremes as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::extremes as cuda_kernel;
use candle_core::shape::Dims;
use candle_core::{DType, Tensor};

/// Computes the largest elements over the dimensions `dims`, which the output lacks: x (B, T, D) over 1 is (B, D).
///
/// `dims` are those of [`sum_over`](super::sum_over). The following also holds for [`max_keepdim`], [`min_over`] and
/// [`min_keepdim`]. A result is NaN if one of its elements is. Backward: the first of equal extremes gets dy, and so
/// does the first NaN; all others get 0. That is PyTorch's `max(dim)`; its `amax` divides dy among equal ones.
/// [`topk(x, 1)`](super::topk()) also returns the indices, with the same gradient, and [`argmax`](super::argmax) only
/// these. Saved for backward: x, y. Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[[1f32, 5.0, 5.0], [7.0, 0.0, 3.0]], &Device::Cpu)?;
/// let y = ops::max_over(&x, 1)?;
/// assert_eq!(y.to_vec1::<f32>()?, [5.0, 7.0]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// let dx = gradients.get(&x).unwrap().to_vec2::<f32>()?;
/// assert_eq!(dx, [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`sum_over`](super::sum_over); a dimension of size 0 among `dims`.
pub fn max_over(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    LARGEST.over(x, dims)
}

/// Computes [`max_over`] with the dimensions `dims` kept, of size 1, so that the maxima broadcast to x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::new(&[[1f32, 5.0], [7.0, 0.0]], &Device::Cpu)?;
/// let below = ops::sub(&x, &ops::max_keepdim(&x, 1)?)?;
/// assert_eq!(below.to_vec2::<f32>()?, [[-4.0, 0.0], [0.0, -7.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`max_over`].
pub fn max_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    LARGEST.keeping(x, dims)
}

/// Computes the smallest elements over the dimensions `dims`; otherwise like [`max_over`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 5.0], [7.0, 0.0]], &Device::Cpu)?;
/// assert_eq!(tallow::ops::min_over(&x, 0)?.to_vec1::<f32>()?, [1.0, 0.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`max_over`].
pub fn min_over(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    SMALLEST.over(x, dims)
}

/// Computes [`min_over`] with the dimensions `dims` kept, of size 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 5.0], [7.0, 0.0]], &Device::Cpu)?;
/// assert_eq!(tallow::ops::min_keepdim(&x, (0, 1))?.to_vec2::<f32>()?, [[0.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`max_over`].
pub fn min_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    SMALLEST.keeping(x, dims)
}

const LARGEST: Reduction = Reduction {
    info: &MAX_INFO,
    plain: |x| first(x, &x.argmax_keepdim(1)?),
    of_nothing: Some("there is no largest element of nothing"),
};

const SMALLEST: Reduction = Reduction {
    info: &MIN_INFO,
    plain: |x| first(x, &x.argmin_keepdim(1)?),
    of_nothing: Some("there is no smallest element of nothing"),
};

/// Returns the elements of x (outer, n, inner) at these indices along n, or the first NaN.
fn first(x: &Tensor, indices: &Tensor) -> candle_core::Result<Tensor> {
    let is_nan = x.ne(x)?.to_dtype(DType::F32)?;
    let has_nan = is_nan.max_keepdim(1)?.ne(0f32)?;
    let indices = has_nan.where_cond(&is_nan.argmax_keepdim(1)?, indices)?;
    x.contiguous()?.gather(&indices.contiguous()?, 1)
}

const MAX_INFO: OpInfo = info("max", MAX);
const MIN_INFO: OpInfo = info("min", MIN);

const fn info(op: &'static str, lowering: Lowering) -> OpInfo {
    OpInfo::new(op)
        .on_gpu_up_to(usize::MAX)
        .planned_composed(lowering)
        .costing(
            "1 an element, backward 1",
            "x, y; backward x, y, dy, dx",
            |o| o.reduction(1.0),
            Some(|o| {
                let (read, elements) = (
                    o.input_bytes() + 2.0 * o.output.bytes(),
                    o.input(0)?.elements(),
                );
                super::cost::cost(0.0, elements, read, o.input_bytes())
            }),
        )
}

pub(super) const INFOS: &[OpInfo] = &[MAX_INFO, MIN_INFO];

const MAX: Lowering = Lowering {
    forward: forward::<true>,
    backward,
};

const MIN: Lowering = Lowering {
    forward: forward::<false>,
    backward,
};

fn forward<const LARGEST: bool>(signature: &Signature<'_>) -> Calls {
    let kernel = kernel!(if LARGEST { "max" } else { "min" }, |T, k, s| {
        let sizes = [k.count("n")?, k.count("inner")?];
        kernel::forward::<T, LARGEST>(s.x("x")?, sizes, s.y("y")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let sizes = [k.count("n")?, k.count("inner")?];
        cuda_kernel::forward(l.gpu, l.x("x")?, sizes, LARGEST, l.y("y")?)
    });
    let [n, inner] = sizes(signature);
    let kernel = kernel.sized([("n", n), ("inner", inner)]);
    Calls::default().call(kernel, [("x", Slot::Input(0))], [("y", Slot::Output)])
}

fn backward(signature: &Signature<'_>) -> Calls {
    let kernel = kernel!("max_backward", |T, k, s| {
        let sizes = [k.count("n")?, k.count("inner")?];
        kernel::backward::<T>([s.x("dy")?, s.x("y")?], s.x("x")?, sizes, s.y("dx")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let sizes = [k.count("n")?, k.count("inner")?];
        cuda_kernel::backward(l.gpu, [l.x("dy")?, l.x("x")?, l.x("y")?], sizes, l.y("dx")?)
    });
    let [n, inner] = sizes(signature);
    let kernel = kernel.sized([("n", n), ("inner", inner)]);
    let reads = [
        ("dy", Slot::OutputGradient),
        ("x", Slot::Input(0)),
        ("y", Slot::Output),
    ];
    Calls::default().call(kernel, reads, [("dx", Slot::Gradient(0))])
}
