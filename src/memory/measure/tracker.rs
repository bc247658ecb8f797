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

use crate::memory::counts;
use crate::memory::record::buffer;
use std::alloc::{GlobalAlloc, Layout};

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

/// The bytes alive now; `None` if no [`Tracker`] is installed.
pub fn current_bytes() -> Option<u64> {
    counts::is_counting().then(|| counts::current_bytes() as u64)
}

/// The most bytes that were alive at once since the last [`reset_peak`]; `None` if no [`Tracker`] is installed.
pub fn peak_bytes() -> Option<u64> {
    counts::is_counting().then(|| counts::peak_bytes() as u64)
}

/// How many blocks have been asked for since the process began, one that is made larger or smaller again each time;
/// `None` if no [`Tracker`] is installed.
pub fn allocations() -> Option<u64> {
    counts::is_counting().then(counts::allocations)
}

/// Lets the peak begin again at what is alive now.
pub fn reset_peak() {
    counts::reset_peak();
}

// SAFETY: every call is handed to the wrapped allocator unchanged; counting and recording touch no memory of it.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Tracker<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the allocator's.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            counts::begin();
            buffer::taken(block, layout.size(), || counts::grow(layout.size()));
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            buffer::taken(block, layout.size(), || counts::grow(layout.size()));
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Told of first: once it is given back, another thread may be given it.
        buffer::given_back(block, layout.size(), || counts::shrink(layout.size()));
        // SAFETY: as above.
        unsafe { self.allocator.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both copies count until it has moved.
        let size = layout.size();
        let without = || counts::current_bytes().saturating_sub(size);
        buffer::given_back(block, size, without);
        // SAFETY: as above.
        let moved = unsafe { self.allocator.realloc(block, layout, new_size) };
        if moved.is_null() {
            buffer::taken(block, size, counts::current_bytes); // it stays where it is
            return moved;
        }
        buffer::taken(moved, new_size, || {
            counts::grow(new_size);
            counts::shrink(size)
        });
        moved
    }
}
