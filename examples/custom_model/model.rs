//! An encoder-decoder: an encoder's block that hides padding, a causal block, and cross-attention to the encoder.

use candle_core::Tensor;
use candle_nn::VarBuilder;
use tallow::attention::{KeyMask, Mask};
use tallow::nn::{self, Architecture::Gpt2, AttentionLayerConfig, ForwardContext, Layer};
use tallow::{Result, ops, probe::in_module};

pub const PADDING: u32 = 0;

pub struct EncoderDecoder {
    tokens: nn::Embedding, // also the head
    positions: nn::Embedding,
    encoder: nn::TransformerBlock,
    decoder: nn::TransformerBlock,
    cross: nn::Attention,
    norms: [nn::LayerNorm; 2],
}

impl EncoderDecoder {
    pub fn new(vocab_size: usize, length: usize, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let config = |mask| AttentionLayerConfig {
            d_model: width,
            num_heads: 4,
            mask,
            ..Default::default()
        };
        let (full, causal) = (config(Mask::Full), config(Mask::Causal));
        let table = |rows, name| nn::Embedding::with_std(rows, width, 0.1, vb.pp(name));
        let norm = |name| nn::LayerNorm::new(width, 1e-5, vb.pp(name));
        let block = nn::TransformerBlock::with_config;
        Ok(Self {
            tokens: table(vocab_size, "tokens")?,
            positions: table(length, "positions")?,
            encoder: block(Gpt2, &full, 4 * width, 1e-5, None, vb.pp("encoder"))?,
            decoder: block(Gpt2, &causal, 4 * width, 1e-5, None, vb.pp("decoder"))?,
            cross: nn::Attention::new(&full, None, vb.pp("cross"))?,
            norms: [norm("ln1")?, norm("ln2")?],
        })
    }

    /// Maps tokens (B, T) to vectors (B, T, D).
    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, tokens.dim(1)? as u32, tokens.device())?;
        let positions = positions.broadcast_as(tokens.shape())?;
        ops::add(
            &self.tokens.forward(tokens)?,
            &self.positions.forward(&positions)?,
        )
    }

    /// Computes the mean loss of the next tokens (B, Tq) that are not padding, from a source (B, Tk), its visible
    /// tokens (B, Tk), and the target's tokens (B, Tq).
    pub fn loss(&self, [source, visible, target, next]: [&Tensor; 4]) -> Result<Tensor> {
        let padding = ForwardContext::padded(KeyMask::padding(visible)?);
        let encode = || self.encoder.forward_with(&self.embed(source)?, &padding);
        let memory = in_module("encoder", encode)?; // (B, Tk, D)
        let x = in_module("decoder", || self.decoder.forward(&self.embed(target)?))?; // (B, Tq, D)
        let [ln1, ln2] = &self.norms;
        let cross = || self.cross.cross(&ln1.forward(&x)?, &memory, &padding);
        let x = ln2.forward(&ops::add(&x, &in_module("cross", cross)?)?)?;
        ops::linear_cross_entropy_ignoring(&x, self.tokens.weight(), next, PADDING.into())
    }
}

impl Layer for EncoderDecoder {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.tokens.visit(&nn::join(path, "tokens"), visit);
        self.positions.visit(&nn::join(path, "positions"), visit);
        self.encoder.visit(&nn::join(path, "encoder"), visit);
        self.decoder.visit(&nn::join(path, "decoder"), visit);
        self.cross.visit(&nn::join(path, "cross"), visit);
        self.norms[0].visit(&nn::join(path, "ln1"), visit);
        self.norms[1].visit(&nn::join(path, "ln2"), visit);
    }
}
