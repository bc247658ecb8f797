//! The labels that tell runs apart.

use serde::Serialize;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution};
use tallow::memory::Mode;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;
use tallow::report::Fields;

/// The labels of a run of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Labels {
    pub size: String,
    pub batch_size: usize,
    pub context_length: usize,
    pub attention: Algorithm,
    pub checkpointing: Checkpointing,
    pub precision: Precision,
    pub execution: Execution,
    pub mode: Mode,
}

impl Labels {
    pub fn of(run: &EndToEnd) -> Self {
        Self {
            size: run.size.clone(),
            batch_size: run.batch_size,
            context_length: run.sequence_length,
            attention: run.attention,
            checkpointing: run.checkpointing,
            precision: run.step.precision,
            execution: run.execution,
            mode: run.mode,
        }
    }

    pub fn fields(&self) -> Fields {
        Fields::of(self).unwrap_or_default() // a struct always has fields
    }
}
