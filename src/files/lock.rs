//! Locks that allow one writer for a path.

use super::atomic::{is_at, target, with_suffix};
use crate::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The beginning of a lock file; a file that begins differently is not one.
const MARK: &str = "tallow: written by ";

/// The most bytes that are read of a lock file, more than any has.
const MAX_BYTES: u64 = 4096;

/// The exclusive right to write a path, until it is dropped: a locked file `path.lock` that names its owner.
///
/// The lock is the system's, which releases it when the owning process ends in any way; the file of a killed process is
/// reused. On a file system without locks, other writers are not kept out.
#[derive(Debug)]
pub(crate) struct PathLock {
    lock_path: PathBuf,
    file: File,
}

impl PathLock {
    /// Makes `held` the lock on `path`, and releases the lock it was before. A pipe or a device has no lock.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path` and the process that writes there, or the reason why a lock file is impossible.
    /// `held` stays as it was.
    pub(crate) fn acquire_for(held: &mut Option<Self>, path: &Path) -> Result<()> {
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
    /// Each names the lock file.
    fn acquire(lock_path: PathBuf) -> io::Result<Self> {
        let unusable = |e: io::Error| {
            let text = format!("its lock file {}: {e}", lock_path.display());
            io::Error::new(e.kind(), text)
        };
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            // Do not write through a link of this name, and do not wait for a pipe.
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
                continue; // its owner removed it meanwhile
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
        // Removed while locked: a process that opened it meanwhile notices. Other systems cannot remove an open file.
        if cfg!(unix) && is_at(&self.file, &self.lock_path) {
            let _ = fs::remove_file(&self.lock_path);
        }
    }
}
