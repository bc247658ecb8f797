//! Head and loss of a step, some rows at a time, with their gradients at once: the logits of all rows are never there,
//! and none is kept.

use super::cross_entropy::Reduction;
use super::cross_entropy::lowering::{gradient_of_counted, in_place, mean_of};
use super::lowering::{Accumulate, Calls, Check, Named, Signature, Slot};
use super::product::{Factor, product, product_into};
use super::weight::read_weight;
use crate::graph::Target;
use candle_core::DType;
use std::ops::Range;

/// Elements of logits at a time, about: 10 MiB of f32. Fewer rows would read and write the head's gradient more often
/// (it is added to once for each chunk), more would leave the cache.
const CHUNK_ELEMENTS: usize = 256 * 10_240;

/// On a GPU: products of so many rows are as fast as larger ones.
const GPU_CHUNK_ELEMENTS: usize = 4096 * 10_240;

/// Rows at a time at least, whatever the vocabulary.
const CHUNK_ROWS: usize = 64;

/// [`linear_cross_entropy`](super::linear_cross_entropy()) where the loss is what is differentiated: its gradient is
/// known beforehand.
///
/// Inputs: x (N, D), the weight (V, D). Reads: the weight's copy, if it has one, and the targets (N). Forward makes the
/// mean loss of the step, and the gradients of both inputs; backward nothing. The loss is computed in f32 for half
/// precision, from logits that come in its dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadLoss {
    /// The target that does not count.
    pub ignore: Option<i64>,
    pub reduction: Reduction,
    /// Micro-batches of the step, whose losses' mean it takes.
    pub micro_batches: usize,
    /// Whether gradients of x and of the weight are needed.
    pub wanted: [bool; 2],
}

/// Its sizes.
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
        let targets = signature.reads.len() - 1;
        let ids = Check::Ids {
            bound: classes,
            ignore: self.ignore,
        };
        let mut calls = Calls::default().checked(targets, ids);
        let targets = Slot::Read(targets);
        let wide = signature.output.dtype;
        let losses = calls.temporary("losses", &[all_rows], wide);
        // How many ids are ignored is known in a run alone.
        let (divisor, dloss) = match (self.reduction, self.ignore) {
            (Reduction::Sum, _) => (1, None), // the run's loss gradient has the divisor
            (Reduction::Mean, None) => (all_rows * self.micro_batches, None),
            (Reduction::Mean, Some(ignore)) => {
                let dloss = calls.temporary("dloss", &[1], wide);
                let (reads, writes) = ([("targets", targets)], [("dloss", dloss)]);
                calls.push(gradient_of_counted(ignore), reads, writes);
                (self.micro_batches, Some(dloss))
            }
        };
        let [dx_is_wanted, dw_is_wanted] = self.wanted;
        let weight = read_weight(signature, 1);
        let (at_once, row_stride) = (sizes.rows_at_once(), sizes.row_stride());
        let parts = sizes.parts();
        let mut of_weight = Accumulate::Never; // or what the plan says
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
                let kernel = product_into(of_x, of_part.t(), row_stride, Accumulate::Never);
                calls.push(kernel, [("a", some_x), ("b", b)], [("c", c)]);
            }
            // The logits become their gradient.
            let reads = Named::from([("targets", some(&mut calls, targets, 1))]);
            let reads = reads.with_some("dloss", dloss);
            let writes = [("logits", logits), ("losses", some(&mut calls, losses, 1))];
            let kernel = in_place([rows, classes, row_stride], divisor, self.ignore);
            calls.push(kernel, reads, writes);
            if dx_is_wanted {
                let mut accumulate = Accumulate::Never;
                for part in &parts {
                    let (of_logits, a) = some_logits(&mut calls, part);
                    let (of_part, b) = some_weight(&mut calls, weight, part);
                    let kernel = product(of_logits, of_part, accumulate);
                    let dx = some(&mut calls, Slot::Gradient(0), width);
                    calls.push(kernel, [("a", a), ("b", b)], [("c", dx)]);
                    accumulate = Accumulate::Always;
                }
            }
            if dw_is_wanted {
                for part in &parts {
                    let (of_logits, a) = some_logits(&mut calls, part);
                    let (_, dw) = some_weight(&mut calls, Slot::Gradient(1), part);
                    let kernel = product(of_logits.t(), of_x, of_weight);
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

    /// Rows whose logits are there at a time.
    fn rows_at_once(&self) -> usize {
        let within =
            |elements: usize| (elements / self.classes).clamp(CHUNK_ROWS.min(self.rows), self.rows);
        match self.target {
            Target::Cpu => within(CHUNK_ELEMENTS),
            // All of a size, and so that each begins where products like it.
            Target::Cuda => {
                let chunks = self.rows.div_ceil(within(GPU_CHUNK_ELEMENTS));
                self.rows.div_ceil(chunks).next_multiple_of(2 * CHUNK_ROWS)
            }
        }
    }

    /// From a row of logits to the next, in elements: on a GPU whole 16 bytes.
    fn row_stride(&self) -> usize {
        match self.target {
            Target::Cpu => self.classes,
            Target::Cuda => self.classes.next_multiple_of(self.in_vector()),
        }
    }

    /// The classes in parts, each multiplied by itself. cuBLASLt has only slow kernels for a vocabulary that is not in
    /// whole 16 bytes (GPT-2's 50,257: 6.7 times slower), however its rows lie: on a GPU the few beyond come apart, and
    /// first, so that dx rounds their sum and not the large one twice.
    fn parts(&self) -> Vec<Range<usize>> {
        let whole = match self.target {
            Target::Cpu => self.classes,
            Target::Cuda => self.classes - self.classes % self.in_vector(),
        };
        let mut parts = vec![whole..self.classes, 0..whole];
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Elements of 16 bytes.
    fn in_vector(&self) -> usize {
        16 / self.dtype.size_in_bytes()
    }
}
