//! Cross-entropy of logits against class labels.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let logits = Tensor::zeros((1, 2, 10), DType::F32, &Device::Cpu)?; // (..., V)
//! let targets = Tensor::new(&[[3i64, -100]], &Device::Cpu)?;
//! let loss = ops::cross_entropy_ignoring(&logits, &targets, -100)?; // the mean over targets that are not -100
//! assert!((loss.to_scalar::<f32>()? - 10f32.ln()).abs() < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```

pub(crate) mod lowering;

use super::cast::cast_for;
use super::cast::operand;
use super::cost::cost;
use super::cpu::ids;
use super::info::OpInfo;
use super::linear::last_dim;
use super::record::{Spec, run, wide_input};
use crate::graph::{self, Attribute, Target};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::cross_entropy as cuda_kernel;
use crate::kernels::limits;
use crate::precision::decide;
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{D, DType, Shape, Tensor};
use lowering::CheckedIds;

/// Computes the mean over all targets of `-log softmax(logits)[target]`: logits (..., V), targets (...) u32 or i64. The
/// loss is a scalar.
///
/// The loss is f32 for logits in f32 or half precision, and f64 for f64. Backward:
/// `dlogits = (softmax(logits) - onehot) / n`. Saved for backward: the logits, and two numbers per row, the largest
/// logit (top) and the sum of `exp(logit - top)`; no probabilities. Autocast: f32 under both policies; half-precision
/// logits are widened inside the kernel, not copied.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let logits = Tensor::zeros((2, 3, 10), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?;
/// let loss = tallow::ops::cross_entropy(&logits, &targets)?.to_scalar::<f32>()?;
/// assert!((loss - 10f32.ln()).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Targets of another shape than the logits' leading dimensions; targets of another dtype, or that are not classes; no
/// targets.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    reduced(logits, targets, None, Reduction::Mean)
}

/// Computes [`cross_entropy()`] without the targets that equal `ignore_index`: the mean is over the others.
///
/// `ignore_index` may be a class, or an id outside the classes. A negative one (PyTorch's default is -100) needs
/// targets in i64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let logits = Tensor::new(&[[2f32, 0.0, 0.0], [0.0, 5.0, 1.0]], &Device::Cpu)?; // (N, V)
/// let targets = Tensor::new(&[0i64, -100], &Device::Cpu)?; // (N)
/// let loss = ops::cross_entropy_ignoring(&logits, &targets, -100)?;
/// let of_first = ops::cross_entropy(&logits.narrow(0, 0, 1)?, &targets.narrow(0, 0, 1)?)?;
/// assert!((loss - of_first)?.to_scalar::<f32>()?.abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`cross_entropy()`]; also if every target is ignored, because the mean would be NaN.
pub fn cross_entropy_ignoring(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: i64,
) -> Result<Tensor> {
    reduced(logits, targets, Some(ignore_index), Reduction::Mean)
}

/// Computes the mean or the sum of the losses of targets other than `ignore`.
///
/// # Errors
/// As [`cross_entropy_ignoring`]; a sum of no targets is allowed.
pub(crate) fn reduced(
    logits: &Tensor,
    targets: &Tensor,
    ignore: Option<i64>,
    reduction: Reduction,
) -> Result<Tensor> {
    let logits = &autocast_logits(logits)?;
    let targets = check(logits, targets, ignore, reduction)?;
    let op = CrossEntropy(targets.clone());
    run(&INFO, op, [logits], || composed_loss(logits, &targets))
}

/// Computes [`cross_entropy_ignoring`], or with `None` [`cross_entropy()`], in plain candle ops.
///
/// # Errors
/// As those.
pub fn reference(logits: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> Result<Tensor> {
    let targets = check(logits, targets, ignore_index, Reduction::Mean)?;
    composed_loss(logits, &targets)
}

/// Casts logits as the policy demands. Half precision is not cast to f32: the op computes in f32 anyway, and a copy
/// would only cost memory.
fn autocast_logits(logits: &Tensor) -> Result<Tensor> {
    match decide("cross_entropy", &[logits.into()]) {
        None | Some(DType::F32) => operand("cross_entropy", logits),
        Some(_) => Ok(cast_for("cross_entropy", [logits])?[0].clone()),
    }
}

fn check(
    logits: &Tensor,
    targets: &Tensor,
    ignore: Option<i64>,
    reduction: Reduction,
) -> Result<Targets> {
    let classes = last_dim("cross_entropy", logits)?;
    let leading = &logits.dims()[..logits.rank() - 1];
    Targets::check(
        "cross_entropy",
        leading,
        classes,
        targets,
        ignore,
        reduction,
    )
}

pub(super) fn output_of(logits: &Tensor) -> (Shape, DType) {
    (().into(), Operand::from(logits).wide_dtype())
}

pub(super) fn composed_loss(logits: &Tensor, targets: &Targets) -> Result<Tensor> {
    let device = logits.device();
    let ids = targets.ids.to_vec1::<u32>()?;
    let checked = CheckedIds::new("cross_entropy", &ids, targets.ignore, targets.divisor)?;
    // The rows that count, and their classes. Other rows are left out, so that not even NaN in them has an effect.
    let (rows, classes): (Vec<u32>, Vec<u32>) = (0..ids.len())
        .filter_map(|row| Some((row as u32, checked.get(row)? as u32)))
        .unzip();
    let counted = rows.len();
    let classes = Tensor::from_vec(classes, (counted, 1), device)?; // (n, 1)
    let rows = Tensor::from_vec(rows, counted, device)?; // (n)
    let logits = wide_input("cross_entropy", logits)?
        .reshape((ids.len(), ()))?
        .index_select(&rows, 0)?; // (n, V)
    let top = logits.max_keepdim(D::Minus1)?.detach(); // (n, 1)
    let below = logits.broadcast_sub(&top)?; // (n, V)
    let total = below.exp()?.sum_keepdim(D::Minus1)?; // (n, 1)
    let losses = (total.log()? - below.gather(&classes, D::Minus1)?)?;
    Ok((losses.sum_all()? / checked.divisor as f64)?)
}

/// The reduction of the losses of targets that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reduction {
    /// The mean; an error if no target counts.
    #[default]
    Mean,
    /// The sum; 0, with gradients of 0, if no target counts.
    Sum,
}

/// Class ids, and the divisor of the sum of their losses.
#[derive(Clone)]
pub(super) struct Targets {
    /// The ids, checked and on the host; in a trace the caller's tensor, by which the trace identifies it.
    pub(super) ids: Tensor,
    ignore: Option<i64>,
    /// 1 for a sum; for a mean the number of targets that count; `None` for a mean in a trace, which does not read
    /// them.
    divisor: Option<usize>,
    reduction: Reduction,
}

impl Targets {
    /// Returns the attributes of a call: the ignored id, and the divisor unless it is the number of rows.
    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let ignore = self.ignore.iter();
        let ignore = ignore.map(|id| ("ignore", Attribute::Integer(*id)));
        let is_mean_of_all = self.ignore.is_none() && self.reduction == Reduction::Mean;
        let divisor = self.divisor.filter(|_| !is_mean_of_all);
        let divisor = divisor.map(|divisor| ("divisor", Attribute::Count(divisor)));
        ignore.chain(divisor).collect()
    }

    /// Checks targets for rows of logits of shape (`leading`, `classes`).
    pub(super) fn check(
        op: &'static str,
        leading: &[usize],
        classes: usize,
        targets: &Tensor,
        ignore: Option<i64>,
        reduction: Reduction,
    ) -> Result<Self> {
        if leading != targets.dims() {
            return Err(Error::Shape {
                op,
                expected: format!(
                    "targets of the logits' leading dimensions, {leading:?} of {:?}",
                    [leading, &[classes]].concat()
                ),
                got: format!("targets {:?}", targets.dims()),
                hint: "one class id for each row of logits".into(),
            });
        }
        let ids = ids(op, targets, classes, ignore)?;
        if ids.elem_count() == 0 {
            return Err(nothing_counts(op, 0));
        }
        let divisor = match reduction {
            Reduction::Sum => Some(1),
            Reduction::Mean if graph::is_tracing() => None,
            Reduction::Mean => Some(CheckedIds::new(op, &ids.to_vec1()?, ignore, None)?.divisor),
        };
        Ok(Self {
            ids,
            ignore,
            divisor,
            reduction,
        })
    }
}

/// Returns whether an op of this name computes the cross-entropy of logits.
pub(crate) fn is_cross_entropy(op: &str) -> bool {
    [INFO.op, super::linear_cross_entropy::INFO.op].contains(&op)
}

pub(super) const INFO: OpInfo = OpInfo::new("cross_entropy")
    .on_gpu_up_to(limits::CROSS_ENTROPY_CLASSES)
    .planned(lowering::LOWERING)
    .costing(
        "4 a logit, backward 3",
        "logits; backward logits, dlogits",
        |o| o.reduction(4.0),
        Some(|o| {
            let logits = o.input(0)?;
            cost(0.0, 3.0 * logits.elements(), logits.bytes(), logits.bytes())
        }),
    );

pub(crate) fn nothing_counts(op: &'static str, targets: usize) -> Error {
    Error::data(op, format!("{targets} targets, all ignored"))
        .must_be("at least one target that counts", "skip this batch")
}

struct CrossEntropy(Targets);

impl Spec for CrossEntropy {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (().into(), inputs[0].wide_dtype())
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.0.attributes()
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        vec![self.0.ids.clone()]
    }

    /// Saves top and total separately: their log-sum-exp as one number would lose the digits of the smaller.
    fn saved(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let logits = &inputs[0];
        vec![(
            "top and total",
            (logits.rows(), 2).into(),
            logits.wide_dtype(),
        )]
    }
}
