//! How much of a plan's arena is needed at a moment of a run.

use super::arena;
use super::plan::{Phase, Plan};

impl Plan {
    /// Bytes of the arena that are needed between call number `call` and the one before it: what earlier calls have
    /// written and this or a later one reads, or a run leaves behind.
    pub fn alive_bytes(&self, call: usize) -> u64 {
        let is_left = |end: usize| end == call && call == self.calls().len();
        let alive = self.buffers().iter().filter(|buffer| {
            let live = &buffer.live;
            buffer.is_in_arena() && live.start < call && (live.end > call || is_left(live.end))
        });
        alive.map(arena::taken_bytes).sum()
    }

    /// The first call of backward; the number of calls if there is none. Where head and loss are computed some rows at
    /// a time, the head's gradients come before it.
    pub fn backward_begins(&self) -> usize {
        let begins = self.first(Phase::Backward);
        let before = self.calls()[..begins].iter().rev();
        begins
            - before
                .take_while(|call| call.phase == Phase::LossGradient)
                .count()
    }

    /// The first call after backward; the number of calls if there is none.
    pub fn backward_ends(&self) -> usize {
        self.first(Phase::Clip)
    }

    /// The first call of this phase or a later one.
    fn first(&self, phase: Phase) -> usize {
        let found = self.calls().iter().position(|call| call.phase >= phase);
        found.unwrap_or(self.calls().len())
    }
}
