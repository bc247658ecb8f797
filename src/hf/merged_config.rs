//! The `config.json` of a saved model: settings that were read and have not changed are written back.

use super::{CONFIG, config};
use crate::model::{Origin, TransformerConfig};
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// Settings with a second name, which is removed when they change.
const SECOND_NAMES: [(&str, &str); 3] = [
    ("rope_parameters", "rope_scaling"),
    ("rope_theta", "rope_scaling"),
    ("n_positions", "n_ctx"),
];

/// Settings of the tokenizer or of training, independent of the architecture.
const NEUTRAL: [&str; 4] = [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
];

/// Returns the settings of a model whose weights are saved in `dtype`. `origin` has the `config.json` that the model
/// comes from. If it is of another model, only its token ids and `initializer_range` are kept.
///
/// # Errors
/// A model that is in none of the families; a text that is not a JSON object.
pub(super) fn settings(
    model: &TransformerConfig,
    dtype: &str,
    origin: Option<&Origin>,
) -> Result<Value> {
    let now = config::to_json(model, dtype)?;
    let Some(Origin {
        config: text,
        ignored,
        ..
    }) = origin
    else {
        return Ok(now);
    };
    let Ok(Value::Object(read)) = serde_json::from_str(text) else {
        return Err(Error::Format {
            path: CONFIG.into(),
            problem: "the settings that the model was loaded with are no JSON object".into(),
            hint: "load it again, or save without SaveOptions::from".into(),
        });
    };
    let is_same = |candidate: &Value| {
        let again = parsed_again(&candidate.to_string(), dtype, ignored);
        again.is_ok_and(|again| again == now)
    };
    let was = config::parse(text, Path::new(CONFIG), ignored);
    if let Ok(was) = was
        && was.architecture == model.architecture
        && let Ok(was) = config::to_json(&was, dtype)
    {
        let changed = changed(&read, &was, &now, dtype);
        // Settings that were read may contradict ones that have changed, for example a list of the layers' types.
        if is_same(&changed) {
            return Ok(changed);
        }
    }
    let mut settings = now.clone();
    for key in NEUTRAL {
        let mut with = settings.clone();
        with[key] = read.get(key).cloned().unwrap_or_default();
        if read.contains_key(key) && is_same(&with) {
            settings = with;
        }
    }
    Ok(settings)
}

/// Returns the settings as written for the configuration that is parsed from this text.
fn parsed_again(text: &str, dtype: &str, ignored: &[String]) -> Result<Value> {
    config::to_json(&config::parse(text, Path::new(CONFIG), ignored)?, dtype)
}

/// Returns the settings that were read, updated where `now` differs from `was`.
fn changed(read: &Map<String, Value>, was: &Value, now: &Value, dtype: &str) -> Value {
    let mut settings = read.clone();
    let keys = [was, now].map(|settings| settings.as_object().into_iter().flat_map(Map::keys));
    let keys: BTreeSet<&String> = keys.into_iter().flatten().collect();
    for key in keys {
        if was.get(key) == now.get(key) {
            continue;
        }
        // Null, since an absent key means the default of `transformers`.
        settings.insert(key.clone(), now.get(key).cloned().unwrap_or(Value::Null));
        for (_, second) in SECOND_NAMES.iter().filter(|(first, _)| first == key) {
            settings.remove(*second);
        }
        if *key == "rope_theta" || *key == "rope_parameters" {
            for key in ["rope_theta", "rope_parameters"] {
                settings.insert(key.into(), now[key].clone());
            }
        }
    }
    let names = ["dtype", "torch_dtype"].map(|name| (name, settings.contains_key(name)));
    for (name, exists) in names {
        if exists || !names.iter().any(|(_, exists)| *exists) && name == "dtype" {
            settings.insert(name.into(), dtype.into());
        }
    }
    // A saved model has a head, even if it was loaded from a base model's folder.
    let is_with_head = |class: &Value| {
        let class = class.as_str().unwrap_or_default();
        class.ends_with("ForCausalLM") || class.ends_with("LMHeadModel")
    };
    let classes = settings.get("architectures").and_then(Value::as_array);
    if !classes.is_some_and(|classes| classes.iter().all(is_with_head) && !classes.is_empty()) {
        settings.insert("architectures".into(), class_of(&settings, now));
    }
    Value::Object(settings)
}

/// Returns the class of a model with a head, for its `model_type`.
fn class_of(settings: &Map<String, Value>, now: &Value) -> Value {
    let class = match settings.get("model_type").and_then(Value::as_str) {
        Some("llama") => "LlamaForCausalLM",
        Some("mistral") => "MistralForCausalLM",
        _ => return now["architectures"].clone(),
    };
    Value::Array(vec![class.into()])
}
