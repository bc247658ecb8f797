//! Where ids come from: a mapped file or memory. It decodes; `Tokens` checks.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{Error, Result};

/// Size of one stored token.
#[derive(Debug, Clone, Copy)]
pub(super) enum Width {
    U8,
    U16,
    U32,
}

impl Width {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// The highest id it can hold.
    pub(super) fn max_id(self) -> u32 {
        match self {
            Self::U8 => u8::MAX.into(),
            Self::U16 => u16::MAX.into(),
            Self::U32 => u32::MAX,
        }
    }
}

pub(super) enum Source {
    /// A file: `header_bytes`, then little-endian tokens of `width` up to its end.
    File {
        path: PathBuf,
        map: Mmap,
        header_bytes: usize,
        width: Width,
    },
    /// Bytes in memory, each a token; `name` says what they are.
    Bytes { name: String, bytes: Vec<u8> },
    /// Ids in memory.
    Ids(Vec<u32>),
}

impl Source {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::File {
                map,
                header_bytes,
                width,
                ..
            } => (map.len() - header_bytes) / width.bytes(),
            Self::Bytes { bytes, .. } => bytes.len(),
            Self::Ids(ids) => ids.len(),
        }
    }

    pub(super) fn width(&self) -> Width {
        match self {
            Self::File { width, .. } => *width,
            Self::Bytes { .. } => Width::U8,
            Self::Ids(_) => Width::U32,
        }
    }

    /// What an error calls it.
    pub(super) fn name(&self) -> String {
        match self {
            Self::File { path, .. } => path.display().to_string(),
            Self::Bytes { name, .. } => name.clone(),
            Self::Ids(_) => "ids in memory".into(),
        }
    }

    /// Decodes tokens `start..start + out.len()`, a range the caller has checked.
    pub(super) fn decode(&self, start: usize, out: &mut [u32]) {
        let end = start + out.len();
        match self {
            Self::File {
                map,
                header_bytes,
                width,
                ..
            } => {
                let bytes =
                    &map[header_bytes + start * width.bytes()..][..out.len() * width.bytes()];
                decode_little_endian(*width, bytes, out);
            }
            Self::Bytes { bytes, .. } => decode_little_endian(Width::U8, &bytes[start..end], out),
            Self::Ids(ids) => out.copy_from_slice(&ids[start..end]),
        }
    }

    /// The error for token `index`, which holds `id`, not an id of the vocabulary.
    pub(super) fn bad_id(
        &self,
        op: &'static str,
        index: usize,
        id: u32,
        vocab_size: usize,
    ) -> Error {
        match self {
            Self::File {
                path,
                header_bytes,
                width,
                ..
            } => {
                let offset = header_bytes + index * width.bytes();
                Error::Format {
                    path: path.clone(),
                    problem: format!(
                        "token {index}, at byte offset {offset}, is {id}, outside the vocabulary of {vocab_size}"
                    ),
                    hint: "was the file written with another tokenizer, or in another format?"
                        .into(),
                }
            }
            _ => Error::TokenId {
                op,
                id: id.into(),
                position: index,
                vocab_size,
            },
        }
    }
}

// Bytes, not a cast of the mapping: no alignment to rely on, and the same on a big-endian machine.
fn decode_little_endian(width: Width, bytes: &[u8], out: &mut [u32]) {
    match width {
        Width::U8 => {
            for (id, byte) in out.iter_mut().zip(bytes) {
                *id = u32::from(*byte);
            }
        }
        Width::U16 => {
            for (id, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *id = u32::from(u16::from_le_bytes(*bytes));
            }
        }
        Width::U32 => {
            for (id, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *id = u32::from_le_bytes(*bytes);
            }
        }
    }
}

/// Maps a regular file for reading.
pub(super) fn map_file(path: &Path) -> Result<Mmap> {
    let refused = |e| Error::io("read", path, e);
    // Asked before opening: to open a pipe would wait for its writer.
    let kind = fs::metadata(path).map_err(refused)?;
    if kind.is_dir() {
        return Err(refused(io::ErrorKind::IsADirectory.into()));
    }
    if !kind.is_file() {
        let text = "not a regular file, and only those can be mapped into memory";
        return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, text)));
    }
    let file = File::open(path).map_err(refused)?;
    // SAFETY: the mapping is private to `Source`, which only copies plain integers out of it, and whatever it copies
    // is checked after the copy. A file that another process shortens meanwhile ends this one by a signal (documented
    // on `Tokens`); no library can prevent that short of reading every file into memory.
    unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map", path, e))
}
