//! From a traced graph to a plan: every node's forward in order, the gradients in reverse, the update.
//!
//! The graph's nodes, without those that only pass a value on ([`program`]), are grouped into *forms* ([`form`]), each of which
//! writes its calls down, forward and backward. A form is found by a pass, one file each:
//!
//! - [`attention`]: heads, rotated, compared and merged in the model's dimension; [`heads`], the same of heads as they lie;
//! - [`linear`]: linear maps of one input, which on a GPU in half precision are one product;
//! - [`gated`]: SwiGLU with its two maps, whose backward needs no memory of its own;
//! - [`norm`]: RMSNorm of a sum, with the addition;
//! - [`embedding`], and [`head`]: head and loss, some rows at a time;
//! - [`node`]: any other op, by its own [lowering](crate::ops::lowering).
//!
//! What lives beside them: values and where they lie ([`Lower`], [`values`]), gradients and their sums ([`gradients`]), weights,
//! their copies and their updates ([`weights`]), what backward runs again ([`recompute`]), and calls that nobody needs
//! ([`dead`]). What does not: where buffers lie ([`arena`](super::arena)) and what computes a call.

mod attention;
mod dead;
mod embedding;
mod form;
mod gated;
mod gradients;
mod head;
mod heads;
mod linear;
mod node;
mod norm;
mod program;
mod recompute;
#[cfg(test)]
mod tests;
mod values;
mod weights;

pub(super) use recompute::Again;

use super::buffer::{BufferId, Category, Home};
use super::op::{Accumulate, Op};
use super::plan::{Operand, Phase, Plan, Runs};
use super::writer::Writer;
use crate::graph::{self, Graph, ValueId};
use crate::kernels::workspace;
use crate::ops::lowering::Ids;
use crate::{Error, Result};
use candle_core::DType;
use form::Form;
use gradients::Gradients;
use program::Program;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use weights::Weights;

/// What runs a plan: kernels differ in what they take at once, and in the room they work in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The CPU, with scratch for so many threads.
    Cpu { threads: usize },
    /// A CUDA GPU.
    Cuda,
}

impl Target {
    /// What a trace for it is told.
    pub fn of_trace(self) -> graph::Target {
        match self {
            Self::Cpu { .. } => graph::Target::Cpu,
            Self::Cuda => graph::Target::Cuda,
        }
    }
}

/// A variable of the model.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    pub name: String,
    /// What the graph reads first may be a view of it.
    pub elements: usize,
    /// Whether the plan updates it. In a forward alone none is.
    pub is_trained: bool,
}

/// What is planned.
pub(super) struct Job<'a> {
    /// Whom errors name.
    pub op: &'static str,
    /// Its first output is the loss; of a forward alone, what it gives out.
    pub graph: &'a Graph,
    pub target: Target,
    pub parameters: &'a [Parameter],
    /// Which parameter a value is. Two values may be one.
    pub numbers: &'a HashMap<ValueId, usize>,
    /// Where an input is; an argument otherwise.
    pub input: &'a dyn Fn(&str) -> Option<Home>,
    /// What the tables hold that kernels read, cosines and sines.
    pub table: &'a dyn Tables,
    /// Values from outside that are no parameters, and whose gradients are left.
    pub differentiated: &'a [ValueId],
    /// How the step is run.
    pub clips: bool,
    pub scales: bool,
    pub accumulation: usize,
    pub optimizer_in_backward: bool,
    pub again: Again,
}

/// The constants that kernels read as f32.
pub(super) trait Tables {
    /// The elements of an operand, which is table number `number`, rounded to `dtype`.
    ///
    /// # Errors
    /// A constant that is not there.
    fn table(&self, number: usize, operand: &graph::Operand, dtype: DType) -> Result<Vec<f32>>;
}

/// A graph as a plan, and what its homes stand for.
pub(super) struct Lowered {
    pub plan: Plan,
    /// What is lent as [`Home::Argument`], by number: all of a value, or the elements of a view, in order.
    pub arguments: Vec<(ValueId, Option<graph::View>)>,
    /// What is read as ids.
    pub ids: Vec<(ValueId, Ids)>,
    /// The loss (1), f64; what a forward alone gives out.
    pub output: Operand,
    /// Of each parameter, where the optimizer does not run in backward.
    pub gradients: Vec<Option<Operand>>,
    /// The norm of all gradients, and what they were multiplied by.
    pub norm: Option<Operand>,
}

/// Plans a step: the graph's first output is the loss.
///
/// # Errors
/// An op that has no planned form; a loss that is not one float.
pub(super) fn step(job: &Job<'_>) -> Result<Lowered> {
    let mut lower = Lower::new(job);
    lower.check_loss()?;
    if job.accumulation > 1 || lower.is_on_gpu() {
        lower.copy_weights();
    }
    let first = lower.plan.calls.len();
    lower.forward()?;
    let loss = lower.mean_loss()?;
    lower.backward()?;
    let repeated = first..lower.plan.calls.len();
    lower.update();
    lower.finish(loss, repeated)
}

/// Plans a forward alone: the graph's first output is given out.
///
/// # Errors
/// An op that has no planned form.
pub(super) fn forward(job: &Job<'_>) -> Result<Lowered> {
    let mut lower = Lower::new(job);
    if lower.is_on_gpu() {
        lower.copy_weights();
    }
    let first = lower.plan.calls.len();
    let output = lower.place_output();
    lower.forward()?;
    let repeated = first..lower.plan.calls.len();
    lower.finish(output, repeated)
}

/// Plans a forward, and after the plan's micro-batches the gradients of what is [differentiated](Job::differentiated), from the
/// output's, which is lent as the argument after those that the graph reads.
///
/// # Errors
/// An op that has no planned form.
pub(super) fn with_gradients(job: &Job<'_>) -> Result<(Lowered, Vec<Operand>)> {
    let mut lower = Lower::new(job);
    lower.forward()?;
    let repeated = 0..lower.plan.calls.len();
    let output = lower.program.outputs[0].clone();
    let out = lower.read(&output);
    let home = Home::Argument(lower.arguments.len());
    let value = lower.program.graph.value(output.value).clone();
    let buffers = &mut lower.plan.buffers;
    let d_out = buffers.add("d_out", &value.shape, value.dtype, Category::Input, home);
    let d_out = lower.plan.whole(d_out);
    lower.contribute(&output, d_out);
    lower.backward()?;
    let gradients = job.differentiated.iter();
    let gradients = gradients.map(|value| match lower.gradients.take(*value) {
        Some(gradient) => Ok(gradient),
        None => Err(no_planned_form(
            job.op,
            "a gradient",
            "",
            " of what is not reached",
        )),
    });
    let gradients = gradients.collect::<Result<Vec<_>>>()?;
    let buffers = &mut lower.plan.buffers;
    buffers.set_category(out.buffer, Category::Output);
    for gradient in &gradients {
        buffers.set_category(gradient.buffer, Category::Gradient);
    }
    let kept = [&out].into_iter().chain(&gradients);
    lower.plan.kept = kept.map(|operand| operand.buffer).collect();
    let (lowered, numbers) = lower.finish_numbered(out, repeated)?;
    let gradients = gradients.into_iter().map(|gradient| Operand {
        buffer: numbers[gradient.buffer.index()],
        ..gradient
    });
    Ok((lowered, gradients.collect()))
}

/// The weights of `graph` that are updated where `is_trained`: those that a gradient of the first output reaches.
pub(super) fn reached(graph: &Graph, is_trained: impl Fn(ValueId) -> bool) -> Vec<ValueId> {
    let elements = |value| is_trained(value).then(|| graph.value(value).elements());
    let program = Program::new(graph, |value| value, elements);
    program.reached().collect()
}

/// A plan in the making.
struct Lower<'a> {
    job: &'a Job<'a>,
    program: Rc<Program<'a>>,
    /// In order, each with the number of the node that it is at.
    forms: Rc<[(usize, Rc<dyn Form>)]>,
    /// By value: the form whose output it is.
    makers: HashMap<ValueId, Rc<dyn Form>>,
    plan: Writer,
    /// By value: where it lies.
    places: Vec<Option<Operand>>,
    /// Views whose elements were put in order.
    dense: HashMap<(usize, graph::View), Operand>,
    tables: Vec<(graph::Operand, Vec<f32>)>,
    arguments: Vec<(ValueId, Option<graph::View>)>,
    ids: Vec<(ValueId, Ids)>,
    gradients: Gradients,
    weights: Weights,
    /// The mean loss, once it is there.
    mean_loss: Option<Operand>,
}

impl<'a> Lower<'a> {
    fn new(job: &'a Job<'a>) -> Self {
        let mut first = HashMap::new();
        let values = (0..job.graph.values.len()).map(ValueId);
        for (value, number) in values.filter_map(|v| Some((v, job.numbers.get(&v)?))) {
            first.entry(*number).or_insert(value);
        }
        let same = |value| match job.numbers.get(&value) {
            Some(number) => first[number],
            None => value,
        };
        let trained = |value| {
            if job.differentiated.contains(&value) {
                return Some(job.graph.value(value).elements());
            }
            let number = job.numbers.get(&value)?;
            let parameter = &job.parameters[*number];
            let is_ours = parameter.is_trained && first[number] == value;
            is_ours.then_some(parameter.elements)
        };
        let program = Rc::new(Program::new(job.graph, same, trained));
        let forms = form::all(&program, job);
        let outputs = forms.iter().flat_map(|(_, form)| {
            let outputs = form.outputs().into_iter();
            outputs.map(move |output| (output, form.clone()))
        });
        Self {
            job,
            makers: outputs.collect(),
            forms: forms.into(),
            plan: Writer::default(),
            places: vec![None; job.graph.values.len()],
            dense: HashMap::new(),
            tables: Vec::new(),
            arguments: Vec::new(),
            ids: Vec::new(),
            gradients: Gradients::default(),
            weights: Weights::new(&program, job),
            mean_loss: None,
            program,
        }
    }

    fn is_on_gpu(&self) -> bool {
        self.job.target == Target::Cuda
    }

    /// Every form's forward.
    fn forward(&mut self) -> Result<()> {
        for (_, form) in self.forms.clone().iter() {
            self.run_forward(&**form)?;
        }
        Ok(())
    }

    fn run_forward(&mut self, form: &dyn Form) -> Result<()> {
        self.plan.path = form.path().into();
        form.forward(self)
    }

    /// Every form's backward, from the loss.
    fn backward(&mut self) -> Result<()> {
        self.plan.phase = Phase::Backward;
        let forms = self.forms.clone();
        for (i, (_, form)) in forms.iter().enumerate().rev() {
            self.run_segments_again(i)?;
            let outputs = form.outputs();
            let is_due =
                |output: &ValueId| self.gradients.has(*output) && self.program.is_wanted(*output);
            if outputs.iter().any(is_due) {
                for input in form.inputs() {
                    if let Some(maker) = self.makers.get(&input).cloned() {
                        maker.prepare(self)?;
                    }
                }
                self.plan.path = form.path().into();
                form.backward(self)?;
            }
            let after = i.checked_sub(1).map(|next| module_of(forms[next].1.path()));
            if after.is_some_and(|next| next != module_of(form.path())) {
                self.update_matrices();
            }
        }
        Ok(())
    }

    /// Of the first output: one float that an op has made.
    fn check_loss(&self) -> Result<()> {
        let op = self.job.op;
        let refuse = |got: String| {
            Err(Error::Shape {
                op,
                expected: "a loss: one f32 that an op has made".into(),
                got,
                hint: "return ops::mean or a cross-entropy of what the model gives; ops::cast makes it f32".into(),
            })
        };
        let Some(output) = self.program.outputs.first() else {
            return refuse("no output".into());
        };
        let shape = self.program.graph.shape_of(output);
        let value = self.program.graph.value(output.value);
        if shape.iter().product::<usize>() != 1 || value.dtype != DType::F32 {
            return refuse(format!("{shape:?} in {}", value.dtype.as_str()));
        }
        if !output.tracked {
            return refuse("one without a graph, that no gradient leaves".into());
        }
        match self.program.maker(output.value) {
            Some(_) => Ok(()),
            None => refuse("a tensor that no op has made".into()),
        }
    }

    /// The mean of all micro-batches' losses, (1) in f64; and where it is not there yet, the gradient of this one's.
    fn mean_loss(&mut self) -> Result<Operand> {
        if let Some(mean) = &self.mean_loss {
            return Ok(mean.clone());
        }
        self.plan.phase = Phase::Loss;
        self.plan.path = "loss".into();
        let output = self.program.outputs[0].clone();
        let loss = self.read(&output);
        let counted = self.job.accumulation;
        let mean = self.mean_of(loss, counted);
        let gradient = self.temporary("gradient of the loss", &[1], DType::F32);
        let op = Op::LossGradient { counted };
        self.plan.call_on(op, Vec::new(), vec![gradient.clone()]);
        self.contribute(&output, gradient);
        Ok(mean)
    }

    /// Adds losses over how many there are in a step.
    fn mean_of(&mut self, losses: Operand, counted: usize) -> Operand {
        let mean = self.temporary("loss", &[1], DType::F64);
        self.plan.kept.push(mean.buffer);
        let op = Op::MeanLoss {
            rows: losses.elements.len(),
            counted,
            accumulate: Accumulate::AfterFirst,
        };
        self.plan.call_on(op, vec![losses], vec![mean.clone()]);
        mean
    }

    /// What follows when all gradients are there.
    fn update(&mut self) {
        if self.job.optimizer_in_backward {
            self.update_waiting();
            return;
        }
        let (scales, clips) = (self.job.scales, self.job.clips);
        self.updates().run(scales, clips);
    }

    fn finish(self, output: Operand, repeated: std::ops::Range<usize>) -> Result<Lowered> {
        Ok(self.finish_numbered(output, repeated)?.0)
    }

    /// The plan, and its numbers of the buffers.
    fn finish_numbered(
        mut self,
        output: Operand,
        repeated: std::ops::Range<usize>,
    ) -> Result<(Lowered, Vec<BufferId>)> {
        let (op, target) = (self.job.op, self.job.target);
        let gradients = self.weights.gradients.clone();
        if !self.job.optimizer_in_backward {
            for gradient in gradients.iter().flatten() {
                let category = Category::Gradient;
                self.plan.buffers.set_category(gradient.buffer, category);
                self.plan.kept.push(gradient.buffer);
            }
        }
        let update = self.plan.calls.split_off(repeated.end);
        let mut needed: HashSet<BufferId> = self.plan.kept.iter().copied().collect();
        let reads = update.iter().flat_map(|call| &call.reads);
        needed.extend(reads.map(|operand| operand.buffer));
        let norm = update.iter().find_map(|call| match call.op {
            Op::ClipFactor { .. } => Some(call.writes[0].clone()),
            _ => None,
        });
        let repeats = self.plan.calls.split_off(repeated.start);
        let repeats = dead::without(repeats, &self.plan.buffers, &mut needed);
        let mut calls = dead::without(self.plan.calls, &self.plan.buffers, &mut needed);
        let before = calls.len();
        calls.extend(repeats);
        let repeated = before..calls.len();
        calls.extend(update);
        if target == Target::Cuda
            && let Some(call) = calls.iter().find(|call| !call.op.is_on_gpu())
        {
            return Err(no_planned_form(op, call.op.name(), &call.path, " on a GPU"));
        }
        let runs = Runs {
            lasting: match target {
                Target::Cpu { .. } => 0..0,
                Target::Cuda => 0..before,
            },
            repeated,
            micro_batches: self.job.accumulation,
        };
        let tables = self.tables.into_iter().map(|(_, table)| table).collect();
        let buffers = self.plan.buffers.into_vec();
        let (plan, numbers) = Plan::new(calls, buffers, tables, runs, &self.plan.kept);
        let plan = match target {
            Target::Cpu { .. } => plan,
            Target::Cuda => {
                let bytes = workspace_bytes(&plan);
                plan.with_workspace(bytes)
            }
        };
        let renamed = |operand: Operand| Operand {
            buffer: numbers[operand.buffer.index()],
            ..operand
        };
        let gradients = gradients.into_iter().map(|x| x.map(renamed));
        let lowered = Lowered {
            plan,
            arguments: self.arguments,
            ids: self.ids,
            output: renamed(output),
            gradients: gradients.collect(),
            norm: norm.map(renamed),
        };
        Ok((lowered, numbers))
    }
}

/// What a GPU's executor takes beside the arena.
fn workspace_bytes(plan: &Plan) -> usize {
    let updated = plan.calls().iter().filter_map(|call| match call.op {
        Op::AdamW { elements, .. } => Some(elements),
        _ => None,
    });
    let outputs = plan.buffers().iter().filter(|b| b.home == Home::Output);
    let output_bytes = outputs.map(|b| b.bytes() as usize).sum::<usize>();
    workspace::PRODUCTS_BYTES + workspace::update_tables_bytes(updated) + output_bytes
}

/// The outermost module of a path: `layers.3` of `layers.3/attn/q_proj`.
fn module_of(path: &str) -> &str {
    path.split('/').next().unwrap_or(path)
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
fn part(operand: &Operand, first: usize, count: usize) -> Operand {
    let start = operand.elements.start + first;
    Operand {
        buffer: operand.buffer,
        elements: start..start + count,
    }
}
