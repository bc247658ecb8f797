//! Eager or planned.

use crate::memory::Mode;

/// How a model is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Execution {
    /// Op by op, with candle's graph.
    #[default]
    Eager,
    /// As planned beforehand, by [`compile`](crate::compile).
    Planned,
}

impl Execution {
    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Planned => "planned",
        }
    }

    /// Whether `mode` so executed is a planned training step: only that may have its
    /// [optimizer in backward](super::EndToEnd::optimizer_in_backward) and a
    /// [memory budget](super::EndToEnd::memory_budget_bytes).
    pub fn is_planned_step(self, mode: Mode) -> bool {
        self == Self::Planned && mode == Mode::TrainStep
    }
}
