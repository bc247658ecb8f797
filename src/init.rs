//! What a program sets once for its process.

/// Has candle's threads sleep sooner while they wait for work: by default they spin on cores that this crate's kernels
/// then want (with 16 cores a small eager step took four times as long).
///
/// Call it first in `main`. Says whether the
/// setting holds.
///
/// It sets the environment variable `CANDLE_BARRIER_POOL_SPIN_LIMIT` to 1000, which candle reads at its first op. One
/// that is set already stays, and holds. A process's environment may be changed only while it has one thread; where
/// there are more, or where that is not known (on neither Linux nor Windows), nothing is set. Set it outside then.
///
/// A program also gains by an allocator that keeps freed pages, which a library cannot choose:
/// [Speed](crate#speed-of-a-program-that-uses-it).
///
/// ```
/// fn main() -> tallow::Result<()> {
///     tallow::init();
///     let device = tallow::device("cpu")?;
///     # let _ = device;
///     Ok(())
/// }
/// ```
pub fn init() -> bool {
    const SPIN_LIMIT: &str = "CANDLE_BARRIER_POOL_SPIN_LIMIT";
    if std::env::var_os(SPIN_LIMIT).is_some() {
        return true;
    }
    if !is_alone() {
        return false;
    }
    // SAFETY: this thread is the only one, so nothing reads the environment meanwhile.
    unsafe { std::env::set_var(SPIN_LIMIT, "1000") };
    true
}

/// Whether this process has one thread.
#[cfg(target_os = "linux")]
fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Windows locks the environment; elsewhere this is not known.
#[cfg(not(target_os = "linux"))]
fn is_alone() -> bool {
    cfg!(windows)
}

#[cfg(test)]
mod tests {
    /// Tests run on threads of their own, beside the main one.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_of_several_threads_is_left_alone() {
        assert!(!super::is_alone());
    }
}
