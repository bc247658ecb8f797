//! Writing token files.

use std::path::Path;

use super::file::Width;
use super::format::TokenFormat;
use super::tokens::Tokens;
use crate::files::write_atomically;
use crate::{Error, Result};

/// Tokens encoded in one go.
const CHUNK_TOKENS: usize = 1 << 16;

/// Writes a token file, which [`Tokens::open`] reads back; a file already there is replaced.
///
/// It goes to a temporary file in the same folder, which is synced and renamed at the end: a crash or an error leaves
/// what was there before. `tokens` may come from anywhere, also from `path` itself, and is never held in
/// memory as a whole.
///
/// # Errors
/// [`Error::Io`] if the file cannot be written; [`Error::Data`] if an id does not fit the format's width, or there are
/// more tokens than its header can count (2^31 - 1); [`Error::Format`] if `tokens` is a file with an id outside
/// its vocabulary.
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

/// Appends `ids`, of which the first is token `start`, to `encoded`.
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
