//! What a profiler has recorded.

use super::kernel::Kernel;
use crate::ops::cost::Cost;
use crate::probe::{Kind, Operand, Parts, Path};
use candle_core::DType;
use std::fmt;

/// The ranges of a stretch of time, on every thread that had any.
///
/// Where steps were recorded ([`step`](super::step); [`Laps`](crate::bench::Laps) and the trainer open them), reports
/// speak of those alone: what ran outside of them is in the trace only. Else the whole recording counts as one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// In the order in which they began on their thread, the outer before the inner.
    pub spans: Vec<Span>,
    /// What ran on a GPU, in the order in which it began; empty on the CPU, and without
    /// [`Profiler::start_on`](super::Profiler::start_on).
    pub kernels: Vec<Kernel>,
    /// The threads' names; a span's `thread` is an index here.
    pub threads: Vec<String>,
    /// From start to finish.
    pub duration_ns: u64,
}

/// A range: when, where, and on what.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// What it stands for.
    pub kind: Kind,
    /// Where it was in the model, itself included (but for steps and phases).
    pub path: Path,
    /// The phase that it was in, or is; empty if none.
    pub phase: &'static str,
    /// The thread's number.
    pub thread: usize,
    /// When it began, after the recording's start.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The range around it on its thread.
    pub parent: Option<usize>,
    /// What an op has read; empty where that is not known.
    pub inputs: Vec<OperandShape>,
    /// What it has made forward.
    pub output: Option<OperandShape>,
    /// What it has cost by what was told, as the calls of a plan tell it; [`cost()`](Self::cost) knows the others too.
    pub cost: Option<Cost>,
    /// What an op's own time is made of, as far as its kernels told: on the CPU.
    pub parts: Parts,
    /// What was allocated as it ended; `None` without a [tracker](crate::memory::tracker).
    pub allocated_bytes: Option<u64>,
}

/// A tensor's shape and dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandShape {
    /// Its dimensions.
    pub dims: Vec<usize>,
    /// The dtype of its elements.
    pub dtype: DType,
}

impl OperandShape {
    pub(super) fn of(operand: &Operand<'_>) -> Self {
        Self {
            dims: operand.dims.to_vec(),
            dtype: operand.dtype,
        }
    }

    /// How many elements.
    pub fn elements(&self) -> f64 {
        self.operand().elements()
    }

    /// What its elements take.
    pub fn bytes(&self) -> f64 {
        self.operand().bytes()
    }

    pub(super) fn operand(&self) -> Operand<'_> {
        Operand {
            dims: &self.dims,
            dtype: self.dtype,
        }
    }
}

/// `4x256x512 f32`.
impl fmt::Display for OperandShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(usize::to_string).collect();
        match dims.is_empty() {
            true => write!(f, "scalar {}", self.dtype.as_str()),
            false => write!(f, "{} {}", dims.join("x"), self.dtype.as_str()),
        }
    }
}

impl Span {
    /// How long it took, with all that is inside.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Its own name.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Step => "step".into(),
            Kind::Phase => self.phase.into(),
            _ => self.path.name(),
        }
    }

    /// Whether it is an op's, forward or backward.
    pub fn is_op(&self) -> bool {
        matches!(self.kind, Kind::Op | Kind::OpBackward)
    }

    /// As errors name it: with its path, in quotes.
    pub(super) fn title(&self) -> String {
        match self.kind {
            Kind::Step | Kind::Phase => format!("{:?}", self.name()),
            _ => format!("\"{}\"", self.path),
        }
    }
}
