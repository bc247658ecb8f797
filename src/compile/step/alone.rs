//! Plans alone, of steps that need not exist.

use super::super::config::{PlanKind, StepConfig};
use super::super::loss::{Job, Loss};
use super::super::plan::Plan;
use super::super::{Batch, Inputs, least, model};
use super::{OP, Step};
use crate::Result;
use crate::graph::Target;
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use candle_core::Tensor;

impl<'l> Step<'l> {
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
}
