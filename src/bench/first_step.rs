//! Costs of the first step: memory pages, threads and kernels that later steps reuse.

use crate::memory::system;
use serde::{Deserialize, Serialize};

/// Costs of a run's first step, warm-up or not. Counts are `None` if the system or device does not report them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FirstStep {
    /// Time of the first step, in ms.
    pub first_step_ms: Option<f64>,
    /// Page faults of the process during the first step.
    pub first_step_page_faults: Option<u64>,
    /// Threads started by the first step.
    pub first_step_threads: Option<u64>,
    /// CUDA sources compiled by the first step.
    pub first_step_kernels_compiled: Option<u64>,
    /// CUDA modules loaded by the first step.
    pub first_step_kernels_loaded: Option<u64>,
    /// Page faults of a later step, as a mean.
    pub later_step_page_faults: Option<f64>,
}

/// Counts of the process so far: page faults, threads, CUDA sources compiled, CUDA modules loaded.
type Counts = [Option<u64>; 4];

fn counts() -> Counts {
    #[cfg(feature = "cuda")]
    let [compiled, loaded] = crate::kernels::cuda::source::counts().map(Some);
    #[cfg(not(feature = "cuda"))]
    let [compiled, loaded] = [None; 2];
    [system::page_faults(), system::threads(), compiled, loaded]
}

/// Takes the counts after each step of a run.
#[derive(Clone, Debug)]
pub(super) struct FirstStepCounter {
    before: Counts,
    later_steps: f64,
    pub result: FirstStep,
}

impl FirstStepCounter {
    /// Takes the counts before the first step.
    pub fn begin() -> Self {
        Self {
            before: counts(),
            later_steps: 0.0,
            result: FirstStep::default(),
        }
    }

    /// Takes the counts after a step, which took `ms`.
    pub fn stepped(&mut self, ms: f64) {
        let now = counts();
        let added = |i: usize| Some(now[i]?.saturating_sub(self.before[i]?));
        let [faults, threads, compiled, loaded] = std::array::from_fn(added);
        self.before = now;
        if self.result.first_step_ms.is_none() {
            self.result = FirstStep {
                first_step_ms: Some(ms),
                first_step_page_faults: faults,
                first_step_threads: threads,
                first_step_kernels_compiled: compiled,
                first_step_kernels_loaded: loaded,
                later_step_page_faults: None,
            };
        } else if let Some(faults) = faults {
            self.later_steps += 1.0;
            let mean = self.result.later_step_page_faults.get_or_insert(0.0);
            *mean += (faults as f64 - *mean) / self.later_steps;
        }
    }
}
