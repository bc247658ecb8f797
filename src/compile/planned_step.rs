//! A plan of a training step on its device: what runs it, and what a run leaves behind.

use super::config::{PlanKind, StepConfig, StepRanks};
use super::executor::{Executor, Tensors};
use super::lower::Lowered;
use super::op::Op;
use super::parameters;
use super::plan::{BufferRange, Plan};
use crate::distributed::Communicator;
use crate::optim::{AdamW, GradScaler, MissingGradients, PlannedUpdate};
use crate::{Error, Result, ops};
use candle_core::{DType, Device, Shape, Tensor, Var};

/// What a step with a loss scale has come to.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledStep {
    /// The mean loss of the batch, not scaled.
    pub loss: f32,
    /// The first parameter whose gradient was infinite or NaN, for which the update was left out; `None` if it was
    /// done.
    pub non_finite: Option<String>,
}

impl ScaledStep {
    /// Whether there was an update.
    pub fn stepped(&self) -> bool {
        self.non_finite.is_none()
    }
}

/// A plan of a step, on its device.
#[derive(Debug)]
pub(super) struct PlannedStep {
    op: &'static str,
    pub plan: Plan,
    pub executor: Executor,
    parameters: Vec<(String, Var)>,
    /// Where a run leaves its loss or output, the gradients' norm and each parameter's gradient.
    output: BufferRange,
    norm: Option<BufferRange>,
    gradients: Vec<Option<BufferRange>>,
    /// By parameter: whether this rank updates it.
    updated: Vec<bool>,
    /// Parameters that the loss does not depend on, and what was planned for each.
    unreached: Vec<(usize, MissingGradients)>,
    pub config: StepConfig,
    /// The ranks that gradients are averaged over.
    communicator: Option<Communicator>,
    has_run: bool,
    /// The norm of the last run's gradients before clipping.
    pub last_norm: Option<f64>,
    /// The optimizer's steps after the last run, with which the plan's copies of weights are those of the weights.
    steps_seen: Option<usize>,
}

impl PlannedStep {
    /// A plan that has [no arena yet](Self::follow). Errors name `op`.
    ///
    /// # Errors
    /// On a GPU, shapes that its kernels do not take; memory that is refused.
    pub fn new(
        op: &'static str,
        lowered: Lowered,
        parameters: Vec<(String, Var)>,
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
            if let Op::AdamW { parameter, .. } = call.op {
                updated[parameter] = true;
            }
        }
        Ok(Self {
            op,
            executor: Executor::new(&lowered.plan, device)?,
            plan: lowered.plan,
            parameters,
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
        })
    }

    /// Takes the arena of the plan that was run before, or allocates one.
    ///
    /// # Errors
    /// An arena that does not fit the device's memory: then no plan has one.
    pub fn follow(&mut self, before: Option<&mut Self>) -> Result<()> {
        (self.has_run, self.last_norm) = (false, None);
        let from = before.map(|before| {
            before.has_run = false;
            &mut before.executor
        });
        self.executor.take_arena(&self.plan, from)
    }

    /// The ranks that a run's exchanges are with.
    ///
    /// # Errors
    /// A plan that has exchanges, and no ranks.
    fn ranks(&self) -> Result<Option<Communicator>> {
        match (self.config.ranks, &self.communicator) {
            (StepRanks::Alone, _) => Ok(None),
            (_, Some(ranks)) => Ok(Some(ranks.clone())),
            (_, None) => Err(Error::Order {
                op: self.op,
                problem: "the plan averages gradients over ranks, and was given none".into(),
                hint: "make the step with Step::replicated or Step::fully_sharded".into(),
            }),
        }
    }

    /// One step on what `tensors` has besides parameters and their updates: the loss.
    ///
    /// # Errors
    /// An optimizer of other parameters; with clipping, gradients that are not finite.
    pub fn run(&mut self, optimizer: &mut AdamW, tensors: &Tensors<'_>) -> Result<f32> {
        let ranks = self.ranks()?;
        let _watch = ranks.as_ref().map(|ranks| ranks.watch(self.op));
        self.run_with(optimizer, tensors, None)?;
        self.loss(tensors.loss_divisor)
    }

    /// One step with the scaler's loss scale.
    ///
    /// # Errors
    /// As [`run`](Self::run); a plan without loss scaling.
    pub fn run_scaled(
        &mut self,
        optimizer: &mut AdamW,
        scaler: &mut GradScaler,
        tensors: &Tensors<'_>,
    ) -> Result<ScaledStep> {
        let ranks = self.ranks()?;
        let _watch = ranks.as_ref().map(|ranks| ranks.watch(self.op));
        let loss_scale = scaler.planned_scale(self.op)?;
        if loss_scale.is_some() && !self.config.loss_scaling {
            return Err(
                Error::config("StepConfig", "loss_scaling", "false").must_be(
                    "true, for a step whose loss is to be scaled",
                    "plan with loss_scaling: true, or call run",
                ),
            );
        }
        let stepped = self.run_with(optimizer, tensors, loss_scale)?;
        let non_finite = match stepped {
            true => None,
            false => self.first_non_finite()?,
        };
        scaler.planned_update(!stepped)?;
        Ok(ScaledStep {
            loss: self.loss(tensors.loss_divisor)?,
            non_finite,
        })
    }

    fn run_with(
        &mut self,
        optimizer: &mut AdamW,
        tensors: &Tensors<'_>,
        loss_scale: Option<f64>,
    ) -> Result<bool> {
        let mut planned = optimizer.planned_updates(self.op, &self.parameters)?;
        self.check_unreached(&planned)?;
        self.leave_out_skipped(&mut planned);
        parameters::check_apart(self.op, &self.parameters, &planned, tensors.arguments)?;
        self.check_shares(&planned)?;
        self.plan.set_moments(|number, dtype| {
            let moments = planned[number].moments.as_ref();
            moments.map_or(dtype, |[exp_avg, _]| exp_avg.dtype())
        });
        if self.steps_seen != Some(optimizer.steps()) {
            self.executor.refresh(); // somebody else has stepped
        }
        for planned in &mut planned {
            planned.update.clip_value = self.config.clip_value.unwrap_or(f64::INFINITY);
        }
        let tensors = Tensors {
            parameters: &self.parameters,
            updates: &planned,
            communicator: self.communicator.as_ref(),
            ..*tensors
        };
        let clip_norm = self.config.clip_norm.unwrap_or(f64::INFINITY);
        (self.has_run, self.last_norm, self.steps_seen) = (false, None, None); // until it is over
        let executor = &mut self.executor;
        let stepped = executor.run(&self.plan, &tensors, clip_norm, loss_scale)?;
        self.has_run = true;
        if stepped {
            optimizer.planned_step_taken(self.skipped().map(|number| &self.parameters[number].1));
            self.last_norm = match self.norm.clone() {
                Some(norm) => self.first(&norm)?,
                None => None,
            };
        }
        self.steps_seen = Some(optimizer.steps());
        Ok(stepped)
    }

    /// The parameters that the plan does not update, since the loss does not depend on them.
    fn skipped(&self) -> impl Iterator<Item = usize> {
        let unreached = self.unreached.iter();
        let skipped = unreached.filter(|(_, missing)| *missing == MissingGradients::Skip);
        skipped.map(|(number, _)| *number)
    }

    /// Takes the state of skipped parameters out, which no call has. A GPU has room for one update for each parameter
    /// of the plan: theirs become another's.
    fn leave_out_skipped(&self, planned: &mut [PlannedUpdate]) {
        let is_skipped = |number: &usize| self.skipped().any(|skipped| skipped == *number);
        let Some(other) = (0..planned.len()).find(|number| !is_skipped(number)) else {
            return;
        };
        let update = planned[other].update;
        for number in self.skipped() {
            (planned[number].moments, planned[number].update) = (None, update);
        }
    }

    /// Whether the plan does with parameters that have no gradient what this optimizer's groups say.
    fn check_unreached(&self, planned: &[PlannedUpdate]) -> Result<()> {
        for (number, missing) in &self.unreached {
            let given = planned[*number].missing;
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

    /// Whether the plan updates the parameters whose state this optimizer has, and no others.
    fn check_shares(&self, planned: &[PlannedUpdate]) -> Result<()> {
        let own = planned.iter().map(|planned| planned.moments.is_some());
        if own.eq(self.updated.iter().copied()) {
            return Ok(());
        }
        let own = planned.iter().filter(|planned| planned.moments.is_some());
        let updated = self.updated.iter().filter(|updated| **updated);
        Err(Error::Order {
            op: self.op,
            problem: format!(
                "the plan updates {} of {} parameters, and the optimizer has the state of {}, or of others",
                updated.count(),
                planned.len(),
                own.count()
            ),
            hint: "divide the optimizer (AdamW::shard) before the step is planned, and run it with that one".into(),
        })
    }

    /// Forward alone: its output, on `device`.
    ///
    /// # Errors
    /// Memory that is refused.
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

    /// Forward and backward from the gradient that is among the inputs.
    ///
    /// # Errors
    /// A parameter that is an input too.
    pub fn forward_backward_from(&mut self, tensors: &Tensors<'_>) -> Result<()> {
        self.run_without_update(tensors)?;
        self.has_run = true;
        Ok(())
    }

    /// A copy of the output, of that shape, that [`forward_backward_from`](Self::forward_backward_from) has left.
    ///
    /// # Errors
    /// [`Error::Order`] for a run that leaves none.
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

    /// Forward, loss and backward alone: the loss.
    ///
    /// # Errors
    /// [`Error::Order`] where the optimizer runs in backward.
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
        let _watch = ranks.as_ref().map(|ranks| ranks.watch(self.op));
        parameters::check_apart(self.op, &self.parameters, &[], tensors.arguments)?;
        let tensors = Tensors {
            parameters: &self.parameters,
            communicator: ranks.as_ref(),
            ..*tensors
        };
        (self.has_run, self.last_norm) = (false, None); // until it is over
        self.executor.refresh(); // the update is somebody else's
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        match &ranks {
            Some(ranks) => ranks.check(), // a rank that failed leaves no mean
            None => Ok(()),
        }
    }

    fn loss(&mut self, divisor: Option<f64>) -> Result<f32> {
        let loss = self.first(&self.output.clone())?;
        if let Some(ranks) = &self.communicator {
            ranks.check()?; // a rank that failed leaves no mean
        }
        let divisor = divisor.unwrap_or(1.0);
        Ok(loss.map_or(f32::NAN, |loss| (loss / divisor) as f32)) // (1)
    }

    pub fn time_phases(&mut self, on: bool) {
        self.executor.time_phases(&self.plan, on);
    }

    /// Copies of the last run's gradients by name, not clipped; of a divided optimizer those of this rank's parameters.
    ///
    /// # Errors
    /// [`Error::Order`] before the first run, and where the optimizer runs in backward, which frees them.
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

    /// The first number of an operand that a run leaves, in f64.
    fn first(&mut self, operand: &BufferRange) -> Result<Option<f64>> {
        let kept: Vec<f64> = self.executor.read(&self.plan, operand)?;
        Ok(kept.first().copied())
    }

    /// The parameter that the check for overflow has named.
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
