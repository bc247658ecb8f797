//! What is run: how much of a step, of which sizes, on whose kernels.

pub use crate::graph::Target as Kernels;

use super::layer::traced;
use super::lifetimes::elements;
use crate::attention::Algorithm;
use crate::graph::{self, Graph};
use crate::model::depth::with_stack;
use crate::model::{TransformerConfig, TransformerLM};
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

impl Workload {
    /// The graph of the pass on a model of [hollow](graph::weights()) weights, whatever region, `no_grad` or kernel
    /// policy the caller is in: for [`estimate_graph`](super::estimate_graph()),
    /// [`saved_tensors`](super::saved_tensors()) and [`node_table`](crate::profile::node_table()).
    ///
    /// ```
    /// use tallow::memory::{Workload, saved_tensors};
    /// use tallow::model::TransformerConfig;
    ///
    /// let workload = Workload { batch_size: 4, sequence_length: 256, ..Default::default() };
    /// let graph = workload.trace(&TransformerConfig::tiny())?;
    /// let saved = saved_tensors(&graph);
    /// let (op, _, bytes) = &saved.by_op()[0]; // the most bytes
    /// println!("{op}: {bytes} of {} bytes", saved.residual_bytes());
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`estimate`](super::estimate()); [`Error::OutOfMemory`] for parameters of 2^47 bytes, and for a tensor of
    /// 2^63; [`Error::Config`] where the system starts no thread with the stack that so many blocks take.
    pub fn trace(&self, config: &TransformerConfig) -> Result<Graph> {
        check_pass(config, self)?;
        if is_beyond(config, self) {
            return Err(Error::OutOfMemory {
                what: "a pass of this model".into(),
                wanted_bytes: u64::MAX,
                available_bytes: MOST_BYTES,
            });
        }
        let config = TransformerConfig {
            checkpointing: self.checkpointing,
            attention: self.attention,
            ..reaching(config, self.sequence_length)
        };
        let shape = (self.batch_size, self.sequence_length);
        let forward = || {
            let weights = graph::weights(self.precision.parameter_dtype());
            let model = TransformerLM::of_any_length(&config, weights)?;
            let tokens = graph::input("tokens", shape, DType::U32)?;
            self.precision.run(|| match self.mode {
                Mode::Forward | Mode::ForwardKeepingGraph => model.forward(&tokens),
                Mode::ForwardBackward | Mode::TrainStep => {
                    model.loss(&tokens, &graph::input("targets", shape, DType::U32)?)
                }
            })
        };
        let trace = || traced(self.kernels, self.mode != Mode::Forward, forward);
        with_stack(config.num_layers, trace)
    }
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
    config.validate()?;
    match config.num_layers > MOST_BLOCKS && !has_too_many_parameters(&config) {
        true => Err(
            Error::config("TransformerConfig", "num_layers", config.num_layers).must_be(
                format!("at most {MOST_BLOCKS} where memory is predicted"),
                "every block is traced",
            ),
        ),
        false => Ok(()),
    }
}

/// As many blocks as are traced.
const MOST_BLOCKS: usize = 4096;

/// The addresses that a process has, on 64 bits.
const MOST_BYTES: u64 = 1 << 47;

fn has_too_many_parameters(config: &TransformerConfig) -> bool {
    config.num_parameters() as f64 * size_of::<f32>() as f64 >= MOST_BYTES as f64
}

/// Whether the parameters have more bytes than a process has addresses, or one tensor of the pass more than any address
/// reaches.
pub(super) fn is_beyond(config: &TransformerConfig, workload: &Workload) -> bool {
    let config = reaching(config, workload.sequence_length);
    let rows = [workload.batch_size, workload.sequence_length];
    let [heads, _] = config.attention_widths();
    let widths = [config.d_model, config.d_ff, config.vocab_size, heads];
    let widest = widths.into_iter().max().unwrap_or_default();
    let scores = match workload.attention {
        Algorithm::Naive => elements(&[config.num_heads, workload.sequence_length]),
        Algorithm::Flash => 0.0,
    };
    let most = elements(&rows) * scores.max(widest as f64);
    most * size_of::<f32>() as f64 >= isize::MAX as f64 || has_too_many_parameters(&config)
}

/// Refuses what has no breakdown, and a workload of nothing.
pub(super) fn check_pass(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    check(config, workload)?;
    check_some("batch_size", workload.batch_size)?;
    check_some("sequence_length", workload.sequence_length)
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
