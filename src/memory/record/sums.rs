//! Sums over a recording: by what is held, and by phase.

use super::{Block, MemoryKind, MemoryRecording, PhaseSpan};

/// Bytes alive at one moment, by what they were there for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings([u64; MemoryKind::ALL.len()]);

impl Holdings {
    /// The bytes that were there for this.
    pub fn bytes_of(&self, kind: MemoryKind) -> u64 {
        self.0[kind as usize]
    }

    /// All of them.
    pub fn total_bytes(&self) -> u64 {
        self.0.iter().sum()
    }

    /// What is not zero, in the order of [`MemoryKind`].
    pub fn iter(&self) -> impl Iterator<Item = (MemoryKind, u64)> {
        let each = MemoryKind::ALL.into_iter().zip(self.0);
        each.filter(|(_, bytes)| *bytes > 0)
    }

    fn add(&mut self, block: &Block) {
        self.0[block.kind as usize] += block.bytes;
    }

    fn remove(&mut self, block: &Block) {
        self.0[block.kind as usize] -= block.bytes;
    }

    /// With what is in no block that is known, so that the sum is `total_bytes`.
    fn filled_up(mut self, total_bytes: u64) -> Self {
        let rest = total_bytes.saturating_sub(self.total_bytes());
        self.0[MemoryKind::Other as usize] += rest;
        self
    }
}

impl MemoryRecording {
    /// Every known block that was alive during the recording, in the order of allocation; first the blocks that were
    /// there before it began.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The phases ([`probe::phase`](crate::probe::phase)), in the order in which they began.
    pub fn phases(&self) -> &[PhaseSpan] {
        &self.phases
    }

    /// The event after which the most was alive; 0 if there was none.
    pub fn peak_at(&self) -> usize {
        self.worst(0, self.curve.len())
    }

    /// The most that was alive at once, small blocks included, as the allocator counted. A peak of blocks that are not
    /// recorded lies between two events; it is less than their threshold away.
    pub fn peak_bytes(&self) -> u64 {
        self.bytes_at(self.peak_at())
    }

    /// The most that was alive in a phase.
    pub fn peak_bytes_in(&self, phase: &PhaseSpan) -> u64 {
        self.bytes_at(self.worst_in(phase))
    }

    /// The event of a phase after which the most was alive.
    pub fn worst_in(&self, phase: &PhaseSpan) -> usize {
        self.worst(phase.begins_at, phase.ends_at.saturating_add(1))
    }

    /// What was alive after this event.
    pub fn bytes_at(&self, event: usize) -> u64 {
        self.curve.get(event).map_or(0, |sample| sample.bytes)
    }

    /// How many events there are: moments for [`bytes_at`](Self::bytes_at) and [`holdings_at`](Self::holdings_at).
    pub fn events(&self) -> usize {
        self.curve.len()
    }

    fn worst(&self, from: usize, to: usize) -> usize {
        let to = to.min(self.curve.len());
        let range = (from..to).rev(); // of equals the first
        range
            .max_by_key(|event| self.curve[*event].bytes)
            .unwrap_or(from)
    }

    /// What was alive after this event, by what it was there for. The sum is [`bytes_at`](Self::bytes_at): what is in
    /// no recorded block is [`MemoryKind::Other`].
    pub fn holdings_at(&self, event: usize) -> Holdings {
        let mut holdings = Holdings::default();
        let alive = self.blocks.iter().filter(|block| block.is_alive_at(event));
        alive.for_each(|block| holdings.add(block));
        holdings.filled_up(self.bytes_at(event))
    }

    /// [`holdings_at`](Self::holdings_at) for every event.
    pub fn holdings(&self) -> Vec<Holdings> {
        let mut now = Holdings::default();
        let before = self.blocks.iter().filter(|block| block.taken_at.is_none());
        before.for_each(|block| now.add(block));
        let steps = self.changes().into_iter().zip(&self.curve);
        let each = steps.map(|(change, sample)| {
            match change {
                Some((true, place)) => now.add(&self.blocks[place]),
                Some((false, place)) => now.remove(&self.blocks[place]),
                None => {}
            }
            now.filled_up(sample.bytes)
        });
        each.collect()
    }

    /// For each event the block that it took (`true`) or gave back, by its place among the blocks.
    pub(super) fn changes(&self) -> Vec<Option<(bool, usize)>> {
        let mut changes = vec![None; self.curve.len()];
        for (place, block) in self.blocks.iter().enumerate() {
            for (event, is_taken) in [(block.taken_at, true), (block.given_back_at, false)] {
                if let Some(event) = event {
                    changes[event] = Some((is_taken, place));
                }
            }
        }
        changes
    }

    /// The `count` largest blocks that were taken while it was recorded, the largest first.
    pub fn largest(&self, count: usize) -> Vec<&Block> {
        let taken = self.blocks.iter().filter(|block| block.taken_at.is_some());
        let mut blocks: Vec<&Block> = taken.collect();
        blocks.sort_by_key(|block| std::cmp::Reverse(block.bytes)); // stable: of equals the first
        blocks.truncate(count);
        blocks
    }
}
