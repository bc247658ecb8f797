//! Where ids come from: an open file or memory. It decodes; `Tokens` checks.

use super::file::{DataFile, Width};
use super::format::TokenFormat;
use crate::{Error, Result};

/// Tokens that are read of a file in one go.
const READ_TOKENS: usize = 1 << 15;

pub(super) enum Source {
    /// A file: `header_bytes`, then little-endian tokens of `width` up to its end.
    File {
        file: DataFile,
        header_bytes: usize,
        width: Width,
    },
    /// Bytes in memory, each a token; `name` says what they are.
    Bytes { name: String, bytes: Vec<u8> },
    /// Ids in memory.
    Ids(Vec<u32>),
}

impl Source {
    /// A file as tokens of `format`.
    pub(super) fn of_file(file: DataFile, format: TokenFormat) -> Self {
        Self::File {
            file,
            header_bytes: format.header_bytes(),
            width: format.width(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::File {
                file,
                header_bytes,
                width,
            } => (file.len - header_bytes) / width.bytes(),
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
            Self::File { file, .. } => file.path.display().to_string(),
            Self::Bytes { name, .. } => name.clone(),
            Self::Ids(_) => "ids in memory".into(),
        }
    }

    /// Decodes tokens `start..start + out.len()`, a range the caller has checked.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that is shorter by now, or cannot be read any more.
    pub(super) fn decode(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let end = start + out.len();
        match self {
            Self::File {
                file,
                header_bytes,
                width,
            } => {
                let mut bytes = vec![0; out.len().min(READ_TOKENS) * width.bytes()];
                for (i, out) in out.chunks_mut(READ_TOKENS).enumerate() {
                    let bytes = &mut bytes[..out.len() * width.bytes()];
                    let first = start + i * READ_TOKENS;
                    file.read_at(header_bytes + first * width.bytes(), bytes)?;
                    decode_little_endian(*width, bytes, out);
                }
            }
            Self::Bytes { bytes, .. } => decode_little_endian(Width::U8, &bytes[start..end], out),
            Self::Ids(ids) => out.copy_from_slice(&ids[start..end]),
        }
        Ok(())
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
                file,
                header_bytes,
                width,
            } => {
                let offset = header_bytes + index * width.bytes();
                Error::format(
                    file.path.clone(),
                    format!(
                        "token {index}, at byte offset {offset}, is {id}, outside the vocabulary of {vocab_size}"
                    ),
                    "was the file written with another tokenizer, or in another format?",
                )
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

// Bytes, not a cast: no alignment to rely on, and the same on a big-endian machine.
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
