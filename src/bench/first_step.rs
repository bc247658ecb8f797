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

/// What the process has had so far; or what a step has added. `None` where it is not known.
#[derive(Clone, Copy, Debug)]
struct Counts {
    faults: Option<u64>,
    threads: Option<u64>,
    /// CUDA sources that were compiled, and modules of kernels that were loaded.
    compiled: Option<u64>,
    loaded: Option<u64>,
}

impl Counts {
    fn now() -> Self {
        #[cfg(feature = "cuda")]
        let [compiled, loaded] = crate::kernels::cuda::source::counts().map(Some);
        #[cfg(not(feature = "cuda"))]
        let [compiled, loaded] = [None; 2];
        Self {
            faults: system::page_faults(),
            threads: system::threads(),
            compiled,
            loaded,
        }
    }

    fn since(self, before: Self) -> Self {
        let added = |now: Option<u64>, before: Option<u64>| Some(now?.saturating_sub(before?));
        Self {
            faults: added(self.faults, before.faults),
            threads: added(self.threads, before.threads),
            compiled: added(self.compiled, before.compiled),
            loaded: added(self.loaded, before.loaded),
        }
    }
}

impl FirstStep {
    /// Before the first step, the model in memory.
    pub fn begin() -> Self {
        Self {
            before: Counts::now(),
            first: None,
            later_faults: 0,
            later_steps: 0,
        }
    }

    /// After each step, with its time.
    pub fn stepped(&mut self, ms: f64) {
        let now = Counts::now();
        let added = now.since(self.before);
        self.before = now;
        match self.first {
            None => self.first = Some((ms, added)),
            Some(_) => {
                self.later_faults += added.faults.unwrap_or_default();
                self.later_steps += 1;
            }
        }
    }

    /// `first_step_ms`, what it did, and `later_step_page_faults`, the mean of the others.
    pub fn fields(&self) -> Fields {
        let first = self.first.map(|(_, added)| added);
        let later = first
            .and_then(|first| first.faults)
            .filter(|_| self.later_steps > 0);
        let later = later.map(|_| self.later_faults as f64 / self.later_steps as f64);
        let mut fields = Fields::new();
        fields.insert("first_step_ms", self.first.map(|(ms, _)| ms));
        fields.insert(
            "first_step_page_faults",
            first.and_then(|first| first.faults),
        );
        fields.insert("first_step_threads", first.and_then(|first| first.threads));
        fields.insert(
            "first_step_kernels_compiled",
            first.and_then(|first| first.compiled),
        );
        fields.insert(
            "first_step_kernels_loaded",
            first.and_then(|first| first.loaded),
        );
        fields.insert("later_step_page_faults", later);
        fields
    }
}
