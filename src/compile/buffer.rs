//! The buffers of a plan: purpose, lifetime and location.

use candle_core::DType;
use std::ops::{Index, Range};

/// The index of a buffer in [`Plan::buffers`](super::Plan::buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub(super) usize);

impl BufferId {
    /// Returns the index in [`Plan::buffers`](super::Plan::buffers).
    pub fn index(self) -> usize {
        self.0
    }
}

/// The purpose of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Category {
    /// A weight, shared with the model.
    Parameter,
    /// A weight in half precision, made from the parameter at the beginning of each step.
    WeightCopy,
    /// A tensor of state of a parameter, such as `exp_avg`, shared with the optimizer.
    OptimizerState,
    /// Token ids, and tables that were computed with the plan.
    Input,
    /// The output of a run, such as logits.
    Output,
    /// A parameter's gradient.
    Gradient,
    /// Saved in forward for backward.
    Activation,
    /// Written and read within one phase.
    Temporary,
    /// Scratch memory of the threads of one call.
    Scratch,
}

impl Category {
    /// All categories, in the order of reports.
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

    /// Returns the name in reports and pictures.
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

/// The location of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// In the plan's arena.
    Arena {
        /// The offset in the arena, a multiple of [`ALIGNMENT_BYTES`](super::arena::ALIGNMENT_BYTES).
        offset_bytes: u64,
    },
    /// The parameter with this index, in the model's or the optimizer's order.
    Parameter(usize),
    /// A tensor of the optimizer's state.
    State {
        /// The index of the parameter.
        parameter: usize,
        /// The index among the tensors of its rule.
        index: usize,
    },
    /// A table that the plan holds: [`Plan::table`](super::Plan::table).
    Table(usize),
    /// The output tensor of the run.
    Output,
    /// The run's argument with this index, of which each micro-batch reads its own slice.
    Input(usize),
    /// The run's argument with this index, the same for every micro-batch.
    Argument(usize),
}

/// A range of memory that calls read and write.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// The name of its contents, for example `layers.3.attn/q`.
    pub name: String,
    /// The shape; elements are stored row by row.
    pub shape: Vec<usize>,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The purpose.
    pub category: Category,
    /// The location.
    pub location: Location,
    /// The indices of the calls that need it, from the first access to the last. No other buffer uses its memory
    /// meanwhile.
    pub live: Range<usize>,
}

impl Buffer {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.elements() as u64 * self.dtype.size_in_bytes() as u64
    }

    /// Returns whether it is in the plan's arena.
    pub fn is_in_arena(&self) -> bool {
        matches!(self.location, Location::Arena { .. })
    }

    /// Returns the bytes of the arena that it occupies, or `None` if it is elsewhere.
    pub fn arena_range(&self) -> Option<Range<u64>> {
        match self.location {
            Location::Arena { offset_bytes } => Some(offset_bytes..offset_bytes + self.bytes()),
            _ => None,
        }
    }
}

#[derive(Default)]
pub(super) struct Buffers(Vec<Buffer>);

impl Buffers {
    /// Adds a buffer. Its lifetime is determined later.
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
