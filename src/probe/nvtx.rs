//! Ranges for NVIDIA's profilers.

use crate::Result;
use crate::probe::Listening;

/// Hands every range of this crate to NVTX for as long as what it returns lives: steps, phases, layers, ops forward and
/// backward, and a user's own ([`range`](super::range)), nested on their thread as they are. Nsight Systems draws them
/// above the kernels that were launched in them (`nsys profile -t cuda,nvtx`, then `nsys stats -r nvtx_gpu_proj_sum`).
/// With no such tool attached NVTX does nothing; PyTorch's counterpart is `torch.autograd.profiler.emit_nvtx`.
///
/// A range is called by its own name, an op's backward by the op's with ` backward` behind it. NVTX ends the innermost
/// range whichever is dropped, so ranges dropped out of order change names there. A range that was open before is not
/// handed on, and one that is open when what this returns is dropped is not ended there: drop it between steps.
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
/// [`Error::Config`](crate::Error::Config) in a build without the feature `nvtx` (`cuda` has it).
#[cfg(feature = "nvtx")]
pub fn emit_nvtx() -> Result<Listening> {
    Ok(crate::probe::listen(std::sync::Arc::new(emitting::Ranges)))
}

/// Hands ranges to NVTX, in a build with the feature `nvtx`.
///
/// # Errors
/// Always, here.
#[cfg(not(feature = "nvtx"))]
pub fn emit_nvtx() -> Result<Listening> {
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
        /// Ranges of this thread that were handed on and have not ended.
        static OPEN: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) struct Ranges;

    impl Listener for Ranges {
        fn entered(&self, event: &Event<'_>) {
            // C's strings end at the first zero byte.
            let name = event.name.split('\0').next().unwrap_or_default();
            match event.kind {
                Kind::OpBackward => nvtx::range_push!("{name} backward"),
                _ => nvtx::range_push!("{name}"),
            };
            OPEN.set(OPEN.get() + 1);
        }

        fn left(&self, _event: &Event<'_>) {
            // A range that began before there was a listener was not pushed.
            if let Some(open) = OPEN.get().checked_sub(1) {
                OPEN.set(open);
                nvtx::range_pop!();
            }
        }
    }
}
