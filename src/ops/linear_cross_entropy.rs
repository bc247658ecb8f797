//! The output head and its loss as one op, which keeps no logits for backward.
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

use super::cpu::{elements, for_stored, tensor, tensors, view};
use super::cross_entropy::lowering::{CheckedIds, PlannedLoss, planned_gradient, planned_loss};
use super::cross_entropy::{Targets, loss_of, plain};
use super::dispatch::{Path, check_same, choose};
use super::info::OpInfo;
use super::linear::factors;
use super::lowering::{Accumulate, Calls, Lowering, Signature, Slot};
use super::operand::check_size;
use super::product::{Factor, packed, product};
use super::record::{Made, Op, Spec, Storages, apply, composed, contiguous, exactly};
use super::weight::{WeightCopy, read_weight, with_copies};
use super::{linear, with_last_dim};
use crate::graph::{MemoryStep, Room, Target};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::kernels::cpu::{Stored, rows::cross_entropy as kernel};
use crate::probe::{Operand, Operands};
use crate::{Error, Result, probe};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Shape, Tensor, WithDType};
use std::sync::OnceLock;
#[cfg(feature = "cuda")]
use {
    super::cuda,
    crate::kernels::cuda::{cross_entropy as cuda_kernel, matmul::Matrix},
    candle_core::CudaStorage,
    std::sync::{Mutex, PoisonError},
};

/// The cross-entropy of `x W^T`: x (..., D), W (V, D), targets (...) u32 or i64, the loss a scalar.
///
/// The same as [`cross_entropy`](super::cross_entropy()) of a [`linear`](linear()), for a loss whose logits nothing
/// else reads. As one op, the logits' gradient is scratch instead of a node of the graph. Backward:
/// `dlogits = (softmax(logits) - onehot) / n`, `dx = dlogits W`, `dW = dlogits^T x`. Kept for backward: x, W, the
/// logits (N, V), and on the CPU two numbers a row, as [`cross_entropy`](super::cross_entropy()) keeps; on a GPU the
/// logits become their gradient in place, and a second backward recomputes them. Autocast: the product is lower under
/// both policies, as [`linear()`] is; the loss is computed from those logits in f32, and returned in f32.
///
/// # Errors
/// As [`linear`](linear()) and [`cross_entropy`](super::cross_entropy()).
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (x, [weight], [copy]) = with_copies("linear_cross_entropy", x, [weight])?;
    let targets = check(&x, &copy.of(&weight), targets)?;
    match choose("linear_cross_entropy", &x)? {
        Path::Kernel => {
            let op = LinearCrossEntropy {
                copy,
                targets,
                kept: OnceLock::new(),
                #[cfg(feature = "cuda")]
                logits: Mutex::default(),
            };
            Ok(apply(&[&contiguous(&x)?, &contiguous(&weight)?], op)?)
        }
        Path::Reference => {
            let product = || linear::reference(&x, &weight);
            let output = (with_last_dim(x.dims(), weight.dims()[0]), x.dtype());
            let logits = composed("linear", &[&x, &weight], output, product)?;
            composed("cross_entropy", &[&logits], loss_of(&logits), || {
                plain(&logits, &targets)
            })
        }
    }
}

/// [`linear_cross_entropy()`] as the two ops it is made of.
///
/// # Errors
/// As [`linear_cross_entropy()`].
pub fn reference(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    check(x, weight, targets)?;
    super::cross_entropy(&super::linear(x, weight)?, targets)
}

fn check(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Targets> {
    const OP: &str = "linear_cross_entropy";
    check_same(OP, &[("x", x), ("weight", weight)])?;
    match (x.dims(), weight.dims()) {
        ([leading @ .., last], [classes, depth]) if last == depth => {
            check_size(
                OP,
                &with_last_dim(x.dims(), *classes),
                x.dtype(),
                x.device(),
            )?;
            Targets::check(OP, leading, *classes, targets, None)
        }
        _ => Err(Error::Shape {
            op: OP,
            expected: "x (..., D) and weight (V, D)".into(),
            got: format!("x {:?}, weight {:?}", x.dims(), weight.dims()),
            hint: "weights are stored (out, in)".into(),
        }),
    }
}

/// The op, as nodes call it.
pub(crate) const NAME: &str = "linear_cross_entropy";

pub(super) const INFO: OpInfo = OpInfo::new(NAME)
    .autocast_as("linear")
    .on_gpu()
    .costing(
        "2 N D V, 4 a logit besides; backward 4 and 3",
        "x, W, logits; backward those and dx, dW",
        |o| o.products(logits_of(o)?, 2.0, 4.0),
        Some(|o| o.products_backward(logits_of(o)?, 4.0, 3.0)),
    )
    .holding("the head's product and the loss")
    .planned(LOWERING);

/// Elements and bytes of the logits (N, V) of x (N, D) and W (V, D).
fn logits_of(o: &Operands<'_>) -> Option<(f64, f64)> {
    let (x, weight) = (o.input(0)?, o.input(1)?);
    let elements = x.elements() / x.last() * *weight.dims.first()? as f64;
    Some((elements, elements * x.dtype.size_in_bytes() as f64))
}

/// In a plan.
const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let (x, weight) = factors(signature);
        let factors = [("a", Slot::Input(0)), ("b", read_weight(signature, 1))];
        let logits = product(x, weight.t(), Accumulate::Never);
        let mut calls = Calls::default().call(logits, factors, [("c", Slot::Kept(0))]);
        let statistics = statistics(signature, &mut calls);
        planned_loss(
            signature,
            of_loss(signature, statistics, Slot::Output),
            calls,
        )
    },
    backward: |signature| {
        let (x, weight) = factors(signature);
        let (logits, mut calls) = (&signature.kept[0], Calls::default());
        let dlogits = calls.scratch(logits.dims, logits.dtype);
        let targets = Slot::Read(signature.reads.len() - 1);
        let statistics = statistics(signature, &mut calls);
        if signature.kept.len() == 1 {
            let loss = calls.scratch(&[1], signature.output.dtype);
            calls = planned_loss(signature, of_loss(signature, statistics, loss), calls);
        }
        let reads = [
            ("logits", Slot::Kept(0)),
            ("targets", targets),
            ("statistics", statistics),
            ("dloss", Slot::OutputGradient),
        ];
        let calls = planned_gradient(signature, reads, dlogits, calls);
        let of_dlogits = Factor::new(x.rows, weight.rows); // (N, V)
        let factors = [("a", dlogits), ("b", read_weight(signature, 1))];
        let dx = product(of_dlogits, weight, Accumulate::Never);
        let calls = calls.call(dx, factors, [("c", Slot::Gradient(0))]);
        let factors = [("a", dlogits), ("b", Slot::Input(0))];
        let dw = product(of_dlogits.t(), x, Accumulate::Never);
        calls.call(dw, factors, [("c", Slot::Gradient(1))])
    },
};

/// (top, total) of each row (N, 2): kept, or on a GPU recomputed from the logits.
fn statistics(signature: &Signature<'_>, calls: &mut Calls) -> Slot {
    match signature.kept.len() {
        1 => {
            let rows = signature.kept[0].rows();
            calls.scratch(&[rows, 2], signature.inputs[0].wide_dtype())
        }
        _ => Slot::Kept(1),
    }
}

fn of_loss(signature: &Signature<'_>, statistics: Slot, loss: Slot) -> PlannedLoss {
    PlannedLoss {
        logits: Slot::Kept(0),
        targets: signature.reads.len() - 1,
        statistics,
        loss,
    }
}

struct LinearCrossEntropy {
    copy: WeightCopy,
    targets: Targets,
    /// The logits (N, V), and (top, total) of each row (N, 2), as cross-entropy keeps them.
    kept: OnceLock<(Tensor, Tensor)>,
    /// The logits (N, V) on a GPU, until backward makes them their gradient.
    #[cfg(feature = "cuda")]
    logits: Mutex<Option<Tensor>>,
}

impl LinearCrossEntropy {
    fn forward<T: Stored>(
        &self,
        x: &[T],
        weight: &[T],
        classes: usize,
    ) -> candle_core::Result<T::Wide> {
        let ids = elements::<u32>(&self.targets.ids)?;
        let targets = CheckedIds::new(&ids, None)?;
        let rows = ids.len();
        let depth = x.len() / rows;
        let x = MatRef::new(x, rows, depth); // (N, D)
        let weight = MatRef::new(weight, classes, depth); // (V, D)
        let logits = tensor::<T>((rows, classes), |logits| {
            matmul(x, weight.t(), logits, false, Threads::All)
        })?;
        let (losses, statistics) = {
            let logits = elements::<T>(&logits)?;
            let target = |row| targets.get(row);
            tensors(rows, (rows, 2), |losses, statistics| {
                kernel::forward(&logits, classes, target, losses, statistics)
            })?
        };
        let loss = targets.mean(&elements::<T::Wide>(&losses)?);
        probe::kept("logits", &logits);
        probe::kept("top and total", &statistics);
        let _ = self.kept.set((logits, statistics)); // empty until now: an op runs forward once
        Ok(loss)
    }
}

#[cfg(feature = "cuda")]
impl LinearCrossEntropy {
    fn backward_on_gpu(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dloss: &Tensor,
    ) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (gpu, rows) = (cuda::gpu(x)?, self.targets.ids.elem_count());
        let ((classes, depth), dtype) = (weight.dims2()?, x.dtype());
        let of_x = cuda::matrix(x, rows, depth)?; // (N, D)
        let dloss = dloss.detach().to_dtype(DType::F32)?;
        let read = self.copy.for_backward(weight)?; // (V, D)
        let kept = {
            let mut logits = self.logits.lock().unwrap_or_else(PoisonError::into_inner);
            logits.take()
        };
        let logits = match kept {
            Some(logits) => logits,
            None => {
                let factors = [of_x, cuda::matrix(&read, classes, depth)?.t()];
                cuda::product(gpu, factors, 1, dtype, (rows, classes))?
            }
        };
        let losses = cuda::alloc_uninit(gpu, DType::F32, rows)?;
        let ids = cuda::ids(gpu, &self.targets.ids)?;
        let targets = self.targets.on_gpu(&ids)?;
        cuda_kernel::in_place(
            gpu,
            cuda::elements(&logits)?,
            classes,
            targets.ids,
            cuda::elements(&dloss)?,
            targets.counted,
            cuda::whole(&losses)?,
        )?;
        let of_dlogits = cuda::matrix(&logits, rows, classes)?; // as they are now
        let dx = x.track_op().then(|| {
            let factors = [of_dlogits, cuda::matrix(&read, classes, depth)?];
            cuda::product(gpu, factors, 1, dtype, x.shape())
        });
        drop(read);
        let factors = [of_dlogits.t(), of_x];
        let dw = weight
            .track_op()
            .then(|| self.copy.gradient_on_gpu(weight, factors));
        Ok(vec![dx.transpose()?, dw.transpose()?])
    }
}

/// What the products that make the logits, dx and dW pack.
fn packs(inputs: &[Operand<'_>], target: Target) -> [Option<MemoryStep>; 3] {
    let [x, weight] = [&inputs[0], &inputs[1]];
    let weight = Factor::new(weight.dims[0], weight.dims[1]); // (V, D)
    let of_x = Factor::new(x.rows(), weight.cols); // (N, D)
    let of_dlogits = Factor::new(of_x.rows, weight.rows); // (N, V)
    let products = [
        (of_x, weight.t()),
        (of_dlogits, weight),
        (of_dlogits.t(), of_x),
    ];
    products.map(|(a, b)| {
        let kernel = product(a, b, Accumulate::Never);
        let room = (target == Target::Cpu).then(|| packed(&kernel, x.dtype).ok());
        room.flatten().map(MemoryStep::Pass)
    })
}

impl Spec for LinearCrossEntropy {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (().into(), inputs[0].wide_dtype())
    }

    fn kept(&self, inputs: &[Operand<'_>], on: Target) -> Vec<(&'static str, Shape, DType)> {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let logits = ("logits", (x.rows(), weight.dims[0]).into(), x.dtype);
        match on {
            Target::Cuda => vec![logits],
            Target::Cpu => vec![
                logits,
                ("top and total", (x.rows(), 2).into(), x.wide_dtype()),
            ],
        }
    }

    fn reads(&self) -> Vec<Tensor> {
        self.copy
            .tensor()
            .into_iter()
            .chain([self.targets.ids.clone()])
            .collect()
    }

    fn holds(&self) -> Option<Room> {
        Some(self.targets.room())
    }

    /// The logits, and from them the loss; on a GPU the numbers of each row go again.
    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let [packed, _, _] = packs(inputs, target);
        let ids = self.targets.room();
        let room = |what, formula, numbers| {
            MemoryStep::Pass(Room {
                what,
                formula,
                elements: numbers * ids.elements,
                element_bytes: inputs[0].wide_dtype().size_in_bytes(),
            })
        };
        let dropped = self.copy.is_dropped().then_some(MemoryStep::DropRead(0));
        let logits = [Some(MemoryStep::Keep(0)), packed];
        let loss = match target {
            Target::Cpu => [
                Some(MemoryStep::Keep(1)),
                Some(MemoryStep::Output),
                Some(room("losses", "BT", 1.0)),
                dropped,
            ],
            Target::Cuda => [
                Some(MemoryStep::Output),
                Some(room("losses, tops and totals", "3BT", 3.0)),
                dropped,
                None,
            ],
        };
        logits.into_iter().chain(loss).flatten().collect()
    }

    /// From the logits' gradient: on the CPU beside the logits, on a GPU in their place.
    fn backward_steps(
        &self,
        inputs: &[Operand<'_>],
        tracked: &[bool],
        target: Target,
    ) -> Vec<MemoryStep> {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let rows = self.targets.room().elements;
        let taken = match target {
            Target::Cpu => Room {
                what: "gradient of the logits",
                formula: "BTV",
                elements: rows * weight.dims[0] as f64,
                element_bytes: x.dtype.size_in_bytes(),
            },
            Target::Cuda => Room {
                what: "losses, ids",
                formula: "2BT",
                elements: 2.0 * rows,
                element_bytes: size_of::<f32>(),
            },
        };
        let mut steps = vec![MemoryStep::Take(taken)];
        let [_, dx, dw] = packs(inputs, target);
        for (of, packed) in [(0, dx), (1, dw)] {
            // On the CPU both are made, asked for or not.
            if target == Target::Cpu || tracked[of] {
                steps.push(MemoryStep::Gradient(of));
                steps.extend(packed);
            }
        }
        if target == Target::Cuda {
            steps.push(MemoryStep::DropKept(0));
        }
        steps
    }

    fn forwarded(&self) {
        self.copy.forwarded();
    }
}

impl Op for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let [(x, x_layout), (weight, weight_layout)] = exactly(inputs)?;
        let (classes, _) = weight_layout.shape().dims2()?;
        for_stored!(x.dtype(), T => {
            let x = view::<T>(x, x_layout)?;
            let loss = self.copy.read(weight, weight_layout, |weight| self.forward(x, weight, classes))?;
            type Wide = <T as Stored>::Wide;
            Ok((Wide::to_cpu_storage_owned(vec![loss]), Shape::from(())))
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        let [(x, x_layout), (weight, weight_layout)] = exactly(inputs)?;
        let (gpu, rows) = (&x.device, self.targets.ids.elem_count());
        let (classes, depth) = weight_layout.shape().dims2()?;
        let of_x = Matrix::new(cuda::view(x, x_layout)?, rows, depth); // (N, D)
        let logits = self.copy.product_on_gpu(of_x, weight, weight_layout)?; // (N, V)
        let room = |len| cuda::alloc_uninit(gpu, DType::F32, len);
        let (losses, statistics, mean) = (room(rows)?, room(2 * rows)?, room(1)?);
        let ids = cuda::ids(gpu, &self.targets.ids)?;
        cuda_kernel::forward(
            gpu,
            cuda::whole(&logits)?,
            self.targets.on_gpu(&ids)?,
            cuda::whole(&losses)?,
            cuda::whole(&statistics)?,
            cuda::whole(&mean)?,
        )?;
        let logits = cuda::tensor(logits, (rows, classes));
        probe::kept("logits", &logits);
        *self.logits.lock().unwrap_or_else(PoisonError::into_inner) = Some(logits);
        Ok((mean, Shape::from(())))
    }

    fn bwd(
        &self,
        inputs: &[&Tensor],
        _loss: &Tensor,
        dloss: &Tensor,
    ) -> candle_core::Result<Vec<Option<Tensor>>> {
        let [x, weight] = exactly(inputs)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return self.backward_on_gpu(x, weight, dloss);
        }
        let Some((logits, statistics)) = self.kept.get() else {
            candle_core::bail!("linear_cross_entropy: backward before forward");
        };
        let (rows, classes) = logits.dims2()?;
        let ids = elements::<u32>(&self.targets.ids)?;
        let targets = CheckedIds::new(&ids, None)?;
        for_stored!(x.dtype(), T => {
            type Wide = <T as Stored>::Wide;
            let share = targets.share(dloss.to_scalar::<Wide>()?);
            let dlogits = {
                let (logits, statistics) = (elements::<T>(logits)?, elements::<Wide>(statistics)?);
                let target = |row| targets.get(row);
                tensor::<T>((rows, classes), |dlogits| {
                    kernel::backward(&logits, classes, target, &statistics, share, dlogits)
                })?
            };
            let dlogits = elements::<T>(&dlogits)?;
            let dlogits = MatRef::new(&dlogits, rows, classes); // (N, V)
            let dx = {
                let weight = self.copy.for_backward(weight)?;
                let weight = elements::<T>(&weight)?;
                let weight = MatRef::new(&weight, classes, weight.len() / classes);
                tensor(x.shape(), |dx| matmul(dlogits, weight, dx, false, Threads::All))?
            };
            let x = elements::<T>(x)?;
            let x = MatRef::new(&x, rows, x.len() / rows);
            let dw = self.copy.gradient(weight, dlogits.t(), x)?;
            Ok(vec![Some(dx), Some(dw)])
        })
    }
}
