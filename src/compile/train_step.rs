//! A training step, planned.

use super::config::{PlanConfig, StepRanks};
use super::executor::Executor;
use super::loss_step::LossStep;
use super::model::Planner;
use super::phase_times::PhaseTimes;
use super::plan::Plan;
use super::step::ScaledStep;
use super::traced::Target;
use super::{least, parameters};
use crate::Result;
use crate::dist::{FullyShard, Replicated};
use crate::model::{MaskedTargets, TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::ops::DropoutKey;
use crate::ops::cross_entropy::nothing_counts;
use crate::optim::{AdamW, GradScaler};
use candle_core::{Device, Tensor, Var};

const OP: &str = "compile::TrainStep";

/// Forward, loss, backward, clipping and AdamW for one batch shape, planned once and run as often as one likes.
///
/// The same step as `model.loss(..)`, `backward()`, [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked)
/// and [`AdamW::step`], on the same variables: learning rates, groups and betas are read from the optimizer at each
/// run. On the CPU or [on a GPU](super#on-a-gpu), with the attention of the model's configuration.
///
/// The arithmetic is [`PlanConfig::precision`]'s, whatever [`autocast`](crate::autocast()) region it is called in.
///
/// A run holds the parameters' and the state's storages: another thread that reads them waits until it is over.
#[derive(Debug)]
pub struct TrainStep {
    step: LossStep,
    checkpointing: Checkpointing,
    separator: Option<u32>,
    ignore_index: Option<i64>,
    /// Of a model that drops anything.
    dropout_seed: Option<u64>,
}

impl TrainStep {
    /// Plans a step of `model` under `optimizer`, and allocates its arena.
    ///
    /// # Errors
    /// A configuration that cannot work ([`PlanConfig::validate`], a sequence beyond the model's context); a model that
    /// is not in f32 (or f64, on the CPU) on one device (the CPU or a CUDA GPU); on a GPU, heads that flash attention
    /// [has no kernel for](crate::compile#on-a-gpu); an optimizer of other parameters than the model's; a memory budget
    /// that no plan keeps to, with the smallest that one would; an arena that does not fit the machine's memory.
    pub fn new(model: &TransformerLM, optimizer: &AdamW, config: &PlanConfig) -> Result<Self> {
        config.check(model.config())?;
        Self::of(model, optimizer, config, model.parameters(), model.device())
    }

    /// Plans a step that updates `parameters`: the model's, or parts of them.
    fn of(
        model: &TransformerLM,
        optimizer: &AdamW,
        config: &PlanConfig,
        parameters: Vec<(String, Var)>,
        device: &Device,
    ) -> Result<Self> {
        parameters::check(OP, &parameters, device)?;
        optimizer.planned_updates(OP, &parameters)?;
        let planner = Planner::new(OP, model, config, Executor::target(device))?;
        let (planned, checkpointing) = planner.train_step()?;
        Ok(Self {
            step: LossStep::of(planned, parameters, device, &config.step(), "PlanConfig")?,
            checkpointing,
            separator: config.separator,
            ignore_index: config.ignore_index,
            dropout_seed: config.dropout_seed_of(model.config()),
        })
    }

    /// As [`new`](Self::new), with gradients and loss averaged over the ranks of `replicated`, as
    /// [its configuration](crate::dist::ReplicatedConfig) says. Every rank runs the step at the same time, each on its
    /// own part of the batch: tokens and targets are this rank's. All have the same weights after it.
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
    /// As [`new`](Self::new); [`Error::Config`](crate::Error::Config) for gradients exchanged in bf16 on the CPU,
    /// [`Error::Placement`](crate::Error::Placement) for a model on another device than the ranks'.
    pub fn replicated(
        model: &TransformerLM,
        optimizer: &AdamW,
        config: &PlanConfig,
        replicated: &Replicated,
    ) -> Result<Self> {
        let config = PlanConfig {
            ranks: match optimizer.own_shard() {
                None => StepRanks::Replicated(replicated.config()),
                Some(own) => StepRanks::ShardedOptimizer(replicated.config(), own),
            },
            ..config.clone()
        };
        let mut step = Self::new(model, optimizer, &config)?;
        step.step.join_job(replicated.communicator())?;
        Ok(step)
    }

    /// As [`new`](Self::new), of a model whose weights are divided over the ranks of `sharded`, from whose
    /// [builder](FullyShard::builder) it was built; the optimizer trains [the parts](FullyShard::parameters). Every
    /// rank runs the step at the same time, each on its own part of the batch: tokens and targets are this rank's.
    ///
    /// A module's weights are gathered in the dtype that its products read, in forward and again in backward, and freed
    /// after they were read last. Its gradients are averaged after its backward, of each micro-batch, and a rank keeps
    /// its part. On a GPU exchanges run beside the kernels, on a stream of their own, the gathers one module ahead, and
    /// are recorded in the CUDA graph with them. On the CPU each is waited for where it begins.
    ///
    /// # Errors
    /// As [`new`](Self::new) and [`replicated`](Self::replicated); [`Error::Order`](crate::Error::Order) for a model
    /// that is not all of what the builder gave; [`Error::Rank`](crate::Error::Rank) where ranks have other weights.
    pub fn fully_sharded(
        model: &TransformerLM,
        optimizer: &AdamW,
        config: &PlanConfig,
        sharded: &FullyShard,
    ) -> Result<Self> {
        let config = PlanConfig {
            ranks: StepRanks::FullySharded(sharded.config(), sharded.shard()),
            ..config.clone()
        };
        config.check(model.config())?;
        let communicator = sharded.communicator();
        let parts = sharded.parts_of(&model.parameters())?;
        let mut step = Self::of(model, optimizer, &config, parts, communicator.device())?;
        step.step.join_job(communicator)?;
        Ok(step)
    }

    /// The plan alone, for a model that need not exist: what a step would do, and what memory it would take. And the
    /// checkpointing that it has, which a memory budget may have chosen.
    ///
    /// ```
    /// use tallow::compile::{PlanConfig, TrainStep};
    /// use tallow::model::TransformerConfig;
    ///
    /// let (plan, _) = TrainStep::plan_for(&TransformerConfig::small(), &PlanConfig::default())?;
    /// println!("{} calls, an arena of {} MiB", plan.calls().len(), plan.peak_bytes() >> 20);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Configurations that cannot work; a memory budget that no plan keeps to, with the smallest that one would.
    pub fn plan_for(
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<(Plan, Checkpointing)> {
        Self::plan_on(&Device::Cpu, model, config)
    }

    /// As [`plan_for`](Self::plan_for), on a GPU of NVIDIA's that need not exist either.
    ///
    /// # Errors
    /// As [`plan_for`](Self::plan_for).
    pub fn plan_for_gpu(
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<(Plan, Checkpointing)> {
        Self::planned(Target::Cuda, model, config)
    }

    /// A lower bound of what a plan takes ([`Plan::total_bytes`]), in no time: from parameters, optimizer state and
    /// gradients, and what blocks keep. Planning takes longer the more blocks and rows there are, so ask this first
    /// where sizes may be absurd.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn least_bytes(model: &TransformerConfig, config: &PlanConfig) -> Result<u64> {
        least::bytes(model, config, true)
    }

    /// As [`plan_for`](Self::plan_for), for a model on `device`: on a GPU linear maps of one input are one product in
    /// half precision, and what kernels work in has other sizes.
    ///
    /// # Errors
    /// As [`plan_for`](Self::plan_for).
    pub fn plan_on(
        device: &Device,
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<(Plan, Checkpointing)> {
        Self::planned(Executor::target(device), model, config)
    }

    fn planned(
        target: Target,
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<(Plan, Checkpointing)> {
        let planner = Planner::hollow(OP, model, config, target)?;
        let (planned, checkpointing) = planner.train_step()?;
        Ok((planned.lowered.plan, checkpointing))
    }

    /// Has the copies of weights that products read in half precision renewed in the next [`run`](Self::run). Only on
    /// a GPU do they last from run to run, renewed by the update; an eager step of the same optimizer is noticed, and
    /// [`forward_backward`](Self::forward_backward) renews them each time. Call this after the weights were changed
    /// in any other way: loaded, or set.
    pub fn refresh(&mut self) {
        self.step.refresh();
    }

    /// One step: the mean loss of the batch before the update. tokens and targets (accumulation * B, T) u32 or i64.
    ///
    /// Where some targets do not count ([`PlanConfig::separator`], [`PlanConfig::ignore_index`]), loss and gradients
    /// are means over those that do: of all micro-batches, and of all ranks.
    ///
    /// Where the plan has loss scaling, the scale is 1 here, and nothing is left out.
    ///
    /// # Errors
    /// Another shape or dtype than planned, ids outside the vocabulary, no target that counts, an optimizer of other
    /// parameters, a learning rate that cannot work; with clipping, gradients that are not finite, naming the first
    /// such parameter. Whatever the error, parameters and optimizer are as they were.
    pub fn run(&mut self, optimizer: &mut AdamW, tokens: &Tensor, targets: &Tensor) -> Result<f32> {
        let given = self.given(tokens, targets, optimizer.steps())?;
        self.run_given(optimizer, &given.counted()?)
    }

    /// [`run`](Self::run), of what [`given`](Self::given) has prepared.
    pub(crate) fn run_given(&mut self, optimizer: &mut AdamW, given: &Given) -> Result<f32> {
        self.step.run(optimizer, &given.inputs())
    }

    /// As [`run`](Self::run) with the scaler's loss scale, which is read here: what [`GradScaler::scale`],
    /// [`unscale`](GradScaler::unscale), [`step`](GradScaler::step) and [`update`](GradScaler::update) do in an eager
    /// step. Where a gradient has overflowed, parameters and optimizer stay what they were, and the scale becomes
    /// smaller.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{PlanConfig, TrainStep};
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
    /// let plan = PlanConfig {
    ///     batch_size: 1, sequence_length: 4, precision: Precision::F16, loss_scaling: true,
    ///     ..Default::default()
    /// };
    /// let mut step = TrainStep::new(&model, &optimizer, &plan)?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// let done = step.run_scaled(&mut optimizer, &mut scaler, &tokens, &tokens)?;
    /// assert!(done.loss.is_finite());
    /// assert_eq!(optimizer.steps(), usize::from(done.stepped()));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run), but for gradients that are not finite; [`Error::Config`](crate::Error::Config) if the
    /// step was planned without loss scaling (and the scaler is not switched off);
    /// [`Error::Order`](crate::Error::Order) if an eager step of the scaler was begun and not ended; as
    /// [`GradScaler::update`].
    pub fn run_scaled(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        tokens: &Tensor,
        targets: &Tensor,
    ) -> Result<ScaledStep> {
        let given = self.given(tokens, targets, optimizer.steps())?;
        self.run_scaled_given(optimizer, scaler, &given.counted()?)
    }

    /// [`run_scaled`](Self::run_scaled), of what [`given`](Self::given) has prepared.
    pub(crate) fn run_scaled_given(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        given: &Given,
    ) -> Result<ScaledStep> {
        self.step.run_scaled(optimizer, scaler, &given.inputs())
    }

    /// As [`run`](Self::run) without the update: forward, loss and backward alone. What it finds is in
    /// [`gradients`](Self::gradients); nothing is clipped. Dropout is that of an optimizer's first step.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Order`](crate::Error::Order) where the optimizer runs in backward.
    pub fn forward_backward(&mut self, tokens: &Tensor, targets: &Tensor) -> Result<f32> {
        let given = self.given(tokens, targets, 0)?.counted()?;
        self.step.forward_backward(&given.inputs())
    }

    /// Prepares the tensors of a run, after `steps` steps of the optimizer. Ranks count their targets together.
    ///
    /// # Errors
    /// Tokens or targets of another dtype; a rank that failed.
    pub(crate) fn given(
        &mut self,
        tokens: &Tensor,
        targets: &Tensor,
        steps: usize,
    ) -> Result<Given> {
        let masked = MaskedTargets::of(tokens, targets, self.separator, self.ignore_index)?;
        let counted = match &masked {
            Some(masked) => Some(self.step.divide_by_targets(masked.counted)?),
            None => None,
        };
        let (count, rank) = (self.plan().micro_batches(), self.step.rank());
        let keys = |seed| DropoutKey::of_step(seed, steps, rank * count..(rank + 1) * count);
        Ok(Given {
            tokens: tokens.clone(),
            targets: targets.clone(),
            masked,
            counted,
            keys: self.dropout_seed.map(keys).transpose()?,
        })
    }

    /// Times the phases of runs from now on, or no more, for [`phase_times`](Self::phase_times).
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use tallow::compile::{PlanConfig, TrainStep};
    /// # use tallow::model::{TransformerConfig, TransformerLM};
    /// # use tallow::optim::{AdamW, AdamWConfig};
    /// # let device = tallow::device("cpu")?;
    /// # let config = TransformerConfig {
    /// #     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    /// #     ..Default::default()
    /// # };
    /// # let model = TransformerLM::new(&config, 0, &device)?;
    /// # let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
    /// # let plan = PlanConfig { batch_size: 1, sequence_length: 4, ..Default::default() };
    /// # let mut step = TrainStep::new(&model, &optimizer, &plan)?;
    /// # let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// step.time_phases(true);
    /// step.run(&mut optimizer, &tokens, &tokens)?;
    /// let times = step.phase_times()?.expect("a run that was timed");
    /// assert!(times.forward_ms > 0.0 && times.backward_ms > 0.0 && times.optimizer_ms > 0.0);
    /// # Ok::<(), tallow::Error>(())
    /// ```
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

    /// The plan.
    pub fn plan(&self) -> &Plan {
        self.step.plan()
    }

    /// Which blocks are recomputed: what was asked for, or what the memory budget chose. (A budget that is met by
    /// running sums, or gates and up, again runs no block again: the plan's calls show it.)
    pub fn checkpointing(&self) -> Checkpointing {
        self.checkpointing
    }

    /// Clips to another norm from the next run on.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if the step was planned without clipping, or the norm is not over 0.
    pub fn set_clip_norm(&mut self, norm: f64) -> Result<()> {
        self.step.set_clip_norm(norm)
    }

    /// The norm of the last run's gradients before clipping; `None` before the first run, and without clipping.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.step.gradient_norm()
    }

    /// Copies of the last run's gradients by name, not clipped; of a [divided](AdamW::shard) optimizer those of this
    /// rank's parameters.
    ///
    /// # Errors
    /// [`Error::Order`](crate::Error::Order) before the first run, and where the optimizer runs in backward, which
    /// frees them.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        self.step.gradients()
    }
}

/// The tensors of a run.
pub(crate) struct Given {
    tokens: Tensor,
    targets: Tensor,
    masked: Option<MaskedTargets>,
    /// How many targets of all ranks count; `None` where all do.
    pub(crate) counted: Option<usize>,
    /// Of dropout, (accumulation, 4).
    keys: Option<Tensor>,
}

impl Given {
    /// # Errors
    /// No target that counts.
    fn counted(self) -> Result<Self> {
        match self.counted {
            Some(0) => Err(nothing_counts(OP, self.targets.elem_count())),
            _ => Ok(self),
        }
    }

    /// By the names that the trace has.
    fn inputs(&self) -> Vec<(&'static str, &Tensor)> {
        let masked = self.masked.as_ref();
        let targets = masked.map_or(&self.targets, |masked| &masked.targets);
        let first_keys = masked.and_then(|masked| masked.first_keys.as_ref());
        let first_keys = first_keys.map(|keys| ("first_keys", keys.tensor()));
        let keys = self.keys.as_ref().map(|keys| ("dropout", keys));
        let inputs = [("tokens", &self.tokens), ("targets", targets)];
        inputs.into_iter().chain(first_keys).chain(keys).collect()
    }
}
