//! The head and the loss of a training step, in chunks of rows. Each chunk's gradients are computed right after its
//! loss, so the logits of all rows never exist and none are saved.

use super::cross_entropy::LossTerms;
use super::cross_entropy::lowering::{gradient_of_counted, in_place, mean_of};
use super::loss::Reduction;
use super::lowering::{Accumulate, Calls, Check, Named, Signature, Slot};
use super::matmul_kernel::{Factor, matmul, matmul_into};
use super::weight::read_weight;
use crate::graph::Target;
use candle_core::DType;
use std::ops::Range;

/// The number of logits in a chunk on the CPU, about 10 MiB of f32. Larger chunks would not fit the cache.
const CHUNK_ELEMENTS: usize = 256 * 10_240;

/// The number of logits in a chunk on a GPU, where larger matmuls are not faster.
const GPU_CHUNK_ELEMENTS: usize = 4096 * 10_240;

/// The minimum number of rows in a chunk on a GPU in half precision, for more classes. Each chunk reads and writes the
/// gradient of the head's weight in f32: with few rows that takes longer than the matmul.
const GPU_CHUNK_ROWS: usize = 2048;

/// The minimum number of rows in a chunk.
const CHUNK_ROWS: usize = 64;

/// [`linear_cross_entropy`](super::linear_cross_entropy()) as the loss of a step, whose gradient is known in forward.
///
/// Inputs: x (N, D), the weight (V, D). Reads: the copy of the weight, if it has one, and the targets (N). Forward
/// computes the mean loss of the step and the gradients of both inputs; backward has no calls. Logits are in x's dtype,
/// the loss in f32 or f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadLoss {
    /// The target that is ignored.
    pub ignore: Option<i64>,
    /// The mean or the sum.
    pub reduction: Reduction,
    pub terms: LossTerms,
    /// The number of micro-batches whose mean the loss is.
    pub micro_batches: usize,
}

/// Sizes and device.
struct Sizes {
    rows: usize,
    width: usize,
    classes: usize,
    dtype: DType,
    target: Target,
}

impl HeadLoss {
    pub fn forward(&self, signature: &Signature<'_>) -> Calls {
        let sizes = &Sizes::of(signature);
        let Sizes {
            rows: all_rows,
            width,
            classes,
            ..
        } = *sizes;
        let targets = signature.extra_inputs.len() - 1;
        let ids = Check::Ids {
            bound: classes,
            ignore: self.ignore,
        };
        let mut calls = Calls::default().checked(targets, ids);
        let targets = Slot::ExtraInput(targets);
        let wide = signature.output.dtype;
        let losses = calls.temporary("losses", &[all_rows], wide);
        // How many ids are ignored is only known in a run.
        let (divisor, dloss) = match (self.reduction, self.ignore) {
            (Reduction::Sum | Reduction::None, _) => (1, None), // the run's loss gradient has the divisor
            (Reduction::Mean, None) => (all_rows * self.micro_batches, None),
            (Reduction::Mean, Some(ignore)) => {
                let dloss = calls.temporary("dloss", &[1], wide);
                let (reads, writes) = ([("targets", targets)], [("dloss", dloss)]);
                calls.push(gradient_of_counted(ignore), reads, writes);
                (self.micro_batches, Some(dloss))
            }
        };
        let [dx_is_wanted, dw_is_wanted] = [0, 1].map(|input| signature.needs_grad(input));
        let weight = read_weight(signature, 1);
        let (at_once, row_stride) = (sizes.rows_at_once(), sizes.row_stride());
        let parts = sizes.parts();
        let mut of_weight = Accumulate::Never; // unless the plan overrides it
        for start in (0..all_rows).step_by(at_once) {
            let rows = at_once.min(all_rows - start);
            let some = |calls: &mut Calls, slot: Slot, width: usize| {
                calls.part(slot, start * width, rows * width)
            };
            let logits = calls.temporary("logits", &[rows, row_stride], sizes.dtype);
            let some_x = some(&mut calls, Slot::Input(0), width);
            let of_x = Factor::new(rows, width);
            let some_logits = |calls: &mut Calls, part: &Range<usize>| {
                let factor = Factor::new(rows, part.len()).with_row_stride(row_stride);
                let len = rows * row_stride - part.start;
                (factor, calls.part(logits, part.start, len))
            };
            let some_weight = |calls: &mut Calls, slot: Slot, part: &Range<usize>| {
                let some = calls.part(slot, part.start * width, part.len() * width);
                (Factor::new(part.len(), width), some)
            };
            for part in &parts {
                let (_, c) = some_logits(&mut calls, part);
                let (of_part, b) = some_weight(&mut calls, weight, part);
                let kernel = matmul_into(of_x, of_part.t(), row_stride, Accumulate::Never);
                calls.push(kernel, [("a", some_x), ("b", b)], [("c", c)]);
            }
            // The gradient overwrites the logits.
            let reads = Named::from([("targets", some(&mut calls, targets, 1))]);
            let reads = reads.with_some("dloss", dloss);
            let writes = [("logits", logits), ("losses", some(&mut calls, losses, 1))];
            let kernel = in_place(
                [rows, classes, row_stride],
                divisor,
                self.ignore,
                self.terms,
            );
            calls.push(kernel, reads, writes);
            if dx_is_wanted {
                let mut accumulate = Accumulate::Never;
                for part in &parts {
                    let (of_logits, a) = some_logits(&mut calls, part);
                    let (of_part, b) = some_weight(&mut calls, weight, part);
                    let kernel = matmul(of_logits, of_part, accumulate);
                    let dx = some(&mut calls, Slot::Gradient(0), width);
                    calls.push(kernel, [("a", a), ("b", b)], [("c", dx)]);
                    accumulate = Accumulate::Always;
                }
            }
            if dw_is_wanted {
                for part in &parts {
                    let (of_logits, a) = some_logits(&mut calls, part);
                    let (_, dw) = some_weight(&mut calls, Slot::Gradient(1), part);
                    let kernel = matmul(of_logits.t(), of_x, of_weight);
                    calls.push(kernel, [("a", a), ("b", some_x)], [("c", dw)]);
                }
                of_weight = Accumulate::Always;
            }
        }
        let ignored = self.ignore.filter(|_| self.reduction == Reduction::Mean);
        let reads = Named::from([("losses", losses)]);
        let reads = reads.with_some("targets", ignored.map(|_| targets));
        let kernel = mean_of(divisor, ignored, Accumulate::AfterFirst);
        calls.call(kernel, reads, [("loss", Slot::StepLoss)])
    }
}

impl Sizes {
    fn of(signature: &Signature<'_>) -> Self {
        let (x, weight) = (&signature.inputs[0], signature.inputs[1].dims);
        Self {
            rows: x.rows(),
            width: weight[1],
            classes: weight[0],
            dtype: x.dtype,
            target: signature.target,
        }
    }

    /// Returns the rows of a chunk.
    fn rows_at_once(&self) -> usize {
        let (elements, least) = match (self.target, self.dtype) {
            // Each chunk reads the weight twice, and reads and writes its gradient: with few rows that takes longer
            // than reading logits from memory. Narrow heads have small weights.
            (Target::Cpu, _) => {
                let least = (self.width / 2).clamp(2 * CHUNK_ROWS, 4 * CHUNK_ROWS);
                (CHUNK_ELEMENTS, least)
            }
            (Target::Cuda, DType::F16 | DType::BF16) => (GPU_CHUNK_ELEMENTS, GPU_CHUNK_ROWS),
            (Target::Cuda, _) => (GPU_CHUNK_ELEMENTS, CHUNK_ROWS),
        };
        let rows = (elements / self.classes).max(least).min(self.rows);
        match self.target {
            Target::Cpu => rows,
            // Chunks of equal size that start at aligned rows.
            Target::Cuda => {
                let chunks = self.rows.div_ceil(rows);
                self.rows.div_ceil(chunks).next_multiple_of(2 * CHUNK_ROWS)
            }
        }
    }

    /// Returns the row stride of the logits, in elements: a multiple of 16 bytes on a GPU.
    fn row_stride(&self) -> usize {
        match self.target {
            Target::Cpu => self.classes,
            Target::Cuda => self.classes.next_multiple_of(self.in_vector()),
        }
    }

    /// Splits the classes into ranges with a matmul each. cuBLASLt only has slow kernels for a vocabulary that is not a
    /// multiple of 16 bytes (GPT-2's 50,257: 6.7 times slower), whatever the row stride. On a GPU the remaining classes
    /// are a range of their own. It comes first, so that dx rounds the small sum twice and not the large one.
    fn parts(&self) -> Vec<Range<usize>> {
        let whole = match self.target {
            Target::Cpu => self.classes,
            Target::Cuda => self.classes - self.classes % self.in_vector(),
        };
        let mut parts = vec![whole..self.classes, 0..whole];
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Returns how many elements 16 bytes hold.
    fn in_vector(&self) -> usize {
        16 / self.dtype.size_in_bytes()
    }
}
