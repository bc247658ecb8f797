//! The implementations of attention that are compared.

use candle_core::Device;
use clap::ValueEnum;
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, Execution, Sampling};
use tallow::memory::AttentionWorkload;

/// An algorithm with the way it is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Implementation {
    /// Scores, softmax and weighted sum, op by op
    Naive,
    /// Tile by tile, without probabilities in memory
    Flash,
    /// Naive, compiled for its shape before it runs; not in f64
    Planned,
    /// Flash, compiled likewise
    PlannedFlash,
}

impl Implementation {
    pub fn algorithm(self) -> Algorithm {
        match self {
            Self::Naive | Self::Planned => Algorithm::Naive,
            Self::Flash | Self::PlannedFlash => Algorithm::Flash,
        }
    }

    pub fn execution(self) -> Execution {
        match self {
            Self::Naive | Self::Flash => Execution::Eager,
            Self::Planned | Self::PlannedFlash => Execution::Planned,
        }
    }

    pub fn is_planned(self) -> bool {
        self.execution() == Execution::Planned
    }

    /// A measurement of attention alone.
    pub fn attention(self, workload: AttentionWorkload, sampling: &Sampling) -> AttentionRun {
        AttentionRun {
            workload: AttentionWorkload {
                algorithm: self.algorithm(),
                ..workload
            },
            sampling: sampling.clone(),
            execution: self.execution(),
        }
    }
}

/// The memory that runs may use: what is available now. On the CPU a sixth of it is left, because the allocator keeps
/// some of the pages that earlier runs freed.
pub fn usable_bytes(device: &Device) -> Option<u64> {
    let available_bytes = tallow::hardware::available_bytes_on(device)?;
    Some(match device.is_cpu() {
        true => available_bytes - available_bytes / 6,
        false => available_bytes,
    })
}
