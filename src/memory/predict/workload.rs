//! What is run: how much of a step, of which sizes, on whose kernels.

pub use crate::graph::Target as Kernels;

use crate::attention::Algorithm;
use crate::dist::{FullyShardConfig, Shard};
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
    /// What the ranks of a job divide, and whose memory it is. Nothing where a serialized workload does not say.
    #[serde(default)]
    pub sharding: Option<Sharding>,
}

/// What the ranks of a job divide among them, in eager steps, and which of them this is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharding {
    /// The optimizer's state, which [`AdamW::shard`](crate::optim::AdamW::shard) divides (ZeRO, stage 1). What buckets
    /// of gradients take is left out: one bucket.
    Optimizer(Shard),
    /// Weights, their gradients and the optimizer's state, which [`FullyShard`](crate::dist::FullyShard) divides (ZeRO,
    /// stage 3): a weight is there as a whole from where it is read first to where backward has read it last. Buckets
    /// are of planned steps.
    Full(Shard, FullyShardConfig),
}

/// The model that runs the workload: one of a shorter context is taken for one that reaches as far.
pub(super) fn reaching(config: &TransformerConfig, sequence_length: usize) -> TransformerConfig {
    TransformerConfig {
        context_length: config.context_length.max(sequence_length),
        ..config.clone()
    }
}

/// The most blocks of a model whose optimizer's state is divided among ranks: each parameter's owner is found by name.
const MOST_SHARED_LAYERS: usize = 1 << 16;

/// Refuses what has no breakdown.
pub(super) fn check(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    let config = TransformerConfig {
        attention: workload.attention,
        ..config.clone()
    };
    config.validate()?;
    match workload.sharding {
        Some(Sharding::Optimizer(_)) if config.num_layers > MOST_SHARED_LAYERS => Err(
            Error::config("Workload", "sharding", "the optimizer's state").must_be(
                format!("None for a model of {} blocks", config.num_layers),
                format!(
                    "owners are found for each parameter of at most {MOST_SHARED_LAYERS} blocks"
                ),
            ),
        ),
        Some(Sharding::Optimizer(own)) => own.validate(),
        Some(Sharding::Full(own, config)) => own.validate().and(config.validate()),
        None => Ok(()),
    }
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

/// Elements of the parameters that a rank has: all, or of each its part.
pub(super) fn own_elements(config: &TransformerConfig, workload: &Workload) -> f64 {
    let Some(Sharding::Full(own, _)) = workload.sharding else {
        return config.num_parameters() as f64;
    };
    let parts = config
        .parameter_counts()
        .map(|(shape, count)| count as f64 * own.part(shape.elem_count()).len() as f64);
    parts.sum()
}

/// Elements of the parameters that the optimizer keeps state of: a rank's own, or those of which it updates the whole.
pub(super) fn state_elements(config: &TransformerConfig, workload: &Workload) -> f64 {
    let Some(Sharding::Optimizer(own)) = workload.sharding else {
        return own_elements(config, workload);
    };
    let shapes = config.parameter_shapes();
    let sizes = shapes
        .iter()
        .map(|(name, shape)| (name.as_str(), shape.elem_count()));
    let owners = Shard::owners(own.world_size, sizes.clone());
    let owned = owners.iter().zip(sizes);
    let owned = owned.filter(|(owner, _)| **owner == own.rank);
    owned.map(|(_, (_, elements))| elements as f64).sum()
}

/// Whose memory it is, and what shares it.
pub(super) fn place(kernels: Kernels) -> String {
    match kernels {
        Kernels::Cpu => format!("{} threads", rayon::current_num_threads()),
        Kernels::Cuda => "on a GPU".into(),
    }
}
