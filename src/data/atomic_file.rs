//! A file that is there whole or not at all.

use std::fs::File;
use std::path::Path;

use crate::{Error, Result};

/// Writes `path` through a temporary file in the same folder, which is synced and then renamed over it: who reads
/// `path`, even after a crash, finds the old content or the new, never a part.
pub(super) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<()>,
) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let refused = |e| Error::io("write", path, e);

    let mut builder = tempfile::Builder::new();
    // A temporary file is private to its owner by default, and the rename would keep it so.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temporary = builder.tempfile_in(folder).map_err(refused)?;

    write(temporary.as_file_mut())?;
    temporary.as_file().sync_all().map_err(refused)?;
    temporary.persist(path).map_err(|e| refused(e.error))?;

    // The rename itself is durable only once the folder is.
    #[cfg(unix)]
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(refused)?;
    Ok(())
}
