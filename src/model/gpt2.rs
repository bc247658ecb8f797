//! Validation of GPT-2 configurations.

use super::TransformerConfig;
use crate::{Error, Result};

/// Returns an error for settings that [`Architecture::Gpt2`](crate::nn::Architecture::Gpt2) does not support.
pub(super) fn check(config: &TransformerConfig) -> Result<()> {
    const NO_ROTATION: &str = "GPT-2 learns its positions and rotates nothing; leave it out";
    let preset = TransformerConfig::default();
    let (heads, width) = (config.num_heads, config.d_model);
    let text = |setting: &dyn std::fmt::Debug| format!("{setting:?}");
    let settings = [
        (
            "rope_theta",
            [&config.rope_theta, &preset.rope_theta].map(|x| text(x)),
            NO_ROTATION,
        ),
        (
            "rope_pairs",
            [&config.rope_pairs, &preset.rope_pairs].map(|x| text(x)),
            NO_ROTATION,
        ),
        (
            "rope_scaling",
            [&config.rope_scaling, &preset.rope_scaling].map(|x| text(x)),
            NO_ROTATION,
        ),
        (
            "qkv_bias",
            [config.qkv_bias, false].map(|x| text(&x)),
            "all maps of GPT-2 but the head have biases; leave it out",
        ),
        (
            "output_bias",
            [config.output_bias, false].map(|x| text(&x)),
            "all maps of GPT-2 but the head have biases; leave it out",
        ),
        (
            "padding_id",
            [config.padding_id, None].map(|x| text(&x)),
            "GPT-2 trains the embedding of every token; leave it out",
        ),
        (
            "qk_norm",
            [config.qk_norm, false].map(|x| text(&x)),
            "GPT-2 normalises no heads; leave it out",
        ),
        (
            "sliding_window",
            [config.sliding_window, None].map(|x| text(&x)),
            "every token of GPT-2 attends to all before it; leave it out",
        ),
        (
            "attention_scale",
            [config.attention_scale, None].map(|x| text(&x)),
            "GPT-2's is 1 / sqrt(head_dim); leave it out",
        ),
        (
            "attention_soft_cap",
            [config.attention_soft_cap, None].map(|x| text(&x)),
            "GPT-2 caps no scores; leave it out",
        ),
        (
            "logit_soft_cap",
            [config.logit_soft_cap, None].map(|x| text(&x)),
            "GPT-2 caps no logits; leave it out",
        ),
        (
            "num_kv_heads",
            [config.num_kv_heads(), heads].map(|x| text(&x)),
            "in GPT-2 each head of q has its own k and v; leave it out",
        ),
        (
            "head_dim",
            [config.head_dim(), width / heads].map(|x| text(&x)),
            "in GPT-2 it is d_model / num_heads; leave it out",
        ),
    ];
    for (field, [got, wanted], hint) in settings {
        if got != wanted {
            let expected = format!("{wanted} where architecture is Gpt2");
            return Err(Error::config("TransformerConfig", field, got).must_be(expected, hint));
        }
    }
    Ok(())
}
