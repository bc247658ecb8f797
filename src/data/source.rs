//! Where ids come from: an open file or memory. It decodes; `Tokens` checks. Files whose raw ids are wider than u16 are
//! found here too.

use super::format::TokenFormat;
use crate::files::{open, read_exact_at};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Tokens that are read of a file in one go.
const READ_TOKENS: usize = 1 << 15;

pub(super) enum Source {
    /// A file.
    File(TokenFile),
    /// Bytes in memory, each a token; `name` says what they are.
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

    /// Decodes tokens `start..start + out.len()`, a range the caller has checked.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that is shorter by now, or cannot be read any more.
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

    /// The error for token `index`, which holds `id`, not an id of the vocabulary.
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

/// The header of llm.c and modded-nanogpt: 256 integers of 32 bits, of which three are used.
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

/// A file of data, open for reading. It is read, not mapped: one that another process shortens is an error then, and
/// not the end of this process.
pub(super) struct DataFile {
    pub(super) path: PathBuf,
    file: File,
    /// Bytes, when it was opened.
    pub(super) len: usize,
    /// The first of them, as many as a header has.
    pub(super) head: Vec<u8>,
}

impl DataFile {
    /// # Errors
    /// [`Error::Io`] for what cannot be read or is no regular file; [`Error::Format`] for an empty one.
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

/// u16 ids that are decoded together; a multiple of 4.
const SCAN_TOKENS: usize = 1 << 14;

/// Files of fewer ids of 32 bits are not judged.
const LEAST_IDS: usize = 16;

/// How many different ids there must be: a few may be a pattern of u16 ids that has a 0 at every second place.
const LEAST_DISTINCT: usize = 4;

/// The largest upper half of an id that is recognised: vocabularies have up to a million ids.
const MOST_UPPER: u32 = 15;

/// Refuses a file without a header whose ids have 32 or 64 bits, little-endian. Read as u16, each would be its lower
/// half and then its upper half, which is at most what the vocabulary allows: 0 where it has no more than 65,536 ids.
///
/// A file is refused only if *every* second u16 is that small while the others are not, and of different values. No
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
                return Ok(()); // as a text's third or fourth token already is
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
