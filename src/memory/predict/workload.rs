//! What is run: how much of a step, of which sizes, on whose kernels.

pub use crate::graph::Target as Kernels;

use crate::attention::Algorithm;
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use crate::optim::Moments;
use crate::precision::Precision;
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};

/// How much of a training step is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The forward pass under `no_grad`.
    Forward,
    /// The forward pass with its graph kept, as before a backward.
    ForwardKeepingGraph,
    /// Forward, loss and backward.
    ForwardBackward,
    /// Forward, loss, backward and AdamW.
    #[default]
    TrainStep,
}

impl Mode {
    /// As tables and flags name it: `train-step`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::ForwardKeepingGraph => "forward-keeping-graph",
            Self::ForwardBackward => "forward-backward",
            Self::TrainStep => "train-step",
        }
    }

    /// Whether backward runs.
    pub(super) fn has_backward(self) -> bool {
        matches!(self, Self::ForwardBackward | Self::TrainStep)
    }
}

/// What is run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// B.
    pub batch_size: usize,
    /// T.
    pub sequence_length: usize,
    /// How much of a step.
    pub mode: Mode,
    /// What computes attention: here, not in the model's configuration. Naive where a serialized workload says nothing.
    #[serde(default)]
    pub attention: Algorithm,
    /// What forward and loss compute in; f32 where a serialized workload says nothing.
    #[serde(default)]
    pub precision: Precision,
    /// What the blocks leave for backward: here, not in the model's configuration. The whole graph where a serialized
    /// workload says nothing.
    #[serde(default)]
    pub checkpointing: Checkpointing,
    /// Whose kernels compute it; the CPU's where a serialized workload says nothing.
    #[serde(default)]
    pub kernels: Kernels,
    /// What AdamW stores running means in; f32 where a serialized workload says nothing.
    #[serde(default)]
    pub moments: Moments,
}

/// The model that runs the workload: one of a shorter context is taken for one that reaches as far.
pub(super) fn reaching(config: &TransformerConfig, sequence_length: usize) -> TransformerConfig {
    TransformerConfig {
        context_length: config.context_length.max(sequence_length),
        ..config.clone()
    }
}

/// Refuses what has no breakdown.
pub(super) fn check(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    let config = TransformerConfig {
        attention: workload.attention,
        ..config.clone()
    };
    config.validate()
}

/// Refuses a workload of nothing.
pub(super) fn check_some(field: &'static str, size: usize) -> Result<()> {
    match size {
        0 => Err(Error::config("Workload", field, "0")
            .must_be("positive", "a step has at least one sequence of one token")),
        _ => Ok(()),
    }
}

/// What AdamW keeps of a parameter with so many bytes an element, and the bytes of an element of it.
pub(super) fn optimizer_state(
    width: usize,
    moments: Moments,
) -> impl Iterator<Item = (&'static str, usize)> {
    let f32_bytes = size_of::<f32>();
    let moment = moments.dtype(DType::F32).size_in_bytes();
    let master = (width < f32_bytes).then_some(("master weights", f32_bytes));
    let moments = ["exp_avg", "exp_avg_sq"].map(|name| (name, moment));
    moments.into_iter().chain(master)
}

/// Whose memory it is, and what shares it.
pub(super) fn place(kernels: Kernels) -> String {
    match kernels {
        Kernels::Cpu => format!("{} threads", rayon::current_num_threads()),
        Kernels::Cuda => "on a GPU".into(),
    }
}
