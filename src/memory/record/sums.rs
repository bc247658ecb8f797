//! Sums over a recording: by use, and by phase.

use super::{Block, MemoryKind, MemoryRecording, PhaseSpan};

/// Bytes alive at one point in time, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesByKind([u64; MemoryKind::ALL.len()]);

impl BytesByKind {
    /// Returns the bytes of this use.
    pub fn bytes_of(&self, kind: MemoryKind) -> u64 {
        self.0[kind as usize]
    }

    /// Returns the bytes of all uses.
    pub fn total_bytes(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Yields the uses with bytes, in the order of [`MemoryKind`].
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

    /// Adds the bytes of no known block to `Other`, so that the sum is `total_bytes`.
    fn filled_up(mut self, total_bytes: u64) -> Self {
        let rest = total_bytes.saturating_sub(self.total_bytes());
        self.0[MemoryKind::Other as usize] += rest;
        self
    }
}

impl MemoryRecording {
    /// Returns every known block that was alive during the recording, in the order of allocation; blocks from before it
    /// first.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the phases ([`probe::phase`](crate::probe::phase)), in the order in which they began.
    pub fn phases(&self) -> &[PhaseSpan] {
        &self.phases
    }

    /// Returns the event after which the most bytes were alive; 0 without events.
    pub fn peak_event(&self) -> usize {
        self.peak_event_between(0, self.curve.len())
    }

    /// Returns the largest number of bytes alive after any event, small blocks included, as the allocator counted.
    /// Blocks under [`RecordConfig::threshold_bytes`](super::RecordConfig::threshold_bytes) are no events: if they
    /// raise memory and are freed between two events, this maximum does not include them.
    pub fn peak_bytes(&self) -> u64 {
        self.bytes_at(self.peak_event())
    }

    /// Returns the peak in a phase.
    pub fn peak_bytes_in(&self, phase: &PhaseSpan) -> u64 {
        self.bytes_at(self.peak_event_in(phase))
    }

    /// Returns the event of a phase after which the most bytes were alive.
    pub fn peak_event_in(&self, phase: &PhaseSpan) -> usize {
        self.peak_event_between(phase.begins_at, phase.ends_at.saturating_add(1))
    }

    /// Returns the bytes alive after this event.
    pub fn bytes_at(&self, event: usize) -> u64 {
        self.curve.get(event).map_or(0, |sample| sample.bytes)
    }

    /// Returns the number of events: the indices of [`bytes_at`](Self::bytes_at) and
    /// [`bytes_by_kind_at`](Self::bytes_by_kind_at).
    pub fn events(&self) -> usize {
        self.curve.len()
    }

    fn peak_event_between(&self, from: usize, to: usize) -> usize {
        let to = to.min(self.curve.len());
        let range = (from..to).rev(); // of equals the first
        range
            .max_by_key(|event| self.curve[*event].bytes)
            .unwrap_or(from)
    }

    /// Returns the bytes alive after this event, by use. The sum is [`bytes_at`](Self::bytes_at): bytes of no recorded
    /// block are [`MemoryKind::Other`].
    pub fn bytes_by_kind_at(&self, event: usize) -> BytesByKind {
        let mut by_kind = BytesByKind::default();
        let alive = self.blocks.iter().filter(|block| block.is_alive_at(event));
        alive.for_each(|block| by_kind.add(block));
        by_kind.filled_up(self.bytes_at(event))
    }

    /// Returns [`bytes_by_kind_at`](Self::bytes_by_kind_at) of every event.
    pub fn bytes_by_kind(&self) -> Vec<BytesByKind> {
        let mut now = BytesByKind::default();
        let before = self
            .blocks
            .iter()
            .filter(|block| block.allocated_at.is_none());
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

    /// Returns for each event the index of the block that it allocated (`true`) or freed (`false`).
    pub(super) fn changes(&self) -> Vec<Option<(bool, usize)>> {
        let mut changes = vec![None; self.curve.len()];
        for (place, block) in self.blocks.iter().enumerate() {
            for (event, is_allocation) in [(block.allocated_at, true), (block.freed_at, false)] {
                if let Some(event) = event {
                    changes[event] = Some((is_allocation, place));
                }
            }
        }
        changes
    }

    /// Returns the `count` largest blocks allocated during the recording, the largest first.
    pub fn largest(&self, count: usize) -> Vec<&Block> {
        let allocated = self
            .blocks
            .iter()
            .filter(|block| block.allocated_at.is_some());
        let mut blocks: Vec<&Block> = allocated.collect();
        blocks.sort_by_key(|block| std::cmp::Reverse(block.bytes)); // stable: of equals the first
        blocks.truncate(count);
        blocks
    }
}
