//! One writer for a path.

use super::atomic::{is_at, target, with_suffix};
use crate::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// What a lock file begins with: no other file is taken for one.
const MARK: &str = "tallow: written by ";

/// The most bytes of a lock file that are read: more than any has.
const MAX_BYTES: u64 = 4096;

/// The right to write a path, held until it is dropped: a locked file `path.lock` beside it that says who holds it.
///
/// The lock is the system's, which frees it when the process that holds it ends, however that is; the file that a
/// killed process leaves is taken over. On a file system without locks no writer is kept away.
#[derive(Debug)]
pub(crate) struct PathLock {
    lock_path: PathBuf,
    file: File,
}

impl PathLock {
    /// Makes `held` the lock on `path`, and frees what it held before. A pipe or a device has no lock.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path` and the process that writes there, or why there can be no lock file. `held` stays.
    pub(crate) fn hold(held: &mut Option<Self>, path: &Path) -> Result<()> {
        let Some(target) = target(path)? else {
            *held = None;
            return Ok(());
        };
        let lock_path = with_suffix(&target, "lock");
        let is_held = |lock: &Self| lock.lock_path == lock_path && is_at(&lock.file, &lock_path);
        if !held.as_ref().is_some_and(is_held) {
            *held = Some(Self::acquire(lock_path).map_err(|e| Error::io("write", path, e))?);
        }
        Ok(())
    }

    /// # Errors
    /// Each names the lock file: the path that it guards is another.
    fn acquire(lock_path: PathBuf) -> io::Result<Self> {
        let unusable = |e: io::Error| {
            let text = format!("its lock file {}: {e}", lock_path.display());
            io::Error::new(e.kind(), text)
        };
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            // What a link of this name leads to is not ours to write, and a pipe is not waited for.
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::custom_flags(
                &mut options,
                libc::O_NOFOLLOW | libc::O_NONBLOCK,
            );
            let mut file = options.open(&lock_path).map_err(unusable)?;
            if !file.metadata().map_err(unusable)?.is_file() {
                return Err(refused(format!(
                    "{} would be its lock file, but is not a regular file; move it away",
                    lock_path.display()
                )));
            }
            let locked = file.try_lock();
            let mut content = Vec::new();
            let read = (&file).take(MAX_BYTES).read_to_end(&mut content);
            read.map_err(unusable)?;
            let text = String::from_utf8_lossy(&content);
            let text = text.trim();
            if !(text.is_empty() || text.starts_with(MARK)) {
                return Err(refused(format!(
                    "{} would be its lock file, but has other content; move it away",
                    lock_path.display()
                )));
            }
            if let Err(TryLockError::WouldBlock) = locked {
                let owner = text
                    .strip_prefix(MARK)
                    .unwrap_or("a process that just began");
                return Err(refused(format!(
                    "another run is writing it, {owner} ({} is locked); end that run, or give another path",
                    lock_path.display()
                )));
            }
            if !is_at(&file, &lock_path) {
                continue; // its owner removed it in between
            }
            let host = sysinfo::System::host_name().unwrap_or_else(|_| "this host".into());
            let owner = format!("{MARK}pid {} on {host}\n", std::process::id());
            let written = file
                .set_len(0)
                .and_then(|()| io::Seek::rewind(&mut file))
                .and_then(|()| file.write_all(owner.as_bytes()));
            written.map_err(unusable)?;
            return Ok(Self { lock_path, file });
        }
    }
}

fn refused(text: String) -> io::Error {
    io::Error::new(ErrorKind::ResourceBusy, text)
}

impl Drop for PathLock {
    fn drop(&mut self) {
        // While it is locked: a process that opened it meanwhile sees that it is gone. Elsewhere it could not.
        if cfg!(unix) && is_at(&self.file, &self.lock_path) {
            let _ = fs::remove_file(&self.lock_path);
        }
    }
}
