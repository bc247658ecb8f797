//! Sums and means over all elements, and log-softmax.

use super::elementwise::in_f32;
use super::info::{OpInfo, per_element};
use super::lowering::{Calls, Lowering, Signature, Slot, kernel, on_gpu};
use crate::graph::{Attribute, Target};
use crate::kernels::cpu::{parallel, rows::log_softmax as log_softmax_kernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{log_softmax as log_softmax_on_gpu, reduce as cuda_kernel};
use crate::kernels::workspace;
use crate::{Error, Result};
use candle_core::{D, DType, Tensor, WithDType};
use std::ops::Range;

/// Computes the sum of all elements, a scalar.
///
/// Half precision is summed in f32 and rounded once; candle's own sum of ones in bf16 stops growing at 256. Backward:
/// dx is dy everywhere. Saved for backward: nothing. Under CUDA's autocast policy the sum is f32.
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
    in_f32(&SUM_INFO, x, (), Tensor::sum_all)
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
    if x.dims().contains(&0) {
        return Err(Error::shape("mean", format!("{:?}", x.dims()))
            .must_be("at least one element", "the mean of an empty tensor is NaN"));
    }
    in_f32(&MEAN_INFO, x, (), Tensor::mean_all)
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
    backward: |_| spread(1.0),
};

const MEAN: Lowering = Lowering {
    forward: |signature| total(signature, reciprocal_of_elements(signature)),
    backward: |signature| spread(reciprocal_of_elements(signature)),
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

fn reciprocal_of_elements(signature: &Signature<'_>) -> f64 {
    let elements: usize = signature.inputs[0].dims.iter().product();
    1.0 / elements as f64
}

/// Plans the sum of x, in f64, times `factor`; on a GPU with scratch for partial sums.
fn total(signature: &Signature<'_>, factor: f64) -> Calls {
    let kernel = kernel!("sum", |T, k, s| {
        let x = s.x::<T>("x")?;
        let of_range = |range: Range<usize>| x[range].iter().map(|x| x.to_f64()).sum::<f64>();
        let total = parallel::sum_ranges(x.len(), of_range) * k.number("factor")?;
        s.y::<T>("y")?[0] = WithDType::from_f64(total);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (x, factor) = (l.x("x")?, k.number("factor")?);
        cuda_kernel::sum(l.gpu, x, factor, l.y("y")?, l.y("parts")?)
    });
    let (mut calls, mut writes) = (Calls::default(), vec![("y", Slot::Output)]);
    if signature.target == Target::Cuda {
        let elements = signature.inputs[0].dims.iter().product();
        let parts = calls.scratch(&[workspace::sum_parts(elements)], DType::F64);
        writes.push(("parts", parts));
    }
    let kernel = kernel.with("factor", Attribute::Number(factor));
    calls.call(kernel, [("x", Slot::Input(0))], writes)
}

/// Plans its backward: every element of dx is dy times `factor`.
fn spread(factor: f64) -> Calls {
    let kernel = kernel!("sum_backward", |T, k, s| {
        let dy = s.x::<T>("dy")?[0].to_f64() * k.number("factor")?;
        s.y::<T>("dx")?.fill(WithDType::from_f64(dy));
    });
    let kernel = on_gpu!(kernel, |k, l| {
        cuda_kernel::spread(l.gpu, l.x("dy")?, k.number("factor")?, l.y("dx")?)
    });
    let kernel = kernel.with("factor", Attribute::Number(factor));
    Calls::default().call(
        kernel,
        [("dy", Slot::OutputGradient)],
        [("dx", Slot::Gradient(0))],
    )
}

fn log_probabilities(x: &Tensor) -> candle_core::Result<Tensor> {
    let centred = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    let total = centred.exp()?.sum_keepdim(D::Minus1)?;
    centred.broadcast_sub(&total.log()?)
}
