//! GPT-2, built only from this crate's layers and ops: LayerNorm with biases, learned positions, GELU by tanh,
//! projections with biases, and a head tied to the embedding. Names are those of `transformers`' `GPT2LMHeadModel`.

use candle_core::{D, Tensor};
use candle_nn::VarBuilder;
use tallow::Result;
use tallow::attention::{Algorithm, AttentionConfig, Mask};
use tallow::nn::{Embedding, Layer, LayerNorm, Linear};
use tallow::ops::{self, Gelu};
use tallow::probe::{in_module, module};

const EPS: f64 = 1e-5;

/// The standard deviation of initial tables. With 1, the head, which uses a table, would give logits in the tens.
const STD: f64 = 0.02;

/// The sizes of a GPT-2, and its attention algorithm.
#[derive(Clone, Debug)]
pub struct Gpt2Config {
    pub vocab_size: usize,
    pub n_positions: usize,
    pub n_embd: usize,
    pub n_layer: usize,
    pub n_head: usize,
    pub attention: Algorithm,
}

struct Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    attn_c_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    mlp_c_proj: Linear,
}

impl Block {
    fn new(width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            ln_1: LayerNorm::new(width, EPS, vb.pp("ln_1"))?,
            c_attn: Linear::with_bias(width, 3 * width, vb.pp("attn.c_attn"))?,
            attn_c_proj: Linear::with_bias(width, width, vb.pp("attn.c_proj"))?,
            ln_2: LayerNorm::new(width, EPS, vb.pp("ln_2"))?,
            c_fc: Linear::with_bias(width, 4 * width, vb.pp("mlp.c_fc"))?,
            mlp_c_proj: Linear::with_bias(4 * width, width, vb.pp("mlp.c_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor, config: &Gpt2Config) -> Result<Tensor> {
        let normed = in_module("ln_1", || self.ln_1.forward(x))?; // (B, T, D), as all here
        let x = &ops::add(x, &in_module("attn", || self.attend(&normed, config))?)?;
        let normed = in_module("ln_2", || self.ln_2.forward(x))?;
        ops::add(x, &in_module("mlp", || self.feed(&normed))?)
    }

    fn attend(&self, x: &Tensor, config: &Gpt2Config) -> Result<Tensor> {
        let joined = in_module("c_attn", || self.c_attn.forward(x))?; // (B, T, 3 D)
        let (width, heads) = (config.n_embd, config.n_head);
        let part = |i| ops::split_heads(&joined.narrow(D::Minus1, i * width, width)?, heads);
        let (q, k, v) = (part(0)?, part(1)?, part(2)?); // (B, H, T, Dh)
        let causal = AttentionConfig {
            mask: Mask::Causal,
            ..Default::default()
        };
        let out = ops::merge_heads(&config.attention.attend(&q, &k, &v, &causal)?)?;
        in_module("c_proj", || self.attn_c_proj.forward(&out))
    }

    fn feed(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = in_module("c_fc", || self.c_fc.forward(x))?; // (B, T, 4 D)
        let hidden = ops::gelu(&hidden, Gelu::Tanh)?;
        in_module("c_proj", || self.mlp_c_proj.forward(&hidden))
    }
}

pub struct Gpt2 {
    config: Gpt2Config,
    wte: Embedding,
    wpe: Embedding,
    h: Vec<Block>,
    ln_f: LayerNorm,
}

impl Gpt2 {
    pub fn new(config: Gpt2Config, vb: VarBuilder<'_>) -> Result<Self> {
        let width = config.n_embd;
        let block = |i| Block::new(width, vb.pp("h").pp(i));
        Ok(Self {
            wte: Embedding::with_std(config.vocab_size, width, STD, vb.pp("wte"))?,
            wpe: Embedding::with_std(config.n_positions, width, STD, vb.pp("wpe"))?,
            h: (0..config.n_layer).map(block).collect::<Result<_>>()?,
            ln_f: LayerNorm::new(width, EPS, vb.pp("ln_f"))?,
            config,
        })
    }

    /// Computes the input of the head, (B, T, D), from tokens (B, T).
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, length) = tokens.dims2()?;
        let positions = Tensor::arange(0, length as u32, tokens.device())?;
        let positions = positions.broadcast_as(tokens.shape())?; // (B, T)
        let words = in_module("wte", || self.wte.forward(tokens))?;
        let mut x = ops::add(&words, &in_module("wpe", || self.wpe.forward(&positions))?)?;
        for (i, block) in self.h.iter().enumerate() {
            let _range = module(|| format!("h.{i}"));
            x = block.forward(&x, &self.config)?;
        }
        in_module("ln_f", || self.ln_f.forward(&x))
    }

    /// Computes logits (B, T, V) from tokens (B, T).
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        ops::linear(&self.hidden(tokens)?, self.wte.weight())
    }

    /// Computes the mean cross-entropy loss of targets (B, T).
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        ops::linear_cross_entropy(&self.hidden(tokens)?, self.wte.weight(), targets)
    }
}

impl Layer for Block {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        let layers: [(&str, &dyn Layer); 6] = [
            ("ln_1", &self.ln_1),
            ("attn.c_attn", &self.c_attn),
            ("attn.c_proj", &self.attn_c_proj),
            ("ln_2", &self.ln_2),
            ("mlp.c_fc", &self.c_fc),
            ("mlp.c_proj", &self.mlp_c_proj),
        ];
        for (name, layer) in layers {
            layer.visit(&format!("{path}.{name}"), visit);
        }
    }
}

impl Layer for Gpt2 {
    fn visit(&self, _: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.wte.visit("wte", visit);
        self.wpe.visit("wpe", visit);
        for (i, block) in self.h.iter().enumerate() {
            block.visit(&format!("h.{i}"), visit);
        }
        self.ln_f.visit("ln_f", visit);
    }
}
