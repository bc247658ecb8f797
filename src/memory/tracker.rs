//! An allocator that counts: the bytes alive now, the most there ever were, and how many blocks were asked for.

use super::recording::buffer;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// On a cache line of their own: who writes one has the others at hand.
#[repr(align(128))]
struct Counts {
    current_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    allocations: AtomicU64,
}

static ACTIVE: AtomicBool = AtomicBool::new(false);
static COUNTS: Counts = Counts {
    current_bytes: AtomicUsize::new(0),
    peak_bytes: AtomicUsize::new(0),
    allocations: AtomicU64::new(0),
};

/// Wraps an allocator and counts what is asked of it. A binary opts in:
///
/// ```
/// use std::alloc::System;
/// use tallow::memory::tracker::{self, Tracker};
///
/// #[global_allocator]
/// static ALLOCATOR: Tracker<System> = Tracker::new(System);
///
/// let before = tracker::current_bytes().expect("the tracker is installed");
/// let block = vec![0u8; 1 << 20];
/// assert!(tracker::current_bytes().unwrap() >= before + block.len() as u64);
/// ```
///
/// While somebody [records](super::record()), every block of a tensor's size is told of too.
///
/// The counts are of bytes requested: what the allocator rounds up or keeps for later is not in them (the process's
/// resident memory is in [`system`](super::system)).
pub struct Tracker<A> {
    allocator: A,
}

impl<A> Tracker<A> {
    /// Counts what is asked of `allocator`.
    pub const fn new(allocator: A) -> Self {
        Self { allocator }
    }
}

/// The bytes alive now; `None` if no [`Tracker`] is installed.
pub fn current_bytes() -> Option<u64> {
    ACTIVE
        .load(Relaxed)
        .then(|| COUNTS.current_bytes.load(Relaxed) as u64)
}

/// The most bytes that were alive at once since the last [`reset_peak`]; `None` if no [`Tracker`] is installed.
pub fn peak_bytes() -> Option<u64> {
    ACTIVE
        .load(Relaxed)
        .then(|| COUNTS.peak_bytes.load(Relaxed) as u64)
}

/// How many blocks have been asked for since the process began, one that is made larger or smaller again each time;
/// `None` if no [`Tracker`] is installed.
pub fn allocations() -> Option<u64> {
    ACTIVE
        .load(Relaxed)
        .then(|| COUNTS.allocations.load(Relaxed))
}

/// Lets the peak begin again at what is alive now.
pub fn reset_peak() {
    let current = COUNTS.current_bytes.load(Relaxed);
    COUNTS.peak_bytes.store(current, Relaxed);
}

/// What is alive now, requires a tracker.
pub(super) fn current() -> usize {
    COUNTS.current_bytes.load(Relaxed)
}

/// What is alive with these.
fn grow(bytes: usize) -> usize {
    COUNTS.allocations.fetch_add(1, Relaxed);
    let current = COUNTS.current_bytes.fetch_add(bytes, Relaxed) + bytes;
    // Read before writing: most allocations are no peak.
    if current > COUNTS.peak_bytes.load(Relaxed) {
        COUNTS.peak_bytes.fetch_max(current, Relaxed);
    }
    current
}

/// What is alive without them.
fn shrink(bytes: usize) -> usize {
    COUNTS.current_bytes.fetch_sub(bytes, Relaxed) - bytes
}

// SAFETY: every call is handed to the wrapped allocator unchanged; counting and recording touch no memory of it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Tracker<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the allocator's.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            ACTIVE.store(true, Relaxed);
            let current = grow(layout.size());
            buffer::taken(block, layout.size(), current);
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            let current = grow(layout.size());
            buffer::taken(block, layout.size(), current);
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Told of first: once it is given back, another thread may be given it.
        let current = shrink(layout.size());
        buffer::given_back(block, layout.size(), current);
        // SAFETY: as above.
        unsafe { self.allocator.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let before = COUNTS.current_bytes.load(Relaxed);
        buffer::given_back(block, layout.size(), before.saturating_sub(layout.size()));
        // SAFETY: as above.
        let moved = unsafe { self.allocator.realloc(block, layout, new_size) };
        if moved.is_null() {
            buffer::taken(block, layout.size(), before); // it stays where it is
            return moved;
        }
        // Grown first: while a block moves, both copies may be alive.
        grow(new_size);
        let current = shrink(layout.size());
        buffer::taken(moved, new_size, current);
        moved
    }
}
