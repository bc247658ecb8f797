//! Sources of ids: an open file or memory. This module decodes; `Tokens` checks. It also detects files whose raw ids
//! are wider than u16.

use super::format::TokenFormat;
use crate::files::{open, read_exact_at};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Tokens that are read from a file at a time.
const READ_TOKENS: usize = 1 << 15;

pub(super) enum Source {
    /// An open file.
    File(TokenFile),
    /// Bytes in memory, each a token; `name` describes them.
    Bytes { name: String, bytes: Vec<u8> },
    /// Ids in memory.
    Ids(Vec<u32>),
}

/// A file: `header_bytes`, then little-endian tokens of `width` up to its end.
pub(super) struct TokenFile {
    pub(super) file: DataFile,
    pub(super) header_bytes: usize,
    pub(super) width: Width,
}

impl Source {
    pub(super) fn of_file(file: DataFile, format: TokenFormat) -> Self {
        Self::File(TokenFile {
            file,
            header_bytes: format.header_bytes(),
            width: format.width(),
        })
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::File(t) => (t.file.len - t.header_bytes) / t.width.bytes(),
            Self::Bytes { bytes, .. } => bytes.len(),
            Self::Ids(ids) => ids.len(),
        }
    }

    pub(super) fn width(&self) -> Width {
        match self {
            Self::File(tokens) => tokens.width,
            Self::Bytes { .. } => Width::U8,
            Self::Ids(_) => Width::U32,
        }
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::File(tokens) => tokens.file.path.display().to_string(),
            Self::Bytes { name, .. } => name.clone(),
            Self::Ids(_) => "ids in memory".into(),
        }
    }

    /// Decodes tokens `start..start + out.len()`, a range that the caller has checked.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that was shortened, or can no longer be read.
    pub(super) fn decode(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let end = start + out.len();
        match self {
            Self::File(tokens) => {
                let (file, width) = (&tokens.file, &tokens.width);
                let mut bytes = vec![0; out.len().min(READ_TOKENS) * width.bytes()];
                for (i, out) in out.chunks_mut(READ_TOKENS).enumerate() {
                    let bytes = &mut bytes[..out.len() * width.bytes()];
                    let first = start + i * READ_TOKENS;
                    file.read_at(tokens.header_bytes + first * width.bytes(), bytes)?;
                    decode_little_endian(*width, bytes, out);
                }
            }
            Self::Bytes { bytes, .. } => decode_little_endian(Width::U8, &bytes[start..end], out),
            Self::Ids(ids) => out.copy_from_slice(&ids[start..end]),
        }
        Ok(())
    }

    /// Returns the error for token `index`, whose `id` is outside the vocabulary.
    pub(super) fn bad_id(
        &self,
        op: &'static str,
        index: usize,
        id: u32,
        vocab_size: usize,
    ) -> Error {
        match self {
            Self::File(tokens) => {
                let offset = tokens.header_bytes + index * tokens.width.bytes();
                Error::format(
                    tokens.file.path.clone(),
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

// From bytes instead of a cast: no alignment needed, and correct on big-endian machines.
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

/// Size of the header of llm.c and modded-nanogpt: 256 32-bit integers, of which three are used.
pub(super) const HEADER_BYTES: usize = 256 * 4;

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

    pub(super) fn max_id(self) -> u32 {
        match self {
            Self::U8 => u8::MAX.into(),
            Self::U16 => u16::MAX.into(),
            Self::U32 => u32::MAX,
        }
    }
}

/// A data file, open for reading. It is read, not mapped: if another process shortens it, reading is an error and does
/// not end this process.
pub(super) struct DataFile {
    pub(super) path: PathBuf,
    file: File,
    /// Size in bytes when it was opened.
    pub(super) len: usize,
    /// Its first bytes, at most the size of a header.
    pub(super) head: Vec<u8>,
}

impl DataFile {
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read or is not regular; [`Error::Format`] for an empty one.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = open(path)?;
        let refused = |e| Error::io("read", path, e);
        let len = file.metadata().map_err(refused)?.len();
        if len == 0 {
            return Err(Error::Format {
                path: path.into(),
                problem: "the file is empty (0 bytes)".into(),
                hint: "give a file with data in it; was what wrote it flushed?".into(),
            });
        }
        let len = usize::try_from(len).map_err(|e| refused(std::io::Error::other(e)))?;
        let mut file = Self {
            path: path.into(),
            file,
            len,
            head: Vec::new(),
        };
        let mut head = vec![0; len.min(HEADER_BYTES)];
        file.read_at(0, &mut head)?;
        file.head = head;
        Ok(file)
    }

    pub(super) fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let read = read_exact_at(&self.file, bytes, offset as u64);
        read.map_err(|e| Error::io("read", &self.path, e))
    }
}

/// u16 ids that are decoded at a time; a multiple of 4.
const SCAN_TOKENS: usize = 1 << 14;

/// The fewest 32-bit ids for which a file is examined.
const LEAST_IDS: usize = 16;

/// The fewest different ids: fewer may be a pattern of u16 ids with a 0 at every second position.
const LEAST_DISTINCT: usize = 4;

/// The largest upper half of an id that is recognised: vocabularies have up to a million ids.
const MOST_UPPER: u32 = 15;

/// Refuses a file without a header whose ids have 32 or 64 bits, little-endian. Read as u16, each would be its lower
/// half followed by its upper half, which is limited by the vocabulary: 0 if that has at most 65,536 ids.
///
/// A file is refused only if *every* second u16 is that small, while the others are not and have different values. No
/// text is like that: each of its tokens would be followed by one of the first few ids.
pub(super) fn refuse_wider_ids(source: &Source, vocab_size: usize) -> Result<()> {
    let Source::File(TokenFile { file, .. }) = source else {
        return Ok(());
    };
    let count = source.len();
    if !count.is_multiple_of(2) || count < 2 * LEAST_IDS {
        return Ok(());
    }
    let most_upper = ((vocab_size - 1) >> 16).min(MOST_UPPER as usize) as u32;
    let mut distinct = BTreeSet::new();
    let mut is_64_bits = count.is_multiple_of(4);
    let mut largest_upper = 0;
    let mut ids = vec![0; SCAN_TOKENS.min(count)];
    for start in (0..count).step_by(SCAN_TOKENS) {
        let ids = &mut ids[..SCAN_TOKENS.min(count - start)];
        source.decode(start, ids)?;
        for [lower, upper] in ids.as_chunks().0 {
            if *upper > most_upper {
                return Ok(()); // usual within the first four tokens of a text
            }
            largest_upper = largest_upper.max(*upper);
            if *lower > most_upper && distinct.len() < LEAST_DISTINCT {
                distinct.insert(*lower);
            }
        }
        is_64_bits &= ids.as_chunks().0.iter().all(|[_, _, a, b]| a | b == 0);
    }
    if distinct.len() < LEAST_DISTINCT {
        return Ok(());
    }
    let (places, width) = match is_64_bits {
        true => ("three of four u16 are 0", "i64"),
        false if largest_upper == 0 => ("every second u16 is 0", "u32"),
        false => ("every second u16 is an upper half", "u32"),
    };
    Err(Error::Format {
        path: file.path.clone(),
        problem: format!(
            "expected raw u16 ids, got what looks like raw {width} ids: {places}, in all {count}"
        ),
        hint: format!(
            "read it as {width} and write it with data::write_tokens as TokenFormat::HeaderedU32; if these are u16 \
             ids indeed, Tokens::open_as with TokenFormat::RawU16 reads them"
        ),
    })
}
