//! Sums and means, of all elements or over some dimensions, and log-softmax.

use super::elementwise::{in_f32, with_attributes};
use super::info::{OpInfo, per_element};
use super::lowering::{Calls, Kernel, Lowering, Signature, Slot, kernel, on_gpu};
use super::operand::{check_size, check_supported, zeros_of};
use crate::error::innermost;
use crate::graph::Attribute;
use crate::kernels::cpu::{rows::log_softmax as log_softmax_kernel, sums as kernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{log_softmax as log_softmax_on_gpu, reduce as cuda_kernel};
use crate::kernels::workspace;
use crate::{Error, Result};
use candle_core::shape::Dims;
use candle_core::{D, DType, Tensor};

/// Computes the sum of all elements, a scalar.
///
/// Half precision is summed in at least f32 and rounded once; candle's own sum of ones in bf16 stops growing at 256.
/// Backward: dx is dy everywhere. Saved for backward: nothing. Under CUDA's autocast policy the sum is f32.
/// [`sum_over`] sums over some dimensions.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let ones = Tensor::ones((4096,), DType::BF16, &Device::Cpu)?;
/// assert_eq!(tallow::ops::sum(&ones)?.to_dtype(DType::F32)?.to_scalar::<f32>()?, 4096.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn sum(x: &Tensor) -> Result<Tensor> {
    SUMMED.over_all(x)
}

/// Computes the sums over the dimensions `dims`, which the output lacks: x (B, T, D) over 1 is (B, D), over (0, 1) it
/// is (D). PyTorch's and candle's `sum(dim)`.
///
/// `dims` is a dimension, a tuple or an array of them, or a slice, counted from 0; [`D::Minus1`] is the last one. The
/// following also holds for [`sum_keepdim`], [`mean_over`] and [`mean_keepdim`]. Half precision is summed in at least
/// f32 and rounded once, and the bits do not depend on the number of threads. Dimensions that are not adjacent are
/// summed from a copy of x. Sums over a dimension of size 0 are zeros. Backward: dx is dy, repeated along `dims`. Saved
/// for backward: nothing. Autocast: the sums are f32 under CUDA's policy, like [`sum`]; the means have the dtype of x,
/// like [`mean`].
///
/// ```
/// use candle_core::{D, Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::Cpu)?; // (2, 3)
/// assert_eq!(ops::sum_over(&x, 0)?.to_vec1::<f32>()?, [5.0, 7.0, 9.0]);
/// let y = ops::sum_over(&x, D::Minus1)?; // (2)
/// assert_eq!(y.to_vec1::<f32>()?, [6.0, 15.0]);
/// let gradients = tallow::backward(ops::sum(&ops::mul(&y, &y)?)?)?;
/// let dx = gradients.get(&x).unwrap().to_vec2::<f32>()?;
/// assert_eq!(dx, [[12.0, 12.0, 12.0], [30.0, 30.0, 30.0]]); // 2 y
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a dimension that x does not have or that is given twice; no dimension.
pub fn sum_over(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    SUMMED.over(x, dims)
}

/// Computes [`sum_over`] with the dimensions `dims` kept, of size 1, so that the sums broadcast to x: (B, T, D) over 1
/// is (B, 1, D).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let counts = Tensor::new(&[[1f32, 3.0], [2.0, 2.0]], &Device::Cpu)?;
/// let shares = ops::div(&counts, &ops::sum_keepdim(&counts, 1)?)?;
/// assert_eq!(shares.to_vec2::<f32>()?, [[0.25, 0.75], [0.5, 0.5]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`sum_over`].
pub fn sum_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    SUMMED.keeping(x, dims)
}

/// Computes the mean of all elements, a scalar. It is summed in at least f32 and returned in x's dtype under both of
/// PyTorch's policies. Backward: dx is dy / n everywhere, with n elements. Saved for backward: nothing.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[[1f32, 2.0], [3.0, 6.0]], &Device::Cpu)?;
/// let y = ops::mean(&x)?;
/// assert_eq!(y.to_scalar::<f32>()?, 3.0);
/// let gradients = tallow::backward(y)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?, [[0.25, 0.25], [0.25, 0.25]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; an empty tensor.
pub fn mean(x: &Tensor) -> Result<Tensor> {
    AVERAGED.over_all(x)
}

/// Computes the means over the dimensions `dims`, which the output lacks: x (B, T, D) over 1 is (B, D). PyTorch's and
/// candle's `mean(dim)`.
///
/// `dims`, precision and errors are those of [`sum_over`]. Backward: dx is dy / n, repeated along `dims`, with n
/// elements in each mean. Saved for backward: nothing.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let h = Var::new(&[[[1f32, 2.0], [3.0, 6.0]]], &Device::Cpu)?; // (B, T, D) = (1, 2, 2)
/// let pooled = ops::mean_over(&h, 1)?; // (B, D)
/// assert_eq!(pooled.to_vec2::<f32>()?, [[2.0, 4.0]]);
/// let gradients = tallow::backward(ops::sum(&pooled)?)?;
/// assert_eq!(gradients.get(&h).unwrap().to_vec3::<f32>()?, [[[0.5, 0.5], [0.5, 0.5]]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`sum_over`]; a dimension of size 0 among `dims`.
pub fn mean_over(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    AVERAGED.over(x, dims)
}

/// Computes [`mean_over`] with the dimensions `dims` kept, of size 1, so that the means broadcast to x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::new(&[[1f32, 3.0], [2.0, 6.0]], &Device::Cpu)?;
/// let centred = ops::sub(&x, &ops::mean_keepdim(&x, 1)?)?;
/// assert_eq!(centred.to_vec2::<f32>()?, [[-1.0, 1.0], [-2.0, 2.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`mean_over`].
pub fn mean_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    AVERAGED.keeping(x, dims)
}

/// Computes `y = x - log(sum(exp(x)))` along the last dimension: x and y (..., V). A scalar is one element, as in
/// PyTorch.
///
/// Half precision is computed in f32 and rounded once. Backward: `dx = dy - softmax(x) sum(dy)`. Saved for backward: x.
/// For a loss, [`cross_entropy`](super::cross_entropy()) needs far less memory.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[0f32, 0.0], [1000.0, 0.0]], &Device::Cpu)?; // (..., V)
/// let y = tallow::ops::log_softmax(&x)?.to_vec2::<f32>()?;
/// assert!((y[0][0] + std::f32::consts::LN_2).abs() < 1e-6);
/// assert_eq!(y[1], [0.0, -1000.0]); // no overflow
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    in_f32(&LOG_SOFTMAX_INFO, x, x.shape(), |x| {
        if x.elem_count() == 0 {
            return Ok(x.clone()); // candle refuses to reduce an empty tensor
        }
        if x.rank() == 0 {
            let row = x.reshape(1)?;
            return log_probabilities(&row)?.reshape(());
        }
        log_probabilities(x)
    })
}

/// An op that reduces dimensions.
pub(super) struct Reduction {
    pub info: &'static OpInfo,
    /// Reduces dimension 1 of x (outer, n, inner) in plain candle ops.
    pub plain: fn(&Tensor) -> candle_core::Result<Tensor>,
    /// The reason why dimensions of size 0 are refused; `None` if the result is zeros.
    pub of_nothing: Option<&'static str>,
}

const SUMMED: Reduction = Reduction {
    info: &SUM_INFO,
    plain: |x| x.sum(1),
    of_nothing: None,
};

const AVERAGED: Reduction = Reduction {
    info: &MEAN_INFO,
    plain: |x| x.mean(1),
    of_nothing: Some("the mean of nothing is NaN"),
};

impl Reduction {
    fn over_all(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(x, &(0..x.rank()).collect::<Vec<_>>(), false)
    }

    /// Reduces `dims`, which the output lacks.
    pub fn over(&self, x: &Tensor, dims: impl Dims) -> Result<Tensor> {
        self.apply(x, &some_dims(self.info.op, x, dims)?, false)
    }

    /// Reduces `dims`, which the output has with size 1.
    pub fn keeping(&self, x: &Tensor, dims: impl Dims) -> Result<Tensor> {
        self.apply(x, &some_dims(self.info.op, x, dims)?, true)
    }

    fn apply(&self, x: &Tensor, dims: &[usize], keeps: bool) -> Result<Tensor> {
        let op = self.info;
        check_supported(op.op, x)?;
        check_size(op.op, x.dims(), x.dtype(), x.device())?; // so that no product of dimensions overflows
        let sizes = x.dims();
        let n = dims.iter().map(|dim| sizes[*dim]).product::<usize>();
        if let Some(reason) = self.of_nothing.filter(|_| n == 0) {
            return Err(Error::shape(op.op, format!("{sizes:?}"))
                .must_be("at least one element in each result", reason));
        }
        let is_reduced = |dim: &usize| dims.contains(dim);
        let (reduced, kept): (Vec<usize>, Vec<usize>) = (0..sizes.len()).partition(is_reduced);
        // Dimensions of size 1 do not separate others.
        let long: Vec<usize> = (0..sizes.len()).filter(|dim| sizes[*dim] != 1).collect();
        let first = long.iter().position(is_reduced).unwrap_or(long.len());
        let end = long
            .iter()
            .rposition(is_reduced)
            .map_or(long.len(), |last| last + 1);
        let (x, inner) = match long[first..end].iter().all(is_reduced) {
            true => (
                x.clone(),
                long[end..].iter().map(|dim| sizes[*dim]).product(),
            ),
            false => (x.permute([&kept[..], &reduced].concat())?, 1),
        };
        let kept_size = |dim| match is_reduced(&dim) {
            true => keeps.then_some(1),
            false => Some(sizes[dim]),
        };
        let shape: Vec<usize> = (0..sizes.len()).filter_map(kept_size).collect();
        let attributes = vec![
            ("n", Attribute::Count(n)),
            ("inner", Attribute::Count(inner)),
        ];
        with_attributes(op, &x, shape.as_slice(), attributes, |x| {
            if x.elem_count() == 0 {
                return zeros_of(op.op, shape.as_slice(), x.dtype(), &[x]);
            }
            let x = x.reshape((x.elem_count() / (n * inner), n, inner))?;
            (self.plain)(&x)?.reshape(shape.as_slice())
        })
    }
}

/// Returns the indices of the dimensions `dims` of x.
pub(super) fn some_dims(op: &'static str, x: &Tensor, dims: impl Dims) -> Result<Vec<usize>> {
    let refuse = |got: String, hint| {
        Err(Error::shape(op, got).must_be(
            format!("dimensions of {:?}, each given once", x.dims()),
            hint,
        ))
    };
    match dims.to_indexes(x.shape(), op) {
        Ok(dims) if dims.is_empty() => refuse(
            "none".into(),
            "the function without dims reduces all elements",
        ),
        Ok(dims) => Ok(dims),
        Err(error) => refuse(
            innermost(&error).to_string(),
            "they are counted from 0; D::Minus1 is the last one",
        ),
    }
}

const SUM_INFO: OpInfo = OpInfo::new("sum")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(SUM)
    .costing(
        "1 an element, backward 0",
        "x, y; backward dy, dx",
        |o| o.reduction(1.0),
        Some(|o| o.moved_back(0.0)),
    );

const MEAN_INFO: OpInfo = OpInfo::new("mean")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(MEAN)
    .costing(
        "1 an element, backward 0",
        "x, y; backward dy, dx",
        |o| o.reduction(1.0),
        Some(|o| o.moved_back(0.0)),
    );

const LOG_SOFTMAX_INFO: OpInfo = per_element!(
    OpInfo::new("log_softmax")
        .on_gpu_up_to(usize::MAX)
        .planned_composed(LOG_SOFTMAX),
    5,
    5,
    "x, y; backward x, dy, dx"
);

pub(super) const INFOS: &[OpInfo] = &[SUM_INFO, MEAN_INFO, LOG_SOFTMAX_INFO];

const SUM: Lowering = Lowering {
    forward: |signature| total(signature, 1.0),
    backward: |signature| spread(signature, 1.0),
};

const MEAN: Lowering = Lowering {
    forward: |signature| total(signature, reciprocal(signature)),
    backward: |signature| spread(signature, reciprocal(signature)),
};

const LOG_SOFTMAX: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("log_softmax", |T, k, s| {
            log_softmax_kernel::forward(s.x::<T>("x")?, k.count("width")?, s.y("y")?);
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let (x, y) = (l.x("x")?, l.y("y")?);
            log_softmax_on_gpu::forward(l.gpu, x, k.count("width")?, y)
        });
        let kernel = kernel.sized([("width", width(signature))]);
        Calls::default().call(kernel, [("x", Slot::Input(0))], [("y", Slot::Output)])
    },
    backward: |signature| {
        let kernel = kernel!("log_softmax_backward", |T, k, s| {
            let (dy, x) = (s.x::<T>("dy")?, s.x("x")?);
            log_softmax_kernel::backward(dy, x, k.count("width")?, s.y("dx")?);
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let (reads, dx) = ([l.x("dy")?, l.x("x")?], l.y("dx")?);
            log_softmax_on_gpu::backward(l.gpu, reads, k.count("width")?, dx)
        });
        let kernel = kernel.sized([("width", width(signature))]);
        let reads = [("dy", Slot::OutputGradient), ("x", Slot::Input(0))];
        Calls::default().call(kernel, reads, [("dx", Slot::Gradient(0))])
    },
};

/// Returns the number of elements in a row; 1 for a scalar.
fn width(signature: &Signature<'_>) -> usize {
    signature.output.dims.last().copied().unwrap_or(1)
}

/// Returns n and inner of x (outer, n, inner), which is reduced along n.
pub(super) fn sizes(signature: &Signature<'_>) -> [usize; 2] {
    ["n", "inner"].map(|name| match signature.attribute(name) {
        Some(Attribute::Count(count)) => count,
        _ => 1,
    })
}

fn reciprocal(signature: &Signature<'_>) -> f64 {
    let [n, _] = sizes(signature);
    1.0 / n as f64
}

/// Plans sums of x, in f64, times `factor`; with scratch for partial sums where few sums have many terms.
fn total(signature: &Signature<'_>, factor: f64) -> Calls {
    let kernel = kernel!("sum", |T, k, s| {
        let (sizes, factor) = ([k.count("n")?, k.count("inner")?], k.number("factor")?);
        kernel::forward(s.x::<T>("x")?, sizes, factor, s.y("y")?, s.some_y("parts")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (sizes, factor) = ([k.count("n")?, k.count("inner")?], k.number("factor")?);
        cuda_kernel::sum(
            l.gpu,
            l.x("x")?,
            sizes,
            factor,
            l.y("y")?,
            l.some_y("parts"),
        )
    });
    let (mut calls, mut writes) = (Calls::default(), vec![("y", Slot::Output)]);
    let [n, inner] = sizes(signature);
    let outer = signature.output.dims.iter().product::<usize>() / inner.max(1);
    let chunks = workspace::sum_chunks([outer, n, inner]);
    if chunks > 1 {
        writes.push(("parts", calls.scratch(&[outer, chunks, inner], DType::F64)));
    }
    calls.call(
        scaled(kernel, signature, factor),
        [("x", Slot::Input(0))],
        writes,
    )
}

/// Plans its backward: dx is dy times `factor`, repeated along n.
fn spread(signature: &Signature<'_>, factor: f64) -> Calls {
    let kernel = kernel!("sum_backward", |T, k, s| {
        let (sizes, factor) = ([k.count("n")?, k.count("inner")?], k.number("factor")?);
        kernel::backward(s.x::<T>("dy")?, sizes, factor, s.y("dx")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (sizes, factor) = ([k.count("n")?, k.count("inner")?], k.number("factor")?);
        cuda_kernel::spread(l.gpu, l.x("dy")?, sizes, factor, l.y("dx")?)
    });
    Calls::default().call(
        scaled(kernel, signature, factor),
        [("dy", Slot::OutputGradient)],
        [("dx", Slot::Gradient(0))],
    )
}

fn scaled(kernel: Kernel, signature: &Signature<'_>, factor: f64) -> Kernel {
    let kernel = kernel.with_all(signature.attributes);
    kernel.with("factor", Attribute::Number(factor))
}

fn log_probabilities(x: &Tensor) -> candle_core::Result<Tensor> {
    let centred = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    let total = centred.exp()?.sum_keepdim(D::Minus1)?;
    centred.broadcast_sub(&total.log()?)
}
