//! From a traced graph to a plan: every node's forward in order, the gradients in reverse, the update.
//!
//! The graph's nodes, without those that only pass a value on ([`program`]), are grouped into *forms* ([`form`]), each
//! of which writes its calls down, forward and backward. A form is found by a pass ([`passes`]), one file each:
//!
//! - [`attention`]: on a GPU, heads rotated, compared and merged in the model's dimension;
//! - [`linear`]: linear maps of one input, which on a GPU in half precision are one product;
//! - [`gated`]: SwiGLU with its two maps, whose backward needs no memory of its own;
//! - [`norm`]: RMSNorm of a sum, with the addition;
//! - [`head`]: head and loss, some rows at a time;
//! - [`node`]: any other op, by its own [lowering](crate::ops::lowering).
//!
//! What lives beside them: values and where they lie ([`Lower`], [`values`]), gradients and their sums ([`gradients`]),
//! weights, their copies and their updates ([`weights`]), what backward runs again ([`recompute`]), calls that no
//! result is needed of ([`dead`]), gradients averaged over ranks ([`exchange`]), weights that other ranks update
//! ([`fetch`]), and weights that every rank has a part of ([`sharded`]). What does not: where buffers lie
//! ([`arena`](super::arena)) and what computes a call.

mod attention;
mod dead;
mod exchange;
mod fetch;
mod finish;
mod form;
mod gated;
mod gradients;
mod head;
mod linear;
mod loss;
mod node;
mod norm;
mod passes;
mod program;
mod recompute;
mod sharded;
#[cfg(test)]
mod tests;
mod values;
mod weights;

pub(super) use recompute::Recompute;

use super::config::{PlanKind, StepConfig};
use super::parts::PartCost;
use super::plan::{BufferRange, Phase, Plan};
use super::traced::TracedFunction;
use super::writer::Writer;
use crate::graph::{self, Target, ValueId};
use crate::ops::cost::Cost;
use crate::ops::lowering::Check;
use crate::optim::MissingGradients;
use crate::probe::Path;
use crate::{Error, Result};
use candle_core::DType;
use form::{Form, Placed};
use gradients::Gradients;
use program::Program;
use recompute::Choice;
use std::collections::HashMap;
use std::rc::Rc;
use weights::Weights;

/// What is planned.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    /// Its first output is the loss, or what a [`PlanKind::Forward`] gives out; of a [`PlanKind::Gradients`] the second
    /// is the gradient of the first, an input.
    pub function: &'a TracedFunction,
    pub kind: PlanKind,
    pub config: &'a StepConfig,
    pub recompute: Recompute,
}

impl Job<'_> {
    fn has_backward(&self) -> bool {
        self.kind != PlanKind::Forward
    }
}

/// A graph as a plan, and what its homes stand for.
pub(super) struct Lowered {
    pub plan: Plan,
    /// What is lent as [`Location::Input`] and [`Location::Argument`], by number: all of a value, or the elements of a
    /// view, in order.
    pub arguments: Vec<(ValueId, Option<graph::View>)>,
    /// The constants that the plan's tables were made from.
    pub tables: Vec<TableOf>,
    /// What is checked before a run.
    pub checks: Vec<(ValueId, Check)>,
    /// The mean loss (1), f64; in a plan of another kind the function's output.
    pub output: BufferRange,
    /// The parameters' gradients: none where the optimizer runs in backward, or another rank has it.
    pub gradients: Vec<Option<BufferRange>>,
    /// The norm of all gradients, and what they were multiplied by.
    pub norm: Option<BufferRange>,
    /// What of [`Job::recompute`] there was.
    pub recompute: Recompute,
    /// Parameters that the loss does not depend on, and what is planned for each.
    pub unreached: Vec<(usize, MissingGradients)>,
}

/// Plans a traced function.
///
/// # Errors
/// An op that has no planned form; an output that a plan of this kind does not take.
pub(super) fn plan(job: &Job<'_>) -> Result<Lowered> {
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
        PlanKind::Gradients => lower.begin_with_given_gradient(),
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

/// A constant that a plan has as a table, and the dtype that it was rounded to.
pub(super) type TableOf = (graph::ValueRef, DType);

/// A plan in the making.
struct Lower<'a> {
    job: &'a Job<'a>,
    program: Rc<Program<'a>>,
    /// In order.
    forms: Rc<[Placed]>,
    /// By value: the number of the form whose output it is.
    makers: HashMap<ValueId, usize>,
    plan: Writer,
    /// By value: where it lies.
    places: Vec<Option<BufferRange>>,
    /// Views whose elements were put in order.
    dense: HashMap<(usize, graph::View), BufferRange>,
    /// Each with the constant that it was made from.
    tables: Vec<(TableOf, Vec<f32>)>,
    arguments: Vec<(ValueId, Option<graph::View>)>,
    checks: Vec<(ValueId, Check)>,
    gradients: Gradients,
    weights: Weights,
    /// The mean loss, once it is there.
    mean_loss: Option<BufferRange>,
    unreached: Vec<(usize, MissingGradients)>,
    /// What of [`Job::recompute`] there is.
    recompute: Recompute,
}

impl<'a> Lower<'a> {
    fn new(job: &'a Job<'a>) -> Self {
        let function = job.function;
        let elements = |value| {
            let number = function.numbers.get(&value)?;
            Some(function.parameters[*number].elements)
        };
        let is_trained = |value| job.has_backward() && function.numbers.contains_key(&value);
        let program = Rc::new(Program::new(&function.graph, elements, is_trained));
        let choice = Choice::new(job.recompute);
        let forms = passes::all(&program, job, &choice);
        let outputs = forms.iter().enumerate().flat_map(|(i, placed)| {
            let outputs = placed.form.outputs().into_iter();
            outputs.map(move |output| (output, i))
        });
        Self {
            job,
            makers: outputs.collect(),
            forms: forms.into(),
            plan: Writer::default(),
            places: vec![None; function.graph.values.len()],
            dense: HashMap::new(),
            tables: Vec::new(),
            arguments: Vec::new(),
            checks: Vec::new(),
            gradients: Gradients::default(),
            weights: Weights::new(&program, job),
            mean_loss: None,
            unreached: Vec::new(),
            recompute: choice.taken(job.recompute),
            program,
        }
    }

    fn is_on_gpu(&self) -> bool {
        self.job.function.target == Target::Cuda
    }

    /// Every form's forward.
    fn forward(&mut self) -> Result<()> {
        for placed in self.forms.clone().iter() {
            self.run_forward(placed)?;
        }
        Ok(())
    }

    fn run_forward(&mut self, placed: &Placed) -> Result<()> {
        self.run_part(placed, placed.costs[0], |lower| placed.form.forward(lower))
    }

    /// Writes calls that are a part of their own, of such cost.
    fn run_part(
        &mut self,
        placed: &Placed,
        cost: Cost,
        write: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.plan.path = placed.form.path().into();
        self.plan.module = self.module_of(placed);
        self.plan.part = Some(self.plan.parts.len());
        write(self)?;
        self.plan.part = None;
        self.plan.parts.push(PartCost {
            path: placed.form.path().into(),
            ops: placed.ops.clone(),
            phase: self.plan.phase,
            cost,
            computed: 0.0, // known when the plan is whole
        });
        Ok(())
    }

    /// The outermost module that a form is in.
    fn module_of(&self, placed: &Placed) -> Path {
        self.program.nodes[placed.at].module
    }

    /// Every form's backward, from the loss.
    fn backward(&mut self) -> Result<()> {
        self.plan.phase = Phase::Backward;
        let forms = self.forms.clone();
        for (i, placed) in forms.iter().enumerate().rev() {
            let form = &placed.form;
            self.recompute_segments(i)?;
            let outputs = form.outputs();
            let is_due =
                |output: &ValueId| self.gradients.has(*output) && self.program.is_wanted(*output);
            if outputs.iter().any(is_due) {
                for input in form.inputs() {
                    if let Some(maker) = self.makers.get(&input) {
                        self.recompute_products(&forms[*maker])?;
                    }
                }
                self.run_part(placed, placed.costs[1], |lower| form.backward(lower))?;
            }
            let next = i.checked_sub(1);
            if next.is_some_and(|next| self.module_of(&forms[next]) != self.module_of(placed)) {
                self.update_matrices();
                self.scatter_gradients();
            }
        }
        Ok(())
    }

    /// The products of a form that does not keep them, if a memory budget wants that.
    fn recompute_products(&mut self, placed: &Placed) -> Result<()> {
        self.run_part(placed, placed.costs[0], |lower| placed.form.prepare(lower))
    }

    /// The form whose output a value is.
    fn maker(&self, value: ValueId) -> Option<Rc<dyn Form>> {
        self.makers.get(&value).map(|i| self.forms[*i].form.clone())
    }

    /// What follows when all gradients are there.
    fn update(&mut self) {
        if self.job.config.optimizer_in_backward {
            self.update_waiting();
            return;
        }
        let (scales, clips) = (
            self.job.config.loss_scaling,
            self.job.config.clip_norm.is_some(),
        );
        self.updates().run(scales, clips);
    }
}

fn no_planned_form(op: &'static str, name: &str, path: &str, what: &str) -> Error {
    Error::Order {
        op,
        problem: format!("{name} has no planned form{what} ({path})"),
        hint: "write it with other ops of tallow::ops, or run the step eagerly".into(),
    }
}

fn attribute(node: &graph::Node, name: &str) -> Option<graph::Attribute> {
    let mut attributes = node.attributes.iter();
    attributes.find_map(|(other, value)| (*other == name).then_some(*value))
}

/// A node's path without its op's name: the place that calls are at.
fn place_of(node: &graph::Node) -> String {
    let place = node.path.strip_suffix(node.op).unwrap_or(&node.path);
    place.strip_suffix('/').unwrap_or(place).to_string()
}

/// Some elements of an operand.
fn part(operand: &BufferRange, first: usize, count: usize) -> BufferRange {
    let start = operand.elements.start + first;
    BufferRange {
        buffer: operand.buffer,
        elements: start..start + count,
    }
}
