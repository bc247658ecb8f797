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

pub(crate) mod lowering;

use super::cast::cast_for;
use super::cost::cost;
use super::cpu::{elements, for_stored, ids, output_keeping, tensor, view};
use super::dispatch::{Path, choose};
use super::embedding::ids_room;
use super::info::OpInfo;
use super::linear::last_dim;
use super::operand::operand;
use super::record::{Spec, apply1, composed, contiguous, elements_of, made, wide_input};
use crate::graph::{self, Attribute, MemoryStep, Room, Target};
use crate::kernels::cpu::{Real, Stored, rows::cross_entropy as kernel};
use crate::kernels::limits;
use crate::precision::decide;
use crate::probe::Operand;
use crate::{Error, Result, probe};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor, WithDType};
use std::sync::OnceLock;
#[cfg(feature = "cuda")]
use {super::cuda, crate::kernels::cuda::cross_entropy as cuda_kernel, candle_core::CudaStorage};

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

    fn forward_steps(&self, inputs: &[Operand<'_>], _: Target) -> Vec<MemoryStep> {
        let ids = self.targets.room();
        let losses = MemoryStep::Pass(Room {
            what: "losses",
            formula: "BT",
            elements: ids.elements,
            element_bytes: inputs[0].wide_dtype().size_in_bytes(),
        });
        let made = made(self, inputs).into_iter();
        [MemoryStep::Hold(ids)]
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
