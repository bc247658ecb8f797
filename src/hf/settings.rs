//! Settings of a `config.json`. Every key must be read, or be known to have no effect.

use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

/// Keys that do not affect training, whatever their value. `transformers` does not read them in the models of these
/// families, or reads them for text generation, for heads of other tasks, or for the output format. Its releases from
/// 4.30 to 5.24 were compared.
const INERT: &[&str] = &[
    // Names, versions and dtypes.
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "is_llama_config",
    "max_sequence_length",
    "name_or_path",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // Selection of implementations, and contents of a forward's result.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "chunk_size_feed_forward",
    "experts_implementation",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pretraining_tp",
    "return_dict",
    "tf_legacy_loss",
    "tie_last_hidden_states",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    "xla_device",
    "cache_implementation",
    // Initial values of weights, which a weight file replaces.
    "initializer_range",
    // Other tasks and other kinds of model.
    "_num_labels",
    "cross_attention_hidden_size",
    "finetuning_task",
    "id2label",
    "label2id",
    "n_special",
    "num_labels",
    "predict_special_tokens",
    "problem_type",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tie_encoder_decoder",
    // Tokens.
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "prefix",
    "sep_token_id",
    "tokenizer_class",
    // Text generation.
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Keys that have no effect if they have this value.
fn usual_values() -> [(&'static str, Value); 5] {
    [
        ("add_cross_attention", json!(false)),
        ("is_decoder", json!(false)),
        ("is_encoder_decoder", json!(false)),
        ("pruned_heads", json!({})),
        ("use_mrope", json!(false)),
    ]
}

/// The settings of one file; each key must be asked for.
pub(super) struct Settings<'a> {
    pub path: &'a Path,
    values: &'a Map<String, Value>,
    /// Keys that are treated as absent.
    ignored: &'a [String],
    asked: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Settings<'a> {
    pub fn new(path: &'a Path, values: &'a Map<String, Value>, ignored: &'a [String]) -> Self {
        Self {
            path,
            values,
            ignored,
            asked: RefCell::default(),
        }
    }

    /// Returns nested settings: the value of one of the keys.
    pub fn inside<'b>(&self, values: &'b Map<String, Value>) -> Settings<'b>
    where
        'a: 'b,
    {
        Settings::new(self.path, values, self.ignored)
    }

    pub fn refuse<T>(&self, problem: String) -> Result<T> {
        self.refuse_with(
            problem,
            "hf::load knows Llama, Mistral, GPT-2 and Gemma 2, and Qwen2 and Qwen3 models without windows",
        )
    }

    fn refuse_with<T>(&self, problem: String, hint: &str) -> Result<T> {
        Err(Error::format(self.path, problem, hint))
    }

    /// Returns whether the file has this key, even with the value null.
    pub fn has(&self, key: &'static str) -> bool {
        self.values.contains_key(key) && !self.is_ignored(key)
    }

    fn is_ignored(&self, key: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored == key)
    }

    /// Returns the value of `key`, unless it is null.
    pub fn get(&self, key: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key);
        let value = self.values.get(key).filter(|value| !value.is_null());
        value.filter(|_| !self.is_ignored(key))
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

    /// Returns the size under `key`; `absent` if the file does not have the key, `None` if it is null.
    pub fn size_or(&self, key: &'static str, absent: Option<usize>) -> Result<Option<usize>> {
        match self.has(key) {
            true => self.size(key),
            false => Ok(absent),
        }
    }

    pub fn number(&self, key: &'static str) -> Result<Option<f64>> {
        self.parsed(key, "a number", Value::as_f64)
    }

    /// Returns the flag under `key`; `default` is the default of `transformers`.
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

    /// Refuses keys that were not asked for, and settings in `wanted` with another value than the one supported.
    pub fn check_rest(&self, wanted: &[(&'static str, Value)]) -> Result<()> {
        for (key, wanted) in wanted.iter().chain(&usual_values()) {
            if let Some(value) = self.get(key)
                && !is_same(value, wanted)
            {
                return self.refuse(format!("{key} is {value}, and only {wanted} is known"));
            }
        }
        let asked = self.asked.borrow();
        for (key, value) in self.values {
            let is_known = asked.contains(key.as_str()) || INERT.contains(&key.as_str());
            if !is_known && !self.is_ignored(key) && !value.is_null() {
                return self.refuse_with(
                    format!("{key} ({value}) is a setting that is not known"),
                    "it may stand for another model; if it changes nothing in training, name it in \
                     LoadOptions::ignore_keys (train --ignore-config-key)",
                );
            }
        }
        Ok(())
    }
}

/// Returns whether two values are equal; numbers are compared by value, so `0` equals `0.0`.
fn is_same(value: &Value, wanted: &Value) -> bool {
    match (value.as_f64(), wanted.as_f64()) {
        (Some(value), Some(wanted)) => value == wanted,
        _ => value == wanted,
    }
}
