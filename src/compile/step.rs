//! A training step of any loss, planned.

use super::arguments::{Arguments, changed_since};
use super::batch::{Batch, D_OUTPUT, DROPOUT, Inputs};
use super::config::{PlanKind, StepConfig, StepRanks, check_clip_norm};
use super::loss::{Job, Loss};
use super::phase_times::PhaseTimes;
use super::plan::Plan;
use super::planned_step::{PlannedStep, ScaledStep};
use super::run::Tensors;
use super::traced::Target;
use super::{least, model, parameters};
use crate::distributed::{Communicator, FullyShard, Replicated};
use crate::graph::{Graph, Value, ValueId};
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::ops::DropoutKey;
use crate::ops::cross_entropy::nothing_counts;
use crate::optim::{AdamW, GradScaler, MissingGradients};
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};

const OP: &str = "compile::Step";

/// Forward, backward, clipping and AdamW of a loss, planned for the shapes of each batch.
///
/// The loss is [`TransformerLM::loss`] ([`Step::of`]), or any function of [inputs](Inputs) over layers with real
/// weights, written with this crate's [`ops`](crate::ops), [`nn`](crate::nn) and [`attention`](crate::attention)
/// ([`Step::new`]). The step is that of an eager loop on the same variables: `loss`, [`backward`](crate::backward),
/// [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked), [`AdamW::step`]. Learning rates, groups and betas
/// are read from the optimizer at each run. The optimizer's weights are updated; a weight that several layers read
/// (tied) has the sum of its gradients; one that the optimizer does not have is frozen.
///
/// **A loss is traced once for each set of shapes and dtypes** ([`graph::trace`](crate::graph::trace())), in the first
/// run with them or in [`prepare`](Self::prepare). What it captures, tensors and numbers, and the branches that it
/// takes are fixed then; what changes from run to run is an input. The last [`MAX_PLANS`](Self::MAX_PLANS) plans are
/// kept, of whatever shapes and [kind](PlanKind), and the one that was used longest ago goes. They share one arena.
///
/// A [checkpointed](crate::nn::checkpoint()) segment is recomputed in backward, and its activations do not stay. A
/// frozen weight is read as it is in each run where the loss reads all of it; of one that is read in parts a copy is
/// made when the step is planned. On the CPU a run reads its inputs where they lie, if they are contiguous; on a GPU it
/// copies them, from the CPU or from there. Ops take a little memory of their own besides the arena. A run holds the
/// storages of parameters and state: another thread that reads them waits until it is over, and on the CPU one that
/// writes an input does.
///
/// On the CPU or [on a GPU](super#on-a-gpu); with parameters in f32, on the CPU also in f64.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::compile::{Step, StepConfig};
/// use tallow::optim::{AdamW, AdamWConfig, parameters_of};
/// use tallow::{nn, ops};
///
/// let device = tallow::device("cpu")?;
/// let weights = VarMap::new();
/// let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
/// let (up, down) = (nn::Linear::new(8, 32, vb.pp("up"))?, nn::Linear::new(32, 3, vb.pp("down"))?);
/// let mut optimizer = AdamW::new(parameters_of(&weights), AdamWConfig::default())?;
/// let config = StepConfig { clip_norm: Some(1.0), ..Default::default() };
/// let mut step = Step::new(&optimizer, &config, |inputs| {
///     let hidden = ops::relu(&up.forward(&inputs.get("x")?)?)?;
///     ops::cross_entropy(&down.forward(&hidden)?, &inputs.get("classes")?)
/// })?;
///
/// let x = Tensor::randn(0f32, 1.0, (16, 8), &device)?;
/// let classes = Tensor::from_iter((0..16u32).map(|i| i % 3), &device)?;
/// let first = step.run(&mut optimizer, [("x", &x), ("classes", &classes)])?;
/// let second = step.run(&mut optimizer, [("x", &x), ("classes", &classes)])?;
/// assert!(second < first);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct Step<'l> {
    loss: Loss<'l>,
    /// The variables that the loss reads; parameters are these, or parts of them.
    weights: Vec<(String, Var)>,
    parameters: Vec<(String, Var)>,
    /// By parameter; empty for the default.
    missing: Vec<MissingGradients>,
    device: Device,
    config: StepConfig,
    communicator: Option<Communicator>,
    times_phases: bool,
    /// So far.
    runs: usize,
    /// Plans that were dropped for others.
    evicted: usize,
    /// In the order of their last use.
    plans: Vec<Prepared>,
}

/// A plan for some shapes.
#[derive(Debug)]
struct Prepared {
    step: PlannedStep,
    arguments: Arguments,
    graph: Graph,
    checkpointing: Checkpointing,
    /// Tensors that the function reads, and that are neither parameters nor inputs.
    constants: Vec<ValueId>,
    kind: PlanKind,
    /// Set for batches that count their targets.
    counts: bool,
}

impl<'l> Step<'l> {
    /// The number of plans that are kept.
    pub const MAX_PLANS: usize = 4;

    /// A step of `loss` under `optimizer`.
    ///
    /// `loss` gives the mean loss of a batch (one float), or the sum over the targets of a batch that
    /// [counts them](Batch::counting).
    ///
    /// # Errors
    /// Weights that are not in f32 (or all in f64, on the CPU) on one device; a configuration that cannot work. Those
    /// of the loss come when it is [traced](Self::prepare).
    pub fn new(
        optimizer: &AdamW,
        config: &StepConfig,
        loss: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Self> {
        let parameters = parameters_of(optimizer);
        let Some((_, first)) = parameters.first() else {
            return Err(Error::Order {
                op: OP,
                problem: "the optimizer has no parameter".into(),
                hint: "build it from the variables that the layers hold".into(),
            });
        };
        let (device, loss) = (first.device().clone(), Loss::Any(Box::new(loss)));
        let all = [parameters.clone(), parameters];
        Self::made(loss, all, Some(optimizer), &device, config)
    }

    /// A step of any function of [inputs](Inputs) without an optimizer, on `device`: for [`forward`](Self::forward),
    /// [`forward_backward`](Self::forward_backward) and
    /// [`forward_backward_from`](Self::forward_backward_from). `parameters` are the variables that it reads, whose
    /// gradients are wanted. They may be in half precision too, and so may the output.
    ///
    /// ```
    /// use candle_core::{DType, Tensor};
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 50, context_length: 8, d_model: 16, num_layers: 2, num_heads: 2, d_ff: 32,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?;
    /// let parameters = model.parameters();
    /// let mut step = Step::without_optimizer(&device, parameters, &StepConfig::default(), |inputs| {
    ///     model.forward(&inputs.get("tokens")?)
    /// })?;
    /// let tokens = Tensor::zeros((3, 8), DType::U32, &device)?; // (B, T)
    /// assert_eq!(step.forward([("tokens", &tokens)])?.dims(), [3, 8, 50]); // logits, (B, T, V)
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), but for half precision.
    pub fn without_optimizer(
        device: &Device,
        parameters: Vec<(String, Var)>,
        config: &StepConfig,
        function: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Self> {
        let loss = Loss::Any(Box::new(function));
        let all = [parameters.clone(), parameters];
        Self::made(loss, all, None, device, config)
    }

    /// A step of `model` under `optimizer`: its [loss](TransformerLM::loss) of `(&tokens, &targets)`, or of
    /// [targets of which some do not count](Batch::masked), by its attention, dropout and checkpointing.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::optim::{AdamW, AdamWConfig};
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?;
    /// let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
    /// let mut step = Step::of(&model, &optimizer, &StepConfig::default())?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// let targets = Tensor::new(&[[2u32, 3, 4, 5]], &device)?; // (B, T)
    /// let first = step.run(&mut optimizer, (&tokens, &targets))?;
    /// let second = step.run(&mut optimizer, (&tokens, &targets))?;
    /// assert!(second < first);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new); an optimizer of other parameters than the model's.
    pub fn of(model: &TransformerLM, optimizer: &AdamW, config: &StepConfig) -> Result<Self> {
        let (loss, all) = (Loss::Model(Box::new(model.clone())), model.parameters());
        Self::made(
            loss,
            [all.clone(), all],
            Some(optimizer),
            model.device(),
            config,
        )
    }

    fn made(
        loss: Loss<'l>,
        [weights, parameters]: [Vec<(String, Var)>; 2],
        optimizer: Option<&AdamW>,
        device: &Device,
        config: &StepConfig,
    ) -> Result<Self> {
        config.validate()?;
        parameters::check(OP, &parameters, device, optimizer.is_some())?;
        let updates = optimizer.map(|optimizer| optimizer.planned_updates(OP, &parameters));
        let updates = updates.transpose()?.unwrap_or_default();
        Ok(Self {
            loss,
            weights,
            parameters,
            missing: updates.iter().map(|update| update.missing).collect(),
            device: device.clone(),
            config: config.clone(),
            communicator: None,
            times_phases: false,
            runs: 0,
            evicted: 0,
            plans: Vec::new(),
        })
    }

    /// The same step, with gradients and loss averaged over the ranks of `replicated`, as
    /// [its configuration](crate::distributed::ReplicatedConfig) says. Every rank runs the step at the same time, each
    /// on its own part of the batch. All have the same weights after it.
    ///
    /// On a GPU a bucket's all-reduce runs beside the rest of backward, on a stream of its own, and is recorded in the
    /// CUDA graph with it. On the CPU it is waited for where it begins.
    ///
    /// Where the optimizer is [divided](AdamW::shard) among the ranks, a gradient is averaged on its owner alone, which
    /// updates the parameter, and a run begins by fetching the others' as its products read them, on a GPU beside the
    /// first layers. So a rank has of others' parameters the values of the last run until
    /// [`AdamW::gather_weights`].
    ///
    /// # Errors
    /// A configuration that does not go with several ranks; [`Error::Placement`] for parameters on another device than
    /// the ranks'. The first run refuses gradients exchanged in bf16 on the CPU.
    pub fn replicated(mut self, optimizer: &AdamW, replicated: &Replicated) -> Result<Self> {
        self.config.ranks = match optimizer.own_shard() {
            None => StepRanks::Replicated(replicated.config()),
            Some(own) => StepRanks::ShardedOptimizer(replicated.config(), own),
        };
        self.joining(replicated.communicator())
    }

    /// A step of a loss over layers whose weights are divided over the ranks of `sharded`, from whose
    /// [builder](FullyShard::builder) they were built; the optimizer trains [the parts](FullyShard::parameters). Every
    /// rank runs the step at the same time, each on its own part of the batch.
    ///
    /// A module's weights are gathered in the dtype that its products read, in forward and again in backward, and freed
    /// after they were read last. Its gradients are averaged after its backward, of each micro-batch, and a rank keeps
    /// its part. On a GPU exchanges run beside the kernels, on a stream of their own, the gathers one module ahead, and
    /// are recorded in the CUDA graph with them. On the CPU each is waited for where it begins.
    ///
    /// # Errors
    /// As [`new`](Self::new) and [`replicated`](Self::replicated); [`Error::Order`] for an optimizer of other
    /// parameters than all parts; [`Error::Rank`] where ranks have other weights.
    pub fn fully_sharded(
        optimizer: &AdamW,
        config: &StepConfig,
        sharded: &FullyShard,
        loss: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Self> {
        let (loss, weights) = (Loss::Any(Box::new(loss)), sharded.hollow_weights());
        Self::of_parts(loss, weights, optimizer, config, sharded)
    }

    /// A step of the loss of `model`, whose weights are divided as those of [`fully_sharded`](Self::fully_sharded).
    ///
    /// # Errors
    /// As [`fully_sharded`](Self::fully_sharded); [`Error::Order`] for a model that is not all of what the builder
    /// gave.
    pub fn of_fully_sharded(
        model: &TransformerLM,
        optimizer: &AdamW,
        config: &StepConfig,
        sharded: &FullyShard,
    ) -> Result<Self> {
        let (loss, weights) = (Loss::Model(Box::new(model.clone())), model.parameters());
        Self::of_parts(loss, weights, optimizer, config, sharded)
    }

    fn of_parts(
        loss: Loss<'l>,
        weights: Vec<(String, Var)>,
        optimizer: &AdamW,
        config: &StepConfig,
        sharded: &FullyShard,
    ) -> Result<Self> {
        let config = StepConfig {
            ranks: StepRanks::FullySharded(sharded.config(), sharded.shard()),
            ..config.clone()
        };
        config.validate()?;
        let communicator = sharded.communicator();
        let all = [weights.clone(), sharded.parts_of(&weights)?];
        Self::made(loss, all, Some(optimizer), communicator.device(), &config)?
            .joining(communicator)
    }

    /// Has every run exchange with these ranks.
    fn joining(mut self, communicator: &Communicator) -> Result<Self> {
        self.config.validate()?;
        for (_, var) in &self.parameters {
            communicator.check_device(var.device())?;
        }
        (self.communicator, self.plans) = (Some(communicator.clone()), Vec::new());
        Ok(self)
    }

    /// The plan alone, of a loss, or any function, over [hollow weights](crate::graph::weights), which are all trained:
    /// what a run of that kind would do with such a batch, and what memory it would take. Of the gradient that a run of
    /// [`PlanKind::Gradients`] is given the batch has nothing.
    ///
    /// ```
    /// use candle_core::DType;
    /// use tallow::compile::{PlanKind, Step, StepConfig};
    /// use tallow::{graph, nn, ops};
    ///
    /// let device = tallow::device("cpu")?;
    /// let head = nn::Linear::new(4096, 50_000, graph::weights(DType::F32))?; // takes no memory
    /// let x = graph::input("x", (2048, 4096), DType::F32)?;
    /// let targets = graph::input("targets", 2048, DType::U32)?;
    /// let batch = [("x", &x), ("targets", &targets)];
    /// let plan = Step::plan_for(&device, PlanKind::TrainStep, &StepConfig::default(), batch, |inputs| {
    ///     ops::linear_cross_entropy(&inputs.get("x")?, head.weight(), &inputs.get("targets")?)
    /// })?;
    /// println!("an arena of {} MiB", plan.peak_bytes() >> 20);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), but for those of the weights and of the device's memory.
    pub fn plan_for(
        target: impl Into<Target>,
        kind: PlanKind,
        config: &StepConfig,
        batch: impl Into<Batch>,
        function: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Plan> {
        config.validate()?;
        let job = Job {
            op: OP,
            kind,
            target: target.into(),
            loss: &Loss::Any(Box::new(function)),
            weights: None,
            config: &config.of(kind),
        };
        Ok(job.plan(&batch.into(), |_| {})?.0.lowered.plan)
    }

    /// The plan alone, of the loss of a model that need not exist, and the blocks that it recomputes, which a memory
    /// budget may have chosen.
    ///
    /// ```
    /// use tallow::compile::{Batch, Step, StepConfig, Target};
    /// use tallow::model::TransformerConfig;
    ///
    /// let (model, batch) = (TransformerConfig::small(), Batch::hollow(4, 256)?);
    /// let (plan, _) = Step::plan_of(Target::Cuda, &model, &StepConfig::default(), &batch)?; // needs no GPU
    /// println!("{} calls, an arena of {} MiB", plan.calls().len(), plan.peak_bytes() >> 20);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Configurations that cannot work; a memory budget that no plan keeps to, with the smallest that one would.
    pub fn plan_of(
        target: impl Into<Target>,
        model: &TransformerConfig,
        config: &StepConfig,
        batch: impl Into<Batch>,
    ) -> Result<(Plan, Checkpointing)> {
        config.validate()?;
        let batch = batch.into();
        let length = batch.length("tokens");
        let hollow = model::hollow(model, length)?;
        let job = Job {
            op: OP,
            kind: PlanKind::TrainStep,
            target: target.into(),
            weights: Some(&hollow.parameters()),
            loss: &Loss::Model(Box::new(hollow)),
            config,
        };
        let (planned, checkpointing) = job.plan(&batch, |_| {})?;
        Ok((planned.lowered.plan, checkpointing))
    }

    /// A lower bound of what the plan of a model's step takes ([`Plan::total_bytes`]), in no time: from parameters,
    /// optimizer state and gradients, and what blocks keep. Planning takes longer the more blocks and rows there are,
    /// so ask this first where sizes may be absurd.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn least_bytes(
        model: &TransformerConfig,
        config: &StepConfig,
        batch: [usize; 2],
    ) -> Result<u64> {
        config.validate()?;
        least::of_step(model, config, batch)
    }

    /// Plans the step for batches of these shapes and dtypes, unless it is planned, and allocates its arena.
    ///
    /// # Errors
    /// Those of the loss and of its trace; an op that has no planned form, by its place; a loss that is not one float;
    /// a weight of the optimizer that the loss does not depend on, unless its group
    /// [takes that](crate::optim::AdamWConfig::missing_gradients); a missing input, or one that the loss does not read;
    /// on a GPU, heads that flash attention [has no kernel for](super#on-a-gpu); a memory budget that no plan keeps
    /// to, with the smallest that one would; an arena that does not fit the device's memory.
    pub fn prepare(&mut self, batch: impl Into<Batch>) -> Result<&Plan> {
        let prepared = self.prepared(PlanKind::TrainStep, &batch.into())?;
        Ok(&prepared.step.plan)
    }

    /// The plan of a kind for a batch, as the last of the plans, with the arena.
    fn prepared(&mut self, kind: PlanKind, batch: &Batch) -> Result<&mut Prepared> {
        let fits = |prepared: &Prepared| {
            let counts = batch.counted().is_some();
            (prepared.kind, prepared.counts) == (kind, counts) && prepared.arguments.take(batch)
        };
        let next = match self.plans.iter().position(fits) {
            Some(place) if place + 1 == self.plans.len() => None,
            Some(place) => Some(self.plans.remove(place)),
            None => {
                let planned = self.planned(kind, batch)?;
                if self.plans.len() == Self::MAX_PLANS {
                    self.plans.remove(0);
                    self.evicted += 1;
                }
                Some(planned)
            }
        };
        if let Some(mut next) = next {
            let before = self.plans.last_mut().map(|before| &mut before.step);
            if let Err(error) = next.step.follow(before) {
                self.plans.clear(); // none has an arena now
                return Err(error);
            }
            self.plans.push(next);
        }
        let Some(last) = self.plans.last_mut() else {
            unreachable!("a plan was found or made");
        };
        Ok(last)
    }

    fn job<'s>(&'s self, kind: PlanKind, config: &'s StepConfig) -> Job<'s> {
        Job {
            op: OP,
            kind,
            target: Target::from(&self.device),
            loss: &self.loss,
            weights: Some(&self.weights),
            config,
        }
    }

    /// The plan of the loss for a batch, its constants in place, without an arena.
    fn planned(&self, kind: PlanKind, batch: &Batch) -> Result<Prepared> {
        let config = self.config.of(kind);
        let job = self.job(kind, &config);
        let (planned, checkpointing) = job.plan(batch, |function| {
            for (parameter, missing) in function.parameters.iter_mut().zip(&self.missing) {
                parameter.missing = *missing;
            }
        })?;
        let arguments = Arguments::new(&planned.function, &planned.lowered, &self.device)?;
        arguments.check(batch)?;
        let mut step = PlannedStep::new(
            OP,
            planned.lowered,
            self.parameters.clone(),
            &self.device,
            &config,
            self.communicator.as_ref(),
        )?;
        step.time_phases(self.times_phases);
        Ok(Prepared {
            step,
            arguments,
            constants: planned.function.constants(),
            graph: planned.function.graph.clone(),
            checkpointing,
            kind,
            counts: batch.counted().is_some(),
        })
    }

    /// Has the copies of weights that products read in half precision renewed in the next [`run`](Self::run). Only on
    /// a GPU do they last from run to run, renewed by the update; an eager step of the same optimizer is noticed, and
    /// [`forward_backward`](Self::forward_backward) renews them each time. Call this after the weights were changed
    /// in any other way: loaded, or set.
    pub fn refresh(&mut self) {
        for prepared in &mut self.plans {
            prepared.step.refresh();
        }
    }

    /// One step: the loss of the batch before the update. Of a batch that [counts its targets](Batch::counting), loss
    /// and gradients are means over those that count: of all micro-batches, and of all ranks.
    ///
    /// Where the plan has loss scaling, the scale is 1 here, and nothing is left out.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare); ids out of bounds, no target that counts, an optimizer of other parameters, a
    /// learning rate that cannot work; with clipping, gradients that are not finite, naming the first such parameter.
    /// Whatever the error, parameters and optimizer are as they were.
    pub fn run(&mut self, optimizer: &mut AdamW, batch: impl Into<Batch>) -> Result<f32> {
        let given = self.given(batch.into(), optimizer.steps())?.counted()?;
        self.run_given(optimizer, &given)
    }

    /// [`run`](Self::run), of what [`given`](Self::given) has prepared.
    pub(crate) fn run_given(&mut self, optimizer: &mut AdamW, given: &Given) -> Result<f32> {
        self.with(given, |step, tensors| step.run(optimizer, tensors))
    }

    /// As [`run`](Self::run) with the scaler's loss scale, which is read here: what [`GradScaler::scale`],
    /// [`unscale`](GradScaler::unscale), [`step`](GradScaler::step) and [`update`](GradScaler::update) do in an eager
    /// step. Where a gradient has overflowed, parameters and optimizer stay what they were, and the scale becomes
    /// smaller.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::optim::{AdamW, AdamWConfig, GradScaler, GradScalerConfig};
    /// use tallow::precision::Precision;
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?;
    /// let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
    /// let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    /// let config = StepConfig { precision: Precision::F16, loss_scaling: true, ..Default::default() };
    /// let mut step = Step::of(&model, &optimizer, &config)?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &tokens))?;
    /// assert!(done.loss.is_finite());
    /// assert_eq!(optimizer.steps(), usize::from(done.stepped()));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run), but for gradients that are not finite; [`Error::Config`] if the step was planned without
    /// loss scaling (and the scaler is not switched off); [`Error::Order`] if an eager step of the scaler was begun and
    /// not ended; as [`GradScaler::update`].
    pub fn run_scaled(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        batch: impl Into<Batch>,
    ) -> Result<ScaledStep> {
        let given = self.given(batch.into(), optimizer.steps())?.counted()?;
        self.run_scaled_given(optimizer, scaler, &given)
    }

    /// [`run_scaled`](Self::run_scaled), of what [`given`](Self::given) has prepared.
    pub(crate) fn run_scaled_given(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        given: &Given,
    ) -> Result<ScaledStep> {
        self.with(given, |step, tensors| {
            step.run_scaled(optimizer, scaler, tensors)
        })
    }

    /// As [`run`](Self::run) without the update: forward, loss and backward alone. What it finds is in
    /// [`gradients`](Self::gradients); nothing is clipped. Dropout is that of an optimizer's first step.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Order`] where the optimizer runs in backward.
    pub fn forward_backward(&mut self, batch: impl Into<Batch>) -> Result<f32> {
        let given = self.given(batch.into(), 0)?.counted()?;
        self.with(&given, PlannedStep::forward_backward)
    }

    /// Forward, and backward from `d_output`, the gradient of the function's output, which need not be one number: what
    /// [`backward_from`](crate::backward_from) does eagerly. [`gradients`](Self::gradients) has the parameters',
    /// [`output`](Self::output) the output. `d_output` is (accumulation * B, ...), of one micro-batch after another;
    /// their gradients are added. Dropout is that of an optimizer's first step. Ranks average gradients as in
    /// [`run`](Self::run). On a GPU pass the same tensor each time: it is read where it lies, and a run that finds it
    /// elsewhere is recorded anew.
    ///
    /// ```
    /// use candle_core::{Tensor, Var};
    /// use tallow::attention::{self, AttentionConfig, Mask};
    /// use tallow::compile::{Batch, Step, StepConfig};
    ///
    /// // Attention alone: q, k and v are its parameters.
    /// let device = tallow::device("cpu")?;
    /// let draw = || Var::randn(0f32, 1.0, (2, 3, 5, 8), &device); // (B, H, T, Dh)
    /// let (q, k, v) = (draw()?, draw()?, draw()?);
    /// let parameters = vec![("q".into(), q.clone()), ("k".into(), k.clone()), ("v".into(), v.clone())];
    /// let causal = AttentionConfig { mask: Mask::Causal, ..Default::default() };
    /// let mut step = Step::without_optimizer(&device, parameters, &StepConfig::default(), |_| {
    ///     attention::flash(&q, &k, &v, &causal)
    /// })?;
    /// let d_out = Tensor::ones((2, 3, 5, 8), candle_core::DType::F32, &device)?;
    /// step.forward_backward_from(Batch::new([]), &d_out)?;
    /// let (name, dq) = &step.gradients()?[0];
    /// assert_eq!((name.as_str(), dq.dims()), ("q", &[2, 3, 5, 8][..]));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), for an output in a float dtype that an op has made; a gradient of another shape
    /// or dtype than the output.
    pub fn forward_backward_from(
        &mut self,
        batch: impl Into<Batch>,
        d_output: &Tensor,
    ) -> Result<()> {
        let batch = batch.into();
        if batch.inputs().any(|(name, _)| name == D_OUTPUT) {
            return Err(Error::Order {
                op: OP,
                problem: format!("an input is called {D_OUTPUT:?}, as the output's gradient is"),
                hint: "call the input otherwise".into(),
            });
        }
        let batch = batch.with(D_OUTPUT, d_output.clone());
        let batch = self.keyed(PlanKind::Gradients, batch, 0)?;
        let given = Given::of(PlanKind::Gradients, batch);
        self.with(&given, PlannedStep::forward_backward_from)
    }

    /// A copy of the output of the last [`forward_backward_from`](Self::forward_backward_from): (B, ...), of its last
    /// micro-batch.
    ///
    /// # Errors
    /// [`Error::Order`] if another run was the last.
    pub fn output(&self) -> Result<Tensor> {
        match self.last() {
            Some(last) => {
                let shape = last.graph.shape_of(&last.graph.outputs[0]);
                last.step.output(last.kind, shape)
            }
            None => Err(nothing_run()),
        }
    }

    /// Forward alone: the function's output for a batch, of which micro-batches are no part. Of a model's step, or any
    /// loss, it is the mean over the batch, of a batch that [counts its targets](Batch::counting) the sum over these.
    /// Nothing is dropped, and no other rank asked: but where [weights are divided](Self::fully_sharded) over ranks,
    /// which all gather them, and so call it as often. Of a [divided optimizer](Self::replicated) parameters are as
    /// this rank has them.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), for an output in a float dtype.
    pub fn forward(&mut self, batch: impl Into<Batch>) -> Result<Tensor> {
        let device = self.device.clone();
        let given = Given::of(PlanKind::Forward, batch.into());
        self.with(&given, |step, tensors| step.forward(tensors, &device))
    }

    /// Prepares a run, after `steps` steps of the optimizer. Ranks count their targets together.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare); a rank that failed.
    pub(crate) fn given(&mut self, batch: Batch, steps: usize) -> Result<Given> {
        let batch = self.keyed(PlanKind::TrainStep, batch, steps)?;
        let (counted, loss_divisor) = match batch.counted() {
            Some(counted) => {
                let (all, mean) = self.over_ranks(counted)?;
                (Some(all), Some(mean))
            }
            None => (None, None),
        };
        Ok(Given {
            counted,
            loss_divisor,
            ..Given::of(PlanKind::TrainStep, batch)
        })
    }

    /// A batch with the keys of dropout after `steps` steps of the optimizer, where its plan reads them.
    fn keyed(&mut self, kind: PlanKind, batch: Batch, steps: usize) -> Result<Batch> {
        let reads_keys = self.prepared(kind, &batch)?.arguments.reads(DROPOUT);
        match self.config.dropout_seed {
            Some(seed) if reads_keys => {
                let rank = self.communicator.as_ref().map_or(0, Communicator::rank);
                let count = self.config.accumulation;
                let micro_batches = rank * count..(rank + 1) * count;
                Ok(batch.with(DROPOUT, DropoutKey::of_step(seed, steps, micro_batches)?))
            }
            _ => Ok(batch),
        }
    }

    /// The targets that count: those of all ranks, and their mean, since ranks average what they have divided.
    fn over_ranks(&self, counted: usize) -> Result<(usize, f64)> {
        let (mean, ranks) = match &self.communicator {
            Some(ranks) => (ranks.mean(&[counted as f64])?[0], ranks.world_size()),
            None => (counted as f64, 1),
        };
        Ok(((mean * ranks as f64).round() as usize, mean))
    }

    fn with<T>(
        &mut self,
        given: &Given,
        run: impl FnOnce(&mut PlannedStep, &Tensors<'_>) -> Result<T>,
    ) -> Result<T> {
        self.prepared(given.kind, &given.batch)?;
        self.runs += 1;
        if let Some(every) = self.config.retrace_every
            && self.runs.is_multiple_of(every.get())
        {
            self.check_trace(&given.batch)?;
        }
        let (device, parameters) = (&self.device, &self.parameters);
        let Some(prepared) = self.plans.last_mut() else {
            unreachable!("it was prepared");
        };
        let arguments = prepared.arguments.given(&given.batch, device, parameters)?;
        let tensors = Tensors {
            arguments: &arguments,
            loss_divisor: given.loss_divisor,
            ..Default::default()
        };
        run(&mut prepared.step, &tensors)
    }

    /// An error where the function does otherwise now than when the last plan was made.
    fn check_trace(&self, batch: &Batch) -> Result<()> {
        let Some(last) = self.last() else {
            return Ok(());
        };
        let config = self.config.of(last.kind);
        let job = self.job(last.kind, &config);
        let function = job.trace(&job.inputs(batch)?, last.checkpointing)?;
        if let Some(difference) = last.graph.difference(&function.graph) {
            return Err(changed_since(OP, difference));
        }
        let (arguments, plan) = (&last.arguments, &last.step.plan);
        arguments.check_constants(&function, plan, &self.device)
    }

    /// Times the phases of runs from now on, or no more, for [`phase_times`](Self::phase_times).
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use tallow::compile::{Step, StepConfig};
    /// # use tallow::model::{TransformerConfig, TransformerLM};
    /// # use tallow::optim::{AdamW, AdamWConfig};
    /// # let device = tallow::device("cpu")?;
    /// # let config = TransformerConfig {
    /// #     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    /// #     ..Default::default()
    /// # };
    /// # let model = TransformerLM::new(&config, 0, &device)?;
    /// # let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
    /// # let mut step = Step::of(&model, &optimizer, &StepConfig::default())?;
    /// # let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// step.time_phases(true);
    /// step.run(&mut optimizer, (&tokens, &tokens))?;
    /// let times = step.phase_times()?.expect("a run that was timed");
    /// assert!(times.forward_ms > 0.0 && times.backward_ms > 0.0 && times.optimizer_ms > 0.0);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn time_phases(&mut self, on: bool) {
        self.times_phases = on;
        for prepared in &mut self.plans {
            prepared.step.time_phases(on);
        }
    }

    /// What the phases of the last run took; `None` if they are not timed, and before a run.
    ///
    /// # Errors
    /// The device's.
    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        self.last().map_or(Ok(None), |last| last.step.phase_times())
    }

    fn last(&self) -> Option<&Prepared> {
        self.plans.last()
    }

    /// The plan of the last run, of whatever [kind](PlanKind), or of [`prepare`](Self::prepare); `None` before.
    pub fn plan(&self) -> Option<&Plan> {
        self.last().map(|last| &last.step.plan)
    }

    /// The plans that are kept, in the order of their last use.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.plans.iter().map(|prepared| &prepared.step.plan)
    }

    /// The trace that the last [plan](Self::plan) was made from.
    pub fn graph(&self) -> Option<&Graph> {
        self.last().map(|last| &last.graph)
    }

    /// The tensors that the function read in that trace and that are neither parameters nor inputs, each with the place
    /// that reads it first: frozen weights, and constants, which a plan may have copies of. What changes from run to
    /// run is to be an input ([`StepConfig::retrace_every`] finds out).
    pub fn constants(&self) -> Vec<(&str, &Value)> {
        let Some(last) = self.last() else {
            return Vec::new();
        };
        let constants = last.constants.iter();
        let constants = constants.map(|id| {
            let mut nodes = last.graph.nodes();
            let reader = nodes.find(|node| node.reads_value(*id));
            (
                reader.map_or("", |node| node.path.as_str()),
                last.graph.value(*id),
            )
        });
        constants.collect()
    }

    /// The number of plans that were dropped for others, of more sets of shapes than [`MAX_PLANS`](Self::MAX_PLANS): a
    /// run that comes back to one plans it again.
    pub fn evicted(&self) -> usize {
        self.evicted
    }

    /// Which blocks the last [plan](Self::plan) recomputes: the model's own choice, or what the memory budget chose. (A
    /// budget that is met by running sums, or gates and up, again runs no block again: the plan's calls show it.)
    pub fn checkpointing(&self) -> Option<Checkpointing> {
        self.last().map(|last| last.checkpointing)
    }

    /// The weights that are updated, with their names.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.parameters
    }

    /// Clips to another norm from the next run on.
    ///
    /// # Errors
    /// [`Error::Config`] if the step was planned without clipping, or the norm is not over 0.
    pub fn set_clip_norm(&mut self, norm: f64) -> Result<()> {
        check_clip_norm(norm)?;
        if self.config.clip_norm.is_none() {
            return Err(Error::Config {
                config: "StepConfig",
                field: "clip_norm",
                expected: "Some, for a step whose gradients are to be clipped".into(),
                got: "None".into(),
                hint: "plan with clip_norm: Some(f64::INFINITY) to begin without clipping".into(),
            });
        }
        self.config.clip_norm = Some(norm);
        for prepared in &mut self.plans {
            prepared.step.set_clip_norm(norm);
        }
        Ok(())
    }

    /// The norm of the last run's gradients before clipping; `None` before the first [`run`](Self::run), after
    /// [`forward_backward`](Self::forward_backward), and without clipping.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.last().and_then(|last| last.step.gradient_norm())
    }

    /// Copies of the last run's gradients by name, not clipped; of a [divided](AdamW::shard) optimizer those of this
    /// rank's parameters.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run, and where the optimizer runs in backward, which frees them.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        match self.last() {
            Some(last) => last.step.gradients(),
            None => Err(nothing_run()),
        }
    }
}

fn nothing_run() -> Error {
    Error::Order {
        op: OP,
        problem: "no step has been run".into(),
        hint: "call run first".into(),
    }
}

/// The variables that an optimizer steps, in the order of its groups.
fn parameters_of(optimizer: &AdamW) -> Vec<(String, Var)> {
    let groups = optimizer.groups().iter();
    let parameters = groups.flat_map(|group| group.parameters.iter().cloned());
    parameters.collect()
}

/// A batch that is ready to run.
pub(crate) struct Given {
    kind: PlanKind,
    batch: Batch,
    /// The number of targets that count, of all ranks; `None` where all do.
    pub(crate) counted: Option<usize>,
    loss_divisor: Option<f64>,
}

impl Given {
    /// Of a batch whose targets are not counted.
    fn of(kind: PlanKind, batch: Batch) -> Self {
        Self {
            kind,
            batch,
            counted: None,
            loss_divisor: None,
        }
    }

    /// # Errors
    /// No target that counts.
    fn counted(self) -> Result<Self> {
        match self.counted {
            Some(0) => Err(nothing_counts(OP, self.batch.elements())),
            _ => Ok(self),
        }
    }
}
