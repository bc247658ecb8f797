//! The output head and its loss as one op. Logits are saved, but their gradient is not a node of the graph.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::randn(0f32, 1.0, (3, 4), &Device::Cpu)?; // (..., D)
//! let weight = Tensor::randn(0f32, 1.0, (10, 4), &Device::Cpu)?; // (V, D)
//! let targets = Tensor::new(&[1u32, 7, 2], &Device::Cpu)?;
//! let loss = ops::linear_cross_entropy(&x, &weight, &targets)?.to_scalar::<f32>()?;
//! let in_two_ops = ops::cross_entropy(&ops::linear(&x, &weight)?, &targets)?.to_scalar::<f32>()?;
//! assert!((loss - in_two_ops).abs() < 1e-5);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cross_entropy::lowering::{PlannedLoss, planned_gradient, planned_loss};
use super::cross_entropy::{CrossEntropyConfig, Targets, composed_loss, cross_entropy_with};
use super::dispatch::{Path, check_same, choose};
use super::info::OpInfo;
use super::linear::{Linear, factors};
use super::lowering::{Accumulate, Calls, Lowering, Signature, Slot};
use super::matmul_kernel::{Factor, matmul};
use super::operand::check_size;
use super::record::{Spec, by_kernels, composed};
use super::weight::{read_weight, with_copies};
use super::{linear, with_last_dim};
use crate::graph::{Attribute, Target};
use crate::probe::{Operand, Operands};
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};

/// Computes the cross-entropy of `x W^T`: x (..., D), W (V, D), targets (...) u32 or i64. The loss is a scalar.
///
/// The result is that of [`cross_entropy`](super::cross_entropy()) of a [`linear`](linear()), for logits that nothing
/// else reads. As one op, the logits' gradient is scratch instead of a node of the graph. Backward:
/// `dlogits = (softmax(logits) - onehot) / n`, `dx = dlogits W`, `dW = dlogits^T x`. Saved for backward: x, W, the
/// logits (N, V), and two numbers per row, as in [`cross_entropy`](super::cross_entropy()). On a GPU the gradient
/// overwrites the logits, and a second backward recomputes them. Autocast: the matmul, and with it the logits, is in
/// half precision under both policies, as of [`linear()`](super::linear()). The loss is computed in f32 and returned in
/// f32.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::randn(0f32, 1.0, (3, 4), &Device::Cpu)?; // (..., D)
/// let weight = Tensor::randn(0f32, 1.0, (10, 4), &Device::Cpu)?; // (V, D)
/// let targets = Tensor::new(&[1u32, 0, 9], &Device::Cpu)?;
/// let loss = ops::linear_cross_entropy(&x, &weight, &targets)?;
/// let by_two = ops::cross_entropy(&ops::linear(&x, &weight)?, &targets)?;
/// assert!((loss - by_two)?.to_scalar::<f32>()?.abs() < 1e-5);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`linear`](linear()) and [`cross_entropy`](super::cross_entropy()).
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    linear_cross_entropy_with(x, weight, targets, &CrossEntropyConfig::default())
}

/// Computes [`linear_cross_entropy()`] without the targets that equal `ignore_index`: the mean is over the others, as
/// in [`cross_entropy_ignoring`](super::cross_entropy_ignoring).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::randn(0f32, 1.0, (3, 4), &Device::Cpu)?; // (..., D)
/// let weight = Tensor::randn(0f32, 1.0, (10, 4), &Device::Cpu)?; // (V, D)
/// let targets = Tensor::new(&[1i64, -100, -100], &Device::Cpu)?;
/// let loss = ops::linear_cross_entropy_ignoring(&x, &weight, &targets, -100)?;
/// let of_first =
///     ops::linear_cross_entropy(&x.narrow(0, 0, 1)?, &weight, &targets.narrow(0, 0, 1)?)?;
/// assert!((loss.to_scalar::<f32>()? - of_first.to_scalar::<f32>()?).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`linear_cross_entropy()`]; also if every target is ignored, because the mean would be NaN.
pub fn linear_cross_entropy_ignoring(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    ignore_index: i64,
) -> Result<Tensor> {
    let config = CrossEntropyConfig {
        ignore_index: Some(ignore_index),
        ..Default::default()
    };
    linear_cross_entropy_with(x, weight, targets, &config)
}

/// Computes [`linear_cross_entropy()`] with the options of [`cross_entropy_with`].
///
/// Class weights and targets that are probabilities are computed by the two ops.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, CrossEntropyConfig};
///
/// let x = Tensor::randn(0f32, 1.0, (3, 4), &Device::Cpu)?; // (..., D)
/// let weight = Tensor::randn(0f32, 1.0, (10, 4), &Device::Cpu)?; // (V, D)
/// let targets = Tensor::new(&[1u32, 0, 9], &Device::Cpu)?;
/// let config = CrossEntropyConfig { label_smoothing: 0.1, z_loss: 1e-4, ..Default::default() };
/// let loss = ops::linear_cross_entropy_with(&x, &weight, &targets, &config)?;
/// let by_two = ops::cross_entropy_with(&ops::linear(&x, &weight)?, &targets, &config)?;
/// assert!((loss - by_two)?.to_scalar::<f32>()?.abs() < 1e-5);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`linear`](linear()) and [`cross_entropy_with`].
pub fn linear_cross_entropy_with(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<Tensor> {
    if config.class_weights.is_some() || targets.dtype().is_float() {
        return cross_entropy_with(&super::linear(x, weight)?, targets, config);
    }
    config.validate()?;
    let (x, [weight], copies) = with_copies(&INFO, x, [weight])?;
    let targets = check(&x, &copies[0].of(&weight), targets, config)?;
    match choose(&INFO, &x)? {
        Path::Kernel => {
            let product = Linear { copies };
            by_kernels(
                &INFO,
                LinearCrossEntropy {
                    linear: product,
                    targets,
                },
                [&x, &weight],
            )
        }
        Path::Reference => {
            let product = || linear::reference(&x, &weight);
            let output = (with_last_dim(x.dims(), weight.dims()[0]), x.dtype());
            let logits = composed(&linear::INFO, &[&x, &weight], output, product)?;
            composed(
                &super::cross_entropy::INFO,
                &[&logits],
                (targets.shape(), Operand::from(&logits).wide_dtype()),
                || composed_loss(&logits, &targets),
            )
        }
    }
}

/// Computes [`linear_cross_entropy_ignoring`], or with `None` [`linear_cross_entropy()`], as two ops.
///
/// # Errors
/// As those.
pub fn reference(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    ignore_index: Option<i64>,
) -> Result<Tensor> {
    let config = CrossEntropyConfig {
        ignore_index,
        ..Default::default()
    };
    check(x, weight, targets, &config)?;
    cross_entropy_with(&super::linear(x, weight)?, targets, &config)
}

fn check(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<Targets> {
    check_same(NAME, &[("x", x), ("weight", weight)])?;
    match (x.dims(), weight.dims()) {
        ([leading @ .., last], [classes, depth]) if last == depth => {
            check_size(
                NAME,
                &with_last_dim(x.dims(), *classes),
                x.dtype(),
                x.device(),
            )?;
            Targets::check(NAME, leading, *classes, targets, config)
        }
        _ => Err(Error::Shape {
            op: NAME,
            expected: "x (..., D) and weight (V, D)".into(),
            got: format!("x {:?}, weight {:?}", x.dims(), weight.dims()),
            hint: "weights are stored (out, in)".into(),
        }),
    }
}

const NAME: &str = "linear_cross_entropy";

pub(crate) const INFO: OpInfo = OpInfo::new(NAME)
    .on_gpu()
    .costing(
        "2 N D V plus 4 per logit; backward 4 N D V plus 3 per logit",
        "x, W, logits; backward those and dx, dW",
        |o| o.matmuls(logits_of(o)?, 2.0, 4.0),
        Some(|o| o.matmuls_backward(logits_of(o)?, 4.0, 3.0)),
    )
    .including("the head's matmul and the loss")
    .planned(LOWERING);

/// Returns the elements and bytes of the logits (N, V) of x (N, D) and W (V, D).
fn logits_of(o: &Operands<'_>) -> Option<(f64, f64)> {
    let (x, weight) = (o.input(0)?, o.input(1)?);
    let elements = x.elements() / x.last() * *weight.dims.first()? as f64;
    Some((elements, elements * x.dtype.size_in_bytes() as f64))
}

/// The lowering as an op. The loss of a planned step is a [`HeadLoss`](super::head_loss::HeadLoss).
const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let (x, weight) = factors(signature);
        let factors = [("a", Slot::Input(0)), ("b", read_weight(signature, 1))];
        let logits = matmul(x, weight.t(), Accumulate::Never);
        let calls = Calls::default().call(logits, factors, [("c", Slot::Saved(0))]);
        let operands = PlannedLoss {
            logits: Slot::Saved(0),
            targets: targets(signature),
            statistics: Slot::Saved(1),
            loss: Slot::Output,
        };
        planned_loss(signature, operands, calls)
    },
    backward: |signature| {
        let (x, weight) = factors(signature);
        let (logits, mut calls) = (&signature.saved[0], Calls::default());
        let dlogits = match signature.target {
            Target::Cpu => calls.scratch(logits.dims, logits.dtype),
            Target::Cuda => Slot::Saved(0), // in place
        };
        let reads = [
            ("logits", Slot::Saved(0)),
            ("targets", Slot::ExtraInput(targets(signature))),
            ("statistics", Slot::Saved(1)),
            ("dloss", Slot::OutputGradient),
        ];
        let calls = planned_gradient(signature, reads, dlogits, calls);
        let of_dlogits = Factor::new(x.rows, weight.rows); // (N, V)
        let factors = [("a", dlogits), ("b", read_weight(signature, 1))];
        let dx = matmul(of_dlogits, weight, Accumulate::Never);
        let calls = calls.call(dx, factors, [("c", Slot::Gradient(0))]);
        let factors = [("a", dlogits), ("b", Slot::Input(0))];
        let dw = matmul(of_dlogits.t(), x, Accumulate::Never);
        calls.call(dw, factors, [("c", Slot::Gradient(1))])
    },
};

/// Returns the index of the targets among the op's extra inputs: they come after the weight's copy.
fn targets(signature: &Signature<'_>) -> usize {
    signature.extra_inputs.len() - 1
}

struct LinearCrossEntropy {
    linear: Linear,
    targets: Targets,
}

impl Spec for LinearCrossEntropy {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (self.targets.shape(), inputs[0].wide_dtype())
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let mut attributes = self.targets.attributes();
        attributes.extend(self.linear.attributes());
        attributes
    }

    fn saved(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let rows = x.rows();
        vec![
            ("logits", (rows, weight.dims[0]).into(), x.dtype),
            ("top and total", (rows, 2).into(), x.wide_dtype()),
        ]
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        let mut reads = self.linear.extra_inputs();
        reads.push(self.targets.ids.clone());
        reads
    }

    fn extra_inputs_for_backward(&self, inputs: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
        let mut reads = self.linear.extra_inputs_for_backward(inputs)?;
        reads.push(self.targets.ids.clone());
        Ok(reads)
    }

    fn free_after_forward(&self) {
        self.linear.free_after_forward();
    }
}
