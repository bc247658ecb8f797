//! An allocator that counts: the bytes alive now, and the most there ever were.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

static ACTIVE: AtomicBool = AtomicBool::new(false);
static CURRENT_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

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
        .then(|| CURRENT_BYTES.load(Relaxed) as u64)
}

/// The most bytes that were alive at once since the last [`reset_peak`]; `None` if no [`Tracker`] is installed.
pub fn peak_bytes() -> Option<u64> {
    ACTIVE
        .load(Relaxed)
        .then(|| PEAK_BYTES.load(Relaxed) as u64)
}

/// Lets the peak begin again at what is alive now.
pub fn reset_peak() {
    PEAK_BYTES.store(CURRENT_BYTES.load(Relaxed), Relaxed);
}

fn grow(bytes: usize) {
    let current = CURRENT_BYTES.fetch_add(bytes, Relaxed) + bytes;
    // Read before writing: most allocations are no peak, and the line stays shared among the cores.
    if current > PEAK_BYTES.load(Relaxed) {
        PEAK_BYTES.fetch_max(current, Relaxed);
    }
}

fn shrink(bytes: usize) {
    CURRENT_BYTES.fetch_sub(bytes, Relaxed);
}

// SAFETY: every call is handed to the wrapped allocator unchanged; counting touches no memory of it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Tracker<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the allocator's.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            ACTIVE.store(true, Relaxed);
            grow(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            grow(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.allocator.dealloc(block, layout) };
        shrink(layout.size());
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { self.allocator.realloc(block, layout, new_size) };
        if !moved.is_null() {
            // Grown first: while a block moves, both copies may be alive.
            grow(new_size);
            shrink(layout.size());
        }
        moved
    }
}
