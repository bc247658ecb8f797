//! A training step of any loss, planned from its trace.

use super::arguments::{Arguments, Constants, check_device};
use super::config::check_clip_norm;
use super::executor::Executor;
use super::lower::{self, Again, Job, Parameter};
use super::plan::Plan;
use super::run::Tensors;
use super::step::{Options, ScaledStep, Step};
use crate::graph::{self, Graph, Traced, ValueId};
use crate::optim::inplace::storage_address;
use crate::optim::{AdamW, GradScaler};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::{HashMap, HashSet};

const OP: &str = "compile::LossStep";

/// How a planned step of a loss is run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepConfig {
    /// Scale the gradients so that their norm is at most this; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// Whether the plan divides gradients by a loss scale and leaves the update out where one has overflowed, for
    /// [`LossStep::run_scaled`].
    pub loss_scaling: bool,
    /// Update each parameter in backward, as soon as its gradient is complete and nothing reads the parameter any more. Goes with
    /// neither clipping nor loss scaling, which need all gradients first.
    pub optimizer_in_backward: bool,
}

impl StepConfig {
    /// Whether the fields go together.
    ///
    /// # Errors
    /// [`Error::Config`]: a norm that is not over 0, an optimizer in backward beside clipping or loss scaling.
    pub fn validate(&self) -> Result<()> {
        if let Some(norm) = self.clip_norm {
            check_clip_norm(norm)?;
        }
        match self.optimizer_in_backward && (self.clip_norm.is_some() || self.loss_scaling) {
            false => Ok(()),
            true => Err(Error::Config {
                config: "StepConfig",
                field: "optimizer_in_backward",
                expected: "false with clip_norm or loss_scaling".into(),
                got: "true".into(),
                hint: "both need all gradients before the first update; leave one out".into(),
            }),
        }
    }
}

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
/// planned as it is traced, one kernel after another. On the CPU or [on a GPU](super#on-a-gpu); with parameters in f32.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::compile::{LossStep, StepConfig};
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
/// let mut step = LossStep::new(&optimizer, &StepConfig { clip_norm: Some(1.0), ..Default::default() }, || {
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
    step: Step,
    graph: Graph,
    arguments: Arguments,
}

impl LossStep {
    /// Plans a step of `loss` under `optimizer`, and allocates its arena.
    ///
    /// `loss` is called once, by [`graph::trace`]: its inputs are hollow, its weights real. What it decides from the shapes of
    /// its inputs is decided for all runs.
    ///
    /// # Errors
    /// Those of `loss` and of its trace; an op that has no planned form, by its place; a loss that is not one f32; a weight of
    /// the optimizer that the loss does not depend on; weights that are not in f32 on one device; a configuration that cannot
    /// work; an arena that does not fit the device's memory.
    pub fn new(
        optimizer: &AdamW,
        config: &StepConfig,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        config.validate()?;
        let device = device_of(optimizer)?;
        let target = Executor::target(&device);
        let Traced { graph, tensors } = graph::trace_with_tensors(target.of_trace(), loss)?;
        let groups = optimizer.groups().iter();
        let trained: HashMap<usize, &(String, Var)> = groups
            .flat_map(|group| &group.parameters)
            .map(|parameter| (storage_address(&parameter.1), parameter))
            .collect();
        let parameter = |id: ValueId| trained.get(&storage_address(&tensors[id.0])).copied();
        let reached = lower::reached(&graph, |id| parameter(id).is_some());
        let named = reached.iter().filter_map(|id| parameter(*id)).cloned();
        let parameters: Vec<(String, Var)> = named.collect();
        check_parameters(&parameters, &device)?;
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
        let constants = Constants {
            op: OP,
            graph: &graph,
            tensors: &tensors,
            device: &device,
        };
        let lowered = lower::step(&Job {
            op: OP,
            graph: &graph,
            target,
            parameters: &trained,
            numbers: &numbers,
            input: &|_| None,
            table: &constants,
            differentiated: &[],
            clips: config.clip_norm.is_some(),
            scales: config.loss_scaling,
            accumulation: 1,
            optimizer_in_backward: config.optimizer_in_backward,
            again: Again::default(),
        })?;
        let options = Options {
            clip_norm: config.clip_norm,
            scales: config.loss_scaling,
            optimizer_in_backward: config.optimizer_in_backward,
        };
        Ok(Self {
            arguments: Arguments::new(&constants, &lowered)?,
            step: Step::new(OP, lowered, parameters, &device, &options)?,
            graph,
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
        let arguments = self.arguments.given(inputs)?;
        self.step.run(optimizer, &tensors(&arguments))
    }

    /// As [`run`](Self::run) with the scaler's loss scale, as [`TrainStep::run_scaled`](super::TrainStep::run_scaled) has it.
    ///
    /// # Errors
    /// As [`run`](Self::run), but for gradients that are not finite; [`Error::Config`] if the step was planned without loss
    /// scaling; as [`GradScaler::update`].
    pub fn run_scaled(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        inputs: &[(&str, &Tensor)],
    ) -> Result<ScaledStep> {
        let arguments = self.arguments.given(inputs)?;
        self.step
            .run_scaled(optimizer, scaler, &tensors(&arguments))
    }

    /// As [`run`](Self::run) without the update: what it finds is in [`gradients`](Self::gradients).
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Order`] where the optimizer runs in backward.
    pub fn forward_backward(&mut self, inputs: &[(&str, &Tensor)]) -> Result<f32> {
        let arguments = self.arguments.given(inputs)?;
        self.step.forward_backward(&tensors(&arguments))
    }

    /// Has the copies of weights that products read in half precision made anew in the next run, as
    /// [`TrainStep::refresh`](super::TrainStep::refresh).
    pub fn refresh(&mut self) {
        self.step.refresh();
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.step.plan
    }

    /// The trace that it was made from.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The weights that are updated, with their names.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.step.parameters
    }

    /// The norm of the last run's gradients before clipping; `None` before the first [`run`](Self::run), after
    /// [`forward_backward`](Self::forward_backward), and without clipping.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.step.gradient_norm()
    }

    /// Copies of the last run's gradients by name, not clipped.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run, and where the optimizer runs in backward, which frees them.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        self.step.gradients()
    }
}

/// What a run is given beside parameters and their updates.
fn tensors<'t>(arguments: &'t [&'t Tensor]) -> Tensors<'t> {
    Tensors {
        arguments,
        ..Default::default()
    }
}

/// The device of the optimizer's parameters: of the first.
fn device_of(optimizer: &AdamW) -> Result<Device> {
    let mut parameters = optimizer
        .groups()
        .iter()
        .flat_map(|group| &group.parameters);
    match parameters.next() {
        Some((_, var)) => Ok(var.device().clone()),
        None => Err(Error::Order {
            op: OP,
            problem: "the optimizer has no parameter".into(),
            hint: "build it from the variables that the layers hold".into(),
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

fn check_parameters(parameters: &[(String, Var)], device: &Device) -> Result<()> {
    if parameters.is_empty() {
        return Err(Error::Order {
            op: OP,
            problem: "the loss depends on no weight of the optimizer".into(),
            hint: "build the optimizer from the variables that the layers hold".into(),
        });
    }
    for (name, var) in parameters {
        check_device(OP, name, var, device)?;
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
