//! Which buffers are alive, and which were at the worst moment.

use super::sizes::Size;
use crate::memory::Holds;
use std::ops::Range;

/// `count` buffers of one size.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) struct Buffer {
    pub holds: Holds,
    pub what: &'static str,
    pub size: Size,
    /// Bytes an element.
    pub width: usize,
    pub count: f64,
}

impl Buffer {
    fn bytes(&self) -> f64 {
        self.count * self.size.elements * self.width as f64
    }
}

/// Names a buffer that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(usize);

#[derive(Default)]
pub(super) struct Ledger {
    /// Every buffer that was ever taken; `None` where it was given back.
    buffers: Vec<Option<Buffer>>,
    alive_bytes: f64,
    worst_bytes: f64,
    worst: Vec<Buffer>,
}

impl Ledger {
    pub fn take(&mut self, buffer: Buffer) -> Key {
        self.alive_bytes += buffer.bytes();
        self.buffers.push(Some(buffer));
        Key(self.buffers.len() - 1)
    }

    /// Gives a buffer back; once is enough.
    pub fn give_back(&mut self, key: Key) {
        self.note(); // what is alive only grows between two of these
        if let Some(buffer) = self.buffers[key.0].take() {
            self.alive_bytes -= buffer.bytes();
        }
    }

    /// The place of the next buffer: what is taken from now on is after it.
    pub fn mark(&self) -> usize {
        self.buffers.len()
    }

    /// What was taken from a place on, whether it is alive or not.
    pub fn keys_from(&self, place: usize) -> impl Iterator<Item = Key> + use<> {
        (place..self.buffers.len()).map(Key)
    }

    /// Gives back what was taken in a range of places, but for `kept`.
    pub fn give_back_all(&mut self, places: Range<usize>, kept: &[Key]) {
        for key in places.map(Key).filter(|key| !kept.contains(key)) {
            self.give_back(key);
        }
    }

    /// A buffer that is alive.
    pub fn get(&self, key: Key) -> Option<Buffer> {
        self.buffers[key.0]
    }

    pub fn alive_bytes(&self) -> f64 {
        self.alive_bytes
    }

    /// The most bytes that were alive at once, and the buffers that had them.
    pub fn into_worst(mut self) -> (f64, Vec<Buffer>) {
        self.note();
        (self.worst_bytes, self.worst)
    }

    fn note(&mut self) {
        if self.alive_bytes > self.worst_bytes {
            self.worst_bytes = self.alive_bytes;
            self.worst = self.buffers.iter().flatten().copied().collect();
        }
    }
}
