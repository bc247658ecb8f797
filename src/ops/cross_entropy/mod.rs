//! Cross-entropy of logits against class labels.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let logits = Tensor::zeros((1, 2, 10), DType::F32, &Device::Cpu)?; // (..., V)
//! let targets = Tensor::new(&[[3i64, -100]], &Device::Cpu)?;
//! // The mean over targets that are not -100.
//! let loss = ops::cross_entropy_ignoring(&logits, &targets, -100)?;
//! assert!((loss.to_scalar::<f32>()? - 10f32.ln()).abs() < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```

pub(crate) mod lowering;

mod composed;

use super::cast::cast_for;
use super::cast::operand;
use super::cost::cost;
use super::cpu::ids;
use super::info::OpInfo;
use super::linear::last_dim;
use super::loss::Reduction;
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

/// Options of [`cross_entropy_with`] and [`linear_cross_entropy_with`](super::linear_cross_entropy_with). The default
/// is [`cross_entropy()`]: the mean over all targets.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::ops::{self, CrossEntropyConfig, Reduction};
///
/// let logits = Tensor::zeros((2, 10), DType::F32, &Device::Cpu)?; // (N, V)
/// let targets = Tensor::new(&[3i64, -100], &Device::Cpu)?; // (N)
/// let config = CrossEntropyConfig {
///     ignore_index: Some(-100),
///     reduction: Reduction::None,
///     ..Default::default()
/// };
/// let losses = ops::cross_entropy_with(&logits, &targets, &config)?.to_vec1::<f32>()?;
/// assert!((losses[0] - 10f32.ln()).abs() < 1e-6 && losses[1] == 0.0);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct CrossEntropyConfig {
    /// The mean or the sum over the targets, or the loss of each. With class weights the mean is divided by the sum of
    /// the targets' weights, as in PyTorch.
    pub reduction: Reduction,
    /// The target that does not count: its loss is 0, and so is its gradient.
    pub ignore_index: Option<i64>,
    /// The share of the target's probability that is spread over all classes, from 0 to 1.
    pub label_smoothing: f64,
    /// The weight of each class, (V), in a float dtype; it gets no gradient.
    pub class_weights: Option<Tensor>,
    /// The coefficient of `lse^2`, with the log-sum-exp of the logits: it keeps logits from drifting. PaLM uses 1e-4
    /// (Chowdhery et al. 2022, section 5).
    pub z_loss: f64,
}

/// Terms of the loss of a row, in addition to the negative log-likelihood.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LossTerms {
    label_smoothing: f64,
    z_loss: f64,
}

pub(crate) const LABEL_SMOOTHING: &str = "label_smoothing";
pub(crate) const Z_LOSS: &str = "z_loss";
/// The flag of calls that return the loss of each row.
pub(crate) const PER_ROW: &str = "per_row";

impl LossTerms {
    /// Returns the terms that are among the attributes of a call.
    pub(crate) fn of(attribute: impl Fn(&'static str) -> Option<Attribute>) -> Self {
        let number = |name| match attribute(name) {
            Some(Attribute::Number(number)) => number,
            _ => 0.0,
        };
        Self {
            label_smoothing: number(LABEL_SMOOTHING),
            z_loss: number(Z_LOSS),
        }
    }

    /// Returns the terms as attributes, those that are not 0.
    pub(crate) fn attributes(self) -> impl Iterator<Item = (&'static str, Attribute)> {
        let all = [
            (LABEL_SMOOTHING, self.label_smoothing),
            (Z_LOSS, self.z_loss),
        ];
        let all = all.into_iter().filter(|(_, number)| *number != 0.0);
        all.map(|(name, number)| (name, Attribute::Number(number)))
    }
}

impl CrossEntropyConfig {
    fn terms(&self) -> LossTerms {
        LossTerms {
            label_smoothing: self.label_smoothing,
            z_loss: self.z_loss,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        const NAME: &str = "CrossEntropyConfig";
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return Err(Error::config(NAME, "label_smoothing", self.label_smoothing)
                .must_be("from 0 to 1", "0.1 is usual"));
        }
        if !(self.z_loss.is_finite() && self.z_loss >= 0.0) {
            return Err(Error::config(NAME, "z_loss", self.z_loss)
                .must_be("0 or a positive number", "1e-4 is usual"));
        }
        Ok(())
    }
}

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
    cross_entropy_with(logits, targets, &CrossEntropyConfig::default())
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
    let config = CrossEntropyConfig {
        ignore_index: Some(ignore_index),
        ..Default::default()
    };
    cross_entropy_with(logits, targets, &config)
}

/// Computes cross-entropy with options: PyTorch's `reduction`, `ignore_index`, `label_smoothing` and `weight`, and a
/// z-loss.
///
/// The loss of a target t is `w_t (1 - s) nll(t) + s / V sum over c of w_c nll(c) + z lse^2`, with `nll(c) = lse -
/// logits[c]`, label smoothing s, class weights w and the coefficient z. Without class weights it is one op with the
/// memory of [`cross_entropy()`]; smoothing reads the logits once more. Class weights multiply the losses of the rows,
/// by other ops; together with smoothing or a z-loss they save three to five tensors of the logits' size.
///
/// Targets in a float dtype, of the logits' shape (..., V), are probabilities p of the classes, and the loss of a row
/// is `-sum over c of w_c p_c log softmax(logits)[c]`: it is composed of [`log_softmax`](super::log_softmax) and other
/// ops, and they have a gradient too. The mean is then over the rows, as in PyTorch. Backward, dtypes and autocast: as
/// [`cross_entropy()`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, CrossEntropyConfig};
///
/// let logits = Tensor::new(&[[2f32, 0.0, 0.0], [0.0, 5.0, 1.0]], &Device::Cpu)?; // (N, V)
/// let targets = Tensor::new(&[0u32, 2], &Device::Cpu)?; // (N)
/// let config = CrossEntropyConfig { label_smoothing: 0.1, z_loss: 1e-4, ..Default::default() };
/// let loss = ops::cross_entropy_with(&logits, &targets, &config)?;
/// let probabilities = Tensor::new(&[[1f32, 0.0, 0.0], [0.0, 0.0, 1.0]], &Device::Cpu)?; // (N, V)
/// let of_probabilities = ops::cross_entropy_with(&logits, &probabilities, &config)?;
/// assert!((loss - of_probabilities)?.to_scalar::<f32>()?.abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`cross_entropy_ignoring`], except that a sum over no targets is 0; label smoothing outside of 0 to 1; a
/// negative z-loss; class weights of another shape than (V), of no float dtype or on another device; an ignored target
/// with probabilities.
pub fn cross_entropy_with(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<Tensor> {
    config.validate()?;
    let logits = &autocast_logits(logits)?;
    if targets.dtype().is_float() {
        return composed::of_probabilities(logits, targets, config);
    }
    if let Some(weights) = &config.class_weights {
        return composed::weighted(logits, targets, weights, config);
    }
    let targets = check(logits, targets, config)?;
    let op = CrossEntropy(targets.clone());
    run(&INFO, op, [logits], || composed_loss(logits, &targets))
}

/// Computes [`cross_entropy_ignoring`], or with `None` [`cross_entropy()`], in plain candle ops.
///
/// # Errors
/// As those.
pub fn reference(logits: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> Result<Tensor> {
    let config = CrossEntropyConfig {
        ignore_index,
        ..Default::default()
    };
    let targets = check(logits, targets, &config)?;
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

fn check(logits: &Tensor, targets: &Tensor, config: &CrossEntropyConfig) -> Result<Targets> {
    let classes = last_dim("cross_entropy", logits)?;
    let leading = &logits.dims()[..logits.rank() - 1];
    Targets::check("cross_entropy", leading, classes, targets, config)
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
    let log_total = below.exp()?.sum_keepdim(D::Minus1)?.log()?; // (n, 1)
    let mut losses = (&log_total - below.gather(&classes, D::Minus1)?)?;
    let LossTerms {
        label_smoothing,
        z_loss,
    } = targets.terms;
    if label_smoothing > 0.0 {
        let smooth = (&log_total - below.mean_keepdim(D::Minus1)?)?;
        losses = ((losses * (1.0 - label_smoothing))? + (smooth * label_smoothing)?)?;
    }
    if z_loss > 0.0 {
        losses = (losses + (log_total.add(&top)?.sqr()? * z_loss)?)?;
    }
    match targets.reduction {
        Reduction::None => {
            let none = Tensor::zeros(ids.len(), losses.dtype(), device)?;
            let losses = none.index_add(&rows, &losses.flatten_all()?, 0)?;
            Ok(losses.reshape(targets.leading.as_slice())?)
        }
        _ => Ok((losses.sum_all()? / checked.divisor as f64)?),
    }
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
    terms: LossTerms,
    /// The dimensions of the targets.
    leading: Vec<usize>,
}

impl Targets {
    /// Returns the shape of the loss.
    pub(super) fn shape(&self) -> Shape {
        match self.reduction {
            Reduction::None => self.leading.as_slice().into(),
            Reduction::Sum | Reduction::Mean => ().into(),
        }
    }

    /// Returns the attributes of a call: the ignored id, the divisor unless it is the number of rows, and terms.
    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let ignore = self.ignore.iter();
        let ignore = ignore.map(|id| ("ignore", Attribute::Integer(*id)));
        let is_mean_of_all = self.ignore.is_none() && self.reduction == Reduction::Mean;
        let divisor = self.divisor.filter(|_| !is_mean_of_all);
        let divisor = divisor.map(|divisor| ("divisor", Attribute::Count(divisor)));
        let per_row =
            (self.reduction == Reduction::None).then_some((PER_ROW, Attribute::Flag(true)));
        let terms = self.terms.attributes();
        ignore.chain(divisor).chain(per_row).chain(terms).collect()
    }

    /// Checks targets for rows of logits of shape (`leading`, `classes`).
    pub(super) fn check(
        op: &'static str,
        leading: &[usize],
        classes: usize,
        targets: &Tensor,
        config: &CrossEntropyConfig,
    ) -> Result<Self> {
        let (ignore, reduction) = (config.ignore_index, config.reduction);
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
            Reduction::Sum | Reduction::None => Some(1),
            Reduction::Mean if graph::is_tracing() => None,
            Reduction::Mean => Some(CheckedIds::new(op, &ids.to_vec1()?, ignore, None)?.divisor),
        };
        Ok(Self {
            ids,
            ignore,
            divisor,
            reduction,
            terms: config.terms(),
            leading: leading.to_vec(),
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
        (self.0.shape(), inputs[0].wide_dtype())
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
