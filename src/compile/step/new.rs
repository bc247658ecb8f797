//! How a step is made, and plans alone, of steps that need not exist.

use super::super::config::{PlanKind, StepConfig, StepRanks};
use super::super::loss::{Job, Loss, hollow_model};
use super::super::plan::Plan;
use super::super::{Batch, Inputs, budget, parameters};
use super::{OP, Step};
use crate::distributed::{Communicator, FullyShard, Replicated};
use crate::graph::Target;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::optim::AdamW;
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};

impl<'l> Step<'l> {
    /// A step of `loss` under `optimizer`.
    ///
    /// `loss` gives the mean loss of a batch (one float), or the sum over the targets of a batch that
    /// [counts them](crate::compile::Batch::counting).
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
    /// [targets of which some do not count](crate::compile::Batch::masked), by its attention, dropout and
    /// checkpointing.
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
        let hollow = hollow_model(model, length)?;
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
        budget::least_of_step(model, config, batch)
    }
}

/// The variables that an optimizer steps, in the order of its groups.
fn parameters_of(optimizer: &AdamW) -> Vec<(String, Var)> {
    let groups = optimizer.groups().iter();
    let parameters = groups.flat_map(|group| group.parameters.iter().cloned());
    parameters.collect()
}
