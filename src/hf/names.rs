//! What a weight is called here, and there.

/// The names of a block's parts.
const PARTS: [(&str, &str); 11] = [
    ("ln1", "input_layernorm"),
    ("attn.q_proj", "self_attn.q_proj"),
    ("attn.k_proj", "self_attn.k_proj"),
    ("attn.v_proj", "self_attn.v_proj"),
    ("attn.output_proj", "self_attn.o_proj"),
    ("attn.q_norm", "self_attn.q_norm"),
    ("attn.k_norm", "self_attn.k_norm"),
    ("ln2", "post_attention_layernorm"),
    ("ffn.w1", "mlp.gate_proj"),
    ("ffn.w2", "mlp.down_proj"),
    ("ffn.w3", "mlp.up_proj"),
];

/// The names outside of blocks.
const ENDS: [(&str, &str); 3] = [
    ("token_embeddings.weight", "model.embed_tokens.weight"),
    ("ln_final.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
];

/// `model.layers.3.mlp.up_proj.weight` of `layers.3.ffn.w3.weight`.
pub(super) fn theirs(ours: &str) -> Option<String> {
    if let Some((_, theirs)) = ENDS.iter().find(|(name, _)| *name == ours) {
        return Some((*theirs).into());
    }
    let (number, part, kind) = in_block(ours.strip_prefix("layers.")?)?;
    let (_, theirs) = PARTS.iter().find(|(name, _)| *name == part)?;
    Some(format!("model.layers.{number}.{theirs}.{kind}"))
}

/// The other way.
pub(super) fn ours(theirs: &str) -> Option<String> {
    if let Some((ours, _)) = ENDS.iter().find(|(_, name)| *name == theirs) {
        return Some((*ours).into());
    }
    let (number, part, kind) = in_block(theirs.strip_prefix("model.layers.")?)?;
    let (ours, _) = PARTS.iter().find(|(_, name)| *name == part)?;
    Some(format!("layers.{number}.{ours}.{kind}"))
}

/// `3`, `mlp.up_proj` and `weight` of `3.mlp.up_proj.weight`.
fn in_block(name: &str) -> Option<(usize, &str, &str)> {
    let (number, rest) = name.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    Some((number.parse().ok()?, part, kind))
}
