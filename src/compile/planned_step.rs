//! A plan on its device, with its executor and the results that a run leaves.

use super::config::{PlanKind, StepConfig, StepRanks};
use super::executor::{Executor, Tensors};
use super::lower::Lowered;
use super::op::BufferRange;
use super::op::Op;
use super::parameters;
use super::plan::Plan;
use crate::distributed::Communicator;
use crate::optim::{GradScaler, MissingGradients, Optimizer, OptimizerVersion, PlannedUpdate};
use crate::{Error, Result, ops};
use candle_core::{DType, Device, Shape, Tensor, Var};

/// The result of a step with loss scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledStep {
    /// The mean loss of the batch, without the loss scale.
    pub loss: f32,
    /// The first parameter whose gradient was infinite or NaN, so that the update was skipped; `None` if the update
    /// [ran](Self::updated).
    pub non_finite: Option<String>,
    updated: bool,
}

impl ScaledStep {
    /// Returns whether the update ran.
    pub fn updated(&self) -> bool {
        self.updated
    }
}

#[derive(Debug)]
pub(super) struct PlannedStep {
    op: &'static str,
    pub plan: Plan,
    pub executor: Executor,
    parameters: Vec<(String, Var)>,
    /// The dimensions of the full parameters, of which this rank may have parts.
    dims: Vec<Vec<usize>>,
    /// The operands that hold the loss or output, the gradients' norm and each parameter's gradient after a run.
    output: BufferRange,
    norm: Option<BufferRange>,
    gradients: Vec<Option<BufferRange>>,
    /// Whether this rank updates each parameter, by index.
    updated: Vec<bool>,
    /// Parameters that the loss does not depend on, and how each was planned.
    unreached: Vec<(usize, MissingGradients)>,
    pub config: StepConfig,
    /// The communicator for exchanges between ranks.
    communicator: Option<Communicator>,
    has_run: bool,
    /// The norm of the last run's gradients before clipping.
    pub last_norm: Option<f64>,
    /// The optimizer's step count after the last run. While it is unchanged, the plan's copies of weights are current.
    steps_seen: Option<usize>,
    /// The optimizer of the last run; `None` before the first, and after an error.
    checked: Option<CheckedOptimizer>,
}

/// An optimizer that a plan can be run with.
#[derive(Debug)]
struct CheckedOptimizer {
    version: OptimizerVersion,
    /// The index of each parameter in the optimizer.
    order: Vec<usize>,
    /// The addresses of the storages of parameters and state, sorted.
    storages: Vec<usize>,
}

impl PlannedStep {
    /// Creates a plan that has [no arena yet](Self::follow). `parameters` may be parts of full ones with dimensions
    /// `dims`. Errors name `op`.
    ///
    /// # Errors
    /// On a GPU, shapes that its kernels do not support; out of memory; gradients exchanged in bf16 on the CPU.
    pub fn new(
        op: &'static str,
        lowered: Lowered,
        (parameters, dims): (Vec<(String, Var)>, Vec<Vec<usize>>),
        device: &Device,
        config: &StepConfig,
        communicator: Option<&Communicator>,
    ) -> Result<Self> {
        if config.ranks.exchanged() == Some(DType::BF16) && device.is_cpu() {
            let of = match config.ranks {
                StepRanks::FullySharded(..) => "FullyShardConfig",
                _ => "ReplicatedConfig",
            };
            return Err(Error::config(of, "dtype", "bf16").must_be(
                "None or f32 in a plan for the CPU",
                "a planned update on the CPU reads gradients in f32",
            ));
        }
        let mut updated = vec![false; parameters.len()];
        for call in lowered.plan.calls() {
            if let Op::Update { parameter, .. } = call.op {
                updated[parameter] = true;
            }
        }
        Ok(Self {
            op,
            executor: Executor::new(&lowered.plan, device)?,
            plan: lowered.plan,
            parameters,
            dims,
            updated,
            unreached: lowered.unreached,
            output: lowered.output,
            norm: lowered.norm,
            gradients: lowered.gradients,
            config: config.clone(),
            communicator: communicator.cloned(),
            has_run: false,
            last_norm: None,
            steps_seen: None,
            checked: None,
        })
    }

    /// Takes over the arena of the plan that ran before, or allocates one.
    ///
    /// # Errors
    /// An arena that does not fit in the device's memory; then no plan has one.
    pub fn follow(&mut self, before: Option<&mut Self>) -> Result<()> {
        (self.has_run, self.last_norm) = (false, None);
        let from = before.map(|before| {
            before.has_run = false;
            &mut before.executor
        });
        self.executor.take_arena(&self.plan, from)
    }

    /// Returns the communicator for a run's exchanges.
    ///
    /// # Errors
    /// A plan with exchanges, but no communicator.
    fn ranks(&self) -> Result<Option<Communicator>> {
        match (self.config.ranks, &self.communicator) {
            (StepRanks::Single, _) => Ok(None),
            (_, Some(ranks)) => Ok(Some(ranks.clone())),
            (_, None) => Err(Error::Order {
                op: self.op,
                problem: "the plan averages gradients over ranks, and was given none".into(),
                hint: "make the step with Step::replicated or Step::fully_sharded".into(),
            }),
        }
    }

    /// Runs a training step. Returns the loss. Parameters and their updates need not be set in `tensors`.
    ///
    /// # Errors
    /// An optimizer of other parameters; with clipping, gradients that are not finite.
    pub fn run(&mut self, optimizer: &mut Optimizer, tensors: &Tensors<'_>) -> Result<f32> {
        let ranks = self.ranks()?;
        let _timeout = ranks.as_ref().map(|ranks| ranks.enter(self.op));
        self.run_with(optimizer, tensors, None)?;
        self.loss(tensors.loss_divisor)
    }

    /// Runs a training step with the scaler's loss scale.
    ///
    /// # Errors
    /// Those of [`run`](Self::run); a plan without loss scaling.
    pub fn run_scaled(
        &mut self,
        optimizer: &mut Optimizer,
        scaler: &mut GradScaler,
        tensors: &Tensors<'_>,
    ) -> Result<ScaledStep> {
        let ranks = self.ranks()?;
        let _timeout = ranks.as_ref().map(|ranks| ranks.enter(self.op));
        let loss_scale = scaler.planned_scale(self.op)?;
        if loss_scale.is_some() && !self.config.loss_scaling {
            return Err(
                Error::config("StepConfig", "loss_scaling", "false").must_be(
                    "true, for a step whose loss is to be scaled",
                    "plan with loss_scaling: true, or call run",
                ),
            );
        }
        let updated = self.run_with(optimizer, tensors, loss_scale)?;
        let non_finite = match updated {
            true => None,
            false => self.first_non_finite()?,
        };
        scaler.planned_update(!updated)?;
        Ok(ScaledStep {
            loss: self.loss(tensors.loss_divisor)?,
            non_finite,
            updated,
        })
    }

    fn run_with(
        &mut self,
        optimizer: &mut Optimizer,
        tensors: &Tensors<'_>,
        loss_scale: Option<f64>,
    ) -> Result<bool> {
        let version = optimizer.version();
        let checked = self.checked.take(); // set again when the run has succeeded
        let checked = checked.filter(|checked| checked.version == version);
        let is_unchanged = checked.is_some();
        let checked = match checked {
            Some(checked) => checked,
            None => self.check_optimizer(optimizer, version)?,
        };
        let mut planned = optimizer.planned_updates(&checked.order, &self.dims)?;
        self.leave_out_skipped(&mut planned);
        parameters::check_arguments(self.op, &checked.storages, tensors.arguments)?;
        if self.steps_seen != Some(optimizer.steps()) {
            self.executor.refresh(); // a step was taken outside of the plan
        }
        for planned in &mut planned {
            planned.update.clip_value = self.config.clip_value.unwrap_or(f64::INFINITY);
        }
        let tensors = Tensors {
            parameters: &self.parameters,
            updates: &planned,
            is_unchanged,
            communicator: self.communicator.as_ref(),
            ..*tensors
        };
        let clip_norm = self.config.clip_norm.unwrap_or(f64::INFINITY);
        (self.has_run, self.last_norm, self.steps_seen) = (false, None, None); // until the run succeeds
        let executor = &mut self.executor;
        let updated = executor.run(&self.plan, &tensors, clip_norm, loss_scale)?;
        (self.has_run, self.checked) = (true, Some(checked));
        if updated {
            optimizer.planned_step_taken(self.skipped().map(|number| &self.parameters[number].1));
            self.last_norm = match self.norm.clone() {
                Some(norm) => self.first(&norm)?,
                None => None,
            };
        }
        self.steps_seen = Some(optimizer.steps());
        Ok(updated)
    }

    /// Checks that the plan can be run with an optimizer, and prepares for its state.
    ///
    /// # Errors
    /// An optimizer of other parameters, of other rules or with other parts of the state than planned; two tensors on
    /// one storage.
    fn check_optimizer(
        &mut self,
        optimizer: &Optimizer,
        version: OptimizerVersion,
    ) -> Result<CheckedOptimizer> {
        let order = optimizer.order_of(self.op, &self.parameters)?;
        let mut planned = optimizer.planned_updates(&order, &self.dims)?;
        self.check_rules(&planned)?;
        self.leave_out_skipped(&mut planned);
        let storages = parameters::exclusive_storages(self.op, &self.parameters, &planned)?;
        self.check_shares(&planned)?;
        self.plan.set_state_dtypes(|parameter, index| {
            let states = planned[parameter].states?;
            Some(states[index].1.dtype())
        });
        Ok(CheckedOptimizer {
            version,
            order,
            storages,
        })
    }

    /// Returns the parameters without a gradient that the plan does not update.
    fn skipped(&self) -> impl Iterator<Item = usize> {
        let unreached = self.unreached.iter();
        let skipped = unreached.filter(|(_, missing)| *missing == MissingGradients::Skip);
        skipped.map(|(number, _)| *number)
    }

    /// Removes the state of skipped parameters, which no call updates. A GPU's table of distinct updates has at most
    /// one entry per planned parameter, so skipped ones copy another parameter's update.
    fn leave_out_skipped(&self, planned: &mut [PlannedUpdate<'_>]) {
        let is_skipped = |number: &usize| self.skipped().any(|skipped| skipped == *number);
        let Some(other) = (0..planned.len()).find(|number| !is_skipped(number)) else {
            return;
        };
        let update = planned[other].update;
        for number in self.skipped() {
            (planned[number].states, planned[number].update) = (None, update);
        }
    }

    /// Checks that the plan has the rules of the optimizer's groups, and treats parameters without a gradient as they
    /// require.
    fn check_rules(&self, planned: &[PlannedUpdate<'_>]) -> Result<()> {
        for call in self.plan.calls() {
            if let Op::Update {
                rule, parameter, ..
            } = &call.op
                && let given = planned[*parameter].rule
                && !rule.is_planned_as(&given)
            {
                return Err(Error::Order {
                    op: self.op,
                    problem: format!(
                        "parameter {} is planned with the state {}, and the optimizer's group has {}",
                        self.parameters[*parameter].0,
                        rule.describe_state(),
                        given.describe_state()
                    ),
                    hint: "plan the step for this optimizer".into(),
                });
            }
        }
        for (number, missing) in &self.unreached {
            let given = planned[*number].rule.missing_gradients();
            if given != *missing {
                return Err(Error::Order {
                    op: self.op,
                    problem: format!(
                        "parameter {} has no gradient: planned with missing_gradients {missing:?}, and the optimizer's \
                         group has {given:?}",
                        self.parameters[*number].0
                    ),
                    hint: "plan the step for this optimizer".into(),
                });
            }
        }
        Ok(())
    }

    /// Checks that the plan updates exactly the parameters whose state the optimizer has.
    fn check_shares(&self, planned: &[PlannedUpdate<'_>]) -> Result<()> {
        let own = planned.iter().map(|planned| planned.states.is_some());
        if own.eq(self.updated.iter().copied()) {
            return Ok(());
        }
        let own = planned.iter().filter(|planned| planned.states.is_some());
        let updated = self.updated.iter().filter(|updated| **updated);
        Err(Error::Order {
            op: self.op,
            problem: format!(
                "the plan updates {} of {} parameters, and the optimizer has the state of {}, or of others",
                updated.count(),
                planned.len(),
                own.count()
            ),
            hint: "divide the optimizer (Optimizer::shard) before the step is planned, and run it with that one".into(),
        })
    }

    /// Runs forward alone. Returns its output on `device`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn forward(&mut self, tensors: &Tensors<'_>, device: &Device) -> Result<Tensor> {
        let buffer = self.plan.buffer_of(&self.output);
        let output = ops::zeros(&buffer.shape[..], buffer.dtype, device)?;
        let tensors = Tensors {
            output: Some(&output),
            ..*tensors
        };
        self.run_without_update(&tensors)?;
        Ok(output)
    }

    /// Runs forward and backward from the output's gradient, which is among the inputs.
    ///
    /// # Errors
    /// A parameter that is also an input.
    pub fn forward_backward_from(&mut self, tensors: &Tensors<'_>) -> Result<()> {
        self.run_without_update(tensors)?;
        self.has_run = true;
        Ok(())
    }

    /// Copies the output of the last [`forward_backward_from`](Self::forward_backward_from), in this shape.
    ///
    /// # Errors
    /// [`Error::Order`] if the last run left no output.
    pub fn output(&self, kind: PlanKind, shape: &[usize]) -> Result<Tensor> {
        if kind != PlanKind::Gradients || !self.has_run {
            return Err(Error::Order {
                op: self.op,
                problem: "the last run has left no output".into(),
                hint: "call forward_backward_from first, or forward, which returns it".into(),
            });
        }
        self.executor
            .copy(&self.plan, &self.output, &Shape::from(shape))
    }

    /// Runs forward, loss and backward. Returns the loss.
    ///
    /// # Errors
    /// [`Error::Order`] if the optimizer runs in backward.
    pub fn forward_backward(&mut self, tensors: &Tensors<'_>) -> Result<f32> {
        if self.config.optimizer_in_backward {
            return Err(Error::Order {
                op: self.op,
                problem: "the plan updates each parameter in backward".into(),
                hint: "plan with optimizer_in_backward: false".into(),
            });
        }
        self.run_without_update(tensors)?;
        self.has_run = true;
        self.loss(tensors.loss_divisor)
    }

    fn run_without_update(&mut self, tensors: &Tensors<'_>) -> Result<()> {
        let ranks = self.ranks()?;
        let _timeout = ranks.as_ref().map(|ranks| ranks.enter(self.op));
        let storages = parameters::exclusive_storages(self.op, &self.parameters, &[])?;
        parameters::check_arguments(self.op, &storages, tensors.arguments)?;
        let tensors = Tensors {
            parameters: &self.parameters,
            communicator: ranks.as_ref(),
            ..*tensors
        };
        (self.has_run, self.last_norm) = (false, None); // until the run succeeds
        self.executor.refresh(); // the caller updates the weights
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        match &ranks {
            Some(ranks) => ranks.check(), // if a rank failed, the mean is not valid
            None => Ok(()),
        }
    }

    fn loss(&mut self, divisor: Option<f64>) -> Result<f32> {
        let loss = self.first(&self.output.clone())?;
        if let Some(ranks) = &self.communicator {
            ranks.check()?; // if a rank failed, the mean is not valid
        }
        let divisor = divisor.unwrap_or(1.0);
        Ok(loss.map_or(f32::NAN, |loss| (loss / divisor) as f32)) // it has one element
    }

    pub fn time_phases(&mut self, on: bool) {
        self.executor.time_phases(&self.plan, on);
    }

    /// Returns copies of the last run's gradients by name, before clipping. With sharding, only those of this rank's
    /// parameters.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run, and if the optimizer runs in backward, which frees the gradients.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        let refuse = |problem: &str, hint: &str| Err(Error::order(self.op, problem, hint));
        if !self.has_run {
            return refuse("the last run has left no gradients", "call run first");
        }
        if self.config.optimizer_in_backward {
            let hint = "plan with optimizer_in_backward: false to read them";
            return refuse("each gradient was freed in backward", hint);
        }
        let gradients = self.parameters.iter().zip(&self.gradients);
        let gradients = gradients.filter_map(|((name, var), gradient)| {
            let gradient = gradient.as_ref()?;
            let copy = self.executor.copy(&self.plan, gradient, var.shape());
            Some(copy.map(|copy| (name.clone(), copy)))
        });
        gradients.collect()
    }

    /// Reads the first element of an operand that a run keeps, as f64.
    fn first(&mut self, operand: &BufferRange) -> Result<Option<f64>> {
        let kept: Vec<f64> = self.executor.read(&self.plan, operand)?;
        Ok(kept.first().copied())
    }

    /// Returns the name of the parameter that the overflow check found.
    fn first_non_finite(&mut self) -> Result<Option<String>> {
        let is_check = |op: &Op| matches!(op, Op::CheckOverflow { .. });
        let Some(call) = self.plan.calls().iter().find(|call| is_check(&call.op)) else {
            return Ok(None);
        };
        let first: Vec<u32> = self
            .executor
            .read(&self.plan, call.writes.operand("first"))?;
        let Op::CheckOverflow { parameters } = &call.op else {
            return Ok(None);
        };
        let number = first
            .first()
            .and_then(|first| parameters.get(*first as usize));
        let parameter = number.and_then(|number| self.parameters.get(*number));
        Ok(parameter.map(|(name, _)| name.clone()))
    }
}
