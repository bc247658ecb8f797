//! Loading of tensors from a file.

use super::open::{check_available, open, read_exact_at, zeros};
use super::parts::Parts;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, safetensors::Load};
use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

pub(super) const MAX_HEADER_BYTES: usize = 100_000_000;

/// Length of the field before the header, which has the header's length.
const LENGTH_BYTES: usize = 8;

/// The hint for a file that has changed since it was written.
const DAMAGED: &str =
    "it was damaged, or changed by another program; take another checkpoint or fetch it again";

/// A safetensors file, opened once. Tensors are read on request, and checked if the file has checksums.
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// Offset of the first tensor.
    data_start: u64,
    /// CRC-32 of the header's bytes.
    header_crc32: u32,
    checksums: Checksums,
    /// Files with parts of tensors, one of each rank, if the file is a manifest.
    parts: Option<Parts>,
}

impl TensorFile {
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read or is not regular; [`Error::Format`] for an incomplete or invalid
    /// safetensors file, or a damaged text; the same for the files with parts of its tensors, if any.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut file = Self::open_one(path)?;
        file.parts = Parts::open(&file)?;
        Ok(file)
    }

    /// Opens one file, without the parts that it may list.
    pub(crate) fn open_one(path: &Path) -> Result<Self> {
        let file = open(path)?;
        let len = file.metadata().map_err(|e| Error::io("read", path, e))?;
        let len = len.len();
        if len == 0 {
            return Err(Error::Format {
                path: path.into(),
                problem: "the file is empty".into(),
                hint: "is it still being written, or the wrong file?".into(),
            });
        }
        let (header, data_start, header_crc32) =
            read_header(&file, len).map_err(|e| match is_pointer(&file) {
                true => Error::Format {
                    path: path.into(),
                    problem: "it is a pointer of Git LFS, not the file with the tensors".into(),
                    hint: "fetch the file: git lfs pull, or hf download".into(),
                },
                false => Error::Format {
                    path: path.into(),
                    problem: format!("not a complete safetensors file ({e})"),
                    hint: "it may be truncated; write or fetch it again".into(),
                },
            })?;
        let mut file = Self {
            path: path.into(),
            file,
            header,
            data_start,
            header_crc32,
            checksums: Checksums::default(),
            parts: None,
        };
        file.read_checksums()?;
        Ok(file)
    }

    /// Reads the checksums if there are any, and checks that every tensor and text has one, and that the texts match
    /// theirs.
    fn read_checksums(&mut self) -> Result<()> {
        let Some(json) = self.text(Checksums::KEY) else {
            return Ok(());
        };
        let key = Checksums::KEY;
        let parsed = serde_json::from_str(json);
        let checksums: Checksums =
            parsed.map_err(|e| self.damaged(format!("its checksums ({key}) do not read: {e}")))?;
        let texts = self.header.metadata().iter().flatten();
        let mut keys: Vec<&String> = texts.map(|(key, _)| key).filter(|k| *k != key).collect();
        keys.sort();
        let names = self.own_names();
        if !(checksums.texts.keys().eq(keys) && checksums.tensors.keys().eq(&names)) {
            let problem = format!("its checksums ({key}) are those of other tensors or texts");
            return Err(self.damaged(problem));
        }
        for (key, expected) in &checksums.texts {
            let text = self.text(key).unwrap_or_default();
            self.check(key, text.as_bytes(), expected)?;
        }
        self.checksums = checksums;
        Ok(())
    }

    /// Returns its path, for errors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text stored under `key` in the metadata.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        let texts = self.header.metadata().as_ref()?;
        texts.get(key).map(String::as_str)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = self.own_names();
        names.extend(self.parts.iter().flat_map(Parts::names));
        names.sort();
        names
    }

    /// Returns the names of the tensors in this file, sorted.
    pub(super) fn own_names(&self) -> Vec<String> {
        let mut names = self.header.offset_keys();
        names.sort();
        names
    }

    /// Returns the CRC-32 of the header, which contains the checksums of tensors and texts.
    pub(super) fn header_crc32(&self) -> u32 {
        self.header_crc32
    }

    /// Returns the dtype, as candle names it, and the number of elements of a tensor in this file.
    pub(super) fn own_elements(&self, name: &str) -> Option<(String, usize)> {
        let TensorInfo { dtype, shape, .. } = self.header.info(name)?;
        Some((candle_name(*dtype), shape.iter().product())) // no overflow: the header was checked
    }

    /// Returns the shape of the tensor called `name`.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        match self.parts.as_ref().and_then(|parts| parts.shape(name)) {
            Some(shape) => Some(shape),
            None => Some(&self.header.info(name)?.shape),
        }
    }

    /// Returns dtype and shape of the tensor called `name`, formatted like [`describe`](crate::saved::describe).
    pub(crate) fn description(&self, name: &str) -> Option<String> {
        if let Some(parts) = &self.parts
            && let Some(shape) = parts.shape(name)
        {
            return Some(format!("{} {shape:?}", parts.dtype(name)?));
        }
        let TensorInfo { dtype, shape, .. } = self.header.info(name)?;
        Some(format!("{} {shape:?}", candle_name(*dtype)))
    }

    /// Returns the tensor called `name` on `device`; `None` if there is none. An f8e4m3 tensor is converted to f32.
    ///
    /// # Errors
    /// [`Error::Format`] if its bytes do not match the checksum, or can no longer be read; [`Error::Weight`] for a
    /// dtype that candle lacks; candle's errors if it cannot be copied to the device.
    pub(crate) fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        if let Some(parts) = self
            .parts
            .as_ref()
            .filter(|parts| parts.shape(name).is_some())
        {
            return parts.joined(name, device).map(Some);
        }
        let Some(info) = self.header.info(name) else {
            return Ok(None);
        };
        let (start, end) = info.data_offsets;
        // The bytes and the tensor exist at the same time.
        check_available(&self.path, name, 2 * (end - start) as u64)?;
        let mut bytes: Vec<u8> = zeros(&self.path, name, end - start)?;
        let offset = self.data_start + start as u64;
        read_exact_at(&self.file, &mut bytes, offset).map_err(|e| {
            let problem = format!("tensor {name}, at byte offset {offset}, cannot be read ({e})");
            self.damaged(problem)
        })?;
        if let Some(expected) = self.checksums.tensors.get(name) {
            self.check(name, &bytes, expected)?;
        }
        let view = TensorView::new(info.dtype, info.shape.clone(), &bytes);
        let view = view.map_err(candle_core::Error::from)?;
        let tensor = match info.dtype {
            // candle's conversion to f64 recurses forever.
            safetensors::Dtype::F8_E4M3 => view.load(&Device::Cpu).and_then(|tensor| {
                let wide = tensor.to_dtype(DType::F32)?;
                wide.to_device(device)
            }),
            _ => view.load(device),
        };
        let tensor = tensor.map_err(|e| {
            Error::weight(self.path.clone(), name, e)
                .must_be("a tensor that candle can hold", "convert it before")
        })?;
        Ok(Some(tensor))
    }

    fn check(&self, name: &str, bytes: &[u8], expected: &str) -> Result<()> {
        let got = checksum(bytes);
        if got == expected {
            return Ok(());
        }
        Err(self.damaged(format!(
            "{name} has the CRC-32 {got}, and {expected} was written"
        )))
    }

    pub(super) fn damaged(&self, problem: String) -> Error {
        Error::format(self.path.clone(), problem, DAMAGED)
    }
}

/// Returns whether a file is a Git LFS pointer to a file that was not fetched.
fn is_pointer(file: &File) -> bool {
    const BEGINNING: &[u8] = b"version https://git-lfs";
    let mut begins = [0; BEGINNING.len()];
    read_exact_at(file, &mut begins, 0).is_ok() && begins == BEGINNING
}

/// Reads the header of a file of `len` bytes; returns it with the offset of the data and the header's CRC-32.
fn read_header(
    file: &File,
    len: u64,
) -> std::result::Result<(Metadata, u64, u32), SafeTensorError> {
    if len < LENGTH_BYTES as u64 {
        return Err(SafeTensorError::HeaderTooSmall);
    }
    let mut length = [0; LENGTH_BYTES];
    read_exact_at(file, &mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES as u64 {
        return Err(SafeTensorError::HeaderTooLarge);
    }
    let data_start = LENGTH_BYTES as u64 + length;
    if data_start > len {
        return Err(SafeTensorError::InvalidHeaderLength);
    }
    let mut header = vec![0; length as usize];
    read_exact_at(file, &mut header, LENGTH_BYTES as u64)?;
    let crc32 = crc32fast::hash(&header);
    let header = std::str::from_utf8(&header).map_err(SafeTensorError::InvalidHeader)?;
    let header: Metadata =
        serde_json::from_str(header).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    if header.data_len() as u64 != len - data_start {
        return Err(SafeTensorError::MetadataIncompleteBuffer);
    }
    Ok((header, data_start, crc32))
}

/// Returns candle's name of a dtype; the format's name for a dtype that candle lacks.
fn candle_name(dtype: safetensors::Dtype) -> String {
    match DType::try_from(dtype) {
        Ok(dtype) => dtype.as_str().into(),
        Err(_) => dtype.to_string(),
    }
}

/// CRC-32 of every tensor and text of a file, 8 hexadecimal digits each, stored as JSON in the file's metadata.
///
/// CRC-32 is zlib's, which is available in every language (`zlib.crc32(bytes)`). It detects any change within 32
/// consecutive bits, and is computed faster than a disk reads. Files of other programs, without checksums, are read
/// unchecked.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Checksums {
    texts: BTreeMap<String, String>,
    tensors: BTreeMap<String, String>,
}

impl Checksums {
    pub(super) const KEY: &str = "tallow.crc32";

    pub(super) fn add_tensor(&mut self, name: &str, bytes: &[u8]) {
        self.tensors.insert(name.into(), checksum(bytes));
    }

    pub(super) fn add_text(&mut self, key: &str, text: &str) {
        self.texts.insert(key.into(), checksum(text.as_bytes()));
    }

    pub(super) fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}
