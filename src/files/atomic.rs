//! Atomic replacement of files.

use super::interrupt;
use super::open::{naming_link, open, read_exact_at};
use crate::{Error, Result};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The prefix of temporary files, which no other file has.
const PREFIX: &str = ".tallow-";

/// Chunk size of a comparison of two files, in bytes.
const COMPARED_BYTES: usize = 1 << 20;

/// Writes `path` completely or not at all: into a temporary file in the same folder, synced, then renamed to `path`. A
/// reader of `path`, even after a crash, finds the old content or the new, never a part.
///
/// A path that is not a regular file (a pipe, `/dev/stdout`) cannot be replaced by a rename and is written to directly.
///
/// # Errors
/// [`Error::Io`] naming `path`, or the error of `write`; the old content stays.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    write_keeping(path, 1, write)
}

/// Writes `content` as [`write_atomically`] does.
pub(crate) fn write_bytes(path: &Path, content: &[u8]) -> Result<()> {
    write_atomically(path, |file| {
        file.write_all(content)
            .map_err(|e| Error::io("write", path, e))
    })
}

/// Writes like [`write_atomically`], and keeps the last `keep - 1` contents of `path` as `path.1` (the latest),
/// `path.2` and so on. If the content does not change, as in a resumed run, nothing moves.
pub(super) fn write_keeping(
    path: &Path,
    keep: usize,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    match target(path)? {
        Some(target) => replace(&target, keep, write).map_err(|e| named(e, path)),
        None => {
            let file = OpenOptions::new().write(true).open(path);
            write(&mut file.map_err(|e| Error::io("write", path, e))?)
        }
    }
}

/// Returns the file that writing to `path` replaces: a link's target, not the link. `None` for a pipe or a device.
///
/// # Errors
/// [`Error::Io`] for a file without write permission, a folder, a missing folder, or a dangling link.
pub(super) fn target(path: &Path) -> Result<Option<PathBuf>> {
    let refused = |e| Error::io("write", path, e);
    match fs::metadata(path) {
        Ok(existing) if existing.is_file() => {
            // A rename would circumvent write protection.
            let writable = OpenOptions::new().append(true).open(path);
            writable.map_err(refused)?;
            Ok(Some(path.canonicalize().map_err(refused)?))
        }
        Ok(existing) if existing.is_dir() => Err(refused(ErrorKind::IsADirectory.into())),
        Ok(_) => Ok(None),
        Err(error) => match (naming_link(path, error), path.file_name()) {
            (error, Some(name)) if error.kind() == ErrorKind::NotFound && !path.is_symlink() => {
                let folder = folder_of(path).canonicalize().map_err(refused)?;
                Ok(Some(folder.join(name)))
            }
            (error, _) => Err(refused(error)),
        },
    }
}

/// Removes the temporary files of killed processes in `path`'s folder: those that no process has locked.
pub(crate) fn remove_abandoned(path: &Path) {
    let path = path.canonicalize().unwrap_or_else(|_| path.into());
    let Ok(entries) = fs::read_dir(folder_of(&path)) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_temporary = name.as_encoded_bytes().starts_with(PREFIX.as_bytes());
        if is_temporary
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && let Ok(file) = open(&entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn replace(
    path: &Path,
    keep: usize,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let refused = |e| Error::io("write", path, e);
    let staged = Staged::write(path, write)?;
    if keep > 1 && !is_same(staged.temporary.as_file(), path).map_err(refused)? {
        keep_earlier(path, keep).map_err(refused)?;
    }
    staged.persist()
}

/// The complete new content of a path, in a temporary file in the same folder. The path changes when it is persisted;
/// dropping it changes nothing.
pub(crate) struct Staged {
    path: PathBuf,
    temporary: NamedTempFile,
}

impl Staged {
    /// Stages `content` for `path`, which must not be a symbolic link.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path`.
    pub(crate) fn new(path: &Path, content: &[u8]) -> Result<Self> {
        Self::write(path, |file| {
            let written = file.write_all(content);
            written.map_err(|e| Error::io("write", path, e))
        })
    }

    fn write(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<Self> {
        let refused = |e| Error::io("write", path, e);
        interrupt::point(path).map_err(refused)?;
        let mut temporary = locked_temporary(path).map_err(refused)?;
        let mut buffered = BufWriter::new(temporary.as_file_mut());
        write(&mut buffered)?;
        buffered.flush().map_err(refused)?;
        drop(buffered);
        temporary.as_file().sync_all().map_err(refused)?;
        Ok(Self {
            path: path.into(),
            temporary,
        })
    }

    /// Renames the temporary file to the path.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path, whose old content stays.
    pub(crate) fn persist(self) -> Result<()> {
        let Self { path, temporary } = self;
        let refused = |e| Error::io("write", &path, e);
        interrupt::point(&path).map_err(refused)?;
        temporary.persist(&path).map_err(|e| refused(e.error))?;
        sync_folder(&path);
        Ok(())
    }
}

/// Renames a file to another name in the same folder.
///
/// # Errors
/// [`Error::Io`] naming `to`, whose old content stays.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    let renamed = interrupt::point(to).and_then(|()| fs::rename(from, to));
    renamed.map_err(|e| Error::io("write", to, e))?;
    sync_folder(to);
    Ok(())
}

/// Removes a file if it exists.
///
/// # Errors
/// [`Error::Io`] naming `path`.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = interrupt::point(path).and_then(|()| fs::remove_file(path));
    match removed {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io("remove", path, e)),
        Ok(()) => {
            sync_folder(path);
            Ok(())
        }
    }
}

/// Syncs the folder of a renamed or removed file. Not every system can sync a folder.
fn sync_folder(path: &Path) {
    if let Ok(folder) = File::open(folder_of(path)) {
        let _ = folder.sync_all();
    }
}

/// Creates a temporary file in the folder of `path`, locked while it is open. The system releases the lock when the
/// process dies, which tells [`remove_abandoned`] that the file is abandoned.
fn locked_temporary(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX);
    // Temporary files are private by default; a report or a checkpoint is an ordinary file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(permissions(
        path,
    )));
    loop {
        let temporary = builder.tempfile_in(folder_of(path))?;
        // Not every file system has locks; without them, `remove_abandoned` cannot lock and remove the file either.
        let _ = temporary.as_file().lock();
        if is_at(temporary.as_file(), temporary.path()) {
            return Ok(temporary);
        } // else it was removed as abandoned just before it was locked
    }
}

/// Returns whether `file` is the file at `path` now. Systems other than Unix cannot tell; there open files cannot be
/// removed.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        match (file.metadata(), fs::metadata(path)) {
            (Ok(ours), Ok(there)) => identity(ours) == identity(there),
            _ => false,
        }
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Returns whether `path` already has the content of `file`.
fn is_same(file: &File, path: &Path) -> io::Result<bool> {
    let Ok(there) = File::open(path) else {
        return Ok(false);
    };
    let len = file.metadata()?.len();
    if there.metadata()?.len() != len {
        return Ok(false); // usual for another step of a run, whose history is longer
    }
    let mut buffers = [vec![0; COMPARED_BYTES], vec![0; COMPARED_BYTES]];
    for offset in (0..len).step_by(COMPARED_BYTES) {
        let count = COMPARED_BYTES.min((len - offset) as usize);
        let [ours, theirs] = &mut buffers;
        read_exact_at(file, &mut ours[..count], offset)?;
        read_exact_at(&there, &mut theirs[..count], offset)?;
        if ours[..count] != theirs[..count] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Renames earlier contents to the next number, and links the content at `path` to `path.1`, so that `path` always
/// exists.
fn keep_earlier(path: &Path, keep: usize) -> io::Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let missing_is_fine = |result: io::Result<()>| match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    };
    for age in (1..keep - 1).rev() {
        missing_is_fine(fs::rename(
            with_suffix(path, age),
            with_suffix(path, age + 1),
        ))?;
    }
    let latest = with_suffix(path, 1);
    missing_is_fine(fs::remove_file(&latest))?;
    // Some file systems have no hard links. A crash between this rename and the next leaves `path.1` without `path`.
    fs::hard_link(path, &latest).or_else(|_| fs::rename(path, &latest))
}

pub(super) fn with_suffix(path: &Path, suffix: impl std::fmt::Display) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!(".{suffix}"));
    name.into()
}

pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Replaces the resolved path in the error by the path that the caller gave.
fn named(error: Error, path: &Path) -> Error {
    match error {
        Error::Io { action, source, .. } => Error::io(action, path, source),
        other => other,
    }
}

/// Returns the permissions of the existing file, else those of new files before the umask.
#[cfg(unix)]
fn permissions(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).map_or(0o666, |existing| existing.permissions().mode() & 0o777)
}
