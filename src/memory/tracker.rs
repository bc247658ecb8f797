//! An allocator that counts: the bytes allocated now, their peak, and the number of allocations.
//!
//! A binary opts in by making a [`Tracker`] its global allocator:
//!
//! ```
//! use std::alloc::System;
//! use tallow::memory::tracker::{self, Tracker};
//!
//! #[global_allocator]
//! static ALLOCATOR: Tracker<System> = Tracker::new(System);
//!
//! let before = tracker::current_bytes().expect("the tracker is installed");
//! let block = vec![0u8; 1 << 20];
//! assert!(tracker::current_bytes().unwrap() >= before + block.len() as u64);
//! ```

use crate::memory::record::buffer::{EventKind, Place, change};
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// An allocator that counts allocations and passes them to the wrapped one; the [module](self) has an example.
///
/// While a [recording](crate::memory::record()) runs, it also reports every block that is large enough to be recorded.
///
/// Counts are of bytes requested, without what the allocator rounds up or caches. [`system`](crate::memory::system) has
/// the process's resident memory.
pub struct Tracker<A> {
    allocator: A,
}

impl<A> Tracker<A> {
    /// Wraps `allocator`.
    pub const fn new(allocator: A) -> Self {
        Self { allocator }
    }
}

/// Counters on a cache line of their own: a thread that updates one has the others in its cache.
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

/// Returns the bytes alive now; 0 without a tracker.
pub(in crate::memory) fn alive_bytes() -> usize {
    COUNTS.current_bytes.load(Relaxed)
}

fn counted(count: impl FnOnce() -> u64) -> Option<u64> {
    ACTIVE.load(Relaxed).then(count)
}

/// Returns the bytes alive now; `None` if no [`Tracker`] is installed.
pub fn current_bytes() -> Option<u64> {
    counted(|| alive_bytes() as u64)
}

/// Returns the peak of bytes alive since the last [`reset_peak`]; `None` if no [`Tracker`] is installed.
pub fn peak_bytes() -> Option<u64> {
    counted(|| COUNTS.peak_bytes.load(Relaxed) as u64)
}

/// Returns the number of allocations since the process's start, each reallocation included; `None` if no [`Tracker`] is
/// installed.
pub fn allocations() -> Option<u64> {
    counted(|| COUNTS.allocations.load(Relaxed))
}

/// Resets the peak to the bytes alive now.
pub fn reset_peak() {
    COUNTS.peak_bytes.store(alive_bytes(), Relaxed);
}

fn grow(bytes: usize) -> usize {
    COUNTS.allocations.fetch_add(1, Relaxed);
    let current = COUNTS.current_bytes.fetch_add(bytes, Relaxed) + bytes;
    // Read before writing: most allocations are not a new peak.
    if current > COUNTS.peak_bytes.load(Relaxed) {
        COUNTS.peak_bytes.fetch_max(current, Relaxed);
    }
    current
}

fn shrink(bytes: usize) -> usize {
    COUNTS.current_bytes.fetch_sub(bytes, Relaxed) - bytes
}

fn record_allocation(block: *mut u8, bytes: usize, count: impl FnOnce() -> usize) {
    change(
        Place::Host,
        EventKind::Allocated,
        block.addr(),
        bytes,
        count,
    );
}

fn record_free(block: *mut u8, bytes: usize, count: impl FnOnce() -> usize) {
    change(Place::Host, EventKind::Freed, block.addr(), bytes, count);
}

// SAFETY: every call is passed to the wrapped allocator unchanged; counting and recording touch no memory of it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Tracker<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's guarantees are those that the wrapped allocator requires.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            ACTIVE.store(true, Relaxed);
            record_allocation(block, layout.size(), || grow(layout.size()));
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            record_allocation(block, layout.size(), || grow(layout.size()));
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Reported first: once it is freed, another thread may get the same block.
        record_free(block, layout.size(), || shrink(layout.size()));
        // SAFETY: as above.
        unsafe { self.allocator.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Old and new block both count until the move is done.
        let size = layout.size();
        let without = || alive_bytes().saturating_sub(size);
        record_free(block, size, without);
        // SAFETY: as above.
        let moved = unsafe { self.allocator.realloc(block, layout, new_size) };
        if moved.is_null() {
            record_allocation(block, size, alive_bytes); // the block was not moved
            return moved;
        }
        record_allocation(moved, new_size, || {
            grow(new_size);
            shrink(size)
        });
        moved
    }
}
