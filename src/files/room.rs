//! Memory for what a file holds: its length is checked before anything is allocated.

use crate::{Error, Result, hardware};
use std::path::Path;

/// Smaller allocations are not held against the available memory: asking the system would take longer.
const CHECKED_BYTES: u64 = 16 << 20;

/// Refuses `wanted_bytes` of memory for what a file holds if the machine has fewer left. A sparse file has any length
/// without using disk space, and a system that overcommits would grant the memory and then kill the process.
///
/// # Errors
/// [`Error::OutOfMemory`] naming `path` and `what`.
pub(crate) fn check_room(path: &Path, what: &str, wanted_bytes: u64) -> Result<()> {
    if wanted_bytes < CHECKED_BYTES {
        return Ok(());
    }
    match hardware::available_bytes() {
        Some(available_bytes) if wanted_bytes > available_bytes => {
            Err(refused(path, what, wanted_bytes, available_bytes))
        }
        _ => Ok(()),
    }
}

/// `len` zeros, each of `T`, to read a part of a file into.
///
/// # Errors
/// As [`check_room`]; the same where the allocator has no memory, instead of an abort.
pub(crate) fn zeros<T: Clone + Default>(path: &Path, what: &str, len: usize) -> Result<Vec<T>> {
    let wanted_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    check_room(path, what, wanted_bytes)?;
    let mut zeros = Vec::new();
    if zeros.try_reserve_exact(len).is_err() {
        let available_bytes = hardware::available_bytes().unwrap_or_default();
        return Err(refused(path, what, wanted_bytes, available_bytes));
    }
    zeros.resize(len, T::default());
    Ok(zeros)
}

fn refused(path: &Path, what: &str, wanted_bytes: u64, available_bytes: u64) -> Error {
    Error::OutOfMemory {
        what: format!("{}: {what}", path.display()),
        wanted_bytes,
        available_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_length_aborts() {
        let path = Path::new("file");
        for len in [1 << 45, usize::MAX / 8, usize::MAX] {
            let error = zeros::<u64>(path, "its ids", len).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            assert!(error.to_string().starts_with("file: its ids: "), "{error}");
        }
        assert_eq!(zeros::<u32>(path, "its ids", 3).unwrap(), [0; 3]);
    }
}
