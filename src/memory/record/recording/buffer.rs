//! Events on their way out of the allocator: written without a lock and without asking for memory.

use crate::memory::counts;
use crate::probe::{self, Path};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
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
    /// How many wanted a place.
    claimed: AtomicUsize,
}

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
/// Null without a recording.
static BUFFER: AtomicPtr<Buffer> = AtomicPtr::new(std::ptr::null_mut());
/// How many are writing, or about to.
static WRITERS: AtomicUsize = AtomicUsize::new(0);

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

/// A block is there.
#[inline]
pub(in crate::memory) fn taken(block: *const u8, bytes: usize, current_bytes: usize) {
    if bytes >= THRESHOLD_BYTES.load(Relaxed) {
        push_here(What::Taken, block.addr(), bytes, current_bytes);
    }
}

/// A block is about to go.
#[inline]
pub(in crate::memory) fn given_back(block: *const u8, bytes: usize, current_bytes: usize) {
    if bytes >= THRESHOLD_BYTES.load(Relaxed) {
        push_here(What::GivenBack, block.addr(), bytes, current_bytes);
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
    let current_bytes = GPU_BYTES.fetch_add(bytes, Relaxed) + bytes;
    if bytes >= GPU_THRESHOLD_BYTES.load(Relaxed) {
        push_here(What::Taken, address, bytes, current_bytes);
    }
}

/// A block of the GPU that is watched is about to go.
#[cfg(feature = "cuda")]
pub(super) fn given_back_on_gpu(address: usize, bytes: usize) {
    let current_bytes = GPU_BYTES.fetch_sub(bytes, Relaxed) - bytes;
    if bytes >= GPU_THRESHOLD_BYTES.load(Relaxed) {
        push_here(What::GivenBack, address, bytes, current_bytes);
    }
}

/// The bytes alive where blocks are recorded.
fn current_bytes() -> usize {
    match GPU_THRESHOLD_BYTES.load(Relaxed) {
        usize::MAX => counts::current_bytes(),
        _ => GPU_BYTES.load(Relaxed),
    }
}

#[cold]
#[inline(never)]
fn push_here(what: What, address: usize, bytes: usize, current_bytes: usize) {
    push(Event {
        at_ns: 0,
        what,
        address,
        bytes,
        current_bytes,
        path: probe::current(),
        phase: probe::current_phase(),
        thread: thread_number(),
    });
}

/// A phase or an op begins or ends here.
pub(super) fn mark(what: What, path: Path, phase: &'static str) {
    push(Event {
        at_ns: 0,
        what,
        address: 0,
        bytes: 0,
        current_bytes: current_bytes(),
        path,
        phase,
        thread: thread_number(),
    });
}

/// Writes an event with the time, if a recording runs and has room.
fn push(event: Event) {
    WRITERS.fetch_add(1, SeqCst);
    let buffer = BUFFER.load(SeqCst);
    if !buffer.is_null() {
        // SAFETY: `stop` takes the pointer away first, and frees the buffer when no thread writes any more; a
        // thread that read the pointer before that is counted among the writers.
        let buffer = unsafe { &*buffer };
        let place = buffer.claimed.fetch_add(1, Relaxed);
        if place < buffer.capacity {
            let at_ns = buffer.start.elapsed().as_nanos() as u64;
            // SAFETY: inside of the buffer, and no other thread has claimed this place.
            unsafe { buffer.events.add(place).write(Event { at_ns, ..event }) };
        }
    }
    WRITERS.fetch_sub(1, SeqCst);
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
    let buffer = Box::into_raw(Box::new(Buffer {
        start: Instant::now(),
        events: events.cast(),
        capacity,
        claimed: AtomicUsize::new(0),
    }));
    let null = std::ptr::null_mut();
    if BUFFER
        .compare_exchange(null, buffer, SeqCst, SeqCst)
        .is_err()
    {
        // SAFETY: from `into_raw` above, and it was not shared.
        drop(unsafe { Box::from_raw(buffer) });
        return Err(Refusal::AlreadyRecording);
    }
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
    let buffer = BUFFER.swap(std::ptr::null_mut(), SeqCst);
    if buffer.is_null() {
        return (Vec::new(), 0);
    }
    while WRITERS.load(SeqCst) > 0 {
        std::hint::spin_loop();
    }
    // SAFETY: from `into_raw` in `start`, taken out above, and its last writer is gone.
    let buffer = unsafe { Box::from_raw(buffer) };
    let claimed = buffer.claimed.load(SeqCst);
    let written = claimed.min(buffer.capacity);
    // SAFETY: who claims a place writes it before it is a writer no more.
    let events = unsafe { std::slice::from_raw_parts(buffer.events.as_ptr(), written) };
    let mut events = events.to_vec();
    // A thread takes its place first and the time after: another may come between.
    let mut latest_ns = 0;
    for event in &mut events {
        latest_ns = latest_ns.max(event.at_ns);
        event.at_ns = latest_ns;
    }
    (events, (claimed - written) as u64)
}

/// How many events there have been.
pub(super) fn position() -> usize {
    WRITERS.fetch_add(1, SeqCst);
    let buffer = BUFFER.load(SeqCst);
    let position = match buffer.is_null() {
        true => 0,
        // SAFETY: as in `push`.
        false => unsafe { &*buffer }.claimed.load(SeqCst),
    };
    WRITERS.fetch_sub(1, SeqCst);
    position
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(layout) = Layout::array::<Event>(self.capacity) {
            // SAFETY: taken in `start` with this layout.
            unsafe { System.dealloc(self.events.as_ptr().cast(), layout) };
        }
    }
}
