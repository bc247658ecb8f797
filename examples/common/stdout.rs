//! The one way to stdout. `println!` panics if stdout is closed or the disk is full; this returns the error, and
//! [`run`](super::run) ends the program with it: quietly if stdout is closed.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use tallow::{Error, Result};

/// What errors call it.
const NAME: &str = "stdout";

/// Whether what is written goes nowhere.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// Has nothing more written: of a job's ranks one speaks.
pub fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// Writes all of it, and flushes.
pub fn write(bytes: &[u8]) -> Result<()> {
    if IS_SILENT.load(Ordering::Relaxed) {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(|error| Error::io("write", NAME, error))
}

/// Writes a line.
pub fn line(text: impl Display) -> Result<()> {
    write(format!("{text}\n").as_bytes())
}

/// Whether the error is that stdout is closed (`| head`).
pub fn is_closed(error: &Error) -> bool {
    let Error::Io { path, source, .. } = error else {
        return false;
    };
    source.kind() == ErrorKind::BrokenPipe && path.as_os_str() == NAME
}

/// What came of writing, for a run that may leave files: such a run goes on without its reader.
pub fn or_files(written: Result<()>, leaves_files: bool) -> Result<()> {
    match written {
        Err(error) if leaves_files && is_closed(&error) => Ok(()),
        written => written,
    }
}
