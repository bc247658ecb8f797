//! `config.json`: read into a configuration, and written from one.

use super::gpt2;
use super::settings::Settings;
use crate::attention::Algorithm;
use crate::model::TransformerConfig;
use crate::nn::{Architecture, Checkpointing, DropoutRates, RopeScaling};
use crate::ops::RotaryPairs;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::path::Path;

/// The configuration that the text of a `config.json` says.
pub(super) fn parse(text: &str, path: &Path) -> Result<TransformerConfig> {
    let values: Value = serde_json::from_str(text).map_err(|e| Error::Format {
        path: path.into(),
        problem: format!("it is not JSON: {e}"),
        hint: "it may be truncated; fetch it again".into(),
    })?;
    let Value::Object(values) = values else {
        return Err(Error::Format {
            path: path.into(),
            problem: "it is no object of settings".into(),
            hint: "hf::load reads the config.json that save_pretrained writes".into(),
        });
    };
    let s = Settings::new(path, &values);
    let kind = s.needed("model_type", s.text("model_type"))?;
    let config = match kind.as_str() {
        "llama" | "mistral" => llama(&s, false, false)?,
        "qwen2" => llama(&s, true, false)?,
        "qwen3" => llama(&s, false, true)?,
        "gpt2" => gpt2::parse(&s)?,
        _ => return s.refuse(format!("model_type is {kind:?}")),
    };
    let config = match config.head_dim() > crate::attention::FLASH_MAX_HEAD_DIM {
        true => TransformerConfig {
            attention: Algorithm::Naive,
            ..config
        },
        false => config,
    };
    config.validate()?;
    Ok(config)
}

/// A model that is like Llama's, or is.
fn llama(s: &Settings<'_>, qkv_bias: bool, qk_norm: bool) -> Result<TransformerConfig> {
    let (scaling, theta) = rotary(s)?;
    let config = TransformerConfig {
        vocab_size: s.needed("vocab_size", s.size("vocab_size"))?,
        context_length: s.needed("max_position_embeddings", s.size("max_position_embeddings"))?,
        d_model: s.needed("hidden_size", s.size("hidden_size"))?,
        num_layers: s.needed("num_hidden_layers", s.size("num_hidden_layers"))?,
        num_heads: s.needed("num_attention_heads", s.size("num_attention_heads"))?,
        d_ff: s.needed("intermediate_size", s.size("intermediate_size"))?,
        rope_theta: theta,
        rms_norm_eps: s.number("rms_norm_eps")?.unwrap_or(1e-6),
        attention: Algorithm::Flash,
        checkpointing: Checkpointing::None,
        num_kv_heads: s.size("num_key_value_heads")?,
        head_dim: s.size("head_dim")?,
        qkv_bias,
        qk_norm,
        tie_embeddings: s.flag("tie_word_embeddings", false)?,
        rope_pairs: RotaryPairs::Halves,
        rope_scaling: scaling,
        sliding_window: match s.text("model_type")?.as_deref() {
            Some("mistral") => window(s)?,
            _ => None,
        },
        dropout: DropoutRates {
            attention: s.number("attention_dropout")?.unwrap_or(0.0),
            ..Default::default()
        },
        architecture: Architecture::Llama,
    };
    if let Some(window) = s.size("sliding_window")?
        && window < config.context_length
        && config.sliding_window.is_none()
        && s.values.get("use_sliding_window") != Some(&Value::Bool(false))
    {
        return s.refuse(format!(
            "sliding_window is {window}, which only Mistral models are known to have"
        ));
    }
    let kinds = s.get("layer_types").and_then(Value::as_array);
    let mut kinds = kinds.into_iter().flatten();
    if let Some(kind) = kinds.find(|kind| *kind != "full_attention") {
        return s.refuse(format!("a layer is of the type {kind}"));
    }
    s.check_rest(&[
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("use_sliding_window", json!(false)),
        ("pretraining_tp", json!(1)),
        ("partial_rotary_factor", json!(1.0)),
        ("rope_interleaved", json!(false)),
    ])?;
    Ok(config)
}

/// How many tokens each attends to in a Mistral model; none if they are all.
fn window(s: &Settings<'_>) -> Result<Option<NonZeroUsize>> {
    const WINDOW: usize = 4096; // the library's own
    let window = match s.values.contains_key("sliding_window") {
        true => s.size("sliding_window")?,
        false => Some(WINDOW),
    };
    let Some(window) = window else {
        return Ok(None);
    };
    let Some(keys) = NonZeroUsize::new(window) else {
        return s.refuse("sliding_window is 0".into());
    };
    let context = s.size("max_position_embeddings")?;
    Ok((context.is_none_or(|context| window < context)).then_some(keys))
}

/// How angles are scaled, and their base: under `rope_parameters`, or as older files have it.
fn rotary(s: &Settings<'_>) -> Result<(RopeScaling, f64)> {
    const THETA: f64 = 10_000.0; // the library's own
    let theta = s.number("rope_theta")?;
    let older = s.get("rope_scaling");
    let given = s.get("rope_parameters").or(older);
    let Some(given) = given else {
        return Ok((RopeScaling::None, theta.unwrap_or(THETA)));
    };
    let Some(values) = given.as_object() else {
        return s.refuse(format!("the scaling of its angles is {given}"));
    };
    let r = Settings::new(s.path, values);
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

/// The `config.json` of a model, as `transformers` reads it.
///
/// # Errors
/// A model that is none of its families'.
pub(super) fn to_json(config: &TransformerConfig, dtype: &str) -> Result<Value> {
    match config.architecture {
        Architecture::Llama => llama_to_json(config, dtype),
        Architecture::Gpt2 => Ok(gpt2::to_json(config, dtype)),
    }
}

fn llama_to_json(config: &TransformerConfig, dtype: &str) -> Result<Value> {
    let refuse = |field, got: String, expected: &str| {
        Err(Error::config("hf::save", field, got)
            .must_be(expected, "as the families of Hugging Face's files have it"))
    };
    if config.rope_pairs != RotaryPairs::Halves {
        return refuse("rope_pairs", format!("{:?}", config.rope_pairs), "Halves");
    }
    let dropout = config.dropout;
    if (dropout.embedding, dropout.residual) != (0.0, 0.0) {
        return refuse("dropout", format!("{dropout:?}"), "that of attention alone");
    }
    let window = config.sliding_window;
    let (kind, class) = match (config.qkv_bias, config.qk_norm, window) {
        (false, false, None) => ("llama", "LlamaForCausalLM"),
        (false, false, Some(_)) => ("mistral", "MistralForCausalLM"),
        (true, false, None) => ("qwen2", "Qwen2ForCausalLM"),
        (false, true, None) => ("qwen3", "Qwen3ForCausalLM"),
        (true, true, _) => return refuse("qk_norm", "true".into(), "false where qkv_bias is true"),
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
    let mut values = json!({
        "model_type": kind,
        "architectures": [class],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads(),
        "head_dim": config.head_dim(),
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": false,
        "attention_dropout": config.dropout.attention,
        "dtype": dtype,
    });
    if let Some(keys) = window {
        values["sliding_window"] = json!(keys);
    }
    Ok(values)
}
