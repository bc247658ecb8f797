//! Cross-entropy of logits against class labels.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let logits = Tensor::zeros((1, 2, 10), DType::F32, &Device::Cpu)?; // (..., V)
//! let targets = Tensor::new(&[[3u32, 99]], &Device::Cpu)?;
//! let loss = ops::cross_entropy_ignoring(&logits, &targets, 99)?; // the mean over targets that are not 99
//! assert!((loss.to_scalar::<f32>()? - 10f32.ln()).abs() < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::cast_for;
use super::cost::cost;
use super::cpu::{elements, for_stored, ids, output_keeping, tensor, view};
use super::dispatch::{Path, choose};
use super::embedding::ids_room;
use super::info::OpInfo;
use super::linear::last_dim;
use super::lowering::{Calls, Ids, Kernel, Lowering, Signature, Slot, kernel, on_gpu};
use super::operand::operand;
use super::record::{Spec, apply1, composed, contiguous, elements_of, made, wide_input};
use crate::graph::{self, Attribute, Room, Step, Target};
use crate::kernels::cpu::{Real, Stored, rows::cross_entropy as kernel};
use crate::kernels::limits;
use crate::precision::decide;
use crate::probe::Operand;
use crate::{Error, Result, probe};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor, WithDType};
use std::sync::OnceLock;
#[cfg(feature = "cuda")]
use {
    super::cuda,
    crate::kernels::cuda::{View, cross_entropy as cuda_kernel},
    candle_core::CudaStorage,
};

/// The mean over all targets of `-log softmax(logits)[target]`: logits (..., V), targets (...) u32 or i64, the loss a
/// scalar.
///
/// The loss is f32 for logits in f32 or half precision, f64 for f64. Backward:
/// `dlogits = (softmax(logits) - onehot) / n`. Kept for backward: the logits, and two numbers a row, the largest logit
/// (top) and the sum of `exp(logit - top)`; no probabilities. Autocast: f32 under both policies; half-precision logits
/// are widened inside, not copied.
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
/// Targets of another shape than the logits' leading dimensions, targets of another dtype or that are no classes, no
/// targets.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    with_ignored(logits, targets, None)
}

/// [`cross_entropy()`], leaving out the targets that equal `ignore_index`: the mean is over the others.
///
/// # Errors
/// As [`cross_entropy()`]; also where every target is ignored, since a mean of nothing is no number.
pub fn cross_entropy_ignoring(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: u32,
) -> Result<Tensor> {
    with_ignored(logits, targets, Some(ignore_index))
}

fn with_ignored(logits: &Tensor, targets: &Tensor, ignore: Option<u32>) -> Result<Tensor> {
    let logits = &autocast_logits(logits)?;
    let targets = check(logits, targets, ignore)?;
    match choose("cross_entropy", logits)? {
        Path::Kernel => {
            let op = CrossEntropy {
                targets,
                statistics: OnceLock::new(),
            };
            Ok(apply1(&contiguous(logits)?, op)?)
        }
        Path::Reference => composed("cross_entropy", &[logits], loss_of(logits), || {
            plain(logits, &targets)
        }),
    }
}

/// [`cross_entropy_ignoring`] (or, with `None`, [`cross_entropy()`]) in plain candle ops.
///
/// # Errors
/// As those.
pub fn reference(logits: &Tensor, targets: &Tensor, ignore_index: Option<u32>) -> Result<Tensor> {
    plain(logits, &check(logits, targets, ignore_index)?)
}

/// Logits as the policy wants them. f32 of half precision is what the op computes in anyway: a copy would only cost
/// memory.
fn autocast_logits(logits: &Tensor) -> Result<Tensor> {
    match decide("cross_entropy", &[logits.into()]) {
        None | Some(DType::F32) => operand("cross_entropy", logits),
        Some(_) => Ok(cast_for("cross_entropy", [logits])?[0].clone()),
    }
}

fn check(logits: &Tensor, targets: &Tensor, ignore: Option<u32>) -> Result<Targets> {
    let classes = last_dim("cross_entropy", logits)?;
    let leading = &logits.dims()[..logits.rank() - 1];
    Targets::check("cross_entropy", leading, classes, targets, ignore)
}

/// Shape and dtype of the loss.
pub(super) fn loss_of(logits: &Tensor) -> (Shape, DType) {
    (().into(), Operand::from(logits).wide_dtype())
}

/// The loss of checked targets in plain candle ops.
pub(super) fn plain(logits: &Tensor, targets: &Targets) -> Result<Tensor> {
    let device = logits.device();
    // The rows that count, and their classes; the others are left out, so that not even a NaN in them counts.
    let (rows, classes): (Vec<u32>, Vec<u32>) = (0..targets.ids.len())
        .filter_map(|row| Some((row as u32, targets.get(row)? as u32)))
        .unzip();
    let classes = Tensor::from_vec(classes, (targets.counted, 1), device)?; // (n, 1)
    let rows = Tensor::from_vec(rows, targets.counted, device)?; // (n)
    let logits = wide_input("cross_entropy", logits)?
        .reshape((targets.ids.len(), ()))?
        .index_select(&rows, 0)?; // (n, V)
    let top = logits.max_keepdim(D::Minus1)?.detach(); // (n, 1)
    let below = logits.broadcast_sub(&top)?; // (n, V)
    let total = below.exp()?.sum_keepdim(D::Minus1)?; // (n, 1)
    let losses = (total.log()? - below.gather(&classes, D::Minus1)?)?;
    Ok((losses.sum_all()? / targets.counted as f64)?)
}

/// Class ids on the host, checked, and how many of them count.
pub(super) struct Targets {
    pub(super) ids: Vec<u32>,
    /// As they came: what a trace knows them by.
    pub(super) tensor: Tensor,
    ignore: Option<u32>,
    counted: usize,
}

impl Targets {
    /// What an op keeps of them.
    pub(super) fn room(&self) -> Room {
        ids_room(elements_of(self.tensor.dims()))
    }

    /// For rows of logits of shape (`leading`, `classes`).
    pub(super) fn check(
        op: &'static str,
        leading: &[usize],
        classes: usize,
        targets: &Tensor,
        ignore: Option<u32>,
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
        let counted = match graph::is_tracing() {
            true => targets.elem_count(), // ids are not read
            false => ids.iter().filter(|id| Some(**id) != ignore).count(),
        };
        if counted == 0 {
            return Err(nothing_counts(op, ids.len()));
        }
        Ok(Self {
            ids,
            tensor: targets.clone(),
            ignore,
            counted,
        })
    }

    /// The class of row `row`, unless it is ignored.
    #[inline(always)]
    pub(super) fn get(&self, row: usize) -> Option<usize> {
        let id = self.ids[row];
        (Some(id) != self.ignore).then_some(id as usize)
    }

    /// The mean of the rows' losses, those of ignored rows being 0.
    pub(super) fn mean<T: Real>(&self, losses: &[T]) -> T {
        // In f64: the mean of a large batch keeps its last digits, and one thread keeps its order.
        let total: f64 = losses.iter().map(|loss| WithDType::to_f64(*loss)).sum();
        T::real(total / self.counted as f64)
    }

    /// What a row's gradient is multiplied by, for the gradient `dloss` of the mean.
    pub(super) fn share<T: Real>(&self, dloss: T) -> T {
        T::real(WithDType::to_f64(dloss) / self.counted as f64)
    }
}

#[cfg(feature = "cuda")]
impl Targets {
    /// As the kernels take them, their ids on the GPU.
    pub(super) fn on_gpu<'a>(
        &self,
        ids: &'a Tensor,
    ) -> candle_core::Result<cuda_kernel::Targets<'a>> {
        Ok(cuda_kernel::Targets {
            ids: cuda::elements(ids)?,
            ignore: self.ignore,
            counted: self.counted,
        })
    }
}

pub(super) const INFO: OpInfo = OpInfo::new("cross_entropy")
    .autocast_as("cross_entropy_loss")
    .on_gpu_up_to(limits::CROSS_ENTROPY_CLASSES)
    .planned(LOWERING)
    .costing(
        "4 a logit, backward 3",
        "logits; backward logits, dlogits",
        |o| o.reduction(4.0),
        Some(|o| {
            let logits = o.input(0)?;
            cost(0.0, 3.0 * logits.elements(), logits.bytes(), logits.bytes())
        }),
    );

/// In a plan.
const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let operands = PlannedLoss {
            logits: Slot::Input(0),
            targets: 0,
            statistics: Slot::Kept(0),
            loss: Slot::Output,
        };
        planned_loss(signature, operands, Calls::default())
    },
    backward: |signature| {
        let reads = [
            ("logits", Slot::Input(0)),
            ("targets", Slot::Read(0)),
            ("statistics", Slot::Kept(0)),
            ("dloss", Slot::OutputGradient),
        ];
        planned_gradient(signature, reads, Slot::Gradient(0), Calls::default())
    },
};

/// What the loss of logits (N, V) reads and writes.
pub(super) struct PlannedLoss {
    pub logits: Slot,
    /// Which of the op's reads.
    pub targets: usize,
    /// (top, total) of each row, (N, 2).
    pub statistics: Slot,
    /// (1).
    pub loss: Slot,
}

/// The mean loss of the rows of `logits`, and their statistics.
pub(super) fn planned_loss(
    signature: &Signature<'_>,
    operands: PlannedLoss,
    mut calls: Calls,
) -> Calls {
    let read = operands.targets;
    let ids = Ids {
        read,
        bound: planned_classes(signature),
        ignore: planned_ignore(signature),
    };
    let rows = signature.reads[read].dims.iter().product();
    let losses = calls.scratch(&[rows], signature.output.dtype);
    let kernel = kernel!("cross_entropy", |T, k, s| {
        let (logits, statistics) = (s.x::<T>("logits")?, s.y("statistics")?);
        let (targets, losses) = (Planned::of(k, s.x("targets")?)?, s.y("losses")?);
        let target = |row| targets.get(row);
        kernel::forward(logits, k.count("classes")?, target, losses, statistics);
        let total: f64 = losses.iter().map(|loss| WithDType::to_f64(*loss)).sum();
        s.y::<<T as Stored>::Wide>("loss")?[0] = Real::real(total / targets.counted as f64);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (logits, targets) = (l.x("logits")?, targets_on_gpu(k, l.x("targets")?));
        let (mean, losses, statistics) = (l.y("loss")?, l.y("losses")?, l.y("statistics")?);
        match l.writes.get("sum") {
            None => cuda_kernel::forward(l.gpu, logits, targets, losses, statistics, mean),
            Some(sum) => {
                cuda_kernel::rows(l.gpu, logits, targets, losses, statistics)?;
                cuda_kernel::mean(l.gpu, losses, 1, *sum, false)?;
                cuda_kernel::share(l.gpu, targets, *sum, mean)
            }
        }
    });
    let kernel = with_classes(signature, kernel);
    let mut writes = vec![
        ("loss", operands.loss),
        ("losses", losses),
        ("statistics", operands.statistics),
    ];
    if counts_on_gpu(signature) {
        writes.push(("sum", calls.scratch(&[1], DType::F64))); // of all losses
    }
    let reads = [("logits", operands.logits), ("targets", Slot::Read(read))];
    calls.ids(ids).call(kernel, reads, writes)
}

/// Whether a GPU has to count the targets of a run.
fn counts_on_gpu(signature: &Signature<'_>) -> bool {
    signature.target == Target::Cuda && planned_ignore(signature).is_some()
}

/// Reads logits, targets, statistics and dloss; writes dlogits.
pub(super) fn planned_gradient(
    signature: &Signature<'_>,
    reads: [(&'static str, Slot); 4],
    dlogits: Slot,
    mut calls: Calls,
) -> Calls {
    let kernel = kernel!("cross_entropy_backward", |T, k, s| {
        let targets = Planned::of(k, s.x("targets")?)?;
        let target = |row| targets.get(row);
        let dloss = s.x::<<T as Stored>::Wide>("dloss")?[0];
        let weight = Real::real(WithDType::to_f64(dloss) / targets.counted as f64);
        let (logits, statistics) = (s.x::<T>("logits")?, s.x("statistics")?);
        let (classes, dlogits) = (k.count("classes")?, s.y("dlogits")?);
        kernel::backward(logits, classes, target, statistics, weight, dlogits);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (logits, mut targets) = (l.x("logits")?, targets_on_gpu(k, l.x("targets")?));
        let (statistics, mut dloss) = (l.x("statistics")?, l.x("dloss")?);
        if let Some(share) = l.writes.get("share") {
            cuda_kernel::share(l.gpu, targets, dloss, *share)?;
            (dloss, targets.counted) = (*share, 1);
        }
        let dlogits = l.y("dlogits")?;
        cuda_kernel::backward(l.gpu, logits, targets, statistics, dloss, dlogits)
    });
    let mut writes = vec![("dlogits", dlogits)];
    if counts_on_gpu(signature) {
        writes.push(("share", calls.scratch(&[1], DType::F32))); // each target's, of dloss
    }
    calls.call(with_classes(signature, kernel), reads, writes)
}

/// The targets of a run, as if all of them counted.
#[cfg(feature = "cuda")]
fn targets_on_gpu<'a>(k: &Kernel, ids: View<'a>) -> cuda_kernel::Targets<'a> {
    cuda_kernel::Targets {
        ids,
        ignore: k.count("ignore").ok().map(|id| id as u32),
        counted: ids.len,
    }
}

fn with_classes(signature: &Signature<'_>, kernel: Kernel) -> Kernel {
    let kernel = kernel.sized([("classes", planned_classes(signature))]);
    kernel.with_all(signature.attributes)
}

/// V: of logits, or of the head's weight.
fn planned_classes(signature: &Signature<'_>) -> usize {
    let dims = match &signature.inputs[..] {
        [logits] => logits.dims.last(),
        [_, weight, ..] => weight.dims.first(),
        [] => None,
    };
    dims.copied().unwrap_or(1)
}

fn planned_ignore(signature: &Signature<'_>) -> Option<u32> {
    match signature.attribute("ignore") {
        Some(Attribute::Count(id)) => Some(id as u32),
        _ => None,
    }
}

/// The targets of a run.
struct Planned<'a> {
    ids: &'a [u32],
    ignore: Option<u32>,
    counted: usize,
}

impl<'a> Planned<'a> {
    fn of(k: &Kernel, ids: &'a [u32]) -> candle_core::Result<Self> {
        let ignore = k.count("ignore").ok().map(|id| id as u32);
        let counted = ids.iter().filter(|id| Some(**id) != ignore).count();
        match counted {
            0 => Err(nothing_counts("cross_entropy", ids.len()).into()),
            _ => Ok(Self {
                ids,
                ignore,
                counted,
            }),
        }
    }

    fn get(&self, row: usize) -> Option<usize> {
        let id = self.ids[row];
        (Some(id) != self.ignore).then_some(id as usize)
    }
}

fn nothing_counts(op: &'static str, targets: usize) -> Error {
    Error::Data {
        what: op.into(),
        expected: "at least one target that counts".into(),
        got: format!("{targets} targets, all ignored"),
        hint: "skip this batch".into(),
    }
}

struct CrossEntropy {
    targets: Targets,
    /// (top, total) of each row, (N, 2). Not their log-sum-exp: one number has no room for the digits of both.
    statistics: OnceLock<Tensor>,
}

impl CrossEntropy {
    fn forward<T: Stored>(&self, logits: &[T]) -> candle_core::Result<(CpuStorage, Shape)> {
        let rows = self.targets.ids.len();
        let classes = logits.len() / rows;
        let target = |row| self.targets.get(row);
        let ((losses, _), statistics) =
            output_keeping::<T::Wide, T::Wide>(rows, (rows, 2), |losses, statistics| {
                kernel::forward(logits, classes, target, losses, statistics)
            })?;
        probe::kept("top and total", &statistics);
        let _ = self.statistics.set(statistics); // empty until now: an op runs forward once
        let mean = self.targets.mean(losses.as_slice::<T::Wide>()?);
        Ok((T::Wide::to_cpu_storage_owned(vec![mean]), Shape::from(())))
    }

    fn backward<T: Stored>(
        &self,
        logits: &Tensor,
        statistics: &Tensor,
        dloss: &Tensor,
    ) -> candle_core::Result<Tensor> {
        let weight = self.targets.share(dloss.to_scalar::<T::Wide>()?);
        let (x, statistics) = (elements::<T>(logits)?, elements::<T::Wide>(statistics)?);
        let classes = x.len() / self.targets.ids.len();
        let target = |row| self.targets.get(row);
        tensor(logits.shape(), |dx| {
            kernel::backward(&x, classes, target, &statistics, weight, dx)
        })
    }
}

impl Spec for CrossEntropy {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (().into(), inputs[0].wide_dtype())
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let ignore = self.targets.ignore;
        ignore
            .map(|id| ("ignore", Attribute::Count(id as usize)))
            .into_iter()
            .collect()
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.targets.tensor.clone()]
    }

    fn kept(&self, inputs: &[Operand<'_>]) -> Vec<(&'static str, Shape, DType)> {
        let logits = &inputs[0];
        vec![(
            "top and total",
            (logits.rows(), 2).into(),
            logits.wide_dtype(),
        )]
    }

    fn forward_steps(&self, inputs: &[Operand<'_>], _: Target) -> Vec<Step> {
        let ids = self.targets.room();
        let losses = Step::Pass(Room {
            what: "losses",
            formula: "BT",
            elements: ids.elements,
            element_bytes: inputs[0].wide_dtype().size_in_bytes(),
        });
        let made = made(self, inputs).into_iter();
        [Step::Hold(ids)]
            .into_iter()
            .chain(made)
            .chain([losses])
            .collect()
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        for_stored!(logits.dtype(), T => self.forward(view::<T>(logits, layout)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        logits: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let (gpu, rows) = (&logits.device, self.targets.ids.len());
        let ids = cuda::ids(gpu, &self.targets.ids)?;
        let room = |len| cuda::alloc_uninit(gpu, DType::F32, len);
        let (losses, statistics, mean) = (room(rows)?, room(2 * rows)?, room(1)?);
        cuda_kernel::forward(
            gpu,
            cuda::view(logits, layout)?,
            self.targets.on_gpu(&ids)?,
            cuda::whole(&losses)?,
            cuda::whole(&statistics)?,
            cuda::whole(&mean)?,
        )?;
        let statistics = cuda::tensor(statistics, (rows, 2));
        probe::kept("top and total", &statistics);
        let _ = self.statistics.set(statistics); // empty until now: an op runs forward once
        Ok((mean, Shape::from(())))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        _loss: &Tensor,
        dloss: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let Some(statistics) = self.statistics.get() else {
            candle_core::bail!("cross_entropy: backward before forward");
        };
        #[cfg(feature = "cuda")]
        if logits.device().is_cuda() {
            let gpu = cuda::gpu(logits)?;
            let (ids, dloss) = (
                cuda::ids(gpu, &self.targets.ids)?,
                dloss.to_dtype(DType::F32)?,
            );
            let dlogits = cuda::alloc_uninit(gpu, logits.dtype(), logits.elem_count())?;
            cuda_kernel::backward(
                gpu,
                cuda::elements(logits)?,
                self.targets.on_gpu(&ids)?,
                cuda::elements(statistics)?,
                cuda::elements(&dloss)?,
                cuda::whole(&dlogits)?,
            )?;
            return Ok(Some(cuda::tensor(dlogits, logits.shape())));
        }
        for_stored!(logits.dtype(), T => Ok(Some(self.backward::<T>(logits, statistics, dloss)?)))
    }
}
