//! Which buffers are alive, and which were at the worst moment.

use crate::graph::ValueId;
use crate::memory::MemoryKind;

/// `count` buffers of one size.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) struct Buffer {
    pub kind: MemoryKind,
    pub what: What,
    pub formula: Formula,
    /// Of one. In f64: exact to 2^53, and no overflow beyond.
    pub elements: f64,
    /// Bytes an element.
    pub width: usize,
    pub count: f64,
}

/// What a buffer is, from which it is named.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) enum What {
    Named(&'static str),
    /// A weight, or what has its size.
    Weight(ValueId),
    /// The output of the node that is this event.
    Output(usize),
}

/// How many elements a buffer has, as reports write it.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) enum Formula {
    Letters(&'static str),
    /// As many as this value.
    Of(ValueId),
}

impl Buffer {
    pub fn bytes(&self) -> f64 {
        self.count * self.elements * self.width as f64
    }
}

/// Names a buffer that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(usize);

#[derive(Default)]
pub(super) struct Ledger {
    /// Every buffer that was ever taken, and whether it is alive.
    buffers: Vec<(Buffer, bool)>,
    /// What was taken (true) and given back, in order.
    log: Vec<(Key, bool)>,
    alive_bytes: f64,
    worst_bytes: f64,
    /// How long the log was at the worst moment.
    worst: usize,
}

impl Ledger {
    pub fn take(&mut self, buffer: Buffer) -> Key {
        self.alive_bytes += buffer.bytes();
        self.buffers.push((buffer, true));
        let key = Key(self.buffers.len() - 1);
        self.log.push((key, true));
        key
    }

    /// Gives a buffer back; once is enough.
    pub fn give_back(&mut self, key: Key) {
        self.note(); // what is alive only grows between two of these
        let (buffer, is_alive) = &mut self.buffers[key.0];
        if std::mem::take(is_alive) {
            self.alive_bytes -= buffer.bytes();
            self.log.push((key, false));
        }
    }

    /// Calls a buffer by another name.
    pub fn rename(&mut self, key: Key, to: Buffer) {
        let (buffer, _) = &mut self.buffers[key.0];
        (buffer.kind, buffer.what, buffer.formula) = (to.kind, to.what, to.formula);
    }

    /// The place of the next buffer: what is taken from now on is after it.
    pub fn mark(&self) -> usize {
        self.buffers.len()
    }

    /// What is alive of that which was taken from a place on.
    pub fn alive_from(&self, place: usize) -> Vec<(Key, Buffer)> {
        let taken = self.buffers.iter().enumerate().skip(place);
        let alive = taken.filter(|(_, (_, is_alive))| *is_alive);
        alive.map(|(i, (buffer, _))| (Key(i), *buffer)).collect()
    }

    /// In bytes, all of it.
    pub fn alive_bytes(&self) -> f64 {
        self.alive_bytes
    }

    /// The most bytes that were alive at once, and the buffers that had them.
    pub fn into_worst(mut self) -> (f64, Vec<Buffer>) {
        self.note();
        let mut alive = vec![false; self.buffers.len()];
        for (key, taken) in &self.log[..self.worst] {
            alive[key.0] = *taken;
        }
        let buffers = self.buffers.iter().zip(alive);
        let worst = buffers.filter(|(_, alive)| *alive);
        (
            self.worst_bytes,
            worst.map(|((buffer, _), _)| *buffer).collect(),
        )
    }

    fn note(&mut self) {
        if self.alive_bytes > self.worst_bytes {
            self.worst_bytes = self.alive_bytes;
            self.worst = self.log.len();
        }
    }
}
