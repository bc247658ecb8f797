//! Reading and writing files so that a reader never meets half of one.

use crate::{Error, Result};
use candle_core::{Device, Tensor, safetensors::Load};
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes `path` completely or not at all: into a temporary file beside it, synced, then renamed over it.
///
/// # Errors
/// [`Error::Io`] naming `path`; what was there before stays.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let attempt = || -> std::io::Result<()> {
        let file = tempfile::Builder::new()
            .prefix(".tallow-")
            .tempfile_in(folder)?;
        let mut buffered = BufWriter::new(file.as_file());
        write(&mut buffered)?;
        buffered.flush()?;
        drop(buffered);
        readable_by_others(file.as_file())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        // The rename itself lives in the folder.
        #[cfg(unix)]
        File::open(folder)?.sync_all()?;
        Ok(())
    };
    attempt().map_err(|e| Error::io("write", path, e))
}

/// Temporary files are private; a report or a checkpoint is an ordinary file.
#[cfg(unix)]
fn readable_by_others(file: &File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn readable_by_others(_file: &File) -> std::io::Result<()> {
    Ok(())
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
    write_atomically(path, |file| file.write_all(&bytes))
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
