//! Which weight there each one here is, or is a part of.

use crate::Result;
use crate::nn::Architecture;
use candle_core::Tensor;

/// A weight there, as one here is made of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Theirs {
    pub name: String,
    /// Which third of its outputs, where it has those of q, k and v one after another.
    pub third: Option<usize>,
    /// Whether it is (in, out), where ours is (out, in).
    pub transposed: bool,
}

impl Theirs {
    /// One that lies there as here.
    pub fn as_here(name: String) -> Self {
        Self::new(name, Same, true)
    }

    /// `is_matrix` is false of a bias, which has outputs alone.
    fn new(name: String, kind: Kind, is_matrix: bool) -> Self {
        Self {
            name,
            third: match kind {
                Third(third) => Some(third),
                Same | Turned => None,
            },
            transposed: is_matrix && kind != Same,
        }
    }

    /// The shape there of a weight of this shape here.
    pub fn shape(&self, ours: &[usize]) -> Vec<usize> {
        let mut shape = ours.to_vec();
        if let (Some(_), Some(outputs)) = (self.third, shape.first_mut()) {
            *outputs = outputs.saturating_mul(3);
        }
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// The weight here, of the one there.
    pub fn part_of(&self, theirs: &Tensor) -> Result<Tensor> {
        let whole = match self.transposed {
            true => theirs.t()?,
            false => theirs.clone(),
        };
        let part = match self.third {
            Some(third) => {
                let outputs = whole.dim(0)? / 3;
                whole.narrow(0, third * outputs, outputs)?
            }
            None => whole,
        };
        // Without the rest, which a view would keep alive.
        match self.transposed || self.third.is_some() {
            true => Ok(part.force_contiguous()?),
            false => Ok(part),
        }
    }

    /// The weight there, of those here: one, or three.
    pub fn joined(&self, ours: &[Tensor]) -> Result<Tensor> {
        let whole = match ours {
            [one] => one.clone(),
            thirds => Tensor::cat(thirds, 0)?,
        };
        match self.transposed {
            true => Ok(whole.t()?.contiguous()?),
            false => Ok(whole),
        }
    }
}

/// A layer: its name here, its name there, and how its weight lies there.
type Row = (&'static str, &'static str, Kind);

/// How a layer's weights lie there.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// As here.
    Same,
    /// (in, out).
    Turned,
    /// The same, and this third of the outputs.
    Third(usize),
}
use Kind::{Same, Third, Turned};

/// The names of an architecture's weights.
pub(super) struct Names {
    /// What all names but the head's begin with, except in files of a base model, which leave it out.
    prefix: &'static str,
    /// What blocks begin with, after it.
    blocks: &'static str,
    /// Outside of blocks.
    ends: &'static [Row],
    /// A block's.
    parts: &'static [Row],
    /// How names of tables end that older files have beside weights: of angles, or of what is masked.
    tables: &'static [&'static str],
}

const LLAMA: Names = Names {
    prefix: "model.",
    blocks: "layers.",
    ends: &[
        ("token_embeddings", "embed_tokens", Same),
        ("ln_final", "norm", Same),
    ],
    parts: &[
        ("ln1", "input_layernorm", Same),
        ("attn.q_proj", "self_attn.q_proj", Same),
        ("attn.k_proj", "self_attn.k_proj", Same),
        ("attn.v_proj", "self_attn.v_proj", Same),
        ("attn.output_proj", "self_attn.o_proj", Same),
        ("attn.q_norm", "self_attn.q_norm", Same),
        ("attn.k_norm", "self_attn.k_norm", Same),
        ("ln2", "post_attention_layernorm", Same),
        ("ffn.w1", "mlp.gate_proj", Same),
        ("ffn.w2", "mlp.down_proj", Same),
        ("ffn.w3", "mlp.up_proj", Same),
    ],
    tables: &["rotary_emb.inv_freq"],
};

const GEMMA2: Names = Names {
    parts: &[
        ("ln1", "input_layernorm", Same),
        ("ln1_post", "post_attention_layernorm", Same),
        ("attn.q_proj", "self_attn.q_proj", Same),
        ("attn.k_proj", "self_attn.k_proj", Same),
        ("attn.v_proj", "self_attn.v_proj", Same),
        ("attn.output_proj", "self_attn.o_proj", Same),
        ("ln2", "pre_feedforward_layernorm", Same),
        ("ln2_post", "post_feedforward_layernorm", Same),
        ("ffn.w1", "mlp.gate_proj", Same),
        ("ffn.w2", "mlp.down_proj", Same),
        ("ffn.w3", "mlp.up_proj", Same),
    ],
    ..LLAMA
};

const GPT2: Names = Names {
    prefix: "transformer.",
    blocks: "h.",
    ends: &[
        ("token_embeddings", "wte", Same),
        ("position_embeddings", "wpe", Same),
        ("ln_final", "ln_f", Same),
    ],
    parts: &[
        ("ln1", "ln_1", Same),
        ("attn.q_proj", "attn.c_attn", Third(0)),
        ("attn.k_proj", "attn.c_attn", Third(1)),
        ("attn.v_proj", "attn.c_attn", Third(2)),
        ("attn.output_proj", "attn.c_proj", Turned),
        ("ln2", "ln_2", Same),
        ("ffn.w1", "mlp.c_fc", Turned),
        ("ffn.w2", "mlp.c_proj", Turned),
    ],
    tables: &[".attn.bias", ".attn.masked_bias"],
};

/// The head, in all of them and here.
pub(super) const HEAD: &str = "lm_head.weight";

impl Names {
    pub fn of(architecture: Architecture) -> &'static Self {
        match architecture {
            Architecture::Llama => &LLAMA,
            Architecture::Gpt2 => &GPT2,
            Architecture::Gemma2 => &GEMMA2,
        }
    }

    /// `model.layers.3.mlp.up_proj.weight` of `layers.3.ffn.w3.weight`.
    pub fn theirs(&self, ours: &str) -> Option<Theirs> {
        if ours == HEAD {
            return Some(Theirs::as_here(ours.into()));
        }
        let prefix = self.prefix;
        let (layer, tensor) = ours.rsplit_once('.')?;
        let is_matrix = tensor == "weight";
        if let Some((_, theirs, kind)) = self.ends.iter().find(|(name, ..)| *name == layer) {
            let name = format!("{prefix}{theirs}.{tensor}");
            return Some(Theirs::new(name, *kind, is_matrix));
        }
        let (number, part) = in_block(layer.strip_prefix("layers.")?)?;
        let (_, theirs, kind) = self.parts.iter().find(|(name, ..)| *name == part)?;
        let name = format!("{prefix}{}{number}.{theirs}.{tensor}", self.blocks);
        Some(Theirs::new(name, *kind, is_matrix))
    }

    /// The weights here that one there is, or has: none if it is not the model's.
    pub fn ours(&self, theirs: &str) -> Vec<String> {
        if theirs == HEAD {
            return vec![theirs.into()];
        }
        let found = || {
            let name = theirs.strip_prefix(self.prefix).unwrap_or(theirs);
            let (layer, tensor) = name.rsplit_once('.')?;
            let all = |rows: &[Row], layer: &str, before: &str| {
                let rows = rows.iter().filter(|(_, name, _)| *name == layer);
                let names = rows.map(|(ours, ..)| format!("{before}{ours}.{tensor}"));
                names.collect()
            };
            match layer.strip_prefix(self.blocks) {
                None => Some(all(self.ends, layer, "")),
                Some(block) => {
                    let (number, part) = in_block(block)?;
                    Some(all(self.parts, part, &format!("layers.{number}.")))
                }
            }
        };
        found().unwrap_or_default()
    }

    /// Whether a tensor there is no weight, but a table that the library once wrote beside them.
    pub fn is_table(&self, theirs: &str) -> bool {
        self.tables.iter().any(|end| theirs.ends_with(end))
    }
}

/// `3` and `mlp.up_proj` of `3.mlp.up_proj`.
fn in_block(layer: &str) -> Option<(usize, &str)> {
    let (number, part) = layer.split_once('.')?;
    Some((number.parse().ok()?, part))
}
