//! Plans of a traced function.

use super::config::StepConfig;
use super::lower::{self, Job, Lowered, Recompute};
use super::plan::BufferRange;
use super::traced::TracedFunction;
use crate::Result;
use crate::graph::ValueId;
use std::rc::Rc;

/// A plan of a step, and the function that it is of.
pub(super) struct Planned {
    pub function: Rc<TracedFunction>,
    pub lowered: Lowered,
}

impl Planned {
    pub fn peak_bytes(&self) -> u64 {
        self.lowered.plan.peak_bytes()
    }
}

impl TracedFunction {
    /// The plan of a training step: the function's output is the loss.
    ///
    /// # Errors
    /// An op that has no planned form; a loss that is not one float; a parameter that it does not depend on.
    pub fn step(self: &Rc<Self>, config: &StepConfig, recompute: Recompute) -> Result<Planned> {
        let job = Job {
            trains: true,
            recompute,
            ..self.job(config)
        };
        Ok(Planned {
            lowered: lower::step(&job)?,
            function: self.clone(),
        })
    }

    /// The plan of a forward alone, which gives the function's output out.
    ///
    /// # Errors
    /// An op that has no planned form.
    pub fn forward(&self) -> Result<Lowered> {
        lower::forward(&self.job(&StepConfig::default()))
    }

    /// The plan of a forward and, after its micro-batches, of the gradients of `differentiated`; these, and outputs but
    /// the first.
    ///
    /// # Errors
    /// An op that has no planned form.
    pub fn with_gradients(
        &self,
        differentiated: &[ValueId],
    ) -> Result<(Lowered, [Vec<BufferRange>; 2])> {
        lower::with_gradients(&Job {
            differentiated,
            ..self.job(&StepConfig::default())
        })
    }

    fn job<'j>(&'j self, config: &'j StepConfig) -> Job<'j> {
        Job {
            function: self,
            trains: false,
            differentiated: &[],
            config,
            recompute: Recompute::default(),
        }
    }
}
