//! Which threads a product runs on.

/// Whether one multiplication may use every thread, or keeps to its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// All threads of the current rayon pool.
    All,
    /// The calling thread only: for use inside a parallel loop.
    One,
}
