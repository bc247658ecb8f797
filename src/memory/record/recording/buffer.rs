//! Events on their way out of the allocator: written without asking for memory.

use crate::memory::counts;
use crate::probe::{self, Path};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU32, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The recording.
    Begins,
    /// A block was taken.
    Taken,
    /// A block was given back.
    GivenBack,
    PhaseBegins,
    PhaseEnds,
    OpBegins,
    OpEnds,
}

/// Something that happened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    /// Since the recording began.
    pub at_ns: u64,
    pub what: What,
    /// Of the block.
    pub address: usize,
    /// Of the block.
    pub bytes: usize,
    /// All that was alive, small blocks too.
    pub current_bytes: usize,
    /// Where the thread was.
    pub path: Path,
    /// The phase that it was in; empty if in none.
    pub phase: &'static str,
    /// Threads are counted as they come.
    pub thread: u32,
}

/// Room for a fixed number of events. It is taken from the system, past the tracker, which would count it.
struct Buffer {
    start: Instant,
    events: NonNull<Event>,
    capacity: usize,
    /// How many are written.
    written: usize,
    /// How many found no room.
    lost: u64,
}

// SAFETY: the only pointer to the events.
unsafe impl Send for Buffer {}

/// Whose blocks are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The process's, as its allocator gives them out.
    Host,
    /// A GPU's.
    Gpu,
}

/// Blocks from this size on are recorded: all that the allocator looks at for one that is not.
static THRESHOLD_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The same of a GPU's; the largest number while none are recorded.
static GPU_THRESHOLD_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The bytes alive on the GPU that is watched.
static GPU_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The recording that runs. An event's count and its place are taken under one lock: counts are then those of the
/// events before, whatever threads do. Nothing under it takes a block or gives one back.
static BUFFER: Mutex<Option<Buffer>> = Mutex::new(None);

fn buffer() -> MutexGuard<'static, Option<Buffer>> {
    BUFFER.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// This thread's number, from 1.
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

/// A block is there; `count` counts it, and says what is alive with it.
#[inline]
pub(in crate::memory) fn taken(block: *const u8, bytes: usize, count: impl FnOnce() -> usize) {
    match bytes < THRESHOLD_BYTES.load(Relaxed) {
        true => _ = count(),
        false => push(What::Taken, block.addr(), bytes, count),
    }
}

/// A block is about to go; `count` counts it, and says what is alive without it.
#[inline]
pub(in crate::memory) fn given_back(block: *const u8, bytes: usize, count: impl FnOnce() -> usize) {
    match bytes < THRESHOLD_BYTES.load(Relaxed) {
        true => _ = count(),
        false => push(What::GivenBack, block.addr(), bytes, count),
    }
}

/// So much is alive on the GPU that is watched from now on.
#[cfg(feature = "cuda")]
pub(super) fn watch_gpu(current_bytes: usize) {
    GPU_BYTES.store(current_bytes, Relaxed);
}

/// A block is there on the GPU that is watched.
#[cfg(feature = "cuda")]
pub(super) fn taken_on_gpu(address: usize, bytes: usize) {
    let count = || GPU_BYTES.fetch_add(bytes, Relaxed) + bytes;
    match bytes < GPU_THRESHOLD_BYTES.load(Relaxed) {
        true => _ = count(),
        false => push(What::Taken, address, bytes, count),
    }
}

/// A block of the GPU that is watched is about to go.
#[cfg(feature = "cuda")]
pub(super) fn given_back_on_gpu(address: usize, bytes: usize) {
    let count = || GPU_BYTES.fetch_sub(bytes, Relaxed) - bytes;
    match bytes < GPU_THRESHOLD_BYTES.load(Relaxed) {
        true => _ = count(),
        false => push(What::GivenBack, address, bytes, count),
    }
}

/// The bytes alive where blocks are recorded.
fn current_bytes() -> usize {
    match GPU_THRESHOLD_BYTES.load(Relaxed) {
        usize::MAX => counts::current_bytes(),
        _ => GPU_BYTES.load(Relaxed),
    }
}

/// A phase or an op begins or ends at `path`, or the recording does.
pub(super) fn mark(what: What, path: Path, phase: &'static str) {
    let thread = thread_number();
    write(current_bytes, |at_ns, current_bytes| Event {
        at_ns,
        what,
        address: 0,
        bytes: 0,
        current_bytes,
        path,
        phase,
        thread,
    });
}

/// A block comes or goes where this thread is.
#[cold]
#[inline(never)]
fn push(what: What, address: usize, bytes: usize, count: impl FnOnce() -> usize) {
    let (path, phase, thread) = (probe::current(), probe::current_phase(), thread_number());
    write(count, |at_ns, current_bytes| Event {
        at_ns,
        what,
        address,
        bytes,
        current_bytes,
        path,
        phase,
        thread,
    });
}

/// Counts, and writes the event of this time and this count if a recording runs and has room.
fn write(count: impl FnOnce() -> usize, event: impl FnOnce(u64, usize) -> Event) {
    let mut buffer = buffer();
    let current_bytes = count();
    let Some(buffer) = buffer.as_mut() else {
        return;
    };
    if buffer.written == buffer.capacity {
        buffer.lost += 1;
        return;
    }
    let at_ns = buffer.start.elapsed().as_nanos() as u64;
    // SAFETY: inside of the buffer.
    unsafe {
        buffer
            .events
            .add(buffer.written)
            .write(event(at_ns, current_bytes))
    };
    buffer.written += 1;
}

/// Why a recording does not begin.
pub(super) enum Refusal {
    AlreadyRecording,
    NoMemory { wanted_bytes: usize },
}

/// Begins to record.
pub(super) fn start(place: Place, capacity: usize, threshold_bytes: usize) -> Result<(), Refusal> {
    let wanted_bytes = capacity.saturating_mul(size_of::<Event>());
    let layout = Layout::array::<Event>(capacity)
        .ok()
        .filter(|layout| layout.size() > 0);
    // SAFETY: not of size zero.
    let events = layout.and_then(|layout| NonNull::new(unsafe { System.alloc(layout) }));
    let Some(events) = events else {
        return Err(Refusal::NoMemory { wanted_bytes });
    };
    let new = Buffer {
        start: Instant::now(),
        events: events.cast(),
        capacity,
        written: 0,
        lost: 0,
    };
    let mut running = buffer();
    if running.is_some() {
        return Err(Refusal::AlreadyRecording);
    }
    *running = Some(new);
    drop(running);
    let threshold = match place {
        Place::Host => &THRESHOLD_BYTES,
        Place::Gpu => &GPU_THRESHOLD_BYTES,
    };
    threshold.store(threshold_bytes.clamp(1, usize::MAX - 1), SeqCst);
    Ok(())
}

/// Ends the recording: what was recorded, and how many events found no room.
pub(super) fn stop() -> (Vec<Event>, u64) {
    THRESHOLD_BYTES.store(usize::MAX, SeqCst);
    GPU_THRESHOLD_BYTES.store(usize::MAX, SeqCst);
    let buffer = buffer().take();
    buffer.map_or_else(Default::default, |buffer| {
        (buffer.events().to_vec(), buffer.lost)
    })
}

/// How many events there have been.
pub(super) fn position() -> usize {
    buffer().as_ref().map_or(0, |buffer| buffer.written)
}

impl Buffer {
    fn events(&self) -> &[Event] {
        // SAFETY: so many have been written.
        unsafe { std::slice::from_raw_parts(self.events.as_ptr(), self.written) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(layout) = Layout::array::<Event>(self.capacity) {
            // SAFETY: taken in `start` with this layout.
            unsafe { System.dealloc(self.events.as_ptr().cast(), layout) };
        }
    }
}
