//! The counters of the [tracker](crate::memory::tracker), for it and for recordings.

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

/// A tracker is installed.
pub(super) fn begin() {
    ACTIVE.store(true, Relaxed);
}

/// Whether one is.
pub(super) fn is_counting() -> bool {
    ACTIVE.load(Relaxed)
}

/// What is alive now; 0 without a tracker.
pub(super) fn current_bytes() -> usize {
    COUNTS.current_bytes.load(Relaxed)
}

/// The most that was alive at once since the last [`reset_peak`].
pub(super) fn peak_bytes() -> usize {
    COUNTS.peak_bytes.load(Relaxed)
}

/// How many blocks were asked for.
pub(super) fn allocations() -> u64 {
    COUNTS.allocations.load(Relaxed)
}

/// Begins the peak at what is alive now.
pub(super) fn reset_peak() {
    COUNTS.peak_bytes.store(current_bytes(), Relaxed);
}

/// What is alive with these.
pub(super) fn grow(bytes: usize) -> usize {
    COUNTS.allocations.fetch_add(1, Relaxed);
    let current = COUNTS.current_bytes.fetch_add(bytes, Relaxed) + bytes;
    // Read before writing: most allocations are no peak.
    if current > COUNTS.peak_bytes.load(Relaxed) {
        COUNTS.peak_bytes.fetch_max(current, Relaxed);
    }
    current
}

/// What is alive without them.
pub(super) fn shrink(bytes: usize) -> usize {
    COUNTS.current_bytes.fetch_sub(bytes, Relaxed) - bytes
}
