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

use super::cross_entropy::lowering::{PlannedLoss, planned_gradient, planned_loss};
use super::cross_entropy::{Targets, loss_of, plain};
use super::dispatch::{Path, check_same, choose};
use super::info::OpInfo;
use super::linear::factors;
use super::lowering::{Accumulate, Calls, Lowering, Signature, Slot};
use super::operand::check_size;
use super::product::{Factor, product};
use super::record::{Spec, by_kernels, composed};
use super::weight::{WeightCopy, read_weight, tell_kept, tensors, tensors_again, with_copies};
use super::{linear, with_last_dim};
use crate::graph::{MemoryStep, Room, Target};
use crate::probe::{Operand, Operands};
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};
#[cfg(feature = "cuda")]
use {
    super::cuda,
    super::record::{Made, Op, Storages, applied, contiguous, exactly},
    crate::kernels::cuda::{cross_entropy as cuda_kernel, matmul::Matrix},
    crate::{graph, probe},
    candle_core::{CpuStorage, CudaStorage},
    std::sync::{Mutex, PoisonError},
};

/// The cross-entropy of `x W^T`: x (..., D), W (V, D), targets (...) u32 or i64, the loss a scalar.
///
/// The same as [`cross_entropy`](super::cross_entropy()) of a [`linear`](linear()), for a loss whose logits nothing
/// else reads. As one op, the logits' gradient is scratch instead of a node of candle's graph, where it would be added
/// to zeros: B T V elements written and read once less, and two buffers of them fewer at the peak. Backward:
/// `dlogits = (softmax(logits) - onehot) / n`, `dx = dlogits W`, `dW = dlogits^T x`. Kept for backward: x, W, the
/// logits (N, V), and on the CPU two numbers a row, as [`cross_entropy`](super::cross_entropy()) keeps; on a GPU the
/// logits become their gradient in place, and a second backward recomputes them. Autocast: the product is lower under
/// both policies, as [`linear()`] is; the loss is computed from those logits in f32, and returned in f32.
///
/// # Errors
/// As [`linear`](linear()) and [`cross_entropy`](super::cross_entropy()).
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (x, [weight], copies) = with_copies(NAME, x, [weight])?;
    let targets = check(&x, &copies[0].of(&weight), targets)?;
    match choose(NAME, &x)? {
        Path::Kernel => {
            let op = LinearCrossEntropy { copies, targets };
            #[cfg(feature = "cuda")]
            if x.device().is_cuda() && !graph::is_tracing() {
                return Ok(OnGpu::new(op).apply(&x, &weight)?);
            }
            by_kernels(NAME, op, [&x, &weight])
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
    copies: [WeightCopy; 1],
    targets: Targets,
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
        let mut reads = tensors(&self.copies);
        reads.push(self.targets.ids.clone());
        reads
    }

    fn reads_again(&self, inputs: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
        let mut reads = tensors_again(&self.copies, &inputs[1..])?;
        reads.push(self.targets.ids.clone());
        Ok(reads)
    }

    /// The logits, and from them the loss; on a GPU the numbers of each row go again.
    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let packed = linear::linear_product(inputs)
            .forward(target)
            .map(MemoryStep::Pass);
        let ids = self.targets.room();
        let room = |what, formula, numbers| {
            MemoryStep::Pass(Room {
                what,
                formula,
                elements: numbers * ids.elements,
                element_bytes: inputs[0].wide_dtype().size_in_bytes(),
            })
        };
        let logits = [
            Some(MemoryStep::Hold(ids)),
            Some(MemoryStep::Keep(0)),
            packed,
            self.copies[0].dropped(0),
        ];
        let loss = match target {
            Target::Cpu => vec![
                MemoryStep::Keep(1),
                MemoryStep::Output,
                room("losses", "BT", 1.0),
            ],
            Target::Cuda => vec![
                MemoryStep::Output,
                room("losses, tops and totals", "3BT", 3.0),
            ],
        };
        logits.into_iter().flatten().chain(loss).collect()
    }

    /// From the logits' gradient: on the CPU beside the logits, on a GPU in their place.
    fn backward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let product = linear::linear_product(inputs);
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
        let if_tracked = target == Target::Cuda;
        let gradients = [product.dx(target), product.dw(target)];
        let gradients = gradients.into_iter().enumerate();
        let gradients = gradients.map(|(of, taking)| MemoryStep::Gradient {
            of,
            if_tracked,
            taking,
        });
        let gone = (target == Target::Cuda).then_some(MemoryStep::DropKept(0));
        [MemoryStep::Take(taken)]
            .into_iter()
            .chain(gradients)
            .chain(gone)
            .collect()
    }

    fn has_kept(&self, _: &[Tensor]) {
        tell_kept(&self.copies);
    }

    fn forwarded(&self) {
        self.copies[0].forwarded();
    }
}

/// As it is computed on a GPU outside of plans: backward makes the logits their gradient.
#[cfg(feature = "cuda")]
struct OnGpu {
    op: LinearCrossEntropy,
    /// (N, V), until then.
    logits: Mutex<Option<Tensor>>,
}

#[cfg(feature = "cuda")]
impl OnGpu {
    fn new(op: LinearCrossEntropy) -> Self {
        let logits = Mutex::default();
        Self { op, logits }
    }

    fn apply(self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        applied(&[&contiguous(x)?, &contiguous(weight)?], self)
    }
}

#[cfg(feature = "cuda")]
impl Op for OnGpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        candle_core::bail!("{NAME} of a GPU on the CPU")
    }

    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        let LinearCrossEntropy { copies, targets } = &self.op;
        let [(x, x_layout), (weight, weight_layout)] = exactly(inputs)?;
        let (gpu, rows) = (&x.device, targets.ids.elem_count());
        let (classes, depth) = weight_layout.shape().dims2()?;
        let of_x = Matrix::new(cuda::view(x, x_layout)?, rows, depth); // (N, D)
        let logits = copies[0].product_on_gpu(of_x, weight, weight_layout)?; // (N, V)
        let room = |len| cuda::alloc_uninit(gpu, DType::F32, len);
        let (losses, statistics, mean) = (room(rows)?, room(2 * rows)?, room(1)?);
        let ids = cuda::ids(gpu, &targets.ids)?;
        cuda_kernel::forward(
            gpu,
            cuda::whole(&logits)?,
            targets.on_gpu(&ids)?,
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
        let LinearCrossEntropy { copies, targets } = &self.op;
        let [x, weight] = exactly(inputs)?;
        let (gpu, rows) = (cuda::gpu(x)?, targets.ids.elem_count());
        let ((classes, depth), dtype) = (weight.dims2()?, x.dtype());
        let of_x = cuda::matrix(x, rows, depth)?; // (N, D)
        let dloss = dloss.detach().to_dtype(DType::F32)?;
        let read = copies[0].for_backward(weight)?; // (V, D)
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
        let ids = cuda::ids(gpu, &targets.ids)?;
        let targets = targets.on_gpu(&ids)?;
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
            .then(|| cuda::product(gpu, factors, 1, weight.dtype(), weight.shape()));
        Ok(vec![dx.transpose()?, dw.transpose()?])
    }
}
