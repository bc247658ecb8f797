//! Constructors of [`Tokens`].

use super::format::TokenFormat;
use super::source::{DataFile, Source, TokenFile, Width};
use super::tokens::{Tokens, position_outside};
use crate::hf::Tokenizer;
use crate::{Error, Result, files};
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::path::Path;

const BYTES_VOCAB_SIZE: usize = 256;

impl Tokens {
    /// Opens any file, text or binary, as bytes; vocabulary 256.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, is a folder or not a regular file; [`Error::Format`] if it is empty.
    pub fn bytes(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let source = Source::File(TokenFile {
            file: DataFile::open(path)?,
            header_bytes: 0,
            width: Width::U8,
        });
        Ok(Self::all_of(source, BYTES_VOCAB_SIZE))
    }

    /// Opens a token file in any [`TokenFormat`], detected by its magic number. A file without one is
    /// [`TokenFormat::RawU16`] if its name ends in `.bin`, it does not look like a file with a damaged header, and all
    /// its ids are less than `vocab_size`. To check the ids it is read once, as by [`validate`](Self::validate). A file
    /// of raw 32- or 64-bit ids, which would read as other u16 tokens, is refused.
    ///
    /// # Errors
    /// Those of [`open_as`](Self::open_as); [`Error::Format`] for a file whose format is not detected.
    pub fn open(path: impl AsRef<Path>, vocab_size: usize) -> Result<Self> {
        check_vocab_size("Tokens::open", vocab_size)?;
        let file = DataFile::open(path.as_ref())?;
        let format = TokenFormat::detect(&file)?;
        let tokens = Self::in_format(file, format, vocab_size)?;
        if format == TokenFormat::RawU16 {
            tokens.refuse_wider_ids()?;
            tokens.validate()?;
        }
        Ok(tokens)
    }

    /// Opens a token file in a given format. Its ids are checked when they are read.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, is a folder or not a regular file; [`Error::Format`], with offset and value,
    /// if it is empty, its header is not the format's, or its size does not match the header or a whole number of
    /// tokens; [`Error::Config`] if `vocab_size` is 0.
    pub fn open_as(path: impl AsRef<Path>, format: TokenFormat, vocab_size: usize) -> Result<Self> {
        check_vocab_size("Tokens::open", vocab_size)?;
        Self::in_format(DataFile::open(path.as_ref())?, format, vocab_size)
    }

    fn in_format(file: DataFile, format: TokenFormat, vocab_size: usize) -> Result<Self> {
        format.check(&file)?;
        Ok(Self::all_of(Source::of_file(file, format), vocab_size))
    }

    /// Concatenates the source files of a folder and its subfolders as bytes; vocabulary 256.
    ///
    /// Files are included if their extension is one of `extensions` (`"rs"`; a leading dot is ignored) and they are
    /// UTF-8. Within each folder, files and subfolders are in the order of their names, so the same tree always gives
    /// the same tokens. Hidden subfolders, subfolders called `target` and symbolic links are skipped.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder or anything in it cannot be read; [`Error::Config`] if `extensions` is empty;
    /// [`Error::Data`] if the included files are empty.
    pub fn source_tree(folder: impl AsRef<Path>, extensions: &[&str]) -> Result<Self> {
        let folder = folder.as_ref();
        if extensions.is_empty() {
            return Err(
                Error::config("Tokens::source_tree", "extensions", "none").must_be(
                    "at least one extension",
                    "for a Rust crate, take rs, md and toml",
                ),
            );
        }
        let names: Vec<&OsStr> = extensions
            .iter()
            .map(|extension| OsStr::new(extension.strip_prefix('.').unwrap_or(extension)))
            .collect();
        let tree = read_tree(folder, &names)?;
        if tree.bytes.is_empty() {
            return Err(Error::Data {
                what: folder.display().to_string(),
                expected: format!(
                    "text in UTF-8 files with extension {}",
                    extensions.join(", ")
                ),
                got: format!("0 bytes ({} such files are not UTF-8)", tree.not_text),
                hint: "hidden folders, folders called target and symbolic links are skipped".into(),
            });
        }
        let source = Source::Bytes {
            name: folder.display().to_string(),
            bytes: tree.bytes,
        };
        Ok(Self::all_of(source, BYTES_VOCAB_SIZE))
    }

    /// Wraps bytes in memory (`&[u8]`, `Vec<u8>`, `&str`, `String`), each a token; vocabulary 256.
    ///
    /// # Errors
    /// [`Error::Data`] if there are none.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let source = Source::Bytes {
            name: "bytes in memory".into(),
            bytes: bytes.into(),
        };
        Self::in_memory(source, BYTES_VOCAB_SIZE)
    }

    /// Wraps ids in memory (`&[u32]`, `Vec<u32>`), which are checked immediately.
    ///
    /// # Errors
    /// [`Error::TokenId`] with the first id that is `vocab_size` or more; [`Error::Data`] if there are no ids;
    /// [`Error::Config`] if `vocab_size` is 0.
    pub fn from_ids(ids: impl Into<Vec<u32>>, vocab_size: usize) -> Result<Self> {
        check_vocab_size("Tokens::from_ids", vocab_size)?;
        let ids = ids.into();
        if let Some(position) = position_outside(&ids, vocab_size) {
            return Err(Error::TokenId {
                op: "Tokens::from_ids",
                id: ids[position].into(),
                position,
                vocab_size,
            });
        }
        Self::in_memory(Source::Ids(ids), vocab_size)
    }

    /// Encodes these tokens, which must be the bytes of a text, with a tokenizer. The ids are stored in memory, with
    /// the tokenizer's vocabulary. Encoding needs about 150 times the text's size in memory meanwhile: encode a large
    /// text elsewhere, and [`open`](Self::open) the token file.
    ///
    /// ```no_run
    /// use tallow::data::Tokens;
    /// use tallow::hf::Tokenizer;
    ///
    /// # fn main() -> tallow::Result<()> {
    /// let tokenizer = Tokenizer::open("SmolLM2-135M")?;
    /// let (train, validation) = Tokens::bytes("my.txt")?.encoded(&tokenizer)?.split(0.1)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Data`] for tokens that are not bytes, bytes that are not UTF-8, or a text without ids; those of
    /// [`Tokenizer::encode`](crate::hf::Tokenizer::encode).
    pub fn encoded(&self, tokenizer: &Tokenizer) -> Result<Self> {
        let refuse = |got: String| Error::Data {
            what: self.to_string(),
            expected: "the bytes of a text in UTF-8".into(),
            got,
            hint: "open it with Tokens::bytes, or convert it to UTF-8".into(),
        };
        if self.vocab_size() != BYTES_VOCAB_SIZE {
            return Err(refuse(format!(
                "ids of a vocabulary of {}",
                self.vocab_size()
            )));
        }
        let bytes: Vec<u8> = self.to_vec()?.into_iter().map(|id| id as u8).collect();
        let text = String::from_utf8(bytes).map_err(|e| refuse(e.to_string()))?;
        Self::from_ids(tokenizer.encode(&text)?, tokenizer.vocab_size())
    }

    fn in_memory(source: Source, vocab_size: usize) -> Result<Self> {
        if source.len() == 0 {
            return Err(
                Error::data(source.name(), "none").must_be("at least 1 token", "give some data")
            );
        }
        Ok(Self::all_of(source, vocab_size))
    }
}

fn check_vocab_size(config: &'static str, vocab_size: usize) -> Result<()> {
    if vocab_size == 0 {
        return Err(Error::config(config, "vocab_size", "0")
            .must_be("at least 1", "give the tokenizer's vocabulary size"));
    }
    Ok(())
}

/// The content of a folder tree.
#[derive(Default)]
struct SourceTree {
    /// The content of every included file, in order.
    bytes: Vec<u8>,
    /// Number of files with an included extension that are not UTF-8, and so not in `bytes`.
    not_text: usize,
}

/// Reads `folder` and its subfolders; [`Tokens::source_tree`] describes the selection.
fn read_tree(folder: &Path, extensions: &[&OsStr]) -> Result<SourceTree> {
    let mut tree = SourceTree::default();
    add_folder(folder, extensions, &mut tree)?;
    Ok(tree)
}

fn add_folder(folder: &Path, extensions: &[&OsStr], tree: &mut SourceTree) -> Result<()> {
    let mut entries: Vec<DirEntry> = fs::read_dir(folder)
        .and_then(Iterator::collect)
        .map_err(|e| Error::io("read", folder, e))?;
    // The system lists a folder in any order.
    entries.sort_by_key(DirEntry::file_name);

    for entry in entries {
        let path = entry.path();
        // The type of the entry itself: a link is neither a file nor a folder here, so cycles are impossible.
        let kind = entry.file_type().map_err(|e| Error::io("read", &path, e))?;
        if kind.is_dir() && !is_skipped(&entry.file_name()) {
            add_folder(&path, extensions, tree)?;
        } else if kind.is_file() && path.extension().is_some_and(|e| extensions.contains(&e)) {
            let content = files::read(&path)?;
            if std::str::from_utf8(&content).is_ok() {
                tree.bytes.extend_from_slice(&content);
            } else {
                tree.not_text += 1;
            }
        }
    }
    Ok(())
}

fn is_skipped(folder_name: &OsStr) -> bool {
    folder_name == "target" || folder_name.as_encoded_bytes().starts_with(b".")
}
