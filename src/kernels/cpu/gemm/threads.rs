//! The threads that a matmul may use.

/// Whether a matmul may use all threads or only the calling one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// All threads of the current rayon pool.
    All,
    /// The calling thread only: for use inside a parallel loop.
    One,
}
