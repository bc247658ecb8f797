//! Constructors of steps, and plans without a step.

use super::super::config::{PlanKind, StepConfig, StepRanks};
use super::super::loss::{Loss, PlanRequest, meta_model};
use super::super::plan::Plan;
use super::super::{Batch, Inputs, budget, parameters};
use super::{OP, Step, dims_of};
use crate::attention::Algorithm;
use crate::distributed::{Communicator, FullyShard, Replicated};
use crate::graph::Target;
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::optim::Optimizer;
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};

impl<'l> Step<'l> {
    /// Creates a step of `loss` with `optimizer`.
    ///
    /// `loss` gets the inputs of one micro-batch and must return a scalar in f32 (on the CPU also f64): the micro-batch's
    /// mean loss or, if the batch has [counted targets](crate::compile::Batch::with_counted_targets), the sum of
    /// the losses of its targets.
    ///
    /// # Errors
    /// Weights that are not all f32 (or all f64, on the CPU) on one device; an invalid configuration. Errors of the
    /// loss occur when it is [traced](Self::prepare).
    pub fn new(
        optimizer: &Optimizer,
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
        Self::with_loss(loss, all, Some(optimizer), &device, config)
    }

    /// Creates a step without an optimizer on `device`, of any function of [inputs](Inputs), for
    /// [`forward`](Self::forward), [`forward_backward`](Self::forward_backward) and
    /// [`forward_backward_from`](Self::forward_backward_from). `parameters` are the variables that it reads and that
    /// need gradients. Parameters and output may also be in half precision.
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
    /// Those of [`new`](Self::new), except that half precision is accepted.
    pub fn without_optimizer(
        device: &Device,
        parameters: Vec<(String, Var)>,
        config: &StepConfig,
        function: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Self> {
        let loss = Loss::Any(Box::new(function));
        let all = [parameters.clone(), parameters];
        Self::with_loss(loss, all, None, device, config)
    }

    /// Creates a step of `model` with `optimizer`. It computes the [loss](TransformerLM::loss) of `(&tokens,
    /// &targets)`, or of [partly ignored targets](crate::compile::Batch::masked), with the model's attention, dropout
    /// and checkpointing.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::optim::{AdamWConfig, Optimizer};
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?;
    /// let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
    /// let mut step = Step::for_model(&model, &optimizer, &StepConfig::default())?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// let targets = Tensor::new(&[[2u32, 3, 4, 5]], &device)?; // (B, T)
    /// let first = step.run(&mut optimizer, (&tokens, &targets))?;
    /// let second = step.run(&mut optimizer, (&tokens, &targets))?;
    /// assert!(second < first);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`new`](Self::new); an optimizer of other parameters than the model's.
    pub fn for_model(
        model: &TransformerLM,
        optimizer: &Optimizer,
        config: &StepConfig,
    ) -> Result<Self> {
        let (loss, all) = (Loss::Model(Box::new(model.clone())), model.parameters());
        Self::with_loss(
            loss,
            [all.clone(), all],
            Some(optimizer),
            model.device(),
            config,
        )
    }

    fn with_loss(
        loss: Loss<'l>,
        [weights, parameters]: [Vec<(String, Var)>; 2],
        optimizer: Option<&Optimizer>,
        device: &Device,
        config: &StepConfig,
    ) -> Result<Self> {
        config.validate()?;
        parameters::check(OP, &parameters, device, optimizer.is_some())?;
        let dims = dims_of(&weights);
        let updates = optimizer.map(|optimizer| {
            let order = optimizer.order_of(OP, &parameters)?;
            optimizer.planned_updates(&order, &dims)
        });
        let updates = updates.transpose()?.unwrap_or_default();
        Ok(Self {
            loss,
            weights,
            parameters,
            rules: updates.iter().map(|update| update.rule).collect(),
            device: device.clone(),
            config: config.clone(),
            communicator: None,
            times_phases: false,
            runs: 0,
            evicted_plans: 0,
            plans: Vec::new(),
        })
    }

    /// Makes the step average gradients and loss over the ranks of `replicated`, by [its
    /// configuration](crate::distributed::ReplicatedConfig). Every rank must run the step at the same time, on its own
    /// part of the batch. Without a sharded optimizer all ranks have equal weights after it.
    ///
    /// On a GPU each bucket's all-reduce runs on a separate stream, concurrently with the rest of backward, and is
    /// recorded in the same CUDA graph. On the CPU each all-reduce is waited for.
    ///
    /// With a [sharded](Optimizer::shard) optimizer, each gradient is reduced to its mean on one rank, the one that
    /// updates the parameter. The gradients of a bucket are reduced together. [`run`](Self::run) begins by fetching
    /// the parameters of other ranks in the order in which matmuls read them, on a GPU concurrently with the first
    /// layers. Until [`Optimizer::gather_weights`], parameters owned by other ranks lag by one update.
    ///
    /// A program calls these functions in this order:
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::distributed::{self, Communicator, Replicated, ReplicatedConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::optim::{AdamWConfig, Optimizer};
    ///
    /// let train = |ranks: Communicator| -> tallow::Result<f32> {
    ///     let config = TransformerConfig {
    ///         vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///         ..Default::default()
    ///     };
    ///     let model = TransformerLM::new(&config, 0, ranks.device())?;
    ///     let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
    ///     // Here a run that continues loads the files of both: TransformerLM::load, Optimizer::load.
    ///     let replicated = Replicated::new(&ranks, model.parameters(), ReplicatedConfig::default())?;
    ///     optimizer.shard(&ranks)?; // leave this out if each rank has memory for the full state
    ///     let step = Step::for_model(&model, &optimizer, &StepConfig::default())?;
    ///     let mut step = step.replicated(&optimizer, &replicated)?;
    ///     // This rank's part of the batch.
    ///     let tokens = Tensor::full(ranks.rank() as u32, (2, 4), ranks.device())?;
    ///     step.run(&mut optimizer, (&tokens, &tokens))?;
    ///     let loss = step.run(&mut optimizer, (&tokens, &tokens))?; // the mean of both ranks
    ///     optimizer.gather_weights()?; // before this rank reads or saves the weights
    ///     Ok(loss)
    /// };
    ///
    /// // Two ranks, here threads of one process; processes call distributed::init.
    /// let losses = std::thread::scope(|scope| -> tallow::Result<Vec<f32>> {
    ///     let ranks = distributed::threads(2)?.into_iter();
    ///     let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || train(rank))).collect();
    ///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    /// })?;
    /// assert_eq!(losses[0], losses[1]);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// A configuration that does not support several ranks; [`Error::Placement`] for parameters on another device than
    /// the communicator's. The first run returns an error if gradients are exchanged in bf16 on the CPU.
    pub fn replicated(mut self, optimizer: &Optimizer, replicated: &Replicated) -> Result<Self> {
        self.config.ranks = match optimizer.own_shard() {
            None => StepRanks::Replicated(replicated.config()),
            Some(own) => StepRanks::ShardedOptimizer(replicated.config(), own),
        };
        self.with_communicator(replicated.communicator())
    }

    /// Creates a step of a loss over layers whose weights are sharded over the ranks of `sharded`. The layers must be
    /// built from its [builder](FullyShard::builder), and the optimizer must train [the
    /// shards](FullyShard::parameters). Every rank must run the step at the same time, on its own part of the batch.
    ///
    /// In each micro-batch a module's weights are gathered for forward and again for backward, in the dtype that its
    /// matmuls read, and freed after their last read. After the module's backward its gradients are averaged, and each
    /// rank keeps its shard of them. On a GPU exchanges run on a separate stream, concurrently with the kernels, and
    /// weights are gathered one [bucket](crate::distributed::FullyShardConfig::bucket_bytes) ahead; all of it is
    /// recorded in one CUDA graph. On the CPU each exchange is waited for.
    ///
    /// # Errors
    /// Those of [`new`](Self::new) and [`replicated`](Self::replicated); [`Error::Order`] for an optimizer of other
    /// parameters than all shards; [`Error::Rank`] if ranks have different weights.
    pub fn fully_sharded(
        optimizer: &Optimizer,
        config: &StepConfig,
        sharded: &FullyShard,
        loss: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Self> {
        let (loss, weights) = (Loss::Any(Box::new(loss)), sharded.meta_weights());
        Self::of_shards(loss, weights, optimizer, config, sharded)
    }

    /// Creates a step of the loss of `model`, whose weights are sharded as for [`fully_sharded`](Self::fully_sharded).
    ///
    /// # Errors
    /// Those of [`fully_sharded`](Self::fully_sharded); [`Error::Order`] for a model that does not have all weights
    /// that the builder created.
    pub fn fully_sharded_for_model(
        model: &TransformerLM,
        optimizer: &Optimizer,
        config: &StepConfig,
        sharded: &FullyShard,
    ) -> Result<Self> {
        let (loss, weights) = (Loss::Model(Box::new(model.clone())), model.parameters());
        Self::of_shards(loss, weights, optimizer, config, sharded)
    }

    fn of_shards(
        loss: Loss<'l>,
        weights: Vec<(String, Var)>,
        optimizer: &Optimizer,
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
        Self::with_loss(loss, all, Some(optimizer), communicator.device(), &config)?
            .with_communicator(communicator)
    }

    /// Sets the communicator for the exchanges of all runs.
    fn with_communicator(mut self, communicator: &Communicator) -> Result<Self> {
        self.config.validate()?;
        for (_, var) in &self.parameters {
            communicator.check_device(var.device())?;
        }
        (self.communicator, self.plans) = (Some(communicator.clone()), Vec::new());
        Ok(self)
    }

    /// Plans a loss, or any function, over [meta weights](crate::graph::weights), without a step. The plan is that of a
    /// run of this kind with such a batch. Every meta weight counts as trained. For a training step, build the meta
    /// model without [`nn::freeze`](crate::nn::freeze()), even if the real model has frozen weights: a meta weight
    /// without a gradient is an error. The plan then also counts gradients and optimizer state of the weights that the
    /// real model freezes; [`prepare`](Self::prepare) plans the step of the real model. [`Plan::total_bytes`] and
    /// [`planned_breakdown`](crate::memory::planned_breakdown) have its memory. For [`PlanKind::Gradients`] the batch
    /// must not include the output's gradient.
    ///
    /// `function` gets an input by its name in the batch. The name that was passed to
    /// [`graph::input`](crate::graph::input()) is not used.
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
    /// println!("an arena of {} MiB", plan.arena_bytes() >> 20);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// An invalid configuration; those of [`prepare`](Self::prepare), except for [`Error::OutOfMemory`] of the arena:
    /// nothing is allocated.
    pub fn plan_for(
        target: impl Into<Target>,
        kind: PlanKind,
        config: &StepConfig,
        batch: impl Into<Batch>,
        function: impl Fn(&Inputs) -> Result<Tensor> + Send + 'l,
    ) -> Result<Plan> {
        config.validate()?;
        let job = PlanRequest {
            op: OP,
            kind,
            target: target.into(),
            loss: &Loss::Any(Box::new(function)),
            weights: None,
            config: &config.of(kind),
        };
        Ok(job.plan(&batch.into(), |_| {})?.0.lowered.plan)
    }

    /// Plans the loss of a model, which may be a [meta model](TransformerLM::meta), without a step. Returns the plan
    /// and the blocks that it recomputes, which a memory budget may have chosen.
    ///
    /// ```
    /// use tallow::compile::{Batch, Step, StepConfig, Target};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    ///
    /// let model = TransformerLM::meta(&TransformerConfig::preset("small")?)?;
    /// let batch = Batch::meta(4, 256)?;
    /// // Needs no GPU.
    /// let (plan, _) = Step::plan_for_model(Target::Cuda, &model, &StepConfig::default(), &batch)?;
    /// println!("an arena of {} MiB, {:.1} TFLOP", plan.arena_bytes() >> 20, plan.flops() / 1e12);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// An invalid configuration; sequences that are longer than the model's context; a memory budget that no plan fits,
    /// with the smallest that would do.
    pub fn plan_for_model(
        target: impl Into<Target>,
        model: &TransformerLM,
        config: &StepConfig,
        batch: impl Into<Batch>,
    ) -> Result<(Plan, Checkpointing)> {
        config.validate()?;
        let batch = batch.into();
        let length = batch.length("tokens");
        let meta = meta_model(model, length)?;
        let job = PlanRequest {
            op: OP,
            kind: PlanKind::TrainStep,
            target: target.into(),
            weights: Some(&meta.parameters()),
            loss: &Loss::Model(Box::new(meta)),
            config,
        };
        let (planned, checkpointing) = job.plan(&batch, |_| {})?;
        Ok((planned.lowered.plan, checkpointing))
    }

    /// Returns a lower bound of the memory of a model's planned step ([`Plan::total_bytes`]), from parameters,
    /// optimizer state, gradients and saved activations. This is immediate, while planning slows down with the number
    /// of blocks and rows. Call this first if sizes may be far too large.
    ///
    /// # Errors
    /// Invalid configurations.
    pub fn memory_lower_bound(
        model: &TransformerConfig,
        attention: Algorithm,
        checkpointing: Checkpointing,
        config: &StepConfig,
        batch: [usize; 2],
    ) -> Result<u64> {
        config.validate()?;
        budget::step_lower_bound(model, attention, checkpointing, config, batch)
    }
}

/// Returns the variables that an optimizer updates, in the order of its groups.
fn parameters_of(optimizer: &Optimizer) -> Vec<(String, Var)> {
    let groups = optimizer.groups().iter();
    let parameters = groups.flat_map(|group| group.parameters.iter().cloned());
    parameters.collect()
}
