//! Lowering of a traced graph to a plan: the forward of all nodes in order, their backward in reverse, then the update.
//!
//! The function's nodes are rewritten first ([`program`](super::program)). Each node's lowering then writes its forward
//! calls, in order ([`mod@forward`]), and its backward calls, in reverse, which pass gradients to the inputs
//! ([`mod@backward`]).
//!
//! The other modules: operands of values ([`values`]), gradients and their sums ([`gradients`]), weights, their copies
//! and updates ([`weights`]), recomputation in backward ([`recompute`]), dead calls ([`dead`]), averages of gradients
//! over ranks ([`exchange`]), weights that other ranks update ([`fetch`]) and sharded weights ([`sharded`]). Offsets of
//! buffers are assigned by [`arena`](super::arena).

mod backward;
mod dead;
mod exchange;
mod fetch;
mod finish;
mod forward;
mod gradients;
mod loss;
mod node_writer;
mod recompute;
mod sharded;
#[cfg(test)]
mod tests;
mod values;
mod weights;

use super::config::{PlanKind, StepConfig};
use super::costs::GroupCost;
use super::op::{BufferRange, Phase};
use super::plan::Plan;
use super::program::{Program, Recompute};
use super::traced::TracedFunction;
use super::writer::Writer;
use crate::graph::{self, Target, ValueId};
use crate::ops::cost::Cost;
use crate::ops::lowering::Check;
use crate::optim::MissingGradients;
use crate::{Error, Result};
use candle_core::DType;
use gradients::Gradients;
use std::collections::HashMap;
use std::rc::Rc;
use weights::Weights;

#[derive(Clone, Copy)]
pub(super) struct LowerRequest<'a> {
    /// Its first output is the loss, or the output of a [`PlanKind::Forward`]. For a [`PlanKind::Gradients`] the second
    /// output is the gradient of the first, which is an input.
    pub function: &'a TracedFunction,
    pub kind: PlanKind,
    pub config: &'a StepConfig,
    pub recompute: Recompute,
}

/// A plan with the meaning of its locations and results.
pub(super) struct Lowered {
    pub plan: Plan,
    /// The arguments in [`Location::Input`] and [`Location::Argument`], by index: a full value, or a view of it made
    /// contiguous.
    pub arguments: Vec<(ValueId, Option<graph::View>)>,
    /// The constants that the plan's tables are computed from.
    pub tables: Vec<TableOf>,
    /// The checks of data before a run.
    pub checks: Vec<(ValueId, Check)>,
    /// The mean loss (1), f64; in a plan of another kind, the function's output.
    pub output: BufferRange,
    /// The parameters' gradients; `None` if the optimizer runs in backward or another rank has the gradient.
    pub gradients: Vec<Option<BufferRange>>,
    /// The norm of all gradients and the factor that they are multiplied by.
    pub norm: Option<BufferRange>,
    /// The actual counts for [`LowerRequest::recompute`].
    pub recompute: Recompute,
    /// Parameters that the loss does not depend on, and how each is planned.
    pub unreached: Vec<(usize, MissingGradients)>,
}

/// Plans a traced function.
///
/// # Errors
/// An op that cannot be planned; an output that a plan of this kind does not support.
pub(super) fn plan(job: &LowerRequest<'_>) -> Result<Lowered> {
    let mut lower = Lower::new(job);
    lower.check_output()?;
    if job.config.accumulation > 1 || lower.is_on_gpu() {
        lower.copy_weights();
    }
    let first = lower.plan.calls.len();
    if job.kind == PlanKind::Forward {
        lower.place_output();
    }
    lower.forward()?;
    let output = match job.kind {
        PlanKind::TrainStep => lower.mean_loss()?,
        PlanKind::Forward => lower.placed_output(),
        PlanKind::Gradients => lower.begin_with_output_gradient(),
    };
    if job.kind != PlanKind::Forward {
        lower.free_weights();
        lower.backward()?;
        lower.scatter_all_gradients();
        lower.complete_gradients()?;
    }
    let per_micro_batch = first..lower.plan.calls.len();
    if job.kind == PlanKind::TrainStep {
        lower.update();
    }
    lower.finish(output, per_micro_batch)
}

/// A constant that is a table of the plan, and the dtype that it is rounded to.
pub(super) type TableOf = (graph::ValueRef, DType);

struct Lower<'a> {
    request: &'a LowerRequest<'a>,
    program: Rc<Program>,
    /// Whether each node's backward recomputes the output in the buffer of the output's gradient.
    recomputes_output: Vec<bool>,
    plan: Writer,
    /// The operand that holds each value.
    places: Vec<Option<BufferRange>>,
    /// Contiguous copies of views.
    dense: HashMap<(usize, graph::View), BufferRange>,
    /// Each table with the constant that it is computed from.
    tables: Vec<(TableOf, Vec<f32>)>,
    arguments: Vec<(ValueId, Option<graph::View>)>,
    checks: Vec<(ValueId, Check)>,
    gradients: Gradients,
    weights: Weights,
    /// The mean loss, once its calls are written.
    mean_loss: Option<BufferRange>,
    unreached: Vec<(usize, MissingGradients)>,
    /// The actual counts for [`LowerRequest::recompute`].
    recompute: Recompute,
}

impl<'a> Lower<'a> {
    fn new(job: &'a LowerRequest<'a>) -> Self {
        let function = job.function;
        let mut program = Program::new(function, job.kind, job.config.accumulation);
        let recompute = program.recompute(job.recompute);
        Self {
            request: job,
            recomputes_output: match job.kind.has_backward() {
                true => backward::nodes_recomputing_output(&program),
                false => vec![false; program.nodes.len()],
            },
            plan: Writer::default(),
            places: vec![None; program.values.len()],
            dense: HashMap::new(),
            tables: Vec::new(),
            arguments: Vec::new(),
            checks: Vec::new(),
            gradients: Gradients::default(),
            weights: Weights::new(&program, job),
            mean_loss: None,
            unreached: Vec::new(),
            recompute,
            program: Rc::new(program),
        }
    }

    fn is_on_gpu(&self) -> bool {
        self.request.function.target == Target::Cuda
    }

    fn forward(&mut self) -> Result<()> {
        (0..self.program.nodes.len()).try_for_each(|i| self.run_forward(i))
    }

    fn run_forward(&mut self, i: usize) -> Result<()> {
        let [cost, _] = self.program.nodes[i].costs;
        self.run_part(i, cost, |lower| lower.forward_of(i))
    }

    /// Writes calls that form a part of their own, with this cost.
    fn run_part(
        &mut self,
        i: usize,
        cost: Cost,
        write: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        self.plan.path.clone_from(&node.path);
        self.plan.module = node.module;
        self.plan.cost_index = Some(self.plan.group_costs.len());
        write(self)?;
        self.plan.cost_index = None;
        self.plan.group_costs.push(GroupCost {
            path: node.path.clone(),
            ops: node.ops.clone(),
            phase: self.plan.phase,
            cost,
            computed: 0.0, // set when the plan is complete, like `scores`
            scores: 0.0,
        });
        Ok(())
    }

    /// Writes the backward of all nodes, from the loss.
    fn backward(&mut self) -> Result<()> {
        self.plan.phase = Phase::Backward;
        let program = self.program.clone();
        for (i, node) in program.nodes.iter().enumerate().rev() {
            self.recompute_segments(i)?;
            let is_due =
                |output: &ValueId| self.gradients.has(*output) && program.needs_grad(*output);
            let mut outputs = [node.output].into_iter().chain(node.second);
            if outputs.any(|output| is_due(&output)) {
                let makers = node.inputs.iter().filter_map(|x| program.maker(x.value));
                for maker in makers.chain([i]) {
                    if self.lacks_saved(maker) {
                        let [cost, _] = program.nodes[maker].costs;
                        self.run_part(maker, cost, |lower| lower.recompute_saved(maker))?;
                    }
                }
                self.run_part(i, node.costs[1], |lower| lower.backward_of(i))?;
            }
            let next = i.checked_sub(1);
            if next.is_some_and(|next| program.nodes[next].module != node.module) {
                self.update_matrices();
                self.scatter_gradients();
            }
        }
        Ok(())
    }

    /// Writes the update, after all gradients are complete.
    fn update(&mut self) {
        if self.request.config.optimizer_in_backward {
            self.update_deferred();
            return;
        }
        let (scales, clips) = (
            self.request.config.loss_scaling,
            self.request.config.clip_norm.is_some(),
        );
        self.updates().run(scales, clips);
    }
}

fn cannot_be_planned(op: &'static str, name: &str, path: &str, what: &str) -> Error {
    Error::Order {
        op,
        problem: format!("{name} cannot be planned{what} ({path})"),
        hint: "write it with other ops of tallow::ops, or run the step eagerly".into(),
    }
}

fn sub_range(operand: &BufferRange, first: usize, count: usize) -> BufferRange {
    let start = operand.elements.start + first;
    BufferRange {
        buffer: operand.buffer,
        elements: start..start + count,
    }
}
