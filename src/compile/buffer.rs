//! The buffers of a plan: what they are, how long they are needed, and where they lie.

use candle_core::DType;
use std::ops::{Index, Range};

/// Which buffer of a [`Plan`](super::Plan): its place in [`Plan::buffers`](super::Plan::buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub(super) usize);

impl BufferId {
    /// Its place in [`Plan::buffers`](super::Plan::buffers).
    pub fn index(self) -> usize {
        self.0
    }
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Category {
    /// A weight, shared with the model.
    Parameter,
    /// A weight in half precision, made from the parameter at the beginning of each step.
    WeightCopy,
    /// A running mean of AdamW's, shared with the optimizer.
    OptimizerState,
    /// Token ids, and tables that were computed with the plan.
    Input,
    /// What a run gives out: logits.
    Output,
    /// A parameter's gradient.
    Gradient,
    /// Kept from forward for backward.
    Activation,
    /// Made and used up within one phase.
    Temporary,
    /// What the threads of one call work in.
    Scratch,
}

impl Category {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 9] = [
        Self::Parameter,
        Self::WeightCopy,
        Self::OptimizerState,
        Self::Input,
        Self::Output,
        Self::Gradient,
        Self::Activation,
        Self::Temporary,
        Self::Scratch,
    ];

    /// As reports and pictures write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::WeightCopy => "weight copy",
            Self::OptimizerState => "optimizer state",
            Self::Input => "input",
            Self::Output => "output",
            Self::Gradient => "gradient",
            Self::Activation => "activation",
            Self::Temporary => "temporary",
            Self::Scratch => "scratch",
        }
    }
}

/// Where a buffer's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// In the plan's own memory, `offset_bytes` from its beginning.
    Arena {
        /// A multiple of [`ALIGNMENT_BYTES`](super::arena::ALIGNMENT_BYTES).
        offset_bytes: u64,
    },
    /// The parameter of this number, in the model's or the optimizer's order.
    Parameter(usize),
    /// AdamW's running mean of that parameter's gradient.
    ExpAvg(usize),
    /// AdamW's running mean of its square.
    ExpAvgSq(usize),
    /// A table that the plan holds: [`Plan::table`](super::Plan::table).
    Table(usize),
    /// What the run gives out.
    Output,
    /// The tensor that the run is given under this number: a micro-batch's part of it.
    Input(usize),
    /// The tensor that the run is given under this number, the same for every micro-batch.
    Argument(usize),
}

/// A piece of memory that calls read and write.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// What it holds, for example `layers.3.attn/q`.
    pub name: String,
    /// Its shape, row by row.
    pub shape: Vec<usize>,
    /// Of its elements.
    pub dtype: DType,
    /// What it is for.
    pub category: Category,
    /// Where it is.
    pub location: Location,
    /// The calls that need it, from the first that touches it to the last: its memory is its own meanwhile.
    pub live: Range<usize>,
}

impl Buffer {
    /// How many elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.elements() as u64 * self.dtype.size_in_bytes() as u64
    }

    /// Whether its memory is the plan's own.
    pub fn is_in_arena(&self) -> bool {
        matches!(self.location, Location::Arena { .. })
    }

    /// The bytes of the arena that it takes; `None` if it lies elsewhere.
    pub fn arena_range(&self) -> Option<Range<u64>> {
        match self.location {
            Location::Arena { offset_bytes } => Some(offset_bytes..offset_bytes + self.bytes()),
            _ => None,
        }
    }
}

/// The buffers of a plan that is being made.
#[derive(Default)]
pub(super) struct Buffers(Vec<Buffer>);

impl Buffers {
    /// One more, without a lifetime yet: the plan finds it.
    pub(super) fn add(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        category: Category,
        location: Location,
    ) -> BufferId {
        self.0.push(Buffer {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            category,
            location,
            live: 0..0,
        });
        BufferId(self.0.len() - 1)
    }

    /// One more in the plan's own memory.
    pub(super) fn arena(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        category: Category,
    ) -> BufferId {
        let location = Location::Arena { offset_bytes: 0 };
        self.add(name, shape, dtype, category, location)
    }

    pub(super) fn set_category(&mut self, id: BufferId, category: Category) {
        self.0[id.0].category = category;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (BufferId, &Buffer)> {
        let numbered = self.0.iter().enumerate();
        numbered.map(|(i, buffer)| (BufferId(i), buffer))
    }

    /// All of them, by their ids.
    pub(super) fn into_vec(self) -> Vec<Buffer> {
        self.0
    }
}

impl Index<BufferId> for Buffers {
    type Output = Buffer;

    fn index(&self, id: BufferId) -> &Buffer {
        &self.0[id.0]
    }
}
