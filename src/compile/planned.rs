//! Plans of a traced function.

use super::config::{PlanKind, StepConfig};
use super::lower::{self, Job, Lowered};
use super::program::Recompute;
use super::traced::TracedFunction;
use crate::Result;
use std::rc::Rc;

/// A plan, and the function that it is of.
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
    /// Its plan.
    ///
    /// # Errors
    /// An op that has no planned form; an output that a plan of this kind does not take; a parameter that the output
    /// does not depend on.
    pub fn plan(
        self: &Rc<Self>,
        kind: PlanKind,
        config: &StepConfig,
        recompute: Recompute,
    ) -> Result<Planned> {
        let job = Job {
            function: self,
            kind,
            config,
            recompute,
        };
        Ok(Planned {
            lowered: lower::plan(&job)?,
            function: self.clone(),
        })
    }
}
