//! Conversion of the `config.json` of Gemma 2.

use super::config::{gelu, padding, rotary, window};
use super::settings::Settings;
use crate::model::TransformerConfig;
use crate::nn::{Architecture, DropoutRates};
use crate::ops::{Gelu, RotaryPairs};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::num::NonZeroUsize;

/// Parses the settings. Absent keys have the defaults of `transformers`.
pub(super) fn parse(s: &Settings<'_>) -> Result<TransformerConfig> {
    let (rope_scaling, rope_theta) = rotary(s)?;
    let vocab_size = s.needed("vocab_size", s.size("vocab_size"))?;
    let num_layers = s.needed("num_hidden_layers", s.size("num_hidden_layers"))?;
    let cap = |key, absent| match s.has(key) {
        true => s.number(key),
        false => Ok(Some(absent)),
    };
    let has_bias = s.flag("attention_bias", false)?;
    let scalar = s.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    if !(scalar > 0.0 && scalar.is_finite()) {
        return s.refuse(format!(
            "query_pre_attn_scalar is {scalar}, and must be positive"
        ));
    }
    let (sliding_window, has_windows) = (window(s)?, has_windows(s, num_layers)?);
    let config = TransformerConfig {
        vocab_size,
        context_length: s.needed("max_position_embeddings", s.size("max_position_embeddings"))?,
        d_model: s.needed("hidden_size", s.size("hidden_size"))?,
        num_layers,
        num_heads: s.needed("num_attention_heads", s.size("num_attention_heads"))?,
        d_ff: s.needed("intermediate_size", s.size("intermediate_size"))?,
        rope_theta,
        norm_eps: s.number("rms_norm_eps")?.unwrap_or(1e-6),
        num_kv_heads: s.size_or("num_key_value_heads", Some(4))?,
        head_dim: s.size_or("head_dim", Some(256))?,
        qkv_bias: has_bias,
        output_bias: has_bias,
        tie_embeddings: s.flag("tie_word_embeddings", true)?,
        rope_pairs: RotaryPairs::Halves,
        rope_scaling,
        sliding_window: sliding_window.filter(|_| has_windows),
        attention_scale: Some(1.0 / scalar.sqrt()),
        attention_soft_cap: cap("attn_logit_softcapping", 50.0)?,
        logit_soft_cap: cap("final_logit_softcapping", 30.0)?,
        dropout: DropoutRates {
            attention: s.number("attention_dropout")?.unwrap_or(0.0),
            ..Default::default()
        },
        padding_id: match s.has("pad_token_id") {
            true => padding(s, vocab_size)?,
            false => Some(0),
        },
        gelu: gelu(s, "hidden_activation")?,
        architecture: Architecture::Gemma2,
        ..TransformerConfig::default()
    };
    s.get("hidden_act"); // this family reads hidden_activation
    s.check_rest(&[("use_bidirectional_attention", json!(false))])?;
    Ok(config)
}

/// The types of two consecutive layers.
const KINDS: [&str; 2] = ["sliding_attention", "full_attention"];

/// Returns whether blocks 0, 2, 4 and so on have windows (true) or none has (false).
fn has_windows(s: &Settings<'_>, num_layers: usize) -> Result<bool> {
    let Some(kinds) = s.get("layer_types") else {
        return Ok(true);
    };
    let is = |kind_of: fn(usize) -> &'static str| {
        let expected: Vec<&str> = (0..num_layers).map(kind_of).collect();
        *kinds == json!(expected)
    };
    match () {
        () if is(|i| KINDS[i % 2]) => Ok(true),
        () if is(|_| KINDS[1]) => Ok(false),
        () => s.refuse(format!(
            "layer_types is {kinds}, and only {KINDS:?} in turn or the second alone are known"
        )),
    }
}

/// Returns the settings of a configuration.
///
/// # Errors
/// A configuration that the family's settings cannot express.
pub(super) fn to_json(config: &TransformerConfig, common: Value) -> Result<Value> {
    if config.qkv_bias != config.output_bias {
        return Err(
            Error::config("hf::save", "output_bias", config.output_bias).must_be(
                format!("{}, as qkv_bias is", config.qkv_bias),
                "Gemma 2 has one setting for both",
            ),
        );
    }
    let scale = config
        .attention_scale
        .unwrap_or(1.0 / (config.head_dim() as f64).sqrt());
    let scalar = 1.0 / (scale * scale);
    let rounded = scalar.round();
    let is_whole = (scalar - rounded).abs() <= 1e-9 * scalar && rounded > 0.0;
    let Some(scalar) = is_whole.then_some(rounded as u64) else {
        return Err(Error::config("hf::save", "attention_scale", scale).must_be(
            "1 / sqrt(n) of an integer n",
            "Gemma 2's query_pre_attn_scalar is an integer",
        ));
    };
    let mut values = common;
    let more = json!({
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": match config.gelu {
            Gelu::Tanh => "gelu_pytorch_tanh",
            Gelu::Erf => "gelu",
        },
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        // The masks of `transformers` require a number even if no layer has a window.
        "sliding_window": config.sliding_window.map_or(config.context_length, NonZeroUsize::get),
        "pad_token_id": config.padding_id,
    });
    if let (Value::Object(values), Value::Object(more)) = (&mut values, more) {
        values.extend(more);
    }
    if config.sliding_window.is_none() {
        values["layer_types"] = json!(vec![KINDS[1]; config.num_layers]);
    }
    Ok(values)
}
