//! Where memory ends.

use crate::memory::MemoryBreakdown;
use crate::report::{Report, format_mib};
use serde::Serialize;
use std::fmt;

/// The first configuration that memory does not hold, by the breakdown: nothing is run for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    /// The implementation, as the rows name it.
    pub implementation: &'static str,
    /// T.
    pub context_length: usize,
    /// Dh or D.
    pub width: usize,
    /// What it would take.
    pub breakdown: MemoryBreakdown,
    /// What is there.
    pub available_bytes: u64,
    /// What CS336's handout counts for it: scores and probabilities B H T^2 each, and out; attention alone.
    pub composed_bytes: Option<u64>,
}

impl Limit {
    /// The terms of what it would take.
    pub fn table(&self) -> Report {
        Report {
            title: format!(
                "{}, T {}, width {}: what it would take, with {} there",
                self.implementation,
                self.context_length,
                self.width,
                format_mib(self.available_bytes)
            ),
            ..self.breakdown.report()
        }
    }
}

/// The size, and what it is held against.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: as sizes double, {} do not hold T {}, width {}, which wants {}",
            self.implementation,
            format_mib(self.available_bytes),
            self.context_length,
            self.width,
            format_mib(self.breakdown.peak_bytes())
        )?;
        match self.composed_bytes {
            Some(bytes) => write!(
                f,
                "; scores, probabilities and output of single ops alone want {}.",
                format_mib(bytes)
            ),
            None => write!(f, "."),
        }
    }
}
