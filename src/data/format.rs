//! Formats of token files: their headers, and their writing.

use super::source::{DataFile, HEADER_BYTES, Width};
use super::tokens::Tokens;
use crate::files::write_atomically;
use crate::{Error, Result};
use std::path::Path;

const VERSION_OFFSET: usize = 4;
const COUNT_OFFSET: usize = 8;

/// The layout of a token file. All numbers are little-endian.
///
/// | format | content | written by |
/// |---|---|---|
/// | `RawU16` | u16 ids, nothing else | nanoGPT |
/// | `HeaderedU16` | 256 i32 {20240520, 1, token count, 0, ..}, then u16 ids | llm.c (GPT-2), modded-nanogpt |
/// | `HeaderedU32` | 256 i32 {20240801, 7, token count, 0, ..}, then u32 ids | llm.c (Llama 3) |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TokenFormat {
    /// u16 ids without a header.
    RawU16,
    /// A header with magic 20240520 and version 1, then u16 ids.
    HeaderedU16,
    /// A header with magic 20240801 and version 7, then u32 ids.
    HeaderedU32,
}

impl TokenFormat {
    /// Returns the bytes of one token.
    pub fn token_bytes(self) -> usize {
        self.width().bytes()
    }

    /// Returns the bytes before the first token: 0 or 1024.
    pub fn header_bytes(self) -> usize {
        match self.magic_and_version() {
            None => 0,
            Some(_) => HEADER_BYTES,
        }
    }

    /// Detects the format of a file by its magic number. A file without one is [`RawU16`](Self::RawU16) if its name
    /// ends in `.bin` and nothing in it looks like a header; the caller must still check its ids.
    ///
    /// # Errors
    /// [`Error::Format`] for any other file, which may be damaged or have no tokens.
    pub(super) fn detect(file: &DataFile) -> Result<Self> {
        let found = read_i32(&file.head, 0);
        let headered = [Self::HeaderedU16, Self::HeaderedU32];
        let by_magic = headered.into_iter().find(|format| {
            format
                .magic_and_version()
                .is_some_and(|(magic, _)| found == Some(magic))
        });
        if let Some(format) = by_magic {
            return Ok(format);
        }
        let raw = "without a header Tokens::open_as reads it, as TokenFormat::RawU16";
        if headered
            .iter()
            .any(|format| format.has_header_after_magic(file))
        {
            return Err(malformed(
                &file.path,
                format!(
                    "magic {} at offset 0 is not known, but the rest looks like a token file's header",
                    shown(found)
                ),
                &format!("the file was damaged: write or fetch it again ({raw})"),
            ));
        }
        let extension = file.path.extension().and_then(|e| e.to_str());
        if !extension.is_some_and(|e| e.eq_ignore_ascii_case("bin")) {
            return Err(malformed(
                &file.path,
                format!(
                    "no token file's magic number at offset 0 (but {}), and the name does not end in .bin",
                    shown(found)
                ),
                &format!("{raw}; text is read with Tokens::bytes"),
            ));
        }
        Ok(Self::RawU16)
    }

    /// Returns whether the bytes after the magic number look like this format's header.
    fn has_header_after_magic(self, file: &DataFile) -> bool {
        let head = &file.head;
        if head.len() < HEADER_BYTES {
            return false;
        }
        let is_unused = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let counted = read_i32(head, COUNT_OFFSET)
            .map(|count| i64::from(count) * self.token_bytes() as i64 + HEADER_BYTES as i64);
        is_unused(&head[COUNT_OFFSET + 4..]) || counted == Some(file.len as i64)
    }

    pub(super) fn width(self) -> Width {
        match self {
            Self::RawU16 | Self::HeaderedU16 => Width::U16,
            Self::HeaderedU32 => Width::U32,
        }
    }

    fn magic_and_version(self) -> Option<(i32, i32)> {
        match self {
            Self::RawU16 => None,
            Self::HeaderedU16 => Some((20240520, 1)),
            Self::HeaderedU32 => Some((20240801, 7)),
        }
    }

    pub(super) fn check(self, file: &DataFile) -> Result<()> {
        match self.magic_and_version() {
            None => self.check_raw(file),
            Some((magic, version)) => self.check_headered(file, magic, version),
        }
    }

    fn check_raw(self, file: &DataFile) -> Result<()> {
        if file.len.is_multiple_of(self.token_bytes()) {
            return Ok(());
        }
        let (size, last) = (file.len, file.len - 1);
        let mut value = [0];
        file.read_at(last, &mut value)?;
        Err(malformed(
            &file.path,
            format!(
                "{size} bytes is not a multiple of the 2 bytes of a u16 token: the byte at offset {last} (value {}) is half a token",
                value[0]
            ),
            "the file was cut, or it is text: read that with Tokens::bytes",
        ))
    }

    fn check_headered(self, file: &DataFile, magic: i32, version: i32) -> Result<()> {
        let (path, content) = (&file.path, &file.head[..]);
        let found_magic = read_i32(content, 0);
        if content.len() < HEADER_BYTES {
            return Err(malformed(
                path,
                format!(
                    "{} bytes, the header alone has {HEADER_BYTES} (magic {} at offset 0)",
                    content.len(),
                    shown(found_magic)
                ),
                "the file was cut, or it has no header: then Tokens::open_as with TokenFormat::RawU16 reads it",
            ));
        }
        if found_magic != Some(magic) {
            return Err(malformed(
                path,
                format!("magic {} at offset 0, expected {magic}", shown(found_magic)),
                "this is another format: Tokens::open finds out which",
            ));
        }
        let found_version = read_i32(content, VERSION_OFFSET);
        if found_version != Some(version) {
            return Err(malformed(
                path,
                format!(
                    "version {} at offset {VERSION_OFFSET}, expected {version} with magic {magic}",
                    shown(found_version)
                ),
                "write the file again in a version known here",
            ));
        }
        let count = read_i32(content, COUNT_OFFSET);
        let holds = file.len - HEADER_BYTES;
        let token_bytes = self.token_bytes();
        // In i64, so that no count overflows on a 32-bit machine.
        let promised = count.map(|count| i64::from(count) * token_bytes as i64);
        if promised != Some(holds as i64) || holds == 0 {
            return Err(malformed(
                path,
                format!(
                    "token count {} at offset {COUNT_OFFSET}, but {holds} bytes follow the header, {token_bytes} a \
                     token",
                    shown(count)
                ),
                "the file was cut, or its writer did not finish; a file without a header is read by Tokens::open_as \
                 with TokenFormat::RawU16",
            ));
        }
        Ok(())
    }

    /// Returns the header of a file at `path` with `count` tokens; empty for the raw format.
    pub(super) fn header(self, path: &Path, count: usize) -> Result<Vec<u8>> {
        let Some((magic, version)) = self.magic_and_version() else {
            return Ok(Vec::new());
        };
        let count = i32::try_from(count).map_err(|_| Error::Data {
            what: path.display().to_string(),
            expected: format!("at most {} tokens, the header counts in i32", i32::MAX),
            got: format!("{count} tokens"),
            hint: "write several files, or TokenFormat::RawU16, which counts nothing".into(),
        })?;
        let mut header = vec![0; HEADER_BYTES];
        for (index, value) in [magic, version, count].into_iter().enumerate() {
            header[index * 4..(index + 1) * 4].copy_from_slice(&value.to_le_bytes());
        }
        Ok(header)
    }
}

fn read_i32(content: &[u8], offset: usize) -> Option<i32> {
    let bytes = content.get(offset..offset + 4)?;
    Some(i32::from_le_bytes(bytes.try_into().ok()?))
}

/// Formats an integer of a header, or "missing" if the file ends before it.
fn shown(value: Option<i32>) -> String {
    value.map_or_else(|| "missing".into(), |value| value.to_string())
}

fn malformed(path: &Path, problem: String, hint: &str) -> Error {
    Error::format(path, problem, hint)
}

/// Tokens that are encoded at a time.
const CHUNK_TOKENS: usize = 1 << 16;

/// Writes a token file, which [`Tokens::open`] reads; an existing file is replaced.
///
/// It is written to a temporary file in the same folder, which is synced and renamed at the end: after a crash or an
/// error the old file is unchanged. `tokens` may come from any source, even from `path` itself, and are never in memory
/// all at the same time.
///
/// # Errors
/// [`Error::Io`] if the file cannot be written; [`Error::Data`] if an id does not fit the format's width, or there are
/// more tokens than its header can count (2^31 - 1); [`Error::Format`] if `tokens` is a file with an id outside its
/// vocabulary.
///
/// ```
/// use tallow::data::{TokenFormat, Tokens, write_tokens};
///
/// # fn main() -> tallow::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("train.bin");
/// let tokens = Tokens::from_ids([464, 6842, 50256], 50257)?;
/// write_tokens(&path, &tokens, TokenFormat::HeaderedU16)?;
/// assert_eq!(Tokens::open(&path, 50257)?.to_vec()?, [464, 6842, 50256]);
/// # Ok(())
/// # }
/// ```
pub fn write_tokens(path: impl AsRef<Path>, tokens: &Tokens, format: TokenFormat) -> Result<()> {
    let path = path.as_ref();
    let header = format.header(path, tokens.len())?;
    write_atomically(path, |file| {
        let mut ids = vec![0; CHUNK_TOKENS.min(tokens.len())];
        let mut encoded = header;
        for start in (0..tokens.len()).step_by(CHUNK_TOKENS) {
            let count = CHUNK_TOKENS.min(tokens.len() - start);
            tokens.copy_to(start, &mut ids[..count])?;
            encode(path, format, start, &ids[..count], &mut encoded)?;
            file.write_all(&encoded)
                .map_err(|e| Error::io("write", path, e))?;
            encoded.clear();
        }
        Ok(())
    })
}

/// Appends `ids` to `encoded`; the first is token `start`.
fn encode(
    path: &Path,
    format: TokenFormat,
    start: usize,
    ids: &[u32],
    encoded: &mut Vec<u8>,
) -> Result<()> {
    let max_id = format.width().max_id();
    if let Some(position) = ids.iter().position(|&id| id > max_id) {
        return Err(Error::Data {
            what: path.display().to_string(),
            expected: format!("ids up to {max_id} for {format:?}"),
            got: format!("id {} at token {}", ids[position], start + position),
            hint: "write it as TokenFormat::HeaderedU32".into(),
        });
    }
    match format.width() {
        Width::U8 => encoded.extend(ids.iter().map(|&id| id as u8)),
        Width::U16 => encoded.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
        Width::U32 => encoded.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A count above i32 cannot be tested through the public API: it would need a file of 4 GiB.
    #[test]
    fn a_count_over_i32_is_an_error_only_with_a_header() {
        let path = Path::new("big.bin");
        let count = i32::MAX as usize + 1;
        for format in [TokenFormat::HeaderedU16, TokenFormat::HeaderedU32] {
            assert!(format.header(path, count - 1).is_ok());
            let text = format.header(path, count).unwrap_err().to_string();
            assert!(text.contains("big.bin"), "{text}");
            assert!(text.contains("2147483648 tokens"), "{text}");
        }
        assert!(TokenFormat::RawU16.header(path, count).is_ok());
    }
}
