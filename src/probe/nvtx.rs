//! NVTX ranges for NVIDIA's profilers.

use crate::Result;
use crate::probe::ListenerGuard;

/// Passes every range of this crate to NVTX while the returned guard is alive: steps, phases, layers, ops forward and
/// backward, and a user's ranges ([`range`](super::range)), nested on their thread. Nsight Systems draws them above the
/// kernels that they launched (`nsys profile -t cuda,nvtx`, then `nsys stats -r nvtx_gpu_proj_sum`). If no such tool is
/// attached, NVTX does nothing. PyTorch's counterpart is `torch.autograd.profiler.emit_nvtx`.
///
/// A range has its own name, an op's backward the op's name with ` backward` appended. NVTX always ends the innermost
/// range, so ranges dropped out of order swap names there. A range opened before the guard is not passed on, and one
/// that is open when the guard is dropped is not ended in NVTX: drop the guard between steps.
///
/// ```
/// use tallow::profile;
///
/// match profile::emit_nvtx() {
///     Ok(emitting) => {
///         let mine = profile::range("encoder"); // a range on the profiler's timeline
///         drop(mine);
///         drop(emitting);
///     }
///     Err(error) => assert!(error.to_string().contains("--features nvtx")),
/// }
/// ```
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) in a build without the feature `nvtx` (`cuda` includes it).
#[cfg(feature = "nvtx")]
pub fn emit_nvtx() -> Result<ListenerGuard> {
    Ok(crate::probe::listen(std::sync::Arc::new(emitting::Ranges)))
}

/// Passes ranges to NVTX, in a build with the feature `nvtx`.
///
/// ```
/// use tallow::probe;
///
/// match probe::emit_nvtx() {
///     Ok(emitting) => drop(emitting), // end of the ranges on the profiler's timeline
///     Err(error) => assert!(error.to_string().contains("--features nvtx")),
/// }
/// ```
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) if the feature `nvtx` is off.
#[cfg(not(feature = "nvtx"))]
pub fn emit_nvtx() -> Result<ListenerGuard> {
    Err(crate::Error::config("profile", "nvtx", "on").must_be(
        "off",
        "this build has no NVTX; build with --features nvtx, which cuda includes",
    ))
}

#[cfg(feature = "nvtx")]
mod emitting {
    use crate::probe::{Event, Kind, Listener};
    use std::cell::Cell;

    thread_local! {
        /// Number of this thread's ranges that were passed to NVTX and have not ended.
        static OPEN: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) struct Ranges;

    impl Listener for Ranges {
        fn on_enter(&self, event: &Event<'_>) {
            // C strings end at the first zero byte.
            let name = event.name.split('\0').next().unwrap_or_default();
            match event.kind {
                Kind::OpBackward => nvtx::range_push!("{name} backward"),
                _ => nvtx::range_push!("{name}"),
            };
            OPEN.set(OPEN.get() + 1);
        }

        fn on_leave(&self, _event: &Event<'_>) {
            // A range that began before the listener was not pushed.
            if let Some(open) = OPEN.get().checked_sub(1) {
                OPEN.set(open);
                nvtx::range_pop!();
            }
        }
    }
}
