//! Lowering of cross-entropy, as an op and as the loss of a step.

#[cfg(feature = "cuda")]
use super::cuda_kernel;
use super::{LABEL_SMOOTHING, PER_ROW, Z_LOSS, nothing_counts};
use crate::graph::{Attribute, Target};
use crate::kernels::cpu::rows::cross_entropy::{self as kernel, Terms};
use crate::kernels::cpu::{Real, Stored};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{View, elementwise};
use crate::ops::cpu::narrow_id;
use crate::ops::cross_entropy::LossTerms;
use crate::ops::lowering::{
    Accumulate, Calls, Check, Kernel, Lowering, Signature, Slot, kernel, on_gpu,
};
use candle_core::{DType, WithDType};

pub(super) const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let operands = PlannedLoss {
            logits: Slot::Input(0),
            targets: 0,
            statistics: Slot::Saved(0),
            loss: Slot::Output,
        };
        planned_loss(signature, operands, Calls::default())
    },
    backward: |signature| {
        let reads = [
            ("logits", Slot::Input(0)),
            ("targets", Slot::ExtraInput(0)),
            ("statistics", Slot::Saved(0)),
            ("dloss", Slot::OutputGradient),
        ];
        planned_gradient(signature, reads, Slot::Gradient(0), Calls::default())
    },
};

/// The operands of the loss of logits (N, V).
pub(in crate::ops) struct PlannedLoss {
    pub logits: Slot,
    /// The index of the targets among the op's extra inputs.
    pub targets: usize,
    /// (top, total) of each row, (N, 2).
    pub statistics: Slot,
    /// The loss, (1), or the losses of the rows.
    pub loss: Slot,
}

/// Plans the mean loss of the rows of `logits`, or the losses of the rows, and their statistics.
pub(in crate::ops) fn planned_loss(
    signature: &Signature<'_>,
    operands: PlannedLoss,
    mut calls: Calls,
) -> Calls {
    let read = operands.targets;
    let ids = Check::Ids {
        bound: planned_classes(signature),
        ignore: planned_ignore(signature),
    };
    let rows = signature.extra_inputs[read].dims.iter().product();
    let kernel = kernel!("cross_entropy", |T, k, s| {
        let (logits, statistics) = (s.x::<T>("logits")?, s.y("statistics")?);
        let (targets, losses) = (CheckedIds::of(k, s.x("targets")?)?, s.y("losses")?);
        let target = |row| targets.get(row);
        let (classes, terms) = (k.count("classes")?, terms_of(k));
        kernel::forward(logits, classes, target, terms, losses, statistics);
        if let Some(loss) = s.some_y::<<T as Stored>::Wide>("loss")? {
            loss[0] = targets.mean(losses);
        }
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (logits, targets) = (l.x("logits")?, targets_on_gpu(k, l.x("targets")?));
        let (losses, statistics) = (l.y("losses")?, l.y("statistics")?);
        match (l.some_y("loss"), l.some_y("sum")) {
            (None, _) => cuda_kernel::rows(l.gpu, logits, targets, losses, statistics),
            (Some(mean), None) => {
                cuda_kernel::forward(l.gpu, logits, targets, losses, statistics, mean)
            }
            (Some(mean), Some(sum)) => {
                cuda_kernel::rows(l.gpu, logits, targets, losses, statistics)?;
                cuda_kernel::mean(l.gpu, losses, None, 1, sum, false)?;
                cuda_kernel::divide_by_counted(l.gpu, targets, sum, mean)
            }
        }
    });
    let kernel = with_classes(signature, kernel);
    let mut writes = match is_per_row(signature) {
        true => vec![("losses", operands.loss)],
        false => {
            let losses = calls.scratch(&[rows], signature.output.dtype);
            vec![("loss", operands.loss), ("losses", losses)]
        }
    };
    writes.push(("statistics", operands.statistics));
    if counts_on_gpu(signature) {
        writes.push(("sum", calls.scratch(&[1], DType::F64))); // the sum of all losses
    }
    let reads = [
        ("logits", operands.logits),
        ("targets", Slot::ExtraInput(read)),
    ];
    calls.checked(read, ids).call(kernel, reads, writes)
}

fn is_per_row(signature: &Signature<'_>) -> bool {
    signature.attribute(PER_ROW).is_some()
}

/// Returns whether a GPU counts the targets in each run. Those of an eager call are counted on the host, and a sum
/// needs no count.
fn counts_on_gpu(signature: &Signature<'_>) -> bool {
    let has_divisor = signature.attribute("divisor").is_some();
    signature.target == Target::Cuda && planned_ignore(signature).is_some() && !has_divisor
}

/// Plans dlogits. Reads logits, targets, statistics and dloss; writes dlogits. On a GPU dlogits may overwrite the
/// logits.
pub(in crate::ops) fn planned_gradient(
    signature: &Signature<'_>,
    reads: [(&'static str, Slot); 4],
    dlogits: Slot,
    mut calls: Calls,
) -> Calls {
    let kernel = kernel!("cross_entropy_backward", |T, k, s| {
        let targets = CheckedIds::of(k, s.x("targets")?)?;
        let target = |row| targets.get(row);
        let dloss = s.x::<<T as Stored>::Wide>("dloss")?; // (1), or of each row
        let weight = |row: usize| targets.divide_by_divisor(dloss[row.min(dloss.len() - 1)]);
        let (logits, statistics) = (s.x::<T>("logits")?, s.x("statistics")?);
        let (classes, dlogits) = (k.count("classes")?, s.y("dlogits")?);
        kernel::backward(
            logits,
            classes,
            target,
            terms_of(k),
            statistics,
            weight,
            dlogits,
        );
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let dlogits = l.y("dlogits")?;
        let logits = l.some_x("logits").unwrap_or(dlogits); // in place
        let mut targets = targets_on_gpu(k, l.x("targets")?);
        let (statistics, mut dloss) = (l.x("statistics")?, l.x("dloss")?);
        if let Some(share) = l.some_y("share") {
            cuda_kernel::divide_by_counted(l.gpu, targets, dloss, share)?;
            (dloss, targets.divisor) = (share, 1);
        }
        cuda_kernel::backward(l.gpu, logits, targets, statistics, dloss, dlogits)
    });
    let mut writes = vec![("dlogits", dlogits)];
    if counts_on_gpu(signature) {
        writes.push(("share", calls.scratch(&[1], DType::F32))); // of dloss, per target
    }
    let kernel = with_classes(signature, kernel);
    let [(_, logits), others @ ..] = reads;
    match logits == dlogits {
        true => calls.call(kernel.in_place(), others, writes),
        false => calls.call(kernel, reads, writes),
    }
}

/// Returns the targets of a run. Without a divisor among the call's attributes, it is the number of targets.
#[cfg(feature = "cuda")]
fn targets_on_gpu<'a>(k: &Kernel, ids: View<'a>) -> cuda_kernel::Targets<'a> {
    cuda_kernel::Targets {
        ids,
        ignore: k.some_integer("ignore").map(narrow_id),
        divisor: k.some_count("divisor").unwrap_or(ids.len),
        terms: [LABEL_SMOOTHING, Z_LOSS].map(|name| k.some_number(name).unwrap_or(0.0) as f32),
    }
}

fn terms_of<R: Real>(k: &Kernel) -> Terms<R> {
    let number = |name| R::real(k.some_number(name).unwrap_or(0.0));
    Terms {
        smoothing: number(LABEL_SMOOTHING),
        z_loss: number(Z_LOSS),
    }
}

fn with_classes(signature: &Signature<'_>, kernel: Kernel) -> Kernel {
    let kernel = kernel.sized([("classes", planned_classes(signature))]);
    kernel.with_all(signature.attributes)
}

/// Returns V, from the logits or the weight of the head.
fn planned_classes(signature: &Signature<'_>) -> usize {
    let dims = match &signature.inputs[..] {
        [logits] => logits.dims.last(),
        [_, weight, ..] => weight.dims.first(),
        [] => None,
    };
    dims.copied().unwrap_or(1)
}

fn planned_ignore(signature: &Signature<'_>) -> Option<i64> {
    match signature.attribute("ignore") {
        Some(Attribute::Integer(id)) => Some(id),
        _ => None,
    }
}

/// The targets of a run, the id that is ignored, and the divisor of the sum of losses.
pub(in crate::ops) struct CheckedIds<'a> {
    ids: &'a [u32],
    ignore: Option<u32>,
    pub(in crate::ops) divisor: usize,
}

impl<'a> CheckedIds<'a> {
    /// Creates the targets. Without `divisor`, it is the number of targets that count.
    ///
    /// # Errors
    /// A mean of no targets.
    pub(in crate::ops) fn new(
        op: &'static str,
        ids: &'a [u32],
        ignore: Option<i64>,
        divisor: Option<usize>,
    ) -> crate::Result<Self> {
        let ignore = ignore.map(narrow_id);
        let divisor = match divisor {
            Some(divisor) => divisor,
            None => ids.iter().filter(|id| Some(**id) != ignore).count(),
        };
        match divisor {
            0 => Err(nothing_counts(op, ids.len())),
            _ => Ok(Self {
                ids,
                ignore,
                divisor,
            }),
        }
    }

    fn of(k: &Kernel, ids: &'a [u32]) -> candle_core::Result<Self> {
        Ok(Self::new(
            k.name(),
            ids,
            k.some_integer("ignore"),
            k.some_count("divisor"),
        )?)
    }

    /// Returns the class of row `row`, unless it is ignored.
    #[inline(always)]
    pub(in crate::ops) fn get(&self, row: usize) -> Option<usize> {
        let id = self.ids[row];
        (Some(id) != self.ignore).then_some(id as usize)
    }

    /// Returns the sum of the rows' losses over the divisor; ignored rows must have a loss of 0.
    pub(in crate::ops) fn mean<T: Real>(&self, losses: &[T]) -> T {
        // In f64 and on one thread: a large batch keeps its digits, and the order is fixed.
        let total: f64 = losses.iter().map(|loss| WithDType::to_f64(*loss)).sum();
        T::real(total / self.divisor as f64)
    }

    /// Returns the factor of a row's gradient, given the gradient `dloss` of the loss.
    pub(in crate::ops) fn divide_by_divisor<T: Real>(&self, dloss: T) -> T {
        T::real(WithDType::to_f64(dloss) / self.divisor as f64)
    }
}

/// Computes the gradient of a mean over the targets that count, up to a factor. Reads `targets` (all rows); writes
/// `dloss` (1): the step's loss gradient, divided by the number of targets that count.
pub(crate) fn gradient_of_counted(ignore: i64) -> Kernel {
    let kernel = kernel!("divide_by_counted", of "dloss", |T, k, s| {
        let targets = CheckedIds::of(k, s.x("targets")?)?;
        let share = s.step.loss_gradient / targets.divisor as f64;
        s.y::<T>("dloss")?[0] = WithDType::from_f64(share);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let targets = targets_on_gpu(k, l.x("targets")?);
        cuda_kernel::divide_by_counted(l.gpu, targets, l.loss_gradient, l.y("dloss")?)
    });
    with_ignored(kernel, Some(ignore))
}

/// Computes the losses and gradients of some rows; the step's loss is the sum of all losses over `divisor`. Reads
/// `targets` (rows) and optionally `dloss` (1), the gradient of the loss, which otherwise is the step's loss gradient.
/// Writes `logits` (rows, V), which become their gradient and whose rows are `row_stride` elements apart, and `losses`
/// (rows).
pub(crate) fn in_place(
    [rows, classes, row_stride]: [usize; 3],
    divisor: usize,
    ignore: Option<i64>,
    terms: LossTerms,
) -> Kernel {
    let kernel = kernel!("cross_entropy", of "logits", |T, k, s| {
        let targets = s.x::<u32>("targets")?;
        let dloss = match s.has_x("dloss") {
            true => WithDType::to_f64(s.x::<<T as Stored>::Wide>("dloss")?[0]),
            false => s.step.loss_gradient,
        };
        let weight = dloss / k.count("divisor")? as f64;
        let ignore = k.some_integer("ignore").map(narrow_id);
        let target = |row: usize| {
            let id = targets[row];
            (Some(id) != ignore).then_some(id as usize)
        };
        let (logits, losses) = (s.y::<T>("logits")?, s.y("losses")?);
        let (dims, terms, weight) = (dims_in_place(k)?, terms_of(k), Real::real(weight));
        kernel::forward_backward_in_place(logits, dims, target, terms, weight, losses);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (logits, dims) = (l.y("logits")?, dims_in_place(k)?);
        let targets = targets_on_gpu(k, l.x("targets")?);
        let dloss = l.some_x("dloss").unwrap_or(l.loss_gradient);
        cuda_kernel::in_place(l.gpu, logits, dims, targets, dloss, l.y("losses")?)
    });
    let kernel = kernel.sized([("rows", rows), ("classes", classes), ("divisor", divisor)]);
    let kernel = match row_stride == classes {
        true => kernel,
        false => kernel.sized([("row_stride", row_stride)]),
    };
    let terms: Vec<_> = terms.attributes().collect();
    let kernel = kernel.with_all(&terms);
    with_ignored(kernel.in_place(), ignore)
}

/// Returns V and the row stride of the logits, in elements.
fn dims_in_place(k: &Kernel) -> candle_core::Result<[usize; 2]> {
    let classes = k.count("classes")?;
    Ok([classes, k.some_count("row_stride").unwrap_or(classes)])
}

fn with_ignored(kernel: Kernel, ignore: Option<i64>) -> Kernel {
    match ignore {
        Some(id) => kernel.with_all(&[("ignore", Attribute::Integer(id))]),
        None => kernel,
    }
}

/// Computes the sum of the rows' losses over `divisor`. Reads `losses` (rows); writes `loss` (1) in f64, or adds to it.
/// With an ignored id it also reads `targets` (rows) and multiplies the divisor by the number of targets that count.
pub(crate) fn mean_of(divisor: usize, ignore: Option<i64>, accumulate: Accumulate) -> Kernel {
    let kernel = kernel!("mean_loss", |T, k, s| {
        let losses = s
            .x::<T>("losses")?
            .iter()
            .map(|loss| WithDType::to_f64(*loss));
        let counting = match s.has_x("targets") {
            true => {
                CheckedIds::new(k.name(), s.x("targets")?, k.some_integer("ignore"), None)?.divisor
            }
            false => 1,
        };
        let share = losses.sum::<f64>() / (k.count("divisor")? * counting) as f64;
        let loss = &mut s.y::<f64>("loss")?[0];
        *loss = share + if s.adds(k, "loss") { *loss } else { 0.0 };
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (losses, loss, divisor) = (l.x("losses")?, l.y("loss")?, k.count("divisor")?);
        let targets = l.some_x("targets").map(|ids| targets_on_gpu(k, ids));
        cuda_kernel::mean(l.gpu, losses, targets, divisor, loss, l.adds(k, "loss"))
    });
    let kernel = kernel.sized([("divisor", divisor)]);
    with_ignored(kernel, ignore).summing("loss", accumulate)
}

/// Computes the gradient of a loss that is not fused with its gradient. Writes `dloss` (1): the step's loss gradient
/// over `divisor`, the number of losses whose mean the step's loss is.
pub(crate) fn gradient_of_mean(divisor: usize) -> Kernel {
    let kernel = kernel!("loss_gradient", of "dloss", |T, k, s| {
        let share = s.step.loss_gradient / k.count("divisor")? as f64;
        s.y::<T>("dloss")?[0] = WithDType::from_f64(share);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let share = 1.0 / k.count("divisor")? as f64;
        elementwise::map(
            l.gpu,
            "scale",
            [share, 0.0],
            &[l.loss_gradient],
            l.y("dloss")?,
        )
    });
    kernel.sized([("divisor", divisor)])
}
