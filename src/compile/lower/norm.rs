//! RMSNorm, with the addition before it where it is of a sum, as the norms of a residual stream are.
//!
//! The gradient of what is normed is added to in place, and what a norm gives does not stay: its backward, which reads
//! the same, recomputes it where its gradient lay.

use super::super::plan::BufferRange;
use super::form::{Form, Forms};
use super::program::Program;
use super::recompute::Choice;
use super::{Job, Lower, Target, attribute, place_of};
use crate::Result;
use crate::graph::{Attribute, ValueId};
use crate::kernels::cpu::rows::residual_norm::partials_len;
use crate::kernels::workspace;
use crate::ops::lowering::{Named, converted};
use crate::ops::residual_norm;
use candle_core::DType;

struct Norm {
    path: String,
    weight: ValueId,
    /// Whether its gradient is needed.
    is_trained: bool,
    eps: f64,
    /// N.
    rows: usize,
    /// D.
    width: usize,
    /// What is normed, (N, D) in f32.
    x: ValueId,
    /// What x is the sum of, if its addition is planned with the norm.
    sum: Option<Sum>,
    /// For what follows, in the dtype that it reads: (N, D).
    y: ValueId,
    /// (N).
    rstd: ValueId,
}

struct Sum {
    /// (N, D) in f32.
    stream: ValueId,
    /// (N, D) in y's dtype.
    branch: ValueId,
    /// Whether they stay for backward in place of x.
    stays: bool,
    gradients: [bool; 2],
}

impl Norm {
    /// What backward reads: x, or stream and branch.
    fn kept(&self, lower: &mut Lower<'_>) -> (BufferRange, Option<BufferRange>) {
        match &self.sum {
            Some(sum) if sum.stays => {
                let branch = lower.value(sum.branch);
                (lower.value(sum.stream), Some(branch))
            }
            _ => (lower.value(self.x), None),
        }
    }

    /// The norm's own backward, where a gradient of y is there: the gradient of x, and where a copy of it in half
    /// precision is to be made by the way, that.
    fn norm_backward(
        &self,
        lower: &mut Lower<'_>,
        dy: BufferRange,
        copies: bool,
    ) -> Option<BufferRange> {
        let before = lower.take_own(self.x);
        let add_dx = before.is_some();
        let shape = [self.rows, self.width];
        let dx = before.unwrap_or_else(|| lower.temporary("dx", &shape, DType::F32));
        let (dw, accumulate) = match self.is_trained {
            true => lower.gradient_of_weights(&[self.weight], DType::F32),
            false => (lower.scratch(&[self.width], DType::F32), Default::default()),
        };
        let partials = match lower.is_on_gpu() {
            true => workspace::rms_norm_partials(self.rows, self.width),
            false => partials_len(self.rows, self.width),
        };
        let partials = lower.scratch(&[partials], DType::F32);
        let (x, branch) = self.kept(lower);
        let dtype = lower.program.graph.value(self.y).dtype;
        let copy = copies.then(|| lower.temporary("copy", &shape, dtype));
        let kernel = residual_norm::norm_backward(shape, add_dx, accumulate);
        let (weight, rstd) = (lower.value(self.weight), lower.value(self.rstd));
        let reads = Named::from([("x", x), ("weight", weight), ("rstd", rstd)]);
        let reads = reads.with_some("branch", branch);
        let writes = [("dy", dy), ("dx", dx.clone()), ("dweight", dw)];
        let writes = Named::from(writes).with("partials", partials);
        let writes = writes.with_some("copy", copy.clone());
        lower.plan.call(kernel, reads, writes);
        lower.gradients.set(self.x, dx);
        if self.is_trained {
            lower.gradient_done(&[self.weight]);
        }
        copy
    }

    /// The gradients of stream and branch, from that of their sum; `copy` is that in the branch's dtype.
    fn sum_backward(&self, lower: &mut Lower<'_>, sum: &Sum, copy: Option<BufferRange>) {
        let Some(dx) = lower.gradients.get(self.x) else {
            return;
        };
        let dtype = lower.program.graph.value(sum.branch).dtype;
        let whole = |value| crate::graph::ValueRef {
            value,
            view: None,
            tracked: true,
        };
        if sum.gradients[0] {
            lower.contribute(&whole(sum.stream), dx.clone());
        }
        if sum.gradients[1] {
            let dx = match copy {
                Some(copy) => copy,
                None if dtype == DType::F32 => dx,
                None => {
                    let copy = lower.temporary("copy", &[self.rows, self.width], dtype);
                    let writes = [("y", copy.clone())];
                    lower.plan.call(converted(), [("x", dx)], writes);
                    copy
                }
            };
            lower.contribute(&whole(sum.branch), dx);
        }
        lower.gradients.take(self.x); // until here it is read
    }
}

impl Form for Norm {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        let sum = self.sum.is_some().then_some(self.x);
        [self.y].into_iter().chain(sum).collect()
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let (shape, eps) = ([self.rows, self.width], self.eps);
        let sum = self
            .sum
            .as_ref()
            .filter(|_| lower.places[self.x.0].is_none());
        let x = match sum {
            Some(_) => lower.make(self.x, "x", &shape),
            None => lower.value(self.x),
        };
        let y = lower.make(self.y, "y", &shape);
        let rstd = lower.make(self.rstd, "rstd", &shape[..1]);
        let weight = lower.value(self.weight);
        match sum {
            Some(sum) => {
                let (stream, branch) = (lower.value(sum.stream), lower.value(sum.branch));
                let reads = [("x", stream), ("branch", branch), ("weight", weight)];
                let writes = [("sum", x), ("y", y), ("rstd", rstd)];
                let kernel = residual_norm::add_norm(shape, eps);
                lower.plan.call(kernel, reads, writes);
            }
            None => {
                let kernel = residual_norm::norm(shape, eps);
                let reads = [("x", x), ("weight", weight)];
                lower.plan.call(kernel, reads, [("y", y), ("rstd", rstd)]);
            }
        }
        Ok(())
    }

    fn remakes_output(&self) -> bool {
        true
    }

    fn recomputed_output(&self, lower: &mut Lower<'_>) -> Option<BufferRange> {
        let (shape, eps) = ([self.rows, self.width], self.eps);
        lower.plan.path.clone_from(&self.path);
        let dtype = lower.program.graph.value(self.y).dtype;
        let y = lower.temporary("y", &shape, dtype);
        let rstd = lower.temporary("rstd", &shape[..1], DType::F32);
        let (x, branch) = self.kept(lower);
        let reads = Named::from([("x", x), ("weight", lower.value(self.weight))]);
        let reads = reads.with_some("branch", branch);
        let writes = [("y", y.clone()), ("rstd", rstd)];
        let kernel = residual_norm::norm(shape, eps);
        lower.plan.call(kernel, reads, writes);
        Some(y)
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let dtype = lower.program.graph.value(self.y).dtype;
        let copies = lower.is_on_gpu()
            && dtype != DType::F32
            && self.sum.as_ref().is_some_and(|sum| sum.gradients[1]);
        let dy = lower.take_own(self.y);
        let copy = match &dy {
            Some(dy) => self.norm_backward(lower, dy.clone(), copies),
            None => None,
        };
        if let Some(sum) = &self.sum {
            self.sum_backward(lower, sum, copy);
        }
        if let Some(y) = dy {
            lower.remade(self.y, y);
        }
        Ok(())
    }
}

/// The norms whose kernel is a call: of f32, to what all that read it want.
pub(super) fn find(program: &Program<'_>, job: &Job<'_>, choice: &Choice, forms: &mut Forms) {
    // By value: whether it is a sum that does not stay.
    let mut passing = vec![false; program.graph.values.len()];
    for (i, node) in program.nodes.iter().enumerate() {
        if node.op == "rms_norm" && is_plannable(program, i) {
            let y = rounded(program, i);
            let sum = sum_of(program, i, y, forms);
            let is_half = program.graph.value(y).dtype != DType::F32;
            let (x, weight) = (node.inputs[0].value, node.inputs[1].value);
            let nodes = sum.iter().flat_map(|(_, nodes)| nodes.clone());
            let cast = program.maker(y).filter(|cast| *cast != i);
            let nodes: Vec<usize> = nodes.chain(cast).collect();
            let sum = sum.map(|(mut sum, _)| {
                let can_pass =
                    job.function.target == Target::Cuda && is_half && !passing[sum.stream.0];
                sum.stays = can_pass && choice.takes_sum();
                passing[x.0] = sum.stays;
                sum
            });
            let dims = program.graph.shape_of(&node.inputs[0]);
            let width = dims[dims.len() - 1];
            let form = Norm {
                path: place_of(node),
                eps: match attribute(node, "eps") {
                    Some(Attribute::Number(eps)) => eps,
                    _ => continue,
                },
                rows: dims.iter().product::<usize>() / width,
                width,
                x,
                weight,
                is_trained: program.passes_through(node, 1),
                sum,
                y,
                rstd: node.kept[0].value,
            };
            forms.add(i, nodes, form);
        }
    }
}

fn is_plannable(program: &Program<'_>, i: usize) -> bool {
    let node = &program.nodes[i];
    let (x, weight) = (&node.inputs[0], &node.inputs[1]);
    let are_f32 = [x, weight]
        .iter()
        .all(|operand| program.graph.value(operand.value).dtype == DType::F32);
    let is_empty = program.graph.shape_of(x).contains(&0);
    // Its backward leaves a gradient of x: one that flows, and not into a weight.
    let flows = program.passes_through(node, 0) && program.maker(x.value).is_some();
    let leaves_gradient = flows || !program.is_wanted(x.value) || !program.is_wanted(node.output);
    are_f32
        && !is_empty
        && leaves_gradient
        && !node.composed
        && node.kept.len() == 1
        && x.view.is_none()
        && program.is_leaf(weight)
}

/// What the norm at `i` gives: its cast, if nothing else reads it.
fn rounded(program: &Program<'_>, i: usize) -> ValueId {
    let y = program.nodes[i].output;
    let Some(cast) = program.only_reader(y) else {
        return y;
    };
    let node = &program.nodes[cast];
    let dtype = program.graph.value(node.output).dtype;
    let is_half = matches!(dtype, DType::BF16 | DType::F16);
    let is_whole = node.inputs.len() == 1 && node.inputs[0].view.is_none();
    match node.op == "cast" && is_half && is_whole && program.are_in_one_segment(i, cast) {
        true => node.output,
        false => y,
    }
}

/// What is normed at `i` as a sum, if that is one which the norm reads before all others; and the nodes that make it.
fn sum_of(program: &Program<'_>, i: usize, y: ValueId, forms: &Forms) -> Option<(Sum, Vec<usize>)> {
    let graph = program.graph;
    let x = program.nodes[i].inputs[0].value;
    let at = program.maker(x)?;
    let add = &program.nodes[at];
    let is_first = program.readers(x).first() == Some(&i) && !program.is_output(x);
    let whole = |operand: &crate::graph::ValueRef| {
        operand.view.is_none() && graph.value(operand.value).shape == graph.value(x).shape
    };
    if add.op != "add" || !forms.is_free(at) || !is_first || !add.inputs.iter().all(whole) {
        return None;
    }
    let [stream, summand] = [0, 1].map(|input| add.inputs[input].value);
    let dtype = graph.value(y).dtype;
    // Under autocast the branch is widened for the sum alone.
    let widened = program.maker(summand).filter(|cast| {
        let node = &program.nodes[*cast];
        let is_cast = node.op == "cast" && node.inputs.len() == 1 && whole(&node.inputs[0]);
        is_cast && forms.is_free(*cast) && program.only_reader(summand) == Some(at)
    });
    let (branch, nodes) = match widened {
        Some(cast) if dtype != DType::F32 => (program.nodes[cast].inputs[0].value, vec![at, cast]),
        _ => (summand, vec![at]),
    };
    let fits = graph.value(stream).dtype == DType::F32 && graph.value(branch).dtype == dtype;
    let gradients = [0, 1].map(|input| program.passes_through(add, input));
    let sum = Sum {
        stream,
        branch,
        stays: false,
        gradients,
    };
    fits.then_some((sum, nodes))
}
