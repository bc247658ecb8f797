//! The results of a step's last run, and its plans.

use super::super::config::check_clip_norm;
use super::super::phase_times::PhaseTimes;
use super::super::plan::Plan;
use super::{Step, nothing_run};
use crate::graph::{Graph, Value};
use crate::nn::Checkpointing;
use crate::{Error, Result};
use candle_core::{Tensor, Var};

impl Step<'_> {
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

    /// The plan of the last run, of whatever [kind](crate::compile::PlanKind), or of [`prepare`](Self::prepare); `None`
    /// before.
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
    /// run is to be an input ([`StepConfig::retrace_every`](crate::compile::StepConfig::retrace_every) finds out).
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

    /// Copies of the last run's gradients by name, not clipped; of a [divided](crate::optim::AdamW::shard) optimizer
    /// those of this rank's parameters.
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
