//! Saving of tensors to a file.

use super::atomic::{remove_abandoned, write_keeping};
use super::tensors::{Checksums, MAX_HEADER_BYTES};
use crate::saved::Numbers;
use crate::{Error, Result, graph};
use candle_core::{Device, Tensor};
use safetensors::tensor::{TensorInfo, View};
use serde_json::{Map, Value};
use std::io;
use std::path::Path;

pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// The condition on its elements; nothing is saved if one violates it.
    pub(crate) numbers: Numbers,
}

/// Writes tensors by name, and texts by key in the metadata, as safetensors with checksums, completely or not at all.
/// The last `keep - 1` earlier files are kept as `path.1` (the latest), `path.2` and so on.
///
/// One tensor at a time is copied to the host.
///
/// # Errors
/// [`Error::Weight`] for a tensor that violates its condition; [`Error::Io`] naming `path`; candle's errors if a tensor
/// cannot be copied to the host. The old content stays.
pub(crate) fn save_tensors(
    path: &Path,
    entries: Vec<Entry>,
    texts: &[(&str, String)],
    keep: usize,
) -> Result<()> {
    save_with_checksum(path, entries, texts, keep).map(drop)
}

/// Writes a rank's tensors, with the identity of the part.
///
/// # Errors
/// Those of [`save_tensors`].
#[cfg(feature = "train")]
pub(crate) fn save_part(
    path: &Path,
    entries: Vec<Entry>,
    part: &super::Part,
) -> Result<super::PartFile> {
    let refused = |e| Error::io("write", path, io::Error::other(e));
    let text = serde_json::to_string(part).map_err(refused)?;
    let crc32 = save_with_checksum(path, entries, &[(super::Part::KEY, text)], 1)?;
    let name = path.file_name().unwrap_or_default();
    Ok(super::PartFile {
        name: name.to_string_lossy().into_owned(),
        crc32,
    })
}

/// Saves, and returns the CRC-32 of the header, which contains the checksums of everything else.
fn save_with_checksum(
    path: &Path,
    mut entries: Vec<Entry>,
    texts: &[(&str, String)],
    keep: usize,
) -> Result<u32> {
    let refused = |e| Error::io("write", path, e);
    if let Some(entry) = entries.iter().find(|e| graph::is_hollow(&e.tensor)) {
        return Err(
            Error::weight(path, entry.name.clone(), "a meta tensor").must_be(
                "a weight with elements",
                "nothing was saved; meta weights are for graph::trace",
            ),
        );
    }
    remove_abandoned(path);
    // By element size, so that every tensor is aligned, then by name.
    entries.sort_by(|a, b| {
        let dtypes = View::dtype(&b.tensor).cmp(&View::dtype(&a.tensor));
        dtypes.then_with(|| a.name.cmp(&b.name))
    });
    let mut checksums = Checksums::default();
    let mut header = Map::new();
    let mut end = 0;
    for entry in &entries {
        let bytes = host_bytes(entry, path)?;
        let info = TensorInfo {
            dtype: View::dtype(&entry.tensor),
            shape: entry.tensor.dims().to_vec(),
            data_offsets: (end, end + bytes.len()),
        };
        end = info.data_offsets.1;
        let info = serde_json::to_value(info).map_err(|e| refused(io::Error::other(e)))?;
        header.insert(entry.name.clone(), info);
        checksums.add_tensor(&entry.name, &bytes);
    }
    let mut metadata = Map::new();
    for (key, text) in texts {
        checksums.add_text(key, text);
        metadata.insert(key.to_string(), Value::String(text.clone()));
    }
    let checksums = checksums.to_json().map_err(|e| refused(e.into()))?;
    metadata.insert(Checksums::KEY.into(), Value::String(checksums));
    header.insert("__metadata__".into(), Value::Object(metadata));
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > MAX_HEADER_BYTES {
        let text = format!(
            "its header would have {} bytes, and safetensors allows {MAX_HEADER_BYTES}",
            header.len()
        );
        return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, text)));
    }
    write_keeping(path, keep, |file| {
        let length = (header.len() as u64).to_le_bytes();
        file.write_all(&length).map_err(refused)?;
        file.write_all(&header).map_err(refused)?;
        for entry in &entries {
            let tensor = on_host(&entry.tensor)?;
            file.write_all(&View::data(&tensor)).map_err(refused)?;
        }
        Ok(())
    })?;
    Ok(crc32fast::hash(&header))
}

/// Returns the bytes of an entry after checking its condition.
fn host_bytes(entry: &Entry, path: &Path) -> Result<Vec<u8>> {
    let tensor = on_host(&entry.tensor)?;
    if let Some(got) = entry.numbers.misfit(&tensor)? {
        let hint = "nothing was saved; training has diverged: lower the learning rate, and resume from the last file";
        let got = Error::weight(path, entry.name.clone(), got);
        return Err(got.must_be(entry.numbers.expected(), hint));
    }
    Ok(View::data(&tensor).into_owned())
}

fn on_host(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.detach().to_device(&Device::Cpu)?.contiguous()?)
}
