//! Mapping between weights in the files and weights of this crate.

use crate::Result;
use crate::nn::Architecture;
use candle_core::Tensor;

/// A weight in the files, and how one of this crate is made from it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FileWeight {
    pub name: String,
    /// Index of its third of the outputs, if the tensor has those of q, k and v one after another.
    pub third: Option<usize>,
    /// Whether it is stored (in, out), while this crate has (out, in).
    pub transposed: bool,
}

impl FileWeight {
    /// A weight with the same layout in the files.
    pub fn same(name: String) -> Self {
        Self::new(name, Same, true)
    }

    /// `is_matrix` is false for a bias, which has outputs only.
    fn new(name: String, kind: Kind, is_matrix: bool) -> Self {
        Self {
            name,
            third: match kind {
                TransposedThird(third) => Some(third),
                Same | Transposed => None,
            },
            transposed: is_matrix && kind != Same,
        }
    }

    /// Returns the shape in the files of a weight with this crate's shape.
    pub fn shape(&self, own_shape: &[usize]) -> Vec<usize> {
        let mut shape = own_shape.to_vec();
        if let (Some(_), Some(outputs)) = (self.third, shape.first_mut()) {
            *outputs = outputs.saturating_mul(3);
        }
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// Returns this crate's weight, from the tensor in the files.
    pub fn own_weight(&self, file_tensor: &Tensor) -> Result<Tensor> {
        let full = match self.transposed {
            true => file_tensor.t()?,
            false => file_tensor.clone(),
        };
        let part = match self.third {
            Some(third) => {
                let outputs = full.dim(0)? / 3;
                full.narrow(0, third * outputs, outputs)?
            }
            None => full,
        };
        // A copy: a view would keep the whole tensor alive.
        match self.transposed || self.third.is_some() {
            true => Ok(part.force_contiguous()?),
            false => Ok(part),
        }
    }

    /// Returns the tensor in the files, from one or three weights of this crate.
    pub fn file_tensor(&self, own_weights: &[Tensor]) -> Result<Tensor> {
        let full = match own_weights {
            [one] => one.clone(),
            thirds => Tensor::cat(thirds, 0)?,
        };
        match self.transposed {
            true => Ok(full.t()?.contiguous()?),
            false => Ok(full),
        }
    }
}

/// A layer: its name in this crate, its name in the files, and the layout of its weight in the files.
type Row = (&'static str, &'static str, Kind);

/// The layout of a layer's weights in the files.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Stored as in this crate.
    Same,
    /// Transposed: (in, out).
    Transposed,
    /// Transposed, and only this third of the outputs.
    TransposedThird(usize),
}
use Kind::{Same, Transposed, TransposedThird};

pub(super) struct Names {
    /// The prefix of all names but the head's; files of a base model omit it.
    prefix: &'static str,
    /// The prefix of a block's names, after `prefix`.
    blocks: &'static str,
    /// Layers outside of blocks.
    ends: &'static [Row],
    /// Layers of a block.
    parts: &'static [Row],
    /// Suffixes of tables that older files contain in addition to weights: of angles, or of masks.
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
        ("attn.q_proj", "attn.c_attn", TransposedThird(0)),
        ("attn.k_proj", "attn.c_attn", TransposedThird(1)),
        ("attn.v_proj", "attn.c_attn", TransposedThird(2)),
        ("attn.output_proj", "attn.c_proj", Transposed),
        ("ln2", "ln_2", Same),
        ("ffn.w1", "mlp.c_fc", Transposed),
        ("ffn.w2", "mlp.c_proj", Transposed),
    ],
    tables: &[".attn.bias", ".attn.masked_bias"],
};

/// The head, under the same name in all files and in this crate.
pub(super) const HEAD: &str = "lm_head.weight";

impl Names {
    pub fn of(architecture: Architecture) -> &'static Self {
        match architecture {
            Architecture::Llama => &LLAMA,
            Architecture::Gpt2 => &GPT2,
            Architecture::Gemma2 => &GEMMA2,
        }
    }

    /// Returns the weight in the files: `model.layers.3.mlp.up_proj.weight` for `layers.3.ffn.w3.weight`.
    pub fn file_weight(&self, own_name: &str) -> Option<FileWeight> {
        if own_name == HEAD {
            return Some(FileWeight::same(own_name.into()));
        }
        let prefix = self.prefix;
        let (layer, tensor) = own_name.rsplit_once('.')?;
        let is_matrix = tensor == "weight";
        if let Some((_, file_layer, kind)) = self.ends.iter().find(|(name, ..)| *name == layer) {
            let name = format!("{prefix}{file_layer}.{tensor}");
            return Some(FileWeight::new(name, *kind, is_matrix));
        }
        let (number, part) = in_block(layer.strip_prefix("layers.")?)?;
        let (_, file_layer, kind) = self.parts.iter().find(|(name, ..)| *name == part)?;
        let name = format!("{prefix}{}{number}.{file_layer}.{tensor}", self.blocks);
        Some(FileWeight::new(name, *kind, is_matrix))
    }

    /// Returns the weights of this crate that a tensor in the files contains; empty if it is not the model's.
    pub fn own_names(&self, file_name: &str) -> Vec<String> {
        if file_name == HEAD {
            return vec![file_name.into()];
        }
        let found = || {
            let name = file_name.strip_prefix(self.prefix).unwrap_or(file_name);
            let (layer, tensor) = name.rsplit_once('.')?;
            let all = |rows: &[Row], layer: &str, before: &str| {
                let rows = rows.iter().filter(|(_, name, _)| *name == layer);
                let names = rows.map(|(own_layer, ..)| format!("{before}{own_layer}.{tensor}"));
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

    /// Returns whether a tensor in the files is a table that older versions of `transformers` wrote, not a weight.
    pub fn is_table(&self, file_name: &str) -> bool {
        self.tables.iter().any(|end| file_name.ends_with(end))
    }
}

/// Splits `3.mlp.up_proj` into `3` and `mlp.up_proj`.
fn in_block(layer: &str) -> Option<(usize, &str)> {
    let (number, part) = layer.split_once('.')?;
    Some((number.parse().ok()?, part))
}
