//! The memory that an example may use, and preparations if it is hardly more than a run needs.

use super::words::grouped;
use candle_core::Device;
use tallow::bench::{EndToEnd, Execution};
use tallow::{Error, Result};

/// The largest memory observed in a process in addition to a step: code, threads and data.
const PROCESS_BYTES: u64 = 64 << 20;

/// Returns the bytes that each run may use on `device`: the limit of the flag in GiB, or the available memory.
///
/// Memory is tight if a run on the CPU fits but leaves less than half of its size plus [`PROCESS_BYTES`]. mimalloc then
/// uses no arenas, because it rounds blocks up and keeps freed pages that no later block may fit, together up to half
/// of what a step has allocated. Also, each kind of run is done once at the smallest sizes before the available memory
/// is read: memory that the process needs in addition to a step is in use by then.
pub fn available_bytes<'r>(
    device: &Device,
    limit_gib: Option<f64>,
    runs: impl IntoIterator<Item = &'r EndToEnd>,
) -> Result<Option<u64>> {
    let limit = limit_gib.map(super::gib_bytes);
    let available = || limit.or_else(|| tallow::hardware::available_bytes_on(device));
    let is_tight = |run: &EndToEnd| {
        let (Some(available), Ok(estimate)) = (available(), run.estimate(device)) else {
            return false;
        };
        let wanted = estimate.peak_bytes; // a planned run needs less than this
        let may_fit = wanted <= available || run.execution == Execution::Planned;
        may_fit && wanted.saturating_add(wanted / 2 + PROCESS_BYTES) > available
    };
    let runs = runs.into_iter();
    let tight = runs.filter(|run| device.is_cpu() && is_tight(run));
    let kinds = grouped(tight, |run| (run.step.precision, run.execution, run.mode));
    if !kinds.is_empty() {
        super::take_blocks_from_the_system();
    }
    for (_, runs) in kinds {
        runs[0].warm_up(device)?;
    }
    Ok(available())
}

/// Refuses work that needs more than the available bytes, if these are known.
pub fn check(what: &str, wanted_bytes: u64, available_bytes: Option<u64>) -> Result<()> {
    match available_bytes {
        Some(available_bytes) if wanted_bytes > available_bytes => Err(Error::OutOfMemory {
            what: what.into(),
            wanted_bytes,
            available_bytes,
        }),
        _ => Ok(()),
    }
}
