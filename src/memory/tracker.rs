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

use crate::memory::record::buffer::{Place, What, change};
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Wraps an allocator and counts what is asked of it: see the [module](self)'s example.
///
/// While a [recording](crate::memory::record()) runs, every block of a tensor's size is reported to it too.
///
/// The counts are of bytes requested: what the allocator rounds up or keeps for later is not in them (the process's
/// resident memory is in [`system`](crate::memory::system)).
pub struct Tracker<A> {
    allocator: A,
}

impl<A> Tracker<A> {
    /// Counts what is asked of `allocator`.
    pub const fn new(allocator: A) -> Self {
        Self { allocator }
    }
}

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

/// The bytes alive now; 0 without a tracker.
pub(in crate::memory) fn alive_bytes() -> usize {
    COUNTS.current_bytes.load(Relaxed)
}

fn counted(count: impl FnOnce() -> u64) -> Option<u64> {
    ACTIVE.load(Relaxed).then(count)
}

/// The bytes alive now; `None` if no [`Tracker`] is installed.
pub fn current_bytes() -> Option<u64> {
    counted(|| alive_bytes() as u64)
}

/// The most bytes that were alive at once since the last [`reset_peak`]; `None` if no [`Tracker`] is installed.
pub fn peak_bytes() -> Option<u64> {
    counted(|| COUNTS.peak_bytes.load(Relaxed) as u64)
}

/// How many blocks have been asked for since the process began, one that is made larger or smaller again each time;
/// `None` if no [`Tracker`] is installed.
pub fn allocations() -> Option<u64> {
    counted(|| COUNTS.allocations.load(Relaxed))
}

/// Lets the peak begin again at what is alive now.
pub fn reset_peak() {
    COUNTS.peak_bytes.store(alive_bytes(), Relaxed);
}

fn grow(bytes: usize) -> usize {
    COUNTS.allocations.fetch_add(1, Relaxed);
    let current = COUNTS.current_bytes.fetch_add(bytes, Relaxed) + bytes;
    // Read before writing: most allocations are no peak.
    if current > COUNTS.peak_bytes.load(Relaxed) {
        COUNTS.peak_bytes.fetch_max(current, Relaxed);
    }
    current
}

fn shrink(bytes: usize) -> usize {
    COUNTS.current_bytes.fetch_sub(bytes, Relaxed) - bytes
}

fn taken(block: *mut u8, bytes: usize, count: impl FnOnce() -> usize) {
    change(Place::Host, What::Taken, block.addr(), bytes, count);
}

fn given_back(block: *mut u8, bytes: usize, count: impl FnOnce() -> usize) {
    change(Place::Host, What::GivenBack, block.addr(), bytes, count);
}

// SAFETY: every call is handed to the wrapped allocator unchanged; counting and recording touch no memory of it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Tracker<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the allocator's.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            ACTIVE.store(true, Relaxed);
            taken(block, layout.size(), || grow(layout.size()));
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            taken(block, layout.size(), || grow(layout.size()));
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Told of first: once it is given back, another thread may be given it.
        given_back(block, layout.size(), || shrink(layout.size()));
        // SAFETY: as above.
        unsafe { self.allocator.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both copies count until it has moved.
        let size = layout.size();
        let without = || alive_bytes().saturating_sub(size);
        given_back(block, size, without);
        // SAFETY: as above.
        let moved = unsafe { self.allocator.realloc(block, layout, new_size) };
        if moved.is_null() {
            taken(block, size, alive_bytes); // it stays where it is
            return moved;
        }
        taken(moved, new_size, || {
            grow(new_size);
            shrink(size)
        });
        moved
    }
}
