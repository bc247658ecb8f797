//! What a first step does once and for all: pages and threads that later steps find there.

use crate::memory::system;
use crate::report::Fields;

/// Counts between the steps of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstStep {
    faults: Option<u64>,
    threads: Option<u64>,
    first_ms: Option<f64>,
    first_faults: Option<u64>,
    first_threads: Option<u64>,
    later_faults: u64,
    later_steps: u64,
}

impl FirstStep {
    /// Before the first step, the model in memory.
    pub fn begin() -> Self {
        Self {
            faults: system::page_faults(),
            threads: system::threads(),
            ..Self::default()
        }
    }

    /// After each step, with its time.
    pub fn stepped(&mut self, ms: f64) {
        let faults = system::page_faults();
        let new = faults
            .zip(self.faults)
            .map(|(now, before)| now.saturating_sub(before));
        self.faults = faults;
        if self.first_ms.is_some() {
            self.later_faults += new.unwrap_or_default();
            self.later_steps += 1;
            return;
        }
        self.first_ms = Some(ms);
        self.first_faults = new;
        let threads = system::threads().zip(self.threads);
        self.first_threads = threads.map(|(now, before)| now.saturating_sub(before));
    }

    /// `first_step_ms`, what it did, and `later_step_page_faults`, the mean of the others.
    pub fn fields(&self) -> Fields {
        let later = self.first_faults.filter(|_| self.later_steps > 0);
        let later = later.map(|_| self.later_faults as f64 / self.later_steps as f64);
        let mut fields = Fields::new();
        fields.insert("first_step_ms", self.first_ms);
        fields.insert("first_step_page_faults", self.first_faults);
        fields.insert("first_step_threads", self.first_threads);
        fields.insert("later_step_page_faults", later);
        fields
    }
}
