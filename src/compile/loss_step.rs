//! A training step of any loss, planned from its trace.

use super::config::check_clip_norm;
use super::executor::Executor;
use super::lower::{self, Again, Job, Lowered, Parameter, Tables};
use super::plan::{Operand, Plan};
use super::run::Tensors;
use super::source::check_apart;
use crate::graph::{self, Graph, Source, Target, Traced, ValueId};
use crate::ops::cpu::{cpu_storage, for_stored, ids};
use crate::ops::lowering::Ids;
use crate::ops::strided;
use crate::optim::inplace::storage_address;
use crate::optim::{AdamW, PlannedUpdate};
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Tensor, Var};
use std::collections::{HashMap, HashSet};

const OP: &str = "compile::LossStep";

/// Forward, backward, clipping and AdamW of any loss, planned once from its [trace](crate::graph::trace).
///
/// The loss is a function of hollow inputs ([`graph::input`]) over layers with real weights, written with this crate's
/// [`ops`](crate::ops), [`nn`](crate::nn) and [`attention`](crate::attention); in an [`autocast`](crate::autocast()) region it
/// is planned as it runs there. The step is the same as an eager one: `loss`, `backward()`,
/// [`clip_grad_norm`](crate::optim::clip_grad_norm), [`AdamW::step`], on the same variables. The optimizer's weights are updated;
/// a weight that several layers read (tied) has the sum of its gradients; one that the optimizer does not have is frozen.
///
/// A [checkpointed](crate::nn::checkpoint()) segment is run again in backward, and its activations do not stay; a released one is
/// planned like the rest, whose memory is free once backward has come through it in any case. A frozen weight is read as it is in each run where the loss reads all of it; of one that is read in parts a copy is made when the
/// step is planned. A run copies its inputs, and ops take a little memory of their own besides the arena.
///
/// Plans are made as [`TrainStep`](super::TrainStep)'s are, with the same passes: norms of sums, gates whose backward needs no
/// memory of its own, attention in the model's dimension, head and loss some rows at a time. An op that none of them takes is
/// planned as it is traced, one kernel after another. On the CPU, with parameters in f32.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::compile::LossStep;
/// use tallow::optim::{AdamW, AdamWConfig};
/// use tallow::{graph, nn, ops};
///
/// let device = tallow::device("cpu")?;
/// let weights = VarMap::new();
/// let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
/// let (up, down) = (nn::Linear::new(8, 32, vb.pp("up"))?, nn::Linear::new(32, 3, vb.pp("down"))?);
/// let mut parameters: Vec<_> = weights.data().lock().unwrap().clone().into_iter().collect();
/// parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
/// let mut optimizer = AdamW::new(parameters, AdamWConfig::default())?;
///
/// let x = graph::input("x", (16, 8), DType::F32)?;
/// let classes = graph::input("classes", 16, DType::U32)?;
/// let mut step = LossStep::new(&optimizer, Some(1.0), || {
///     let hidden = ops::relu(&up.forward(&x)?)?;
///     ops::cross_entropy(&down.forward(&hidden)?, &classes)
/// })?;
///
/// let x = Tensor::randn(0f32, 1.0, (16, 8), &device)?;
/// let classes = Tensor::from_iter((0..16u32).map(|i| i % 3), &device)?;
/// let first = step.run(&mut optimizer, &[("x", &x), ("classes", &classes)])?;
/// let second = step.run(&mut optimizer, &[("x", &x), ("classes", &classes)])?;
/// assert!(second < first);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct LossStep {
    plan: Plan,
    graph: Graph,
    executor: Executor,
    parameters: Vec<(String, Var)>,
    arguments: Vec<Argument>,
    /// Inputs that are read as ids.
    ids: Vec<(String, Ids)>,
    loss: Operand,
    gradients: Vec<Operand>,
    /// The norm of all gradients, where they are clipped.
    norm: Option<Operand>,
    clip_norm: Option<f64>,
    has_run: bool,
    /// Whether the last run has clipped.
    has_norm: bool,
}

/// What a run reads where it lies.
#[derive(Debug)]
enum Argument {
    /// An input, by name.
    Input {
        name: String,
        shape: Vec<usize>,
        dtype: DType,
    },
    /// A constant, or a frozen weight.
    Held(Tensor),
}

impl LossStep {
    /// Plans a step of `loss` under `optimizer`, clipping gradients to `clip_norm` where there is one, and allocates its arena.
    ///
    /// `loss` is called once, by [`graph::trace`]: its inputs are hollow, its weights real. What it decides from the shapes of
    /// its inputs is decided for all runs.
    ///
    /// # Errors
    /// Those of `loss` and of its trace; an op that has no planned form, by its place; a loss that is not one f32; a weight of
    /// the optimizer that the loss does not depend on; weights that are not in f32 on the CPU; a norm that is not over 0; an arena that
    /// does not fit the machine's memory.
    pub fn new(
        optimizer: &AdamW,
        clip_norm: Option<f64>,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        if let Some(norm) = clip_norm {
            check_clip_norm(norm)?;
        }
        let Traced { graph, tensors } = graph::trace_with_tensors(Target::Cpu, loss)?;
        let groups = optimizer.groups().iter();
        let trained: HashMap<usize, &(String, Var)> = groups
            .flat_map(|group| &group.parameters)
            .map(|parameter| (storage_address(&parameter.1), parameter))
            .collect();
        let parameter = |id: ValueId| trained.get(&storage_address(&tensors[id.0])).copied();
        let reached = lower::reached(&graph, |id| parameter(id).is_some());
        let named = reached.iter().filter_map(|id| parameter(*id)).cloned();
        let parameters: Vec<(String, Var)> = named.collect();
        check_parameters(&parameters)?;
        check_reached(optimizer, &parameters)?;
        optimizer.planned_updates(OP, &parameters)?;
        let trained = parameters.iter().map(|(name, var)| Parameter {
            name: name.clone(),
            elements: var.elem_count(),
            is_trained: true,
        });
        let trained: Vec<Parameter> = trained.collect();
        let numbers = reached.iter().enumerate();
        let numbers = numbers.map(|(number, value)| (*value, number)).collect();
        let lowered = lower::step(&Job {
            op: OP,
            graph: &graph,
            target: Executor::target(&Device::Cpu),
            parameters: &trained,
            numbers: &numbers,
            input: &|_| None,
            table: &Constants(&tensors),
            clips: clip_norm.is_some(),
            scales: false,
            accumulation: 1,
            optimizer_in_backward: false,
            again: Again::default(),
        })?;
        let arguments = arguments(&graph, &tensors, &lowered)?;
        let ids = checked_ids(&graph, &lowered, &arguments)?;
        Ok(Self {
            executor: Executor::new(&lowered.plan, &Device::Cpu)?,
            plan: lowered.plan,
            graph,
            parameters,
            arguments,
            ids,
            loss: lowered.output,
            gradients: lowered.gradients.into_iter().flatten().collect(), // all are reached
            norm: lowered.norm,
            clip_norm,
            has_run: false,
            has_norm: false,
        })
    }

    /// One step: the loss before the update. `inputs` are the tensors of the trace's inputs by their names, of the planned shapes
    /// and dtypes.
    ///
    /// # Errors
    /// A missing input, another name, shape, dtype or device than planned, ids out of bounds, an optimizer of other
    /// parameters, a learning rate that cannot work; with clipping, gradients that are not finite, naming the first such
    /// parameter. Whatever the error, parameters and optimizer are as they were.
    pub fn run(&mut self, optimizer: &mut AdamW, inputs: &[(&str, &Tensor)]) -> Result<f32> {
        let planned = optimizer.planned_updates(OP, &self.parameters)?;
        check_apart(OP, &self.parameters, &planned)?;
        let given = self.given(inputs)?;
        check_not_lent(&given, &planned)?;
        (self.has_run, self.has_norm) = (false, false); // until it is over
        let arguments: Vec<&Tensor> = given.iter().collect();
        let tensors = Tensors {
            parameters: &self.parameters,
            updates: &planned,
            arguments: &arguments,
            ..Default::default()
        };
        let clip_norm = self.clip_norm.unwrap_or(f64::INFINITY);
        self.executor.run(&self.plan, &tensors, clip_norm, None)?;
        optimizer.planned_step_taken();
        (self.has_run, self.has_norm) = (true, self.norm.is_some());
        self.loss()
    }

    /// As [`run`](Self::run) without the update: what it finds is in [`gradients`](Self::gradients).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn forward_backward(&mut self, inputs: &[(&str, &Tensor)]) -> Result<f32> {
        let given = self.given(inputs)?;
        (self.has_run, self.has_norm) = (false, false); // until it is over
        let arguments: Vec<&Tensor> = given.iter().collect();
        let tensors = Tensors {
            parameters: &self.parameters,
            arguments: &arguments,
            ..Default::default()
        };
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        self.has_run = true;
        self.loss()
    }

    fn loss(&mut self) -> Result<f32> {
        let loss: Vec<f64> = self.executor.read(&self.plan, &self.loss)?;
        Ok(loss[0] as f32)
    }

    /// The tensors of a run's arguments, contiguous.
    fn given(&self, inputs: &[(&str, &Tensor)]) -> Result<Vec<Tensor>> {
        let names = self.arguments.iter().filter_map(|argument| match argument {
            Argument::Input { name, .. } => Some(name.as_str()),
            Argument::Held(_) => None,
        });
        let names: Vec<&str> = names.collect();
        if let Some((other, _)) = inputs.iter().find(|(name, _)| !names.contains(name)) {
            return Err(Error::Order {
                op: OP,
                problem: format!("{other:?} is no input that the loss reads"),
                hint: format!("it reads {}", names.join(", ")),
            });
        }
        for (name, check) in &self.ids {
            if let Some((_, tensor)) = inputs.iter().find(|(other, _)| other == name) {
                ids(OP, tensor, check.bound, check.ignore)?;
            }
        }
        let arguments = self.arguments.iter().map(|argument| match argument {
            Argument::Held(tensor) => Ok(tensor.clone()),
            Argument::Input { name, shape, dtype } => input(name, shape, *dtype, inputs),
        });
        arguments.collect()
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The trace that it was made from.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The weights that are updated, with their names.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.parameters
    }

    /// The norm of the last run's gradients before clipping; `None` before the first [`run`](Self::run), after
    /// [`forward_backward`](Self::forward_backward), and without clipping.
    ///
    /// # Errors
    /// Memory that cannot be read.
    pub fn gradient_norm(&mut self) -> Result<Option<f64>> {
        match &self.norm {
            Some(norm) if self.has_norm => {
                let norm: Vec<f64> = self.executor.read(&self.plan, norm)?;
                Ok(norm.first().copied())
            }
            _ => Ok(None),
        }
    }

    /// Copies of the last run's gradients by name, not clipped.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run.
    pub fn gradients(&mut self) -> Result<Vec<(String, Tensor)>> {
        if !self.has_run {
            return Err(Error::Order {
                op: "compile::LossStep::gradients",
                problem: "no step has been run".into(),
                hint: "call run first".into(),
            });
        }
        let gradients = self.parameters.iter().zip(&self.gradients);
        let copies = gradients.map(|((name, var), gradient)| {
            let copy = self.executor.copy(&self.plan, gradient, var.shape())?;
            Ok((name.clone(), copy))
        });
        copies.collect()
    }
}

/// The tensors of a trace's values, of which kernels read some as tables.
struct Constants<'a>(&'a [Tensor]);

impl Tables for Constants<'_> {
    fn table(&self, _: usize, operand: &graph::Operand, dtype: DType) -> Result<Vec<f32>> {
        let tensor = &self.0[operand.value.0];
        let elements = match &operand.view {
            None => tensor.flatten_all()?,
            Some(view) => match held(tensor, strided::end(view))? {
                Argument::Held(elements) => {
                    let count = view.shape.iter().product();
                    elements.flatten_all()?.narrow(0, view.offset, count)? // contiguous
                }
                Argument::Input { .. } => unreachable!("a constant is no input"),
            },
        };
        let rounded = elements.to_dtype(dtype)?.to_dtype(DType::F32)?;
        Ok(rounded.flatten_all()?.to_vec1()?)
    }
}

/// The inputs that are read as ids; constants that are ids are checked here.
fn checked_ids(
    graph: &Graph,
    lowered: &Lowered,
    arguments: &[Argument],
) -> Result<Vec<(String, Ids)>> {
    let mut inputs = Vec::new();
    for (id, check) in &lowered.ids {
        let id = &origin(graph, *id);
        if graph.value(*id).source == Source::Node {
            return Err(Error::Order {
                op: OP,
                problem: "token ids that an op makes are not checked before a run".into(),
                hint: "make them an input, or a constant".into(),
            });
        }
        let number = lowered.arguments.iter().position(|other| other == id);
        match number.map(|number| &arguments[number]) {
            Some(Argument::Input { name, .. }) => inputs.push((name.clone(), *check)),
            Some(Argument::Held(held)) => {
                ids(OP, held, check.bound, check.ignore)?;
            }
            None => {} // nobody reads them
        }
    }
    Ok(inputs)
}

/// Where the elements of a value come from, through copies in order.
fn origin(graph: &Graph, id: ValueId) -> ValueId {
    let makes_it = |node: &&graph::Node| node.output == id && node.op == "contiguous";
    match graph.nodes().find(makes_it) {
        Some(node) => origin(graph, node.inputs[0].value),
        None => id,
    }
}

/// What is lent.
fn arguments(graph: &Graph, tensors: &[Tensor], lowered: &Lowered) -> Result<Vec<Argument>> {
    let arguments = lowered.arguments.iter().enumerate().map(|(number, id)| {
        let (value, tensor) = (graph.value(*id), &tensors[id.0]);
        if let Source::Input(name) = &value.source
            && graph::is_hollow(tensor)
        {
            return Ok(Argument::Input {
                name: name.clone(),
                shape: value.shape.clone(),
                dtype: value.dtype,
            });
        }
        let home = super::Home::Argument(number);
        let elements = match lowered.plan.at_home(home) {
            Some(buffer) => lowered.plan.buffer(buffer).elements(),
            None => 0, // only dead calls read it
        };
        held(tensor, elements)
    });
    arguments.collect()
}

/// The first `elements` of a tensor's storage: itself, or a copy where it is a view.
fn held(tensor: &Tensor, elements: usize) -> Result<Argument> {
    if graph::is_hollow(tensor) {
        return Err(Error::Order {
            op: OP,
            problem: format!(
                "a hollow weight {:?} has no elements to compute with",
                tensor.dims()
            ),
            hint: "build the model with real weights; only inputs are hollow".into(),
        });
    }
    check_cpu("a constant or a frozen weight", tensor)?;
    let (storage, layout) = tensor.storage_and_layout();
    if layout.start_offset() == 0 && tensor.is_contiguous() && tensor.elem_count() == elements {
        return Ok(Argument::Held(tensor.detach()));
    }
    let copy = match cpu_storage(&storage)? {
        CpuStorage::U32(x) => Tensor::from_slice(&x[..elements], elements, &Device::Cpu)?,
        CpuStorage::I64(x) => Tensor::from_slice(&x[..elements], elements, &Device::Cpu)?,
        CpuStorage::U8(x) => Tensor::from_slice(&x[..elements], elements, &Device::Cpu)?,
        other => flat(other, elements)?,
    };
    Ok(Argument::Held(copy))
}

fn flat(storage: &CpuStorage, elements: usize) -> candle_core::Result<Tensor> {
    for_stored!(storage.dtype(), T => {
        Tensor::from_slice(&storage.as_slice::<T>()?[..elements], elements, &Device::Cpu)
    })
}

/// The tensor of an input, as planned.
fn input(name: &str, shape: &[usize], dtype: DType, inputs: &[(&str, &Tensor)]) -> Result<Tensor> {
    let Some((_, tensor)) = inputs.iter().find(|(other, _)| *other == name) else {
        return Err(Error::Order {
            op: OP,
            problem: format!("no tensor for the input {name:?}"),
            hint: format!("pass it to run: {shape:?} in {}", dtype.as_str()),
        });
    };
    if tensor.dims() != shape || tensor.dtype() != dtype {
        return Err(Error::Shape {
            op: OP,
            expected: format!("{name} {shape:?} in {}, as planned", dtype.as_str()),
            got: format!("{:?} in {}", tensor.dims(), tensor.dtype().as_str()),
            hint: "plan another step for another shape".into(),
        });
    }
    check_cpu(name, tensor)?;
    // A copy: weights are lent for writing during a run, and an input on the storage of one would wait for it for ever.
    Ok(tensor.detach().force_contiguous()?)
}

fn check_cpu(what: &str, tensor: &Tensor) -> Result<()> {
    match tensor.device().is_cpu() {
        true => Ok(()),
        false => Err(Error::Placement {
            op: OP,
            expected: format!("{what} on the CPU"),
            got: format!("{:?}", tensor.device().location()),
            hint: "on a GPU, plan a TransformerLM with compile::TrainStep, or run eagerly".into(),
        }),
    }
}

/// A constant on the storage of the optimizer's state would wait for ever: that is lent for writing.
fn check_not_lent(arguments: &[Tensor], updates: &[PlannedUpdate]) -> Result<()> {
    let state = updates
        .iter()
        .flat_map(|planned| [&planned.exp_avg, &planned.exp_avg_sq]);
    let lent: HashSet<usize> = state.map(storage_address).collect();
    match arguments.iter().any(|x| lent.contains(&storage_address(x))) {
        false => Ok(()),
        true => Err(Error::Order {
            op: OP,
            problem: "the loss reads the optimizer's state".into(),
            hint: "give the loss a copy of it".into(),
        }),
    }
}

/// As an eager step, which has no gradient of what the loss does not depend on.
fn check_reached(optimizer: &AdamW, parameters: &[(String, Var)]) -> Result<()> {
    let reached: HashSet<_> = parameters.iter().map(|(_, var)| var.id()).collect();
    let mut groups = optimizer
        .groups()
        .iter()
        .flat_map(|group| &group.parameters);
    match groups.find(|(_, var)| !reached.contains(&var.id())) {
        None => Ok(()),
        Some((name, _)) => Err(Error::MissingGradient {
            op: OP,
            parameter: name.clone(),
        }),
    }
}

fn check_parameters(parameters: &[(String, Var)]) -> Result<()> {
    if parameters.is_empty() {
        return Err(Error::Order {
            op: OP,
            problem: "the loss depends on no weight of the optimizer".into(),
            hint: "build the optimizer from the variables that the layers hold".into(),
        });
    }
    for (name, var) in parameters {
        check_cpu(name, var)?;
        if var.dtype() != DType::F32 || !var.is_contiguous() {
            return Err(Error::DType {
                op: OP,
                expected: "parameters in f32, contiguous".into(),
                got: format!(
                    "{name} in {}, strides {:?}",
                    var.dtype().as_str(),
                    var.stride()
                ),
                hint: "build the model in f32; autocast computes in half precision".into(),
            });
        }
    }
    Ok(())
}
