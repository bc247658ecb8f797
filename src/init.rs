//! Settings of the process.

/// Shortens how long candle's worker threads spin before they sleep. Call it first in `main`.
///
/// By default they spin on cores that this crate's kernels need: with 16 cores a small eager step took four times as
/// long. Returns whether the setting applies.
///
/// It sets the environment variable `CANDLE_BARRIER_POOL_SPIN_LIMIT` to 1000, which candle reads at its first op; an
/// existing value is kept and applies. The environment can be changed safely only while the process has one thread.
/// With more threads, and on other systems than Linux and Windows, nothing is set: set it outside of the process.
/// [`distributed::init`](crate::distributed::init()) starts threads, so call `tallow::init` before it.
///
/// A program that trains on a GPU may leave it out: only what candle computes on the CPU gains from it.
///
/// An allocator that keeps freed pages saves time too; see [Speed](crate#speed-of-a-program-that-uses-it).
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
    if !is_single_threaded() {
        return false;
    }
    // SAFETY: this thread is the only one, so nothing reads the environment meanwhile.
    unsafe { std::env::set_var(SPIN_LIMIT, "1000") };
    true
}

/// Returns whether this process has only one thread.
#[cfg(target_os = "linux")]
fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// On Windows the environment is locked; on other systems the number of threads is unknown.
#[cfg(not(target_os = "linux"))]
fn is_single_threaded() -> bool {
    cfg!(windows)
}

#[cfg(test)]
mod tests {
    /// Tests run on separate threads, in addition to the main one.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_of_several_threads_is_left_alone() {
        assert!(!super::is_single_threaded());
    }
}
