//! Calls and their ops: kernels, exchanges with other ranks, and the steps of the update.

use super::buffer::{BufferId, Buffers};
use crate::distributed::{Collective, Reduce};
use crate::ops::lowering::{Kernel, Named};
use crate::optim::muon::ITERATION;
use crate::optim::{MuonConfig, Rule};
use crate::probe::Path;
use std::fmt;
use std::ops::Range;

/// The op of a call. Its operands have the names in `code` below, in this order. An operand that is written in place is
/// listed among the writes only.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// A kernel. Its operands are named by the op that plans it.
    Kernel(Kernel),
    /// Replaces `x` by its mean over the ranks of a job. Only the last micro-batch of a step runs it.
    AllReduce {
        /// The number of elements of `x`.
        elements: usize,
    },
    /// Replaces `x` on rank `root` by its mean over the ranks of a job; on other ranks its contents are unspecified.
    /// Only the last micro-batch of a step runs it.
    Reduce {
        /// The number of elements of `x`.
        elements: usize,
        /// The rank that receives the mean.
        root: usize,
    },
    /// Replaces `x` by the contents of rank `root`. Only the first micro-batch of a step runs it.
    Broadcast {
        /// The number of elements of `x`.
        elements: usize,
        /// The rank that sends.
        root: usize,
    },
    /// Fills `x` with the [shards](crate::distributed::Shard::part) of all ranks, of which each rank has its own in
    /// place.
    AllGather {
        /// The number of elements of `x`.
        elements: usize,
    },
    /// Replaces this rank's [shard](crate::distributed::Shard::part) of `x` by its mean over the ranks of a job; the
    /// contents of the other shards are unspecified.
    ReduceScatter {
        /// The number of elements of `x`.
        elements: usize,
    },
    /// Divides `gradient` by the loss scale, in place. Writes `found` (1): whether all elements are finite; on a GPU,
    /// whether one is not.
    Unscale {
        /// The number of elements of the gradient.
        elements: usize,
    },
    /// Reads `found` of all gradients (P). Writes `first` (1): the position of the first gradient that is not finite,
    /// or P if all are. On the CPU the step ends here if one is not. On a GPU `factor` (3) makes the updates do
    /// nothing.
    CheckOverflow {
        /// The parameters' indices, by position. A fully sharded parameter has one position for each rank.
        parameters: Vec<usize>,
    },
    /// Reads `x`. Writes `square` (1), the sum of its squares, and on a GPU `chunks`, the partial sums.
    SumOfSquares {
        /// The number of elements of `x`.
        elements: usize,
    },
    /// Reads the sums of `squares` (P). Writes `factor` (2): the norm, and the factor by which clipping multiplies the
    /// gradients. On a GPU it has a third element (3): which gradient is not finite, if one is.
    ClipFactor {
        /// The parameters' indices, by position. A fully sharded parameter has one position for each rank.
        parameters: Vec<usize>,
    },
    /// The first part of Muon's update: reads `gradient` and, if gradients are clipped or checked, `factor`. Writes
    /// `momentum_buffer` and `direction`. With sharded weights all are parts.
    Momentum {
        /// The index in [`Location::Parameter`](super::buffer::Location::Parameter).
        parameter: usize,
        /// The number of elements that are updated.
        elements: usize,
    },
    /// The second part of Muon's update: makes `directions` (count, rows, columns) nearly orthogonal, in place. Writes
    /// scratch memory.
    Orthogonalize {
        /// The rule, with the settings of the iteration.
        rule: MuonConfig,
        /// The number of matrices.
        count: usize,
        /// The rows and columns of each.
        shape: [usize; 2],
    },
    /// Reads `gradient` and, if gradients are clipped or checked, `factor`. Writes `parameter`, the rule's tensors of
    /// state by their names and, on a GPU, the half-precision `copy` that matmuls read, if there is one. As the last
    /// part of Muon's update it reads the orthogonal direction as `gradient`, and writes no state.
    Update {
        /// The rule. A run has the current hyperparameters.
        rule: Rule,
        /// The index in [`Location::Parameter`](super::buffer::Location::Parameter).
        parameter: usize,
        /// The number of elements that are updated.
        elements: usize,
    },
}

impl From<Kernel> for Op {
    fn from(kernel: Kernel) -> Self {
        Self::Kernel(kernel)
    }
}

impl Op {
    /// Returns the kernel, or `None` for exchanges and steps of the update.
    pub fn kernel(&self) -> Option<&Kernel> {
        match self {
            Self::Kernel(kernel) => Some(kernel),
            _ => None,
        }
    }

    /// Returns the collectives of an exchange, each with the elements of `x` that it applies to. Empty for other ops.
    pub(super) fn collectives(&self, world_size: usize) -> Vec<(Collective, Range<usize>)> {
        let reduce = Reduce::Mean;
        let (collective, elements) = match *self {
            Self::AllReduce { elements } => (Collective::AllReduce(reduce), elements),
            Self::Reduce { elements, root } => (Collective::Reduce { reduce, root }, elements),
            Self::Broadcast { elements, root } => (Collective::Broadcast { root }, elements),
            Self::AllGather { elements } => return Collective::gathering(world_size, elements),
            Self::ReduceScatter { elements } => {
                return Collective::scattering(world_size, elements);
            }
            _ => return Vec::new(),
        };
        vec![(collective, 0..elements)]
    }

    /// Returns the parameters whose gradients the op checks, by position.
    #[cfg(feature = "cuda")]
    pub(super) fn checked(&self) -> Option<&[usize]> {
        match self {
            Self::CheckOverflow { parameters } | Self::ClipFactor { parameters } => {
                Some(parameters)
            }
            _ => None,
        }
    }

    /// Returns the name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kernel(kernel) => kernel.name(),
            Self::AllReduce { .. } => "all_reduce",
            Self::Reduce { .. } => "reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::AllGather { .. } => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::Unscale { .. } => "unscale",
            Self::CheckOverflow { .. } => "check_overflow",
            Self::SumOfSquares { .. } => "sum_of_squares",
            Self::ClipFactor { .. } => "clip_factor",
            Self::Momentum { .. } => "momentum",
            Self::Orthogonalize { .. } => ITERATION,
            Self::Update { rule, .. } => rule.name(),
        }
    }

    /// Returns whether a GPU can run it.
    pub fn is_on_gpu(&self) -> bool {
        match self {
            Self::Kernel(kernel) => kernel.is_on_gpu(),
            Self::Update { rule, .. } => rule.info().gpu_width.is_some(),
            _ => true,
        }
    }

    /// Returns whether it is a part of the update of parameters.
    pub fn is_update(&self) -> bool {
        matches!(
            self,
            Self::Momentum { .. } | Self::Orthogonalize { .. } | Self::Update { .. }
        )
    }

    /// Returns whether it is a matmul and nothing else.
    pub fn is_matmul(&self) -> bool {
        self.kernel().is_some_and(Kernel::is_matmul)
    }

    /// Returns the FLOPs of its matmuls: the model's work as counted by [`flops`](crate::model::flops), whatever the
    /// kernel skips or computes twice.
    pub fn flops(&self) -> f64 {
        self.kernel().map_or(0.0, Kernel::flops)
    }

    /// Returns whether its first write is also read: accumulated to, or changed in place.
    pub fn reads_what_it_writes(&self) -> bool {
        match self {
            Self::Kernel(kernel) => kernel.reads_what_it_writes(),
            Self::AllReduce { .. }
            | Self::Reduce { .. }
            | Self::Broadcast { .. }
            | Self::AllGather { .. }
            | Self::ReduceScatter { .. }
            | Self::Momentum { .. }
            | Self::Orthogonalize { .. }
            | Self::Update { .. }
            | Self::Unscale { .. } => true,
            _ => false,
        }
    }

    /// Returns the sizes, as `explain` prints them.
    pub fn sizes(&self) -> String {
        match self {
            Self::Kernel(kernel) => kernel.sizes(),
            Self::AllReduce { elements }
            | Self::Reduce { elements, .. }
            | Self::Broadcast { elements, .. }
            | Self::AllGather { elements }
            | Self::ReduceScatter { elements }
            | Self::Unscale { elements }
            | Self::SumOfSquares { elements }
            | Self::Momentum { elements, .. }
            | Self::Update { elements, .. } => elements.to_string(),
            Self::Orthogonalize {
                count,
                shape: [rows, columns],
                ..
            } => format!("{count} of {rows}x{columns}"),
            Self::CheckOverflow { parameters } | Self::ClipFactor { parameters } => {
                parameters.len().to_string()
            }
        }
    }
}

/// The phase of a step that a call belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// From tokens to the head's input; in a plan without a loss, to the logits.
    #[default]
    Forward,
    /// Head and loss.
    Loss,
    /// The loss's gradient. Also the gradients of head and loss, where these are computed together for some rows at a
    /// time.
    LossGradient,
    /// All other gradients.
    Backward,
    /// The norm of the gradients.
    Clip,
    /// The update.
    Optimizer,
}

impl Phase {
    /// Returns the name in reports and probe events.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Loss | Self::LossGradient => "loss",
            Self::Backward => "backward",
            Self::Clip => "clip",
            Self::Optimizer => "optimizer",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A contiguous range of a buffer's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// The buffer.
    pub buffer: BufferId,
    /// The elements.
    pub elements: Range<usize>,
}

impl BufferRange {
    pub(super) fn whole(buffers: &Buffers, id: BufferId) -> Self {
        Self {
            buffer: id,
            elements: 0..buffers[id].elements(),
        }
    }
}

/// A call of a plan: an op with its operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The op, with its sizes.
    pub op: Op,
    /// The path in the model, for example `layers.3/attn`.
    pub path: String,
    /// The outermost module of the path, or the root if it is in none.
    pub module: Path,
    /// The phase of the step.
    pub phase: Phase,
    /// The index of its entry in [`Plan::costs`](super::Plan::costs). `None` for the mean loss and its gradient, for
    /// initial copies of weights, and for the update.
    pub cost_index: Option<usize>,
    /// The operands that are read, by the op's names.
    pub reads: Named<BufferRange>,
    /// The operands that are written, by the op's names.
    pub writes: Named<BufferRange>,
}

impl Call {
    /// Returns the operands that are read, followed by those that are written.
    pub fn operands(&self) -> impl Iterator<Item = &BufferRange> + Clone {
        self.reads.iter().chain(self.writes.iter())
    }
}
