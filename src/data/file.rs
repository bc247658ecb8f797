//! A file of tokens as it lies on disk.

use crate::files::{open, read_exact_at};
use crate::{Error, Result};
use std::fs::File;
use std::path::{Path, PathBuf};

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

    /// The highest id it can hold.
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

    /// Fills `bytes` from `offset` on.
    pub(super) fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let read = read_exact_at(&self.file, bytes, offset as u64);
        read.map_err(|e| Error::io("read", &self.path, e))
    }
}
