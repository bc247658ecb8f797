//! What a first step does once and for all: pages, threads and kernels that later steps find there.

use crate::memory::system;
use crate::report::Fields;

/// Counts between the steps of a run.
#[derive(Clone, Debug)]
pub(super) struct FirstStep {
    before: Counts,
    first: Option<(f64, Counts)>,
    later_faults: u64,
    later_steps: u64,
}

/// Page faults, threads, CUDA sources that were compiled, and modules of kernels that were loaded: of the process so
/// far, or in a step. `None` where it is not known.
type Counts = [Option<u64>; 4];

fn counts() -> Counts {
    #[cfg(feature = "cuda")]
    let [compiled, loaded] = crate::kernels::cuda::source::counts().map(Some);
    #[cfg(not(feature = "cuda"))]
    let [compiled, loaded] = [None; 2];
    [system::page_faults(), system::threads(), compiled, loaded]
}

impl FirstStep {
    /// Before the first step, the model in memory.
    pub fn begin() -> Self {
        Self {
            before: counts(),
            first: None,
            later_faults: 0,
            later_steps: 0,
        }
    }

    /// After each step, with its time.
    pub fn stepped(&mut self, ms: f64) {
        let now = counts();
        let added = |i: usize| Some(now[i]?.saturating_sub(self.before[i]?));
        let added: Counts = std::array::from_fn(added);
        self.before = now;
        match self.first {
            None => self.first = Some((ms, added)),
            Some(_) => {
                self.later_faults += added[0].unwrap_or_default();
                self.later_steps += 1;
            }
        }
    }

    /// `first_step_ms`, what it did, and `later_step_page_faults`, the mean of the others.
    pub fn fields(&self) -> Fields {
        let first = self.first.map_or([None; 4], |(_, added)| added);
        let mut fields = Fields::new();
        fields.insert("first_step_ms", self.first.map(|(ms, _)| ms));
        let names = [
            "page_faults",
            "threads",
            "kernels_compiled",
            "kernels_loaded",
        ];
        for (name, count) in names.into_iter().zip(first) {
            fields.insert(format!("first_step_{name}"), count);
        }
        let later = first[0].filter(|_| self.later_steps > 0);
        let later = later.map(|_| self.later_faults as f64 / self.later_steps as f64);
        fields.insert("later_step_page_faults", later);
        fields
    }
}
