//! A block of memory, as a recording has it.

use super::MemoryKind;
use crate::probe::Path;

/// A block of memory that was alive while it was recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Where it was.
    pub address: usize,
    /// How large it was.
    pub bytes: u64,
    /// What it was there for.
    pub kind: MemoryKind,
    /// What [`Recorder::label`](crate::memory::Recorder::label) has called it, if it has.
    pub name: Option<String>,
    /// Where it was taken: an op's path, or the range around candle's own work; the root if before the recording.
    pub path: Path,
    /// The phase in which it was taken; empty if in none.
    pub phase: &'static str,
    /// The thread that took it, counted as they come, from 1; 0 for what was there before.
    pub thread: u32,
    /// The event with which it came; `None` if it was there before.
    pub taken_at: Option<usize>,
    /// The event with which it went; `None` if it was there at the end.
    pub given_back_at: Option<usize>,
}

impl Block {
    /// Whether it was alive just after this event.
    pub fn is_alive_at(&self, event: usize) -> bool {
        self.taken_at.is_none_or(|taken| taken <= event)
            && self
                .given_back_at
                .is_none_or(|given_back| event < given_back)
    }
}

/// A phase, from its first event to its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseSpan {
    /// `forward`, `backward`, `optimizer`, or what a caller has called it.
    pub name: &'static str,
    /// The event with which it began.
    pub begins_at: usize,
    /// The event with which it ended; the recording's last if it did not.
    pub ends_at: usize,
}

/// What a block's [`MemoryKind`] follows from, beside the block.
#[derive(Clone, Copy)]
pub(super) struct Circumstances {
    /// The phase as a stretch of events.
    pub phase: Option<usize>,
    /// The call of the op that took it.
    pub call: Option<usize>,
    /// The call of the op in which it was given back.
    pub given_back_in: Option<usize>,
}
