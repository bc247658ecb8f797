//! Conversion of `config.json` to a [`TransformerConfig`] and back.

use super::settings::Settings;
use super::{gemma2, gpt2};
use crate::model::TransformerConfig;
use crate::nn::{Architecture, DropoutRates, RopeScaling};
use crate::ops::{Gelu, RotaryPairs};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::path::Path;

/// Parses the text of a `config.json`. Keys in `ignored` are treated as absent.
pub(super) fn parse(text: &str, path: &Path, ignored: &[String]) -> Result<TransformerConfig> {
    let values: Value = serde_json::from_str(text).map_err(|e| Error::Format {
        path: path.into(),
        problem: format!("it is not JSON: {e}"),
        hint: "it may be truncated; fetch it again".into(),
    })?;
    let Value::Object(values) = values else {
        return Err(Error::Format {
            path: path.into(),
            problem: "expected a JSON object".into(),
            hint: "hf::load reads the config.json that save_pretrained writes".into(),
        });
    };
    let s = Settings::new(path, &values, ignored);
    let kind = s.needed("model_type", s.text("model_type"))?;
    let config = match kind.as_str() {
        "llama" => llama(&s, Family::Llama)?,
        "mistral" => llama(&s, Family::Mistral)?,
        "qwen2" => llama(&s, Family::Qwen2)?,
        "qwen3" => llama(&s, Family::Qwen3)?,
        "gpt2" => gpt2::parse(&s)?,
        "gemma2" => gemma2::parse(&s)?,
        _ => return s.refuse(format!("model_type is {kind:?}")),
    };
    config.validate().map_err(|error| in_file(error, path))?;
    Ok(config)
}

/// Adds the file to an error about a field of the configuration that was read from it.
fn in_file(error: Error, path: &Path) -> Error {
    match error {
        Error::Config {
            field,
            expected,
            got,
            hint,
            ..
        } => Error::format(path, format!("{field} must be {expected}, got {got}"), hint),
        other => other,
    }
}

/// The families whose layers are those of Llama.
#[derive(Clone, Copy, PartialEq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

fn llama(s: &Settings<'_>, family: Family) -> Result<TransformerConfig> {
    let (scaling, theta) = rotary(s)?;
    // The defaults of `transformers` for a file without the key.
    let (kv_heads, head_dim) = match family {
        Family::Llama => (None, None),
        Family::Mistral => (Some(8), None),
        Family::Qwen2 => (Some(32), None),
        Family::Qwen3 => (Some(32), Some(128)),
    };
    let has_bias = s.flag("attention_bias", false)?;
    let (qkv_bias, output_bias) = match family {
        Family::Llama | Family::Qwen3 => (has_bias, has_bias),
        Family::Mistral => (false, false), // does not read the setting
        Family::Qwen2 => (true, false),    // does not read it either
    };
    let vocab_size = s.needed("vocab_size", s.size("vocab_size"))?;
    let config = TransformerConfig {
        vocab_size,
        context_length: s.needed("max_position_embeddings", s.size("max_position_embeddings"))?,
        d_model: s.needed("hidden_size", s.size("hidden_size"))?,
        num_layers: s.needed("num_hidden_layers", s.size("num_hidden_layers"))?,
        num_heads: s.needed("num_attention_heads", s.size("num_attention_heads"))?,
        d_ff: s.needed("intermediate_size", s.size("intermediate_size"))?,
        rope_theta: theta,
        norm_eps: s.number("rms_norm_eps")?.unwrap_or(1e-6),
        num_kv_heads: s.size_or("num_key_value_heads", kv_heads)?,
        head_dim: s.size_or("head_dim", head_dim)?,
        qkv_bias,
        output_bias,
        qk_norm: family == Family::Qwen3,
        tie_embeddings: s.flag("tie_word_embeddings", false)?,
        rope_pairs: RotaryPairs::Halves,
        rope_scaling: scaling,
        sliding_window: match family {
            Family::Mistral => window(s)?,
            _ => None,
        },
        attention_scale: None,
        attention_soft_cap: None,
        logit_soft_cap: None,
        dropout: DropoutRates {
            attention: s.number("attention_dropout")?.unwrap_or(0.0),
            ..Default::default()
        },
        padding_id: padding(s, vocab_size)?,
        gelu: Gelu::Tanh,
        architecture: Architecture::Llama,
    };
    let kinds = s.get("layer_types").and_then(Value::as_array);
    let mut kinds = kinds.into_iter().flatten();
    if let Some(kind) = kinds.find(|kind| *kind != "full_attention") {
        return s.refuse(format!("a layer is of the type {kind}"));
    }
    for key in ["max_window_layers", "use_sliding_window"] {
        s.get(key); // families without windows in some layers do not read them
    }
    if family != Family::Mistral
        && let Some(window) = window_of_some_layers(s, family, config.num_layers)?
        && window < config.context_length
    {
        return s.refuse(format!(
            "sliding_window is {window}, which only Mistral and Gemma 2 models are known to have"
        ));
    }
    s.check_rest(&[
        ("hidden_act", json!("silu")),
        ("mlp_bias", json!(false)),
        ("partial_rotary_factor", json!(1.0)),
        ("rope_interleaved", json!(false)),
    ])?;
    Ok(config)
}

/// Returns the token whose embedding `transformers` does not train. A negative id counts from the end, as in PyTorch.
pub(super) fn padding(s: &Settings<'_>, vocab_size: usize) -> Result<Option<u32>> {
    let Some(id) = s.parsed("pad_token_id", "a token id", Value::as_i64)? else {
        return Ok(None);
    };
    let from_start = match id {
        ..0 => i64::try_from(vocab_size).map_or(id, |size| size.saturating_add(id)),
        _ => id,
    };
    match u32::try_from(from_start) {
        Ok(row) if (row as usize) < vocab_size => Ok(Some(row)),
        _ => s.refuse(format!(
            "pad_token_id is {id}, outside the vocabulary of {vocab_size}"
        )),
    }
}

/// Returns the window of a Qwen model's last layers, or one that a Llama should not have. `None` if no layer has one.
fn window_of_some_layers(
    s: &Settings<'_>,
    family: Family,
    num_layers: usize,
) -> Result<Option<usize>> {
    // Defaults of `transformers`.
    const FIRST_LAYER: usize = 28;
    const WINDOW: usize = 4096;
    if family == Family::Llama {
        let is_on = s.flag("use_sliding_window", true)?;
        return Ok(s.size("sliding_window")?.filter(|_| is_on));
    }
    let is_on = s.flag("use_sliding_window", false)?;
    let first_layer = s.size_or("max_window_layers", Some(FIRST_LAYER))?;
    let window = s.size_or("sliding_window", Some(WINDOW))?;
    // A list of the layers' types decides, and so far none of its types has a window.
    let is_in_use = is_on
        && s.get("layer_types").is_none()
        && first_layer.is_none_or(|first| first < num_layers);
    Ok(window.filter(|_| is_in_use))
}

/// Returns the sliding window of a Mistral or Gemma 2 model, in tokens; `None` if it is not smaller than the context.
pub(super) fn window(s: &Settings<'_>) -> Result<Option<NonZeroUsize>> {
    const WINDOW: usize = 4096; // default of `transformers`
    let Some(window) = s.size_or("sliding_window", Some(WINDOW))? else {
        return Ok(None);
    };
    let Some(keys) = NonZeroUsize::new(window) else {
        return s.refuse("sliding_window is 0".into());
    };
    let context = s.size("max_position_embeddings")?;
    Ok((context.is_none_or(|context| window < context)).then_some(keys))
}

/// Returns the scaling of rotary angles and their base, from `rope_scaling` or, if that is empty, from
/// `rope_parameters`. `transformers` reads them in this order.
pub(super) fn rotary(s: &Settings<'_>) -> Result<(RopeScaling, f64)> {
    const THETA: f64 = 10_000.0; // default of `transformers`
    let theta = s.number("rope_theta")?;
    let [older, newer] = ["rope_scaling", "rope_parameters"].map(|key| s.get(key));
    let is_set = |given: &&Value| given.as_object().is_none_or(|values| !values.is_empty());
    let Some(given) = older.filter(is_set).or(newer) else {
        return Ok((RopeScaling::None, theta.unwrap_or(THETA)));
    };
    let Some(values) = given.as_object() else {
        return s.refuse(format!("the scaling of its angles is {given}"));
    };
    let r = s.inside(values);
    let theta = r.number("rope_theta")?.or(theta).unwrap_or(THETA);
    let old_kind = r.text("type")?;
    let kind = r
        .text("rope_type")?
        .or(old_kind)
        .unwrap_or("default".into());
    let factor = || r.needed("factor", r.number("factor"));
    let original_context = || {
        let given = r.size("original_max_position_embeddings")?;
        let all = s.size("max_position_embeddings")?;
        r.needed("original_max_position_embeddings", Ok(given.or(all)))
    };
    let scaling = match kind.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "llama3" => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: r.needed("low_freq_factor", r.number("low_freq_factor"))?,
            high_freq_factor: r.needed("high_freq_factor", r.number("high_freq_factor"))?,
            original_context: original_context()?,
        },
        "yarn" => {
            let factor = factor()?;
            RopeScaling::Yarn {
                factor,
                original_context: original_context()?,
                beta_fast: r.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: r.number("beta_slow")?.unwrap_or(1.0),
                attention_factor: r
                    .number("attention_factor")?
                    .unwrap_or(0.1 * factor.ln() + 1.0),
            }
        }
        _ => return s.refuse(format!("its angles are scaled by {kind:?}")),
    };
    r.check_rest(&[
        ("truncate", json!(true)),
        ("partial_rotary_factor", json!(1.0)),
    ])?;
    Ok((scaling, theta))
}

/// Returns the activation under `key`, by any name that `transformers` has for the two versions of GELU.
pub(super) fn gelu(s: &Settings<'_>, key: &'static str) -> Result<Gelu> {
    match s.text(key)?.as_deref() {
        None | Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh") => Ok(Gelu::Tanh),
        Some("gelu" | "gelu_python") => Ok(Gelu::Erf),
        Some(other) => s.refuse(format!(
            "{key} is {other:?}, and only gelu_new, gelu_pytorch_tanh and gelu are known"
        )),
    }
}

/// Returns the `config.json` of a model, in the format of `transformers`.
///
/// # Errors
/// [`Error::Config`] for a model that is in none of the families.
pub(super) fn to_json(config: &TransformerConfig, dtype: &str) -> Result<Value> {
    if config.architecture == Architecture::Gpt2 {
        return Ok(gpt2::to_json(config, dtype));
    }
    if config.rope_pairs != RotaryPairs::Halves {
        return refuse("rope_pairs", format!("{:?}", config.rope_pairs), "Halves");
    }
    let dropout = config.dropout;
    if (dropout.embedding, dropout.residual) != (0.0, 0.0) {
        return refuse("dropout", format!("{dropout:?}"), "that of attention alone");
    }
    let common = json!({
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads(),
        "head_dim": config.head_dim(),
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope_parameters(config),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "attention_dropout": config.dropout.attention,
        "dtype": dtype,
    });
    match config.architecture {
        Architecture::Gemma2 => gemma2::to_json(config, common),
        Architecture::Llama | Architecture::Gpt2 => llama_to_json(config, common),
    }
}

fn refuse<T>(field: &'static str, got: String, expected: &str) -> Result<T> {
    Err(Error::config("hf::save", field, got)
        .must_be(expected, "as the families of Hugging Face's files have it"))
}

fn rope_parameters(config: &TransformerConfig) -> Value {
    let mut rope = json!({"rope_type": "default", "rope_theta": config.rope_theta});
    let more = match config.rope_scaling {
        RopeScaling::None => json!({}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_context,
        }),
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
        } => json!({
            "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
            "attention_factor": attention_factor, "original_max_position_embeddings": original_context,
        }),
    };
    if let (Value::Object(rope), Value::Object(more)) = (&mut rope, &more) {
        rope.extend(more.clone());
    }
    rope
}

/// Adds the settings of the families with Llama's layers to `common`.
fn llama_to_json(config: &TransformerConfig, common: Value) -> Result<Value> {
    let of_gemma = [
        ("attention_scale", config.attention_scale),
        ("attention_soft_cap", config.attention_soft_cap),
        ("logit_soft_cap", config.logit_soft_cap),
    ];
    for (field, value) in of_gemma {
        if let Some(value) = value {
            return refuse(field, value.to_string(), "None but in Gemma 2");
        }
    }
    let window = config.sliding_window;
    let biases = [config.qkv_bias, config.output_bias];
    let (kind, class) = match (biases, config.qk_norm, window) {
        ([false, false] | [true, true], false, None) => ("llama", "LlamaForCausalLM"),
        ([false, false], false, Some(_)) => ("mistral", "MistralForCausalLM"),
        ([true, false], false, None) => ("qwen2", "Qwen2ForCausalLM"),
        ([false, false] | [true, true], true, None) => ("qwen3", "Qwen3ForCausalLM"),
        ([false, true], false, _) => {
            return refuse(
                "output_bias",
                "true".into(),
                "false where qkv_bias is false",
            );
        }
        ([qkv_bias, output_bias], true, None) => {
            let expected = format!("{qkv_bias}, as qkv_bias is, where heads are normalised");
            return refuse("output_bias", output_bias.to_string(), &expected);
        }
        (_, _, Some(keys)) => {
            let expected = "None where there are biases, or norms of heads";
            return refuse("sliding_window", keys.to_string(), expected);
        }
    };
    if kind == "qwen2" && config.head_dim() * config.num_heads != config.d_model {
        return refuse(
            "head_dim",
            config.head_dim().to_string(),
            "D / H in a model with biases",
        );
    }
    let mut values = common;
    values["model_type"] = json!(kind);
    values["architectures"] = json!([class]);
    values["hidden_act"] = json!("silu");
    if let Some(keys) = window {
        values["sliding_window"] = json!(keys);
    }
    if let Some(id) = config.padding_id {
        values["pad_token_id"] = json!(id);
    }
    Ok(values)
}
