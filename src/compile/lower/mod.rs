//! From a traced graph to a plan: every node's forward in order, the gradients in reverse, the update.
//!
//! What lives here: values and where they lie ([`Lower`]), views of them, gradients ([`backward`]), and the passes:
//! head and loss in rows ([`loss_in_rows`]), calls that nobody needs ([`dead`]). What does not: what an op does, which its
//! [lowering](crate::ops::lowering) says.

mod backward;
mod dead;
mod loss_in_rows;

use super::buffer::{Category, Home};
use super::op::Op;
use super::plan::{Operand, Plan, Runs};
use super::update::Update;
use super::writer::Writer;
use crate::graph::{self, Graph, Source, ValueId};
use crate::ops::lowering::{self, Calls, Ids, Lowering, Signature, Slot};
use crate::ops::strided;
use crate::probe;
use crate::{Error, Result};
use candle_core::DType;
use std::collections::{HashMap, HashSet};

/// A graph as a plan, and what its homes stand for.
pub(super) struct Lowered {
    pub plan: Plan,
    /// What is lent as [`Home::Argument`], by number.
    pub arguments: Vec<ValueId>,
    /// What is read as ids.
    pub ids: Vec<(ValueId, Ids)>,
    /// The loss, (1).
    pub loss: Operand,
    /// Of each parameter.
    pub gradients: Vec<Operand>,
    /// The norm of all gradients, and what they were multiplied by.
    pub norm: Option<Operand>,
}

/// What the plan of a graph is to have.
pub(super) struct Wanted<'a> {
    /// The weights that are updated, by their numbers.
    pub parameters: &'a [Trained],
    /// Whether gradients are clipped.
    pub clips: bool,
}

/// A weight that is updated.
pub(super) struct Trained {
    pub value: ValueId,
    pub name: String,
    /// Of the variable: what the graph read first may be a view of it.
    pub elements: usize,
}

/// Plans a step: `graph`'s first output is the loss.
///
/// # Errors
/// An op that has no lowering; a loss that is not one float.
pub(super) fn step(op: &'static str, graph: &Graph, wanted: &Wanted<'_>) -> Result<Lowered> {
    let mut lower = Lower::new(op, graph, wanted);
    for node in graph.nodes() {
        lower.forward(node)?;
    }
    let loss = lower.loss()?;
    let gradients = lower.gradients(&loss)?;
    let repeated = 0..lower.plan.calls.len();
    let all: Vec<Option<Operand>> = gradients.iter().cloned().map(Some).collect();
    let mut update = Update {
        plan: &mut lower.plan,
        gradients: &all,
        copies: &[],
        on_card: false,
    };
    update.run(false, wanted.clips);
    lower.plan.kept.push(loss.buffer);
    for gradient in &gradients {
        lower.plan.kept.push(gradient.buffer);
        lower
            .plan
            .buffers
            .set_category(gradient.buffer, Category::Gradient);
    }
    Ok(lower.finish(loss, gradients, repeated))
}

/// The weights of `graph` that are updated where `is_trained`: those that a gradient of the first output reaches.
pub(super) fn reached(graph: &Graph, is_trained: impl Fn(ValueId) -> bool) -> Vec<ValueId> {
    let flows = Flow::of(graph, is_trained);
    let values = (0..graph.values.len()).map(ValueId);
    values
        .filter(|value| !is_made(graph, *value) && flows.is_wanted(*value))
        .collect()
}

fn is_made(graph: &Graph, value: ValueId) -> bool {
    graph.value(value).source == Source::Node
}

/// Whether a node hands a gradient to this input. Of a segment's end, whose input is taken out of its graph, it does.
fn flows(graph: &Graph, node: &graph::Node, input: usize) -> bool {
    let is_end = || !node.inputs.iter().any(|x| x.tracked);
    node.inputs[input].tracked || (is_end() && graph.value(node.output).tracked)
}

/// Where gradients flow: from the first output to the weights that are trained.
struct Flow {
    /// By value: whether it depends on such a weight.
    depends: Vec<bool>,
    /// By value: whether the output depends on it.
    matters: Vec<bool>,
}

impl Flow {
    fn of(graph: &Graph, is_trained: impl Fn(ValueId) -> bool) -> Self {
        let count = graph.values.len();
        let mut depends: Vec<bool> = (0..count)
            .map(|value| !is_made(graph, ValueId(value)) && is_trained(ValueId(value)))
            .collect();
        for node in graph.nodes() {
            let mut inputs = node.inputs.iter().enumerate();
            let depends_here = inputs.any(|(i, x)| depends[x.value.0] && flows(graph, node, i));
            depends[node.output.0] = depends_here;
        }
        let mut matters = vec![false; count];
        if let Some(output) = graph.outputs.first() {
            matters[output.value.0] = true;
        }
        let nodes: Vec<_> = graph.nodes().collect();
        for node in nodes.into_iter().rev() {
            if matters[node.output.0] && depends[node.output.0] {
                let inputs = node.inputs.iter().enumerate();
                let inputs = inputs.filter(|(i, _)| flows(graph, node, *i));
                inputs.for_each(|(_, x)| matters[x.value.0] = true);
            }
        }
        Self { depends, matters }
    }

    /// Whether a value's gradient is needed.
    fn is_wanted(&self, value: ValueId) -> bool {
        self.depends[value.0] && self.matters[value.0]
    }
}

/// A plan in the making, and where the graph's values lie in it.
struct Lower<'a> {
    op: &'static str,
    graph: &'a Graph,
    wanted: &'a Wanted<'a>,
    flow: Flow,
    plan: Writer,
    places: Vec<Option<Operand>>,
    /// Views whose elements were put in order.
    dense: HashMap<(usize, Vec<usize>, Vec<usize>, usize), Operand>,
    arguments: Vec<ValueId>,
    ids: Vec<(ValueId, Ids)>,
    /// Gradients of the inputs of nodes whose forward has computed them, by the node's output.
    early: HashMap<ValueId, Vec<(usize, Operand)>>,
}

impl<'a> Lower<'a> {
    fn new(op: &'static str, graph: &'a Graph, wanted: &'a Wanted<'a>) -> Self {
        let trained: HashSet<ValueId> = wanted.parameters.iter().map(|x| x.value).collect();
        Self {
            op,
            graph,
            wanted,
            flow: Flow::of(graph, |value| trained.contains(&value)),
            plan: Writer::default(),
            places: vec![None; graph.values.len()],
            dense: HashMap::new(),
            arguments: Vec::new(),
            ids: Vec::new(),
            early: HashMap::new(),
        }
    }

    /// Whether a node hands a gradient that is needed to this input.
    fn hands_on(&self, node: &graph::Node, input: usize) -> bool {
        self.flow.is_wanted(node.inputs[input].value) && flows(self.graph, node, input)
    }

    /// The lowering of a node's op.
    fn lowering(&self, node: &graph::Node) -> Result<&'static Lowering> {
        let found = lowering::of(node.op);
        let found = found.filter(|_| !node.composed || lowering::takes_composed(node.op));
        found.ok_or_else(|| self.no_planned_form(node))
    }

    fn no_planned_form(&self, node: &graph::Node) -> Error {
        let composed = match node.composed {
            true => ", composed of candle's own ops",
            false => "",
        };
        Error::Order {
            op: self.op,
            problem: format!("{} has no planned form ({}{composed})", node.op, node.path),
            hint: "write it with other ops of tallow::ops, or run the step eagerly".into(),
        }
    }

    /// The calls of a node's forward.
    fn forward(&mut self, node: &graph::Node) -> Result<()> {
        let lowering = self.lowering(node)?;
        let signature = signature(self.graph, node);
        self.plan.path = place_of(&node.path, node.op);
        if self.is_head_and_loss(node) {
            let gradients = self.loss_in_rows(node);
            self.early.insert(node.output, gradients);
            return Ok(());
        }
        let calls = (lowering.forward)(&signature);
        if let Some(ids) = calls.ids {
            self.ids.push((node.reads[ids.read].value, ids));
        }
        if let Some(input) = calls.same.first() {
            let operand = self.read(&node.inputs[*input]);
            self.places[node.output.0] = Some(operand);
            return Ok(());
        }
        let output = self.arena(node.op, node.output);
        self.places[node.output.0] = Some(output);
        for kept in &node.kept {
            let operand = self.arena(kept.name, kept.value);
            self.places[kept.value.0] = Some(operand);
        }
        self.calls(node, calls, &mut |_, slot| {
            unreachable!("{slot:?} in a forward")
        })
    }

    /// Writes `calls` down; what is no value of the graph, `other` finds.
    fn calls(
        &mut self,
        node: &graph::Node,
        calls: Calls,
        other: &mut dyn FnMut(&mut Self, Slot) -> Operand,
    ) -> Result<()> {
        let scratch = calls.scratch.iter();
        let scratch: Vec<Operand> = scratch
            .map(|(shape, dtype)| self.temporary("scratch", shape, *dtype))
            .collect();
        let mut find = |lower: &mut Self, slot| match slot {
            Slot::Input(i) => Some(lower.read(node.inputs.get(i)?)),
            Slot::Read(i) => Some(lower.read(node.reads.get(i)?)),
            Slot::Output => Some(lower.value(node.output)),
            Slot::Kept(i) => Some(lower.value(node.kept.get(i)?.value)),
            Slot::Scratch(i) => scratch.get(i).cloned(),
            slot => Some(other(lower, slot)),
        };
        for call in calls.calls {
            let mut all = |slots: Vec<Slot>| -> Option<Vec<Operand>> {
                slots.into_iter().map(|slot| find(self, slot)).collect()
            };
            let operands = all(call.reads).zip(all(call.writes));
            // An op that keeps nothing, say, as attention of no queries does not.
            let (reads, writes) = operands.ok_or_else(|| self.no_planned_form(node))?;
            self.plan.call_on(Op::Kernel(call.kernel), reads, writes);
        }
        Ok(())
    }

    /// A new buffer of the arena.
    fn temporary(&mut self, name: &str, shape: &[usize], dtype: DType) -> Operand {
        let category = Category::Temporary;
        let id = self.plan.arena(name, shape, dtype, category);
        self.plan.whole(id)
    }

    /// A new buffer for a value that an op makes.
    fn arena(&mut self, name: &str, value: ValueId) -> Operand {
        let value = self.graph.value(value);
        self.temporary(name, &value.shape, value.dtype)
    }

    /// Where all of a value lies.
    fn value(&mut self, id: ValueId) -> Operand {
        if let Some(operand) = &self.places[id.0] {
            return operand.clone();
        }
        let value = self.graph.value(id);
        let mut parameters = self.wanted.parameters.iter();
        let (name, elements, category, home) =
            match parameters.position(|trained| trained.value == id) {
                Some(number) => {
                    let Trained { name, elements, .. } = &self.wanted.parameters[number];
                    let home = Home::Parameter(number);
                    (name.clone(), *elements, Category::Parameter, home)
                }
                None => {
                    self.arguments.push(id);
                    let home = Home::Argument(self.arguments.len() - 1);
                    let name = argument_name(&value.source, id);
                    (name, self.extent(id), Category::Input, home)
                }
            };
        let shape = match value.elements() == elements {
            true => value.shape.clone(),
            false => vec![elements], // first read as a view
        };
        let id_of_buffer = self
            .plan
            .buffers
            .add(&name, &shape, value.dtype, category, home);
        let operand = self.plan.whole(id_of_buffer);
        self.places[id.0] = Some(operand.clone());
        operand
    }

    /// How many elements of a value's storage are read: views may reach beyond what was read first.
    fn extent(&self, id: ValueId) -> usize {
        let of_nodes = self
            .graph
            .nodes()
            .flat_map(|node| node.inputs.iter().chain(&node.reads));
        let reads = of_nodes.chain(&self.graph.outputs);
        let reads = reads.filter(|operand| operand.value == id);
        let ends = reads.map(|operand| match &operand.view {
            Some(view) => strided::end(view),
            None => self.graph.value(id).elements(),
        });
        let read = ends.max().unwrap_or(0);
        match self.graph.value(id).source {
            Source::Input(_) => read.max(self.graph.value(id).elements()), // all of it is given
            _ => read,
        }
    }

    /// The elements of an operand, one after another: where they lie, or a copy.
    fn read(&mut self, operand: &graph::Operand) -> Operand {
        let base = self.value(operand.value);
        let elements = self.graph.value(operand.value).elements();
        let Some(view) = &operand.view else {
            return part(&base, 0, elements);
        };
        if view.shape.contains(&0) {
            return part(&base, 0, 0); // it may begin beyond its value
        }
        if strided::is_contiguous(view) {
            return part(&base, view.offset, view.shape.iter().product());
        }
        let key = (
            operand.value.0,
            view.shape.clone(),
            view.stride.clone(),
            view.offset,
        );
        if let Some(copy) = self.dense.get(&key) {
            return copy.clone();
        }
        let dtype = self.graph.value(operand.value).dtype;
        let copy = self.temporary("contiguous", &view.shape, dtype);
        let kernel = strided::gather(view.clone());
        let (reads, writes) = (vec![base], vec![copy.clone()]);
        self.plan.call_on(Op::Kernel(kernel), reads, writes);
        self.dense.insert(key, copy.clone());
        copy
    }

    /// The first output, as a loss.
    fn loss(&mut self) -> Result<Operand> {
        let op = self.op;
        let refuse = |got: String| {
            Err(Error::Shape {
                op,
                expected: "a loss: one float".into(),
                got,
                hint: "return ops::mean or a cross-entropy of what the model gives".into(),
            })
        };
        let Some(output) = self.graph.outputs.first() else {
            return refuse("no output".into());
        };
        let shape = self.graph.shape_of(output);
        let value = self.graph.value(output.value);
        if shape.iter().product::<usize>() != 1 || !value.dtype.is_float() {
            return refuse(format!("{shape:?} in {}", value.dtype.as_str()));
        }
        if !output.tracked {
            return refuse("one without a graph, that no gradient leaves".into());
        }
        let loss = self.read(output);
        match self.plan.buffers[loss.buffer].is_in_arena() {
            true => Ok(loss),
            false => refuse("a tensor that no op has made".into()),
        }
    }

    fn finish(
        mut self,
        loss: Operand,
        gradients: Vec<Operand>,
        repeated: std::ops::Range<usize>,
    ) -> Lowered {
        let update = self.plan.calls.split_off(repeated.end);
        let mut needed: HashSet<_> = self.plan.kept.iter().copied().collect();
        let reads = update.iter().flat_map(|call| &call.reads);
        needed.extend(reads.map(|operand| operand.buffer));
        let mut calls = dead::without(self.plan.calls, &self.plan.buffers, needed);
        let repeated = 0..calls.len();
        let norm = update.iter().find_map(|call| match call.op {
            Op::ClipFactor { .. } => Some(call.writes[0].clone()),
            _ => None,
        });
        calls.extend(update);
        let runs = Runs {
            lasting: 0..0,
            repeated,
            micro_batches: 1,
        };
        let buffers = self.plan.buffers.into_vec();
        let (plan, numbers) = Plan::numbered(calls, buffers, Vec::new(), runs, &self.plan.kept);
        let renamed = |operand: Operand| Operand {
            buffer: numbers[operand.buffer.index()],
            ..operand
        };
        Lowered {
            plan,
            arguments: self.arguments,
            ids: self.ids,
            loss: renamed(loss),
            gradients: gradients.into_iter().map(renamed).collect(),
            norm: norm.map(renamed),
        }
    }
}

fn argument_name(source: &Source, id: ValueId) -> String {
    match source {
        Source::Weight(name) | Source::Input(name) if !name.is_empty() => name.clone(),
        Source::Constant => format!("constant {}", id.0),
        _ => format!("weight {}", id.0),
    }
}

/// What a lowering is told of a node.
fn signature<'g>(graph: &'g Graph, node: &'g graph::Node) -> Signature<'g> {
    let of_value = |id: ValueId| probe::Operand {
        dims: &graph.value(id).shape,
        dtype: graph.value(id).dtype,
    };
    let operands = |operands: &'g [graph::Operand]| {
        let operands = operands.iter().map(|operand| probe::Operand {
            dims: graph.shape_of(operand),
            dtype: graph.value(operand.value).dtype,
        });
        operands.collect()
    };
    Signature {
        attributes: &node.attributes,
        inputs: operands(&node.inputs),
        reads: operands(&node.reads),
        output: of_value(node.output),
        kept: node.kept.iter().map(|kept| of_value(kept.value)).collect(),
    }
}

/// A node's path without its op's name: the place that calls are at.
fn place_of(path: &str, op: &str) -> String {
    let place = path.strip_suffix(op).unwrap_or(path);
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
