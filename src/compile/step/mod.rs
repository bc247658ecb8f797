//! A planned training step of any loss: constructors and standalone plans ([`new`]), runs ([`run`]), and their results.

mod new;
mod run;

use super::arguments::Arguments;
use super::batch::Batch;
use super::config::{PlanKind, StepConfig};
use super::loss::{Loss, PlanRequest};
use super::phase_times::PhaseTimes;
use super::plan::Plan;
use super::planned_step::PlannedStep;
use crate::distributed::Communicator;
use crate::graph::{Graph, Target, Value, ValueId};
use crate::nn::Checkpointing;
use crate::optim::Rule;
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};

const OP: &str = "compile::Step";

/// Forward, backward, clipping and update of a loss, planned for the shapes of each batch.
///
/// The loss is [`TransformerLM::loss`](crate::model::TransformerLM::loss) ([`Step::for_model`]) or a function of
/// [inputs](super::Inputs) ([`Step::new`]). The function calls this crate's [`ops`](crate::ops), [`nn`](crate::nn) and
/// [`attention`](crate::attention). Its layers have real weights, not [meta tensors](crate::graph#meta-tensors);
/// without weights, [`plan_for`](Self::plan_for) predicts the step's memory.
///
/// A step does what an eager loop does with the same variables: `loss`, [`backward`](crate::backward),
/// [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked),
/// [`Optimizer::step`](crate::optim::Optimizer::step). Learning rates, groups, betas, moments and the step count are
/// read from the optimizer at each run: after [`Optimizer::load`](crate::optim::Optimizer::load) the same step
/// continues. The optimizer's weights are updated. A weight that several layers read (tied) receives the sum of its
/// gradients. A weight that the optimizer does not have is frozen.
///
/// **A loss is traced once for each set of shapes and dtypes** ([`graph::trace`](crate::graph::trace())), in the first
/// run with them or in [`prepare`](Self::prepare). The tensors and numbers that it captures and the branches that it
/// takes are fixed then. Whatever changes from run to run must be an input. The last [`MAX_PLANS`](Self::MAX_PLANS)
/// plans are kept, of any shapes and [kind](PlanKind); the least recently used one is evicted. All share one arena.
///
/// A [checkpointed](crate::nn::checkpoint()) segment is recomputed in backward; its activations are not saved. A frozen
/// weight that the loss reads in full is read in place in each run; one that is read through views is copied when the
/// step is planned. On the CPU a run reads contiguous inputs in place; on a GPU it copies them, from the CPU or the
/// GPU. [`compile`](crate::compile#what-a-plan-is-exact-about) lists the memory outside of the arena. A run locks the
/// storages of parameters and optimizer state: another thread that reads them waits until the run ends. On the CPU a
/// thread that writes an input waits too.
///
/// Runs on the CPU or [on a GPU](crate::compile#on-a-gpu), with parameters in f32, on the CPU also in f64.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::compile::{Step, StepConfig};
/// use tallow::optim::{AdamWConfig, Optimizer, parameters_of};
/// use tallow::{nn, ops};
///
/// let device = tallow::device("cpu")?;
/// let weights = VarMap::new();
/// let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
/// let (up, down) = (nn::Linear::new(8, 32, vb.pp("up"))?, nn::Linear::new(32, 3, vb.pp("down"))?);
/// let mut optimizer = Optimizer::new(parameters_of(&weights), AdamWConfig::default())?;
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
    /// The variables that the loss reads. The parameters are these, or shards of them.
    weights: Vec<(String, Var)>,
    parameters: Vec<(String, Var)>,
    /// The rules of the parameters; empty without an optimizer.
    rules: Vec<Rule>,
    device: Device,
    config: StepConfig,
    communicator: Option<Communicator>,
    times_phases: bool,
    runs: usize,
    evicted_plans: usize,
    /// The plans, least recently used first.
    plans: Vec<Prepared>,
}

/// A plan for one set of shapes.
#[derive(Debug)]
struct Prepared {
    step: PlannedStep,
    arguments: Arguments,
    graph: Graph,
    checkpointing: Checkpointing,
    /// Tensors that the function reads and that are neither parameters nor inputs.
    constants: Vec<ValueId>,
    kind: PlanKind,
    /// Whether the batch counts its targets.
    counts_targets: bool,
}

impl<'l> Step<'l> {
    /// The number of plans that are kept.
    pub const MAX_PLANS: usize = 4;

    /// Plans the step for batches of these shapes and dtypes, if no such plan exists, and allocates its arena.
    /// [`plan_for`](Self::plan_for) plans without allocating.
    ///
    /// # Errors
    /// Errors of the loss and of its trace; an op that cannot be planned, with its path; a loss that is not a scalar
    /// f32, or on the CPU f64; a weight of the optimizer that the loss does not depend on, unless its group [permits
    /// that](crate::optim::AdamWConfig::missing_gradients); a missing input, or one that the loss does not read; on a
    /// GPU, heads that flash attention [has no kernel for](crate::compile#on-a-gpu); a memory budget that no plan fits,
    /// with the smallest that would do; an arena that does not fit in the device's memory.
    pub fn prepare(&mut self, batch: impl Into<Batch>) -> Result<&Plan> {
        let prepared = self.prepared(PlanKind::TrainStep, &batch.into())?;
        Ok(&prepared.step.plan)
    }

    /// Finds or makes the plan of a kind for a batch. It becomes the last of the plans and owns the arena.
    fn prepared(&mut self, kind: PlanKind, batch: &Batch) -> Result<&mut Prepared> {
        let fits = |prepared: &Prepared| {
            let counts = batch.counted_targets().is_some();
            (prepared.kind, prepared.counts_targets) == (kind, counts)
                && prepared.arguments.accepts(batch)
        };
        let next = match self.plans.iter().position(fits) {
            Some(place) if place + 1 == self.plans.len() => None,
            Some(place) => Some(self.plans.remove(place)),
            None => {
                let planned = self.planned(kind, batch)?;
                if self.plans.len() == Self::MAX_PLANS {
                    self.plans.remove(0);
                    self.evicted_plans += 1;
                }
                Some(planned)
            }
        };
        if let Some(mut next) = next {
            let before = self.plans.last_mut().map(|before| &mut before.step);
            if let Err(error) = next.step.follow(before) {
                self.plans.clear(); // no plan has an arena now
                return Err(error);
            }
            self.plans.push(next);
        }
        let Some(last) = self.plans.last_mut() else {
            unreachable!("a plan was found or made");
        };
        Ok(last)
    }

    fn last(&self) -> Option<&Prepared> {
        self.plans.last()
    }

    fn request<'s>(&'s self, kind: PlanKind, config: &'s StepConfig) -> PlanRequest<'s> {
        PlanRequest {
            op: OP,
            kind,
            target: Target::from(&self.device),
            loss: &self.loss,
            weights: Some(&self.weights),
            config,
        }
    }

    /// Makes the plan of the loss for a batch, with its constants but without an arena.
    fn planned(&self, kind: PlanKind, batch: &Batch) -> Result<Prepared> {
        let config = self.config.of(kind);
        let request = self.request(kind, &config);
        let (planned, checkpointing) = request.plan(batch, |function| {
            for (parameter, rule) in function.parameters.iter_mut().zip(&self.rules) {
                parameter.rule = *rule;
            }
        })?;
        let arguments = Arguments::new(&planned.function, &planned.lowered, &self.device)?;
        arguments.check(batch)?;
        let mut step = PlannedStep::new(
            OP,
            planned.lowered,
            (self.parameters.clone(), dims_of(&self.weights)),
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
            counts_targets: batch.counted_targets().is_some(),
        })
    }

    /// Makes the next [`run`](Self::run) renew the [half-precision copies](crate::compile#half-precision) of weights.
    /// It has an effect only on a GPU, where copies persist from run to run. Call it after you have set weights of the
    /// existing model in place: with [`nn::load`](crate::nn::load()), `VarMap::load`, or [`Var::set`] on the variables
    /// of [`Layer::parameters`](crate::nn::Layer::parameters). (A newly built model has other variables, and needs
    /// another optimizer and step.) It is not needed after [`Optimizer::load`](crate::optim::Optimizer::load), nor
    /// after an eager step of the same optimizer, which is detected, nor for
    /// [`forward_backward`](Self::forward_backward), which always renews the copies.
    pub fn refresh(&mut self) {
        for prepared in &mut self.plans {
            prepared.step.executor.refresh();
        }
    }

    /// Enables or disables the timing of phases in later runs, for [`phase_times`](Self::phase_times).
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use tallow::compile::{Step, StepConfig};
    /// # use tallow::model::{TransformerConfig, TransformerLM};
    /// # use tallow::optim::{AdamWConfig, Optimizer};
    /// # let device = tallow::device("cpu")?;
    /// # let config = TransformerConfig {
    /// #     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    /// #     ..Default::default()
    /// # };
    /// # let model = TransformerLM::new(&config, 0, &device)?;
    /// # let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
    /// # let mut step = Step::for_model(&model, &optimizer, &StepConfig::default())?;
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

    /// Returns the phase times of the last run; `None` before the first run, or if phases are not timed.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        let last = self.last();
        last.map_or(Ok(None), |last| last.step.executor.phase_times())
    }

    /// Returns the plan of the last run, of any [kind](crate::compile::PlanKind), or of the last
    /// [`prepare`](Self::prepare); `None` before the first.
    pub fn plan(&self) -> Option<&Plan> {
        self.last().map(|last| &last.step.plan)
    }

    /// Returns the plans that are kept, least recently used first.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.plans.iter().map(|prepared| &prepared.step.plan)
    }

    /// Returns the trace that the last [plan](Self::plan) was made from.
    pub fn graph(&self) -> Option<&Graph> {
        self.last().map(|last| &last.graph)
    }

    /// Returns the frozen weights and constants of that trace: tensors that the function reads and that are neither
    /// parameters nor inputs. Each comes with the path of the op that reads it first. The plan may have copies of
    /// constants, so whatever changes from run to run must be an input
    /// ([`StepConfig::retrace_every`](crate::compile::StepConfig::retrace_every) detects violations).
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

    /// Returns the number of plans that were evicted because there were more than [`MAX_PLANS`](Self::MAX_PLANS). A run
    /// with an evicted plan's shapes plans again.
    pub fn evicted_plans(&self) -> usize {
        self.evicted_plans
    }

    /// Returns the blocks that the last [plan](Self::plan) recomputes: as the model configures, or to fit the memory
    /// budget. (If recomputing residual sums, or gate and up, is enough for the budget, no block is recomputed; the
    /// plan's calls show what is.)
    pub fn checkpointing(&self) -> Option<Checkpointing> {
        self.last().map(|last| last.checkpointing)
    }

    /// Returns the weights that are updated, with their names.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.parameters
    }

    /// Returns the norm of the last run's gradients before clipping; `None` before the first [`run`](Self::run), after
    /// [`forward_backward`](Self::forward_backward), and without clipping.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.last().and_then(|last| last.step.last_norm)
    }

    /// Returns copies of the last run's gradients by name, before clipping. With a
    /// [sharded](crate::optim::Optimizer::shard) optimizer, only those of this rank's parameters.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run, and if the optimizer runs in backward, which frees the gradients.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        match self.last() {
            Some(last) => last.step.gradients(),
            None => Err(nothing_run()),
        }
    }
}

fn dims_of(weights: &[(String, Var)]) -> Vec<Vec<usize>> {
    let dims = weights.iter().map(|(_, var)| var.dims().to_vec());
    dims.collect()
}

fn nothing_run() -> Error {
    Error::order(OP, "no step has been run", "call run first")
}
