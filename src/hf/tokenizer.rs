//! The tokenizer of a model, from its `tokenizer.json`.

use crate::files::read_to_string;
use crate::model::TransformerConfig;
use crate::{Error, Result};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

const FILE: &str = "tokenizer.json";

/// Conversion of text to ids and back, by the library `tokenizers`.
///
/// No special tokens are added around a text; a special token in the text, such as `<|endoftext|>`, becomes its id. The
/// file's settings for truncation and padding are ignored: a text is encoded completely.
///
/// ```no_run
/// use tallow::hf::Tokenizer;
///
/// let tokenizer = Tokenizer::open("SmolLM2-135M")?;
/// let ids = tokenizer.encode("to be, or not to be")?;
/// assert_eq!(tokenizer.decode(&ids)?, "to be, or not to be");
/// # Ok::<(), tallow::Error>(())
/// ```
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
}

impl Tokenizer {
    /// Reads the `tokenizer.json` of a folder.
    ///
    /// # Errors
    /// [`Error::Io`] if the file is missing or cannot be read; [`Error::Format`] if it is not a tokenizer, or has no
    /// token.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join(FILE);
        let refuse = |problem: String| Error::Format {
            path: path.clone(),
            problem,
            hint: "fetch it again, or write it with save_pretrained".into(),
        };
        let text = read_to_string(&path)?;
        let parsed = guarded(|| text.parse::<tokenizers::Tokenizer>());
        let mut inner = parsed.map_err(|e| refuse(format!("it is not a tokenizer: {e}")))?;
        let whole = inner.with_truncation(None).map(|_| ());
        whole.map_err(|e| refuse(format!("it cuts texts: {e}")))?;
        inner.with_padding(None);
        let largest = inner.get_vocab(true).into_values().max();
        let largest = largest.ok_or_else(|| refuse("it has no token".into()))?;
        Ok(Self {
            vocab_size: largest as usize + 1,
            inner,
            path,
        })
    }

    /// Returns the ids of a text, all of them less than [`vocab_size`](Self::vocab_size).
    ///
    /// # Errors
    /// [`Error::Data`] for a text that the tokenizer cannot encode, such as unknown words without an id for them.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoded = guarded(|| self.inner.encode_fast(text, false));
        let encoded = encoded.map_err(|e| self.refuse("a text that it has ids for", e))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Returns the text of ids, including special tokens. Bytes that are not UTF-8 (an incomplete character at the end,
    /// for example) become U+FFFD.
    ///
    /// # Errors
    /// [`Error::TokenId`] for an unknown id; [`Error::Data`] for ids that cannot be decoded.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let is_unknown = |id: &u32| self.inner.id_to_token(*id).is_none();
        if let Some(position) = ids.iter().position(is_unknown) {
            return Err(Error::TokenId {
                op: "Tokenizer::decode",
                id: ids[position].into(),
                position,
                vocab_size: self.vocab_size,
            });
        }
        let decoded = guarded(|| self.inner.decode(ids, false));
        decoded.map_err(|e| self.refuse("ids that make a text", e))
    }

    /// Returns the largest id, added tokens included, plus one. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Checks that the model's embedding has a row for each id.
    ///
    /// # Errors
    /// [`Error::Format`] if it has fewer.
    pub fn check_fits(&self, model: &TransformerConfig) -> Result<()> {
        let (ids, rows) = (self.vocab_size, model.vocab_size);
        if ids <= rows {
            return Ok(());
        }
        Err(Error::format(
            self.path.clone(),
            format!(
                "its ids go up to {}, and the model's vocab_size is {rows}",
                ids - 1
            ),
            "take the tokenizer of this model, or a model whose embedding has these rows",
        ))
    }

    fn refuse(&self, expected: &str, problem: String) -> Error {
        Error::data(self.path.display().to_string(), problem)
            .must_be(expected, "check that the tokenizer is for such texts")
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size)
            .finish()
    }
}

/// Calls the library. It panics on some files (a broken table of characters, for example); a panic becomes an error.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => answer.map_err(|e| e.to_string()),
        Err(_) => Err("the library tokenizers panicked".into()),
    }
}
