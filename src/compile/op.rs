//! Calls, and what one does: a kernel, an exchange with other ranks, or a part of the update.

use super::buffer::{BufferId, Buffers};
use crate::distributed::{Collective, Reduce};
use crate::ops::lowering::{Kernel, Named};
use crate::probe::Path;
use std::fmt;
use std::ops::Range;

/// What a call does. It has its operands by the names in `code` here, in this order; what is written in place is among
/// the writes alone.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// A kernel. Operands as what plans it names them.
    Kernel(Kernel),
    /// Writes `x`, in place: its mean over the ranks of a job. Of a step's micro-batches the last alone has it.
    AllReduce {
        /// Of x.
        elements: usize,
    },
    /// Writes `x`, in place: on rank `root` its mean over the ranks of a job, on the others nothing of use. Of a step's
    /// micro-batches the last alone has it.
    Reduce {
        /// Of x.
        elements: usize,
        /// The rank.
        root: usize,
    },
    /// Writes `x`, in place: what rank `root` has there. Of a step's micro-batches the first alone has it.
    Broadcast {
        /// Of x.
        elements: usize,
        /// The rank.
        root: usize,
    },
    /// Writes `x`, in place, of which each rank has its [part](crate::distributed::Shard::part): that of every rank.
    AllGather {
        /// Of x.
        elements: usize,
    },
    /// Writes `x`, in place: in this rank's [part](crate::distributed::Shard::part) its mean over the ranks of a job,
    /// in the others nothing of use.
    ReduceScatter {
        /// Of x.
        elements: usize,
    },
    /// A gradient over the loss scale. Writes `gradient`, in place, and `found` (1): whether all of it is finite; on a
    /// GPU, whether it is not.
    Unscale {
        /// Of the gradient.
        elements: usize,
    },
    /// Reads what was `found` of the gradients (P); writes `first` (1), the place of the first that is not finite, P if
    /// all are. Where one is not, the step ends here; on a GPU the updates are told to change nothing, by `factor`
    /// (3).
    CheckOverflow {
        /// The parameters' numbers, by place. Of parameters that ranks have parts of, each has as many places.
        parameters: Vec<usize>,
    },
    /// Reads `x`; writes `square`, the sum of its squares (1) and, on a GPU, those of its `chunks`.
    SumOfSquares {
        /// Of x.
        elements: usize,
    },
    /// Reads the sums of `squares` (P); writes `factor` (2), the norm and what clipping multiplies the gradients by; on
    /// a GPU also which gradient is not finite, if one is (3).
    ClipFactor {
        /// The parameters' numbers, by place. Of parameters that ranks have parts of, each has as many places.
        parameters: Vec<usize>,
    },
    /// Reads `gradient` and, where gradients are clipped or checked, `factor`; writes `parameter`, `exp_avg`,
    /// `exp_avg_sq` and, on a GPU, the `copy` that products read, where there is one.
    AdamW {
        /// Its number in [`Location::Parameter`](super::Location::Parameter).
        parameter: usize,
        /// How many elements it has.
        elements: usize,
    },
}

impl From<Kernel> for Op {
    fn from(kernel: Kernel) -> Self {
        Self::Kernel(kernel)
    }
}

impl Op {
    /// The kernel, unless it is an exchange or a part of the update.
    pub fn kernel(&self) -> Option<&Kernel> {
        match self {
            Self::Kernel(kernel) => Some(kernel),
            _ => None,
        }
    }

    /// What ranks do together for it, by the elements of `x` that they do it to; nothing, if it is no exchange.
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

    /// The parameters whose gradients it checks, by place.
    #[cfg(feature = "cuda")]
    pub(super) fn checked(&self) -> Option<&[usize]> {
        match self {
            Self::CheckOverflow { parameters } | Self::ClipFactor { parameters } => {
                Some(parameters)
            }
            _ => None,
        }
    }

    /// As reports call it.
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
            Self::AdamW { .. } => "adamw",
        }
    }

    /// Whether a GPU has a kernel for it.
    pub fn is_on_gpu(&self) -> bool {
        self.kernel().is_none_or(Kernel::is_on_gpu)
    }

    /// Whether it is a matrix product and nothing else.
    pub fn is_product(&self) -> bool {
        self.kernel().is_some_and(Kernel::is_product)
    }

    /// FLOPs of its matrix products: the model's work, as [`flops`](crate::model::flops) counts it, whatever the kernel
    /// leaves out or does twice.
    pub fn flops(&self) -> f64 {
        self.kernel().map_or(0.0, Kernel::flops)
    }

    /// Whether what it writes first is also read: what is added to or changed in place.
    pub fn reads_what_it_writes(&self) -> bool {
        match self {
            Self::Kernel(kernel) => kernel.reads_what_it_writes(),
            Self::AllReduce { .. }
            | Self::Reduce { .. }
            | Self::Broadcast { .. }
            | Self::AllGather { .. }
            | Self::ReduceScatter { .. }
            | Self::AdamW { .. }
            | Self::Unscale { .. } => true,
            _ => false,
        }
    }

    /// The sizes, as `explain` prints them.
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
            | Self::AdamW { elements, .. } => elements.to_string(),
            Self::CheckOverflow { parameters } | Self::ClipFactor { parameters } => {
                parameters.len().to_string()
            }
        }
    }
}

/// The part of a step that a call belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// From tokens to what the head reads; without a loss, to logits.
    #[default]
    Forward,
    /// Head and loss.
    Loss,
    /// The loss's gradient, and those of head and loss where they are computed with it, some rows at a time.
    LossGradient,
    /// The gradients of the rest.
    Backward,
    /// The gradients' norm.
    Clip,
    /// The update.
    Optimizer,
}

impl Phase {
    /// As reports and the probe call it.
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

/// Some elements of a buffer, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// Whose.
    pub buffer: BufferId,
    /// Which.
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

/// One kernel call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What is done, and its sizes.
    pub op: Op,
    /// Where in the model, for example `layers.3.attn`.
    pub path: String,
    /// The outermost module that this is in; the root, if it is in none.
    pub module: Path,
    /// The part of the step.
    pub phase: Phase,
    /// Which of [`Plan::costs`](super::Plan::costs) it belongs to. `None` for the mean loss and its gradient, copies of
    /// weights that are made first, and the update.
    pub part: Option<usize>,
    /// What is read, by the op's names.
    pub reads: Named<BufferRange>,
    /// What is written, by the op's names.
    pub writes: Named<BufferRange>,
}

impl Call {
    /// What is read, and then what is written.
    pub fn operands(&self) -> impl Iterator<Item = &BufferRange> + Clone {
        self.reads.iter().chain(self.writes.iter())
    }
}
