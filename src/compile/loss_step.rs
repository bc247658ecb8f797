//! A training step of any loss, planned from its trace.

use super::arguments::Arguments;
use super::budget;
use super::config::{StepConfig, StepRanks};
use super::executor::Executor;
use super::parameters;
use super::phase_times::PhaseTimes;
use super::plan::Plan;
use super::planned::Planned;
use super::run::Tensors;
use super::step::{ScaledStep, Step};
use super::traced::TracedFunction;
use crate::dist::{Communicator, FullyShard, Replicated};
use crate::graph::Graph;
use crate::optim::{AdamW, GradScaler, PlannedUpdate};
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};
use std::rc::Rc;

const OP: &str = "compile::LossStep";

/// Forward, backward, clipping and AdamW of any loss, planned once from its [trace](crate::graph::trace).
///
/// The loss is a function of hollow inputs ([`graph::input`](crate::graph::input())) over layers with real weights,
/// written with this crate's [`ops`](crate::ops), [`nn`](crate::nn) and [`attention`](crate::attention); in an
/// [`autocast`](crate::autocast()) region it is planned as it runs there. The step is the same as an eager one: `loss`,
/// `backward()`, [`clip_grad_norm`](crate::optim::clip_grad_norm), [`AdamW::step`], on the same variables. The
/// optimizer's weights are updated; a weight that several layers read (tied) has the sum of its gradients; one that the
/// optimizer does not have is frozen.
///
/// A [checkpointed](crate::nn::checkpoint()) segment is recomputed in backward, and its activations do not stay. A
/// frozen weight is read as it is in each run where the loss reads all of it; of one that is read in parts a copy is
/// made when the step is planned. A run copies its inputs, from the CPU or from where the step is planned, and ops take
/// a little memory of their own besides the arena.
///
/// Plans are made as [`TrainStep`](super::TrainStep)'s are, with the same passes: norms of sums, gates whose backward
/// needs no memory of its own, attention in the model's dimension, head and loss some rows at a time. An op that none
/// of them takes is planned as it is traced, one kernel after another. On the CPU or [on a GPU](super#on-a-gpu); with
/// parameters in f32, on the CPU also in f64.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::compile::{LossStep, StepConfig};
/// use tallow::optim::{AdamW, AdamWConfig, parameters_of};
/// use tallow::{graph, nn, ops};
///
/// let device = tallow::device("cpu")?;
/// let weights = VarMap::new();
/// let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
/// let (up, down) = (nn::Linear::new(8, 32, vb.pp("up"))?, nn::Linear::new(32, 3, vb.pp("down"))?);
/// let mut optimizer = AdamW::new(parameters_of(&weights), AdamWConfig::default())?;
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
    /// `loss` is called once, by [`graph::trace`](crate::graph::trace()): its inputs are hollow, its weights real. What
    /// it decides from the shapes of its inputs is decided for all runs.
    ///
    /// # Errors
    /// Those of `loss` and of its trace; an op that has no planned form, by its place; a loss that is not one f32; a
    /// weight of the optimizer that the loss does not depend on, unless its group
    /// [takes that](crate::optim::AdamWConfig::missing_gradients); weights that are not in f32 (or all in f64, on the
    /// CPU) on one device; a configuration that cannot work; an arena that does not fit the device's memory.
    pub fn new(
        optimizer: &AdamW,
        config: &StepConfig,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        config.validate()?;
        let groups = optimizer.groups().iter();
        let parameters = groups.flat_map(|group| group.parameters.iter().cloned());
        let parameters: Vec<(String, Var)> = parameters.collect();
        let updates = optimizer.planned_updates(OP, &parameters)?;
        Self::of_updates(&updates, parameters, config, loss)
    }

    /// As [`new`](Self::new), without an optimizer: for [`forward_backward`](Self::forward_backward) alone.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of_parameters(
        parameters: Vec<(String, Var)>,
        config: &StepConfig,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        Self::of_updates(&[], parameters, config, loss)
    }

    fn of_updates(
        updates: &[PlannedUpdate],
        parameters: Vec<(String, Var)>,
        config: &StepConfig,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        config.validate()?;
        let Some((_, first)) = parameters.first() else {
            return Err(Error::Order {
                op: OP,
                problem: "the optimizer has no parameter".into(),
                hint: "build it from the variables that the layers hold".into(),
            });
        };
        let device = first.device().clone();
        Self::plan_and_allocate(
            updates,
            &parameters.clone(),
            parameters,
            &device,
            config,
            loss,
        )
    }

    /// As [`new`](Self::new), with gradients and loss averaged over the ranks of `replicated`, as
    /// [its configuration](crate::dist::ReplicatedConfig) says. Every rank runs the step at the same time, each on its
    /// own part of the batch.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Config`] for gradients exchanged in bf16 on the CPU.
    pub fn replicated(
        optimizer: &AdamW,
        config: &StepConfig,
        replicated: &Replicated,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        let config = StepConfig {
            ranks: match optimizer.own_shard() {
                None => StepRanks::Replicated(replicated.config()),
                Some(own) => StepRanks::ShardedOptimizer(replicated.config(), own),
            },
            ..config.clone()
        };
        let mut step = Self::new(optimizer, &config, loss)?;
        step.join_job(replicated.communicator())?;
        Ok(step)
    }

    /// As [`new`](Self::new), of layers whose weights are divided over the ranks of `sharded`, from whose
    /// [builder](FullyShard::builder) they were built; the optimizer trains [the parts](FullyShard::parameters). See
    /// [`TrainStep::fully_sharded`](super::TrainStep::fully_sharded).
    ///
    /// # Errors
    /// As [`replicated`](Self::replicated); [`Error::Order`] for an optimizer of other parameters than all parts.
    pub fn fully_sharded(
        optimizer: &AdamW,
        config: &StepConfig,
        sharded: &FullyShard,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        let config = StepConfig {
            ranks: StepRanks::FullySharded(sharded.config(), sharded.shard()),
            ..config.clone()
        };
        config.validate()?;
        let (communicator, weights) = (sharded.communicator(), sharded.hollow_weights());
        let (device, parts) = (communicator.device(), sharded.parts_of(&weights)?);
        let updates = optimizer.planned_updates(OP, &parts)?;
        let mut step = Self::plan_and_allocate(&updates, &weights, parts, device, &config, loss)?;
        step.join_job(communicator)?;
        Ok(step)
    }

    /// Plans a step of a loss over `weights`, which updates `parameters`: these, or parts of them.
    fn plan_and_allocate(
        updates: &[PlannedUpdate],
        weights: &[(String, Var)],
        parameters: Vec<(String, Var)>,
        device: &Device,
        config: &StepConfig,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        parameters::check(OP, &parameters, device)?;
        let named = weights.iter();
        let named = named.map(|(name, var)| (name.as_str(), var.as_tensor()));
        let mut function = TracedFunction::new(OP, Executor::target(device), named, loss)?;
        for (parameter, update) in function.parameters.iter_mut().zip(updates) {
            parameter.missing = update.missing;
        }
        let planned = Self::planned(function, config)?;
        Self::of(planned, parameters, device, config, "StepConfig")
    }

    /// Has every run exchange with these ranks, for which it was planned.
    pub(super) fn join_job(&mut self, communicator: &Communicator) -> Result<()> {
        self.step.join_job(communicator)
    }

    /// [`Step::divide_by_targets`].
    pub(super) fn divide_by_targets(&mut self, counted: usize) -> Result<usize> {
        self.step.divide_by_targets(counted)
    }

    /// This rank's number, 0 in a step of one.
    pub(super) fn rank(&self) -> usize {
        self.step.rank()
    }

    /// The plan alone, on `device`, of a loss over [hollow weights](crate::graph::weights): what a step would do, and
    /// what memory it would take. All hollow weights are trained.
    ///
    /// ```
    /// use candle_core::DType;
    /// use tallow::compile::{LossStep, StepConfig};
    /// use tallow::{graph, nn, ops};
    ///
    /// let device = tallow::device("cpu")?;
    /// let head = nn::Linear::new(4096, 50_000, graph::weights(DType::F32))?; // takes no memory
    /// let x = graph::input("x", (2048, 4096), DType::F32)?;
    /// let targets = graph::input("targets", 2048, DType::U32)?;
    /// let plan = LossStep::plan_for(&device, &StepConfig::default(), || {
    ///     ops::linear_cross_entropy(&x, head.weight(), &targets)
    /// })?;
    /// println!("an arena of {} MiB", plan.peak_bytes() >> 20);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), but for those of the weights and of the device's memory.
    pub fn plan_for(
        device: &Device,
        config: &StepConfig,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Plan> {
        config.validate()?;
        let function = TracedFunction::of_hollow_weights(OP, Executor::target(device), loss)?;
        Ok(Self::planned(function, config)?.lowered.plan)
    }

    fn planned(function: TracedFunction, config: &StepConfig) -> Result<Planned> {
        let function = Rc::new(function);
        let plan = |(), recompute| function.step(config, recompute);
        let (planned, ()) = budget::plan(config, "StepConfig", [(), ()], [], plan)?;
        Ok(planned)
    }

    /// Allocates the arena of a plan, whose function has these parameters. Errors name `config_name`.
    pub(super) fn of(
        Planned { function, lowered }: Planned,
        parameters: Vec<(String, Var)>,
        device: &Device,
        config: &StepConfig,
        config_name: &'static str,
    ) -> Result<Self> {
        Ok(Self {
            arguments: Arguments::new(&function, &lowered, device)?,
            step: Step::new(
                function.op,
                lowered,
                parameters,
                device,
                config,
                config_name,
            )?,
            graph: function.graph.clone(),
        })
    }

    /// One step: the loss before the update. `inputs` are the tensors of the trace's inputs by their names, of the
    /// planned shapes and dtypes.
    ///
    /// # Errors
    /// A missing input, another name, shape, dtype or device than planned, ids out of bounds, an optimizer of other
    /// parameters, a learning rate that cannot work; with clipping, gradients that are not finite, naming the first
    /// such parameter. Whatever the error, parameters and optimizer are as they were.
    pub fn run(&mut self, optimizer: &mut AdamW, inputs: &[(&str, &Tensor)]) -> Result<f32> {
        let arguments = self.arguments.given(inputs)?;
        self.step.run(optimizer, &tensors(&arguments))
    }

    /// As [`run`](Self::run) with the scaler's loss scale, as [`TrainStep::run_scaled`](super::TrainStep::run_scaled)
    /// has it.
    ///
    /// # Errors
    /// As [`run`](Self::run), but for gradients that are not finite; [`Error::Config`] if the step was planned without
    /// loss scaling; as [`GradScaler::update`].
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

    /// Times the phases of runs from now on, or no more, for [`phase_times`](Self::phase_times).
    pub fn time_phases(&mut self, on: bool) {
        self.step.time_phases(on);
    }

    /// What the phases of the last run took; `None` if they are not timed, and before a run.
    ///
    /// # Errors
    /// The device's.
    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        self.step.phase_times()
    }

    /// Has the copies of weights that products read in half precision renewed in the next run, as
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

    /// Clips to another norm from the next run on.
    ///
    /// # Errors
    /// [`Error::Config`] if the step was planned without clipping, or the norm is not over 0.
    pub fn set_clip_norm(&mut self, norm: f64) -> Result<()> {
        self.step.set_clip_norm(norm)
    }

    /// Copies of the last run's gradients by name, not clipped; of a [divided](AdamW::shard) optimizer those of this
    /// rank's parameters.
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
