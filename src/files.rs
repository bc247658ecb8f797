//! Reading and writing files so that a reader never meets half of one.

use crate::{Error, Result};
use candle_core::{Device, Tensor, safetensors::Load};
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes `path` completely or not at all: into a temporary file beside it, synced, then renamed over it. Who reads
/// `path`, even after a crash, finds the old content or the new, never a part.
///
/// A path that is no regular file (a pipe, `/dev/stdout`) cannot be renamed over, and is written to.
///
/// # Errors
/// [`Error::Io`] naming `path`, or what `write` returns; what was there before stays.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let refused = |e| Error::io("write", path, e);
    match std::fs::metadata(path) {
        Ok(existing) if existing.is_file() => {
            // Renaming would get round a write protection.
            OpenOptions::new()
                .append(true)
                .open(path)
                .map_err(refused)?;
            // What a link points to is replaced, not the link.
            let target = path.canonicalize().map_err(refused)?;
            replace(&target, write).map_err(|e| named(e, path))
        }
        Ok(_) => {
            let mut file = OpenOptions::new().write(true).open(path).map_err(refused)?;
            write(&mut file)
        }
        Err(_) => replace(path, write),
    }
}

/// [`write_atomically`] for content that is there already.
pub(crate) fn write_bytes(path: &Path, content: &[u8]) -> Result<()> {
    write_atomically(path, |file| {
        file.write_all(content)
            .map_err(|e| Error::io("write", path, e))
    })
}

fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let refused = |e| Error::io("write", path, e);
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tallow-");
    // Temporary files are private by default; a report or a checkpoint is an ordinary file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(permissions(
        path,
    )));
    let mut temporary = builder.tempfile_in(folder).map_err(refused)?;
    let mut buffered = BufWriter::new(temporary.as_file_mut());
    write(&mut buffered)?;
    buffered.flush().map_err(refused)?;
    drop(buffered);
    temporary.as_file().sync_all().map_err(refused)?;
    temporary.persist(path).map_err(|e| refused(e.error))?;
    // The rename itself is on the disk once the folder is. Not every system can sync a folder.
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

/// The error with the path as the caller wrote it, not what a link resolved to.
fn named(error: Error, path: &Path) -> Error {
    match error {
        Error::Io { action, source, .. } => Error::io(action, path, source),
        other => other,
    }
}

/// Those of the file that is replaced, else what the process creates files with.
#[cfg(unix)]
fn permissions(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).map_or(0o666, |existing| existing.permissions().mode() & 0o777)
}

/// Maps `path` for reading.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be opened, [`Error::Format`] for an empty one.
pub(crate) fn map(path: &Path) -> Result<memmap2::Mmap> {
    let file = File::open(path).map_err(|e| Error::io("read", path, e))?;
    let metadata = file.metadata().map_err(|e| Error::io("read", path, e))?;
    if metadata.is_dir() {
        let error = std::io::Error::from(std::io::ErrorKind::IsADirectory);
        return Err(Error::io("read", path, error));
    }
    if metadata.len() == 0 {
        return Err(Error::Format {
            path: path.into(),
            problem: "the file is empty".into(),
            hint: "is it still being written, or the wrong file?".into(),
        });
    }
    // SAFETY: a mapped file that another process truncates or rewrites is that process's mistake; we only read.
    unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io("map", path, e))
}

/// Writes tensors with their names, and text beside them, as safetensors.
///
/// # Errors
/// [`Error::Io`] naming `path`, or candle's where a tensor cannot be brought to the host.
pub(crate) fn save_tensors(
    path: &Path,
    tensors: &[(String, Tensor)],
    metadata: HashMap<String, String>,
) -> Result<()> {
    let mut on_host = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let tensor = tensor.detach().to_device(&Device::Cpu)?.contiguous()?;
        on_host.push((name.as_str(), tensor));
    }
    let bytes =
        safetensors::serialize(on_host, Some(metadata)).map_err(candle_core::Error::from)?;
    write_bytes(path, &bytes)
}

/// A safetensors file, mapped; tensors are read when asked for.
pub(crate) struct TensorFile {
    map: memmap2::Mmap,
    /// The text saved beside the tensors.
    pub metadata: HashMap<String, String>,
}

impl TensorFile {
    /// # Errors
    /// [`Error::Io`] or, for a truncated or corrupt file, [`Error::Format`].
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let corrupt = |e: safetensors::SafeTensorError| Error::Format {
            path: path.into(),
            problem: format!("not a whole safetensors file ({e})"),
            hint: "it may be truncated; write or fetch it again".into(),
        };
        let (_, header) = SafeTensors::read_metadata(&map).map_err(corrupt)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        SafeTensors::deserialize(&map).map_err(corrupt)?;
        Ok(Self { map, metadata })
    }

    /// The names, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = self
            .tensors()?
            .names()
            .into_iter()
            .map(ToString::to_string)
            .collect();
        names.sort();
        Ok(names)
    }

    /// The tensor called `name`, on `device`; `None` if there is none.
    pub(crate) fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        match self.tensors()?.tensor(name) {
            Ok(view) => Ok(Some(view.load(device)?)),
            Err(_) => Ok(None),
        }
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        Ok(SafeTensors::deserialize(&self.map).map_err(candle_core::Error::from)?)
    }
}
