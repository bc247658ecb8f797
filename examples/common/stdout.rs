//! Writing to stdout. `println!` panics if stdout is closed or the disk is full. These functions return the error, and
//! [`run`](super::run) ends the program with it, silently if stdout is closed.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use tallow::{Error, Result};

/// The path in errors.
const NAME: &str = "stdout";

/// Whether output is discarded.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// Discards all further output, so that only one rank of a job prints.
pub fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// Writes all bytes, and flushes.
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

/// Returns text that a model generated, with control characters escaped if stdout is a terminal.
pub fn for_terminal(text: &str) -> String {
    if !std::io::stdout().is_terminal() {
        return text.into();
    }
    let shown = |c: char| match c.is_control() && !c.is_whitespace() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Returns whether the error means that stdout is closed (`| head`).
pub fn is_closed(error: &Error) -> bool {
    is_of_stdout(error, |cause| cause.kind() == ErrorKind::BrokenPipe)
}

/// Returns whether the error means that stdout was a terminal that has been closed.
fn is_hung_up(error: &Error) -> bool {
    const EIO: i32 = 5;
    cfg!(unix) && is_of_stdout(error, |cause| cause.raw_os_error() == Some(EIO))
}

fn is_of_stdout(error: &Error, is_cause: impl FnOnce(&std::io::Error) -> bool) -> bool {
    matches!(error, Error::Io { path, source, .. } if path.as_os_str() == NAME && is_cause(source))
}

/// Ignores an error of a closed stdout if the run also leaves files: it then continues without a reader.
pub fn or_files(written: Result<()>, leaves_files: bool) -> Result<()> {
    match written {
        Err(error) if leaves_files && (is_closed(&error) || is_hung_up(&error)) => Ok(()),
        written => written,
    }
}
