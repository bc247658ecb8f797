//! The settings of a `config.json`, each of which has to be known.

use crate::{Error, Result};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

/// What does not change what a model computes in training.
const INERT: [&str; 16] = [
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "use_cache",
];

/// As [`INERT`], of which the library writes no more or other programs write more.
const ALSO_INERT: [&str; 6] = [
    "is_llama_config",
    "problem_type",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
];

/// The settings of one file, each of which has to be asked for.
pub(super) struct Settings<'a> {
    pub path: &'a Path,
    pub values: &'a Map<String, Value>,
    asked: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Settings<'a> {
    pub fn new(path: &'a Path, values: &'a Map<String, Value>) -> Self {
        Self {
            path,
            values,
            asked: RefCell::default(),
        }
    }

    pub fn refuse<T>(&self, problem: String) -> Result<T> {
        Err(Error::Format {
            path: self.path.into(),
            problem,
            hint:
                "hf::load knows Llama, Mistral, GPT-2, and Qwen2 and Qwen3 models without windows"
                    .into(),
        })
    }

    /// What is there under `key`, unless it is null.
    pub fn get(&self, key: &'static str) -> Option<&Value> {
        self.asked.borrow_mut().insert(key);
        self.values.get(key).filter(|value| !value.is_null())
    }

    pub fn parsed<T>(
        &self,
        key: &'static str,
        what: &str,
        parse: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match parse(value) {
            Some(parsed) => Ok(Some(parsed)),
            None => self.refuse(format!("{key} is {value}, not {what}")),
        }
    }

    pub fn size(&self, key: &'static str) -> Result<Option<usize>> {
        let parse = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.parsed(key, "a size", parse)
    }

    pub fn number(&self, key: &'static str) -> Result<Option<f64>> {
        self.parsed(key, "a number", Value::as_f64)
    }

    /// `default` is what the library takes where the file says nothing.
    pub fn flag(&self, key: &'static str, default: bool) -> Result<bool> {
        let given = self.parsed(key, "true or false", Value::as_bool)?;
        Ok(given.unwrap_or(default))
    }

    pub fn text(&self, key: &'static str) -> Result<Option<String>> {
        self.parsed(key, "a text", |value| Some(value.as_str()?.to_string()))
    }

    pub fn needed<T>(&self, key: &'static str, value: Result<Option<T>>) -> Result<T> {
        match value? {
            Some(value) => Ok(value),
            None => self.refuse(format!("it has no {key}")),
        }
    }

    /// Refuses what nothing has asked for, and what is set but would change what is computed.
    pub fn check_rest(&self, wanted: &[(&'static str, Value)]) -> Result<()> {
        for (key, wanted) in wanted {
            if let Some(value) = self.get(key)
                && !is_same(value, wanted)
            {
                return self.refuse(format!("{key} is {value}, and only {wanted} is known"));
            }
        }
        let asked = self.asked.borrow();
        for (key, value) in self.values {
            let is_inert = INERT.contains(&key.as_str()) || ALSO_INERT.contains(&key.as_str());
            if !asked.contains(key.as_str()) && !is_inert && !value.is_null() {
                return self.refuse(format!("{key} ({value}) is a setting that is not known"));
            }
        }
        Ok(())
    }
}

/// Whether both are one value: numbers by what they are, `0` as `0.0`.
fn is_same(value: &Value, wanted: &Value) -> bool {
    match (value.as_f64(), wanted.as_f64()) {
        (Some(value), Some(wanted)) => value == wanted,
        _ => value == wanted,
    }
}
