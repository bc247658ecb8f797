//! The event buffer of a recording, written to without allocating.

use super::RecordConfig;
use crate::memory::tracker;
use crate::probe::{self, Path};
use crate::{Error, Result, hardware};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU32, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(super) const OP: &str = "memory::record";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory) enum EventKind {
    Begins,
    Allocated,
    Freed,
    PhaseBegins,
    PhaseEnds,
    OpBegins,
    OpEnds,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub at_ns: u64,
    pub kind: EventKind,
    /// Address of the block that `bytes` is the size of; 0 without a block.
    pub address: usize,
    pub bytes: usize,
    /// All bytes alive, including small blocks.
    pub current_bytes: usize,
    pub path: Path,
    pub phase: &'static str,
    pub thread: u32,
}

/// A buffer of fixed capacity. Its memory comes from the system allocator, since the tracker would count it.
struct Buffer {
    start: Instant,
    events: NonNull<Event>,
    capacity: usize,
    written: usize,
    lost: u64,
}

// SAFETY: this is the only pointer to the events.
unsafe impl Send for Buffer {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory) enum Place {
    Host,
    Gpu,
}

/// The smallest block that is recorded, by [`Place`]; `usize::MAX` without a recording.
static THRESHOLD_BYTES: [AtomicUsize; 2] = [const { AtomicUsize::new(usize::MAX) }; 2];
pub(super) static GPU_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The running recording. Counting a block and writing its event happen under one lock, so that counts match the order
/// of events whatever other threads do. Nothing is allocated or freed under the lock.
static BUFFER: Mutex<Option<Buffer>> = Mutex::new(None);

fn buffer() -> MutexGuard<'static, Option<Buffer>> {
    BUFFER.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

fn thread_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    match THREAD.get() {
        0 => {
            let number = NEXT.fetch_add(1, Relaxed);
            THREAD.set(number);
            number
        }
        number => number,
    }
}

/// Reports a block that was allocated or is about to be freed. `count` updates the counter and returns the bytes alive.
#[inline]
pub(in crate::memory) fn change(
    place: Place,
    kind: EventKind,
    address: usize,
    bytes: usize,
    count: impl FnOnce() -> usize,
) {
    match bytes < THRESHOLD_BYTES[place as usize].load(Relaxed) {
        true => _ = count(),
        false => push(kind, address, bytes, count),
    }
}

fn current_bytes() -> usize {
    match THRESHOLD_BYTES[Place::Gpu as usize].load(Relaxed) {
        usize::MAX => tracker::alive_bytes(),
        _ => GPU_BYTES.load(Relaxed),
    }
}

/// Writes an event for the begin or end of a phase, of an op, or of the recording.
pub(super) fn mark(kind: EventKind, path: Path, phase: &'static str) {
    write(kind, [0, 0], path, phase, current_bytes);
}

#[cold]
#[inline(never)]
fn push(kind: EventKind, address: usize, bytes: usize, count: impl FnOnce() -> usize) {
    let (path, phase) = (probe::current(), probe::current_phase());
    write(kind, [address, bytes], path, phase, count);
}

/// Updates the count, then writes the event with its time and count if a recording runs and has capacity left.
fn write(
    kind: EventKind,
    [address, bytes]: [usize; 2],
    path: Path,
    phase: &'static str,
    count: impl FnOnce() -> usize,
) {
    let thread = thread_number();
    let mut buffer = buffer();
    let current_bytes = count();
    let Some(buffer) = buffer.as_mut() else {
        return;
    };
    if buffer.written == buffer.capacity {
        buffer.lost += 1;
        return;
    }
    let event = Event {
        at_ns: buffer.start.elapsed().as_nanos() as u64,
        kind,
        address,
        bytes,
        current_bytes,
        path,
        phase,
        thread,
    };
    // SAFETY: `written` is less than the capacity.
    unsafe { buffer.events.add(buffer.written).write(event) };
    buffer.written += 1;
}

pub(super) fn start(place: Place, config: &RecordConfig) -> Result<()> {
    let capacity = config.capacity;
    let layout = Layout::array::<Event>(capacity)
        .ok()
        .filter(|layout| layout.size() > 0);
    // SAFETY: the size is not zero.
    let events = layout.and_then(|layout| NonNull::new(unsafe { System.alloc(layout) }));
    let events = events.ok_or_else(|| {
        let wanted_bytes = capacity.saturating_mul(size_of::<Event>()) as u64;
        hardware::not_granted(&format!("{OP}, {capacity} events"), wanted_bytes)
    })?;
    let new = Buffer {
        start: Instant::now(),
        events: events.cast(),
        capacity,
        written: 0,
        lost: 0,
    };
    let mut running = buffer();
    if running.is_some() {
        return Err(Error::Order {
            op: OP,
            problem: "another recording is running".into(),
            hint: "finish or drop the other recorder first".into(),
        });
    }
    *running = Some(new);
    drop(running);
    let threshold_bytes = config.threshold_bytes.clamp(1, usize::MAX - 1);
    THRESHOLD_BYTES[place as usize].store(threshold_bytes, SeqCst);
    Ok(())
}

/// Ends the recording and returns its events, and the number of events lost because the buffer was full.
pub(super) fn stop() -> (Vec<Event>, u64) {
    for threshold in &THRESHOLD_BYTES {
        threshold.store(usize::MAX, SeqCst);
    }
    let Some(buffer) = buffer().take() else {
        return Default::default();
    };
    // SAFETY: `written` events have been written.
    let events = unsafe { std::slice::from_raw_parts(buffer.events.as_ptr(), buffer.written) };
    (events.to_vec(), buffer.lost)
}

pub(super) fn position() -> usize {
    buffer().as_ref().map_or(0, |buffer| buffer.written)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(layout) = Layout::array::<Event>(self.capacity) {
            // SAFETY: allocated in `start` with this layout.
            unsafe { System.dealloc(self.events.as_ptr().cast(), layout) };
        }
    }
}
