//! Head and loss, some rows at a time, with their gradients at once: the logits of all rows are never there, and none
//! is kept.

use super::super::config::PlanKind;
use super::super::plan::{BufferRange, Phase};
use super::form::{Form, Forms};
use super::linear;
use super::program::Program;
use super::{Job, Lower, attribute, part as part_of, place_of};
use crate::Result;
use crate::graph::{self, Attribute, ValueId};
use crate::ops::cross_entropy::Reduction;
use crate::ops::cross_entropy::lowering::{gradient_of_counted, in_place};
use crate::ops::linear_cross_entropy;
use crate::ops::lowering::{Accumulate, Check, Named};
use crate::ops::product::{Factor, product, product_into};
use candle_core::DType;
use std::cell::RefCell;
use std::ops::Range;

/// Elements of logits at a time, about: 10 MiB of f32. Fewer rows would read and write the head's gradient more often
/// (it is added to once for each chunk), more would leave the cache.
const CHUNK_ELEMENTS: usize = 256 * 10_240;

/// On a GPU: products of so many rows are as fast as larger ones.
const GPU_CHUNK_ELEMENTS: usize = 4096 * 10_240;

/// Rows at a time at least, whatever the vocabulary.
const CHUNK_ROWS: usize = 64;

/// Head and loss, where the loss is what is differentiated: its gradient is known beforehand.
struct Head {
    path: String,
    /// (N, D).
    x: graph::ValueRef,
    /// (V, D).
    weight: ValueId,
    /// (N).
    targets: graph::ValueRef,
    /// The target that does not count.
    ignore: Option<i64>,
    reduction: Reduction,
    loss: ValueId,
    /// Whether gradients of x and of the weight are needed.
    gradients: [bool; 2],
    dtype: DType,
    rows: usize,
    width: usize,
    classes: usize,
    /// The gradient of x, which forward computes.
    dx: RefCell<Option<BufferRange>>,
}

impl Head {
    /// Rows whose logits are there at a time.
    fn rows_at_once(&self, on_gpu: bool) -> usize {
        let within =
            |elements: usize| (elements / self.classes).clamp(CHUNK_ROWS.min(self.rows), self.rows);
        match on_gpu {
            false => within(CHUNK_ELEMENTS),
            // All of a size, and so that each begins where products like it.
            true => {
                let chunks = self.rows.div_ceil(within(GPU_CHUNK_ELEMENTS));
                self.rows.div_ceil(chunks).next_multiple_of(2 * CHUNK_ROWS)
            }
        }
    }

    /// From a row of logits to the next, in elements: on a GPU whole 16 bytes.
    fn row_stride(&self, on_gpu: bool) -> usize {
        match on_gpu {
            false => self.classes,
            true => self.classes.next_multiple_of(in_vector(self.dtype)),
        }
    }

    /// The classes in parts, each multiplied by itself. cuBLASLt has only slow kernels for a vocabulary that is not in
    /// whole 16 bytes (GPT-2's 50,257: 6.7 times slower), however its rows lie: on a GPU the few beyond come apart, and
    /// first, so that dx rounds their sum and not the large one twice.
    fn parts(&self, on_gpu: bool) -> Vec<Range<usize>> {
        let whole = match on_gpu {
            false => self.classes,
            true => self.classes - self.classes % in_vector(self.dtype),
        };
        let mut parts = vec![whole..self.classes, 0..whole];
        parts.retain(|part| !part.is_empty());
        parts
    }
}

/// Elements of 16 bytes.
fn in_vector(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

impl Form for Head {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        vec![self.loss]
    }

    fn copy_weights(&self, lower: &mut Lower<'_>) {
        lower.plan.path.clone_from(&self.path);
        lower.product_weight(&[self.weight], self.dtype);
    }

    /// The loss is computed in f32 for half precision, from logits that come in its dtype.
    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let (all_rows, width, classes) = (self.rows, self.width, self.classes);
        let micro_batches = lower.job.config.accumulation;
        lower.plan.phase = Phase::Loss;
        let ids = Check::Ids {
            bound: classes,
            ignore: self.ignore,
        };
        lower.checks.push((self.targets.value, ids));
        let (x, targets) = (lower.read(&self.x), lower.read(&self.targets));
        let wide = lower.program.graph.value(self.loss).dtype;
        let losses = lower.temporary("losses", &[all_rows], wide);
        // How many ids are ignored is known in a run alone.
        let (divisor, dloss) = match (self.reduction, self.ignore) {
            (Reduction::Sum, _) => (1, None), // the run's loss gradient has the divisor
            (Reduction::Mean, None) => (all_rows * micro_batches, None),
            (Reduction::Mean, Some(ignore)) => {
                let dloss = lower.temporary("dloss", &[1], wide);
                let (reads, writes) = ([("targets", targets.clone())], [("dloss", dloss.clone())]);
                lower.plan.call(gradient_of_counted(ignore), reads, writes);
                (micro_batches, Some(dloss))
            }
        };
        let [dx, dw] = self.gradients;
        let dx = dx.then(|| lower.temporary("dx", &[all_rows, width], self.dtype));
        let weight = lower.product_weight(&[self.weight], self.dtype);
        let dw = dw.then(|| lower.gradient_of_weights(&[self.weight], wide));
        let at_once = self.rows_at_once(lower.is_on_gpu());
        let row_stride = self.row_stride(lower.is_on_gpu());
        let parts = self.parts(lower.is_on_gpu());
        for start in (0..all_rows).step_by(at_once) {
            let rows = at_once.min(all_rows - start);
            let some = |x: &BufferRange, width: usize| part_of(x, start * width, rows * width);
            lower.plan.phase = Phase::Loss;
            let logits = lower.temporary("logits", &[rows, row_stride], self.dtype);
            let some_x = some(&x, width);
            let of_x = Factor::new(rows, width);
            let of_logits = |part: &Range<usize>| {
                let factor = Factor::new(rows, part.len()).with_row_stride(row_stride);
                let len = rows * row_stride - part.start;
                (factor, part_of(&logits, part.start, len))
            };
            let of_weight = |part: &Range<usize>, weight: &BufferRange| {
                let some = part_of(weight, part.start * width, part.len() * width);
                (Factor::new(part.len(), width), some)
            };
            for part in &parts {
                let ((_, c), (of_weight, b)) = (of_logits(part), of_weight(part, &weight));
                let kernel = product_into(of_x, of_weight.t(), row_stride, Accumulate::Never);
                let factors = [("a", some_x.clone()), ("b", b)];
                lower.plan.call(kernel, factors, [("c", c)]);
            }
            // The logits become their gradient.
            let reads = Named::from([("targets", some(&targets, 1))]);
            let reads = reads.with_some("dloss", dloss.clone());
            let writes = [("logits", logits.clone()), ("losses", some(&losses, 1))];
            let kernel = in_place([rows, classes, row_stride], divisor, self.ignore);
            lower.plan.call(kernel, reads, writes);
            lower.plan.phase = Phase::LossGradient;
            if let Some(dx) = &dx {
                let mut accumulate = Accumulate::Never;
                for part in &parts {
                    let ((of_logits, a), (of_weight, b)) =
                        (of_logits(part), of_weight(part, &weight));
                    let kernel = product(of_logits, of_weight, accumulate);
                    let writes = [("c", some(dx, width))];
                    lower.plan.call(kernel, [("a", a), ("b", b)], writes);
                    accumulate = Accumulate::Always;
                }
            }
            if let Some((dw, first)) = &dw {
                let accumulate = if start == 0 {
                    *first
                } else {
                    Accumulate::Always
                };
                for part in &parts {
                    let ((of_logits, a), (_, c)) = (of_logits(part), of_weight(part, dw));
                    let kernel = product(of_logits.t(), of_x, accumulate);
                    let factors = [("a", a), ("b", some_x.clone())];
                    lower.plan.call(kernel, factors, [("c", c)]);
                }
            }
        }
        lower.plan.phase = Phase::Loss;
        let ignored = self.ignore.map(|id| (targets, id));
        let ignored = ignored.filter(|_| self.reduction == Reduction::Mean);
        lower.mean_loss = Some(lower.mean_of(losses, divisor, ignored));
        if dw.is_some() {
            lower.gradient_done(&[self.weight]);
        }
        if let Some(dx) = dx {
            self.dx.replace(Some(dx.clone()));
            lower.gradients.set(self.loss, dx); // that there is one
        }
        Ok(())
    }

    fn differentiates_at_once(&self) -> bool {
        true
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        lower.gradients.take(self.loss);
        if let Some(dx) = self.dx.take() {
            lower.contribute(&self.x, dx);
        }
        Ok(())
    }
}

/// The loss, if it is made of a head.
pub(super) fn find(program: &Program<'_>, job: &Job<'_>, forms: &mut Forms) {
    if job.kind != PlanKind::TrainStep {
        return; // its gradient is not known beforehand
    }
    let Some(loss) = program.outputs.first().map(|output| output.value) else {
        return;
    };
    let Some(i) = program.maker(loss) else {
        return;
    };
    let (graph, node) = (program.graph, &program.nodes[i]);
    let is_head = node.op == linear_cross_entropy::NAME
        && !node.composed
        && linear::is_own(program, job, node, 1);
    // Read by anything else, its gradient would not be 1.
    if !is_head || !program.is_wanted(loss) || !program.readers(loss).is_empty() {
        return;
    }
    let (x, weight) = (&node.inputs[0], &node.inputs[1]);
    let targets = node.reads[node.reads.len() - 1].clone();
    let is_empty = [x, weight].iter().any(|x| graph.shape_of(x).contains(&0));
    if graph.value(targets.value).dtype != DType::U32 || is_empty {
        return;
    }
    let ignore = match attribute(node, "ignore") {
        Some(Attribute::Integer(id)) => Some(id),
        _ => None,
    };
    let reduction = match attribute(node, "divisor") {
        Some(_) => Reduction::Sum,
        None => Reduction::Mean,
    };
    let [classes, width] = [0, 1].map(|dim| graph.shape_of(weight)[dim]);
    let form = Head {
        path: place_of(node),
        rows: graph.shape_of(x).iter().product::<usize>() / width,
        x: x.clone(),
        weight: weight.value,
        targets,
        ignore,
        reduction,
        loss,
        gradients: [0, 1].map(|input| program.passes_through(node, input)),
        dtype: graph.value(x.value).dtype,
        width,
        classes,
        dx: RefCell::default(),
    };
    forms.add(i, [], form);
}
