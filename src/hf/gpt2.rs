//! Conversion of the `config.json` of GPT-2.

use super::config::gelu;
use super::settings::Settings;
use crate::Result;
use crate::model::TransformerConfig;
use crate::nn::{Architecture, DropoutRates};
use crate::ops::Gelu;
use serde_json::{Value, json};

pub(super) fn parse(s: &Settings<'_>) -> Result<TransformerConfig> {
    let n_positions = s.needed("n_positions", s.size("n_positions"))?;
    let n_embd = s.needed("n_embd", s.size("n_embd"))?;
    let rate = |key| Result::Ok(s.number(key)?.unwrap_or(0.1)); // default of `transformers`
    let config = TransformerConfig {
        vocab_size: s.needed("vocab_size", s.size("vocab_size"))?,
        context_length: n_positions,
        d_model: n_embd,
        num_layers: s.needed("n_layer", s.size("n_layer"))?,
        num_heads: s.needed("n_head", s.size("n_head"))?,
        d_ff: s.size("n_inner")?.unwrap_or(n_embd.saturating_mul(4)),
        norm_eps: s.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        tie_embeddings: s.flag("tie_word_embeddings", true)?,
        dropout: DropoutRates {
            embedding: rate("embd_pdrop")?,
            attention: rate("attn_pdrop")?,
            residual: rate("resid_pdrop")?,
        },
        gelu: gelu(s, "activation_function")?,
        architecture: Architecture::Gpt2,
        ..TransformerConfig::default()
    };
    s.get("pad_token_id"); // this family's embedding has no padding row
    s.check_rest(&[
        ("n_ctx", json!(n_positions)),
        ("reorder_and_upcast_attn", json!(false)),
        ("scale_attn_by_inverse_layer_idx", json!(false)),
        ("scale_attn_weights", json!(true)),
    ])?;
    Ok(config)
}

pub(super) fn to_json(config: &TransformerConfig, dtype: &str) -> Value {
    json!({
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.d_ff,
        "activation_function": match config.gelu {
            Gelu::Tanh => "gelu_new",
            Gelu::Erf => "gelu",
        },
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": true,
        "scale_attn_by_inverse_layer_idx": false,
        "reorder_and_upcast_attn": false,
        "attn_pdrop": config.dropout.attention,
        "embd_pdrop": config.dropout.embedding,
        "resid_pdrop": config.dropout.residual,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype,
    })
}
