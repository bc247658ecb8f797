//! The transformer language model.

use super::{TransformerConfig, depth};
use crate::attention::Algorithm;
use crate::nn::{
    self, Architecture, Checkpointing, DropoutRates, Embedding, ForwardContext, Layer, Linear,
    Norm, RotaryConfig, RotaryEmbedding, TransformerBlock, join,
};
use crate::ops::CrossEntropyConfig;
use crate::probe::{self, in_module};
use crate::{Error, Result, graph, hardware, ops};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// The name of the head, a module and a weight.
pub(crate) const HEAD: &str = "lm_head";

/// A pre-norm transformer language model: token embedding, blocks, a final norm and an output head.
///
/// It has the weight names of Stanford CS336's model, whose checkpoints load. By its
/// [configuration](TransformerConfig) it is also a model of the Llama, Qwen, Mistral, GPT-2 or Gemma 2 families, under
/// the same names:
/// `token_embeddings.weight`, `layers.{i}.attn.{q,k,v,output}_proj.weight`, `layers.{i}.ffn.{w1,w2,w3}.weight`,
/// `layers.{i}.{ln1,ln2}.weight`, `ln_final.weight`, `lm_head.weight` unless it is tied;
/// `attn.{q,k,v,output}_proj.bias` and `attn.{q,k}_norm.weight` where the configuration has them.
/// [GPT-2](crate::nn::Architecture::Gpt2) has `position_embeddings.weight`, no `ffn.w3`, and a `bias` in every norm and
/// linear layer except the head; [Gemma 2](crate::nn::Architecture::Gemma2) has
/// `layers.{i}.{ln1_post,ln2_post}.weight`.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::model::{TransformerConfig, TransformerLM};
///
/// let device = tallow::device("cpu")?;
/// let config = TransformerConfig {
///     vocab_size: 50, context_length: 8, d_model: 16, num_layers: 2, num_heads: 2, d_ff: 32,
///     ..Default::default()
/// };
/// let model = TransformerLM::new(&config, 0, &device)?;
/// let tokens = Tensor::zeros((3, 8), DType::U32, &device)?; // (B, T)
/// assert_eq!(model.forward(&tokens)?.dims(), [3, 8, 50]); // (B, T, V)
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TransformerLM {
    config: TransformerConfig,
    attention: Algorithm,
    checkpointing: Checkpointing,
    token_embeddings: Embedding,
    /// (context_length, D), if positions are learned.
    position_embeddings: Option<Embedding>,
    /// sqrt(D), (1), if embeddings are multiplied by it.
    embedding_scale: Option<Tensor>,
    layers: Vec<TransformerBlock>,
    ln_final: Norm,
    lm_head: Linear,
    device: Device,
    origin: Option<Arc<Origin>>,
}

/// Files of the folder that a model was loaded from, to be saved with it.
#[derive(Debug)]
pub(crate) struct Origin {
    /// The text of `config.json`.
    pub config: String,
    /// Its keys that were ignored.
    pub ignored: Vec<String>,
    /// The content of `generation_config.json`.
    pub generation: Option<Vec<u8>>,
}

impl TransformerLM {
    /// Creates a model in f32 with weights drawn from `seed`. The same seed gives the same bits.
    ///
    /// # Errors
    /// A configuration that [`TransformerConfig::validate`] refuses.
    pub fn new(config: &TransformerConfig, seed: u64, device: &Device) -> Result<Self> {
        config.validate()?; // before the builder draws anything
        check_available(config, device)?;
        Self::from_var_builder(config, nn::seeded(seed, DType::F32, device))
    }

    /// Creates a model with parameters from the builder, in its dtype and on its device.
    ///
    /// Parameters that the builder keeps as variables (a `VarMap`) are shared with it.
    ///
    /// # Errors
    /// A configuration that [`TransformerConfig::validate`] refuses; a dtype that is not a float; errors of the
    /// builder.
    pub fn from_var_builder(config: &TransformerConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate()?;
        check_float(vb.dtype())?;
        Self::for_trace(config, vb)
    }

    /// Creates a model of [meta weights](graph::weights()) in f32, for plans and traces.
    ///
    /// # Errors
    /// A configuration that [`TransformerConfig::validate`] refuses.
    pub fn meta(config: &TransformerConfig) -> Result<Self> {
        Self::from_var_builder(config, graph::weights(DType::F32))
    }

    /// Creates a model for a trace: like [`from_var_builder`](Self::from_var_builder), with any context length.
    pub(crate) fn for_trace(config: &TransformerConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let architecture = config.architecture;
        let rotary = match architecture {
            Architecture::Llama | Architecture::Gemma2 => {
                let rotary = RotaryConfig {
                    theta: config.rope_theta,
                    head_dim: config.head_dim(),
                    max_length: config.context_length,
                    pairs: config.rope_pairs,
                    scaling: config.rope_scaling,
                };
                Some(RotaryEmbedding::with_config(
                    &rotary,
                    vb.dtype(),
                    vb.device(),
                )?)
            }
            Architecture::Gpt2 => None,
        };
        let eps = config.norm_eps;
        let layers = (0..config.num_layers).map(|i| {
            let block = TransformerBlock::with_config(
                architecture,
                &config.self_attention(i),
                config.d_ff,
                eps,
                rotary.clone(),
                vb.pp("layers").pp(i),
            );
            let block = block?.with_gelu(config.gelu);
            Ok(block.with_dropout(config.dropout))
        });
        let (vocab, width) = (config.vocab_size, config.d_model);
        let table = |rows: usize, name: &str| match architecture {
            Architecture::Llama => Embedding::new(rows, width, vb.pp(name)),
            Architecture::Gpt2 | Architecture::Gemma2 => {
                Embedding::with_std(rows, width, 0.02, vb.pp(name))
            }
        };
        let token_embeddings = table(vocab, "token_embeddings")?.with_padding(config.padding_id);
        let positions = || table(config.context_length, "position_embeddings");
        let position_embeddings = config.is_gpt2().then(positions).transpose()?;
        let embedding_scale = match architecture {
            Architecture::Gemma2 => {
                let scale = Tensor::new(&[(width as f64).sqrt()], vb.device())?;
                Some(scale.to_dtype(vb.dtype())?)
            }
            Architecture::Llama | Architecture::Gpt2 => None,
        };
        let layers: Vec<TransformerBlock> = layers.collect::<Result<_>>()?;
        let ln_final = Norm::new(architecture, width, eps, vb.pp("ln_final"))?;
        let lm_head = match config.tie_embeddings {
            true => Linear::from_weights(token_embeddings.weight().clone(), None)?,
            false => Linear::new(width, vocab, vb.pp(HEAD))?,
        };
        Ok(Self {
            config: config.clone(),
            attention: Algorithm::default(),
            checkpointing: Checkpointing::default(),
            token_embeddings,
            position_embeddings,
            embedding_scale,
            layers,
            ln_final,
            lm_head,
            device: vb.device().clone(),
            origin: None,
        })
    }

    /// Remembers the folder that the model was loaded from.
    pub(crate) fn with_origin(self, origin: Origin) -> Self {
        Self {
            origin: Some(Arc::new(origin)),
            ..self
        }
    }

    /// Returns the files of the folder that the model was loaded from.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        self.origin.as_deref()
    }

    /// Freezes the weights that `is_frozen` selects by name, as [`nn::freeze()`] does. The trained ones are shared. A
    /// tied head is frozen with the embedding.
    ///
    /// ```
    /// use tallow::model::{TransformerConfig, TransformerLM};
    ///
    /// let config = TransformerConfig {
    ///     vocab_size: 50, context_length: 8, d_model: 16, num_layers: 2, num_heads: 2, d_ff: 32,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &tallow::device("cpu")?)?;
    /// let model = model.freeze(|name| name != "lm_head.weight" && !name.starts_with("layers.1."))?;
    /// assert_eq!(model.parameters().len(), 1 + 9); // of the head and of the last block
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Order`] for sharded weights.
    pub fn freeze(self, is_frozen: impl Fn(&str) -> bool + Send + Sync) -> Result<Self> {
        let vb = nn::freeze(nn::from_weights(self.weights()), is_frozen);
        let model = Self::for_trace(&self.config, vb)?.with_attention(self.attention)?;
        Ok(Self {
            checkpointing: self.checkpointing,
            origin: self.origin,
            ..model
        })
    }

    /// Sets the activation checkpointing of the blocks; a new model has none. Results do not depend on it. The
    /// parameters are shared.
    pub fn with_checkpointing(self, checkpointing: Checkpointing) -> Self {
        Self {
            checkpointing,
            ..self
        }
    }

    /// Sets the algorithm of attention; that of a new model is naive. The choice changes results only by rounding. The
    /// parameters are shared.
    ///
    /// # Errors
    /// Those of [`TransformerConfig::check_attention`].
    pub fn with_attention(self, attention: Algorithm) -> Result<Self> {
        self.config.check_attention(attention)?;
        let layers = self.layers.into_iter();
        let layers = layers.map(|layer| layer.with_attention(attention));
        Ok(Self {
            layers: layers.collect(),
            attention,
            ..self
        })
    }

    /// Sets the dropout rates. The parameters are shared.
    ///
    /// # Errors
    /// A rate outside [0, 1).
    pub fn with_dropout(mut self, rates: DropoutRates) -> Result<Self> {
        rates.check("TransformerConfig")?;
        self.config.dropout = rates;
        let layers = self.layers.into_iter();
        let layers = layers.map(|layer| layer.with_dropout(rates));
        Ok(Self {
            layers: layers.collect(),
            ..self
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Returns the algorithm of attention.
    pub fn attention(&self) -> Algorithm {
        self.attention
    }

    /// Returns the activation checkpointing.
    pub fn checkpointing(&self) -> Checkpointing {
        self.checkpointing
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns every trained weight with its name, in a fixed order: embeddings, blocks, final norm, head. A tied
    /// weight is listed once, under its first name.
    pub fn parameters(&self) -> Vec<(String, Var)> {
        Layer::parameters(self)
    }

    /// Returns the names of the frozen weights.
    pub(crate) fn frozen_weights(&self) -> Vec<String> {
        let weights = self.weights().into_iter();
        let frozen = weights.filter(|(_, weight)| !weight.is_variable());
        frozen.map(|(name, _)| name).collect()
    }

    /// Returns the number of trained parameters; a tied weight is counted once.
    pub fn num_parameters(&self) -> usize {
        let parameters = self.parameters().into_iter();
        parameters.map(|(_, var)| var.elem_count()).sum()
    }

    /// Returns the layer from [hidden states](Self::hidden_states) to logits, before a [soft
    /// cap](TransformerConfig::logit_soft_cap). Its weight (V, D) is the table of the embedding if they are tied.
    pub fn head(&self) -> &Linear {
        &self.lm_head
    }

    /// Maps tokens (B, T), u32 or i64, to logits (B, T, V), in the dtype of the head's linear layer: that of the
    /// weights, or half precision in an autocast region.
    ///
    /// # Errors
    /// Tokens of another rank or dtype; an empty batch or sequence; a T beyond `context_length`; an id outside the
    /// vocabulary (checked on the host before any kernel runs). With gradient tracking, more blocks than this thread's
    /// stack holds in backward (8 KiB each: 256 on a thread of 2 MiB, 1,024 on one of 8 MiB); planned steps and
    /// forwards without a graph have no such limit.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.forward_with(tokens, &ForwardContext::default())
    }

    /// Maps tokens (B, T) to logits (B, T, V) with padding, score bias, packed documents or dropout.
    ///
    /// A document attends only to itself. Learned positions are counted through the whole sequence. Dropout of the
    /// embeddings uses the site of the context's key, that of block i the sites 4 i + 1 to 4 i + 3 after it.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward); first keys, a key mask or a score bias of another shape.
    pub fn forward_with(&self, tokens: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let hidden = self.hidden_states(tokens, context)?; // (B, T, D)
        in_module(HEAD, || self.logits(&hidden)) // (B, T, V)
    }

    /// Maps hidden states (B, T, D) to logits (B, T, V), with the soft cap.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.lm_head.forward(hidden)?;
        match self.config.logit_soft_cap {
            None => Ok(logits),
            Some(cap) => ops::soft_cap(&logits, cap),
        }
    }

    /// Computes the mean cross-entropy, a scalar, of tokens and targets (B, T), u32 or i64.
    ///
    /// It equals [`ops::cross_entropy`](ops::cross_entropy()) of [`forward`](Self::forward) and needs less time and
    /// memory: head and loss are one op, [`ops::linear_cross_entropy`](ops::linear_cross_entropy()), unless the logits
    /// have a [soft cap](TransformerConfig::logit_soft_cap).
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward); targets of another shape than the tokens, or outside the vocabulary.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.loss_with(tokens, targets, &ForwardContext::default(), None)
    }

    /// Computes the loss with packed documents or dropout ([`forward_with`](Self::forward_with)). Targets that equal
    /// `ignore` are left out of the mean (for example -100 in i64), as the first token of each packed document should
    /// be.
    ///
    /// In a plan, with first keys and a dropout key as inputs of each run:
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::attention::{Algorithm, FirstKeys};
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::nn::{DropoutRates, ForwardContext};
    /// use tallow::ops::DropoutKey;
    /// use tallow::optim::{AdamWConfig, Optimizer};
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 10, context_length: 8, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///     dropout: DropoutRates { residual: 0.1, ..Default::default() },
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?.with_attention(Algorithm::Flash)?;
    /// let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
    /// let mut step = Step::new(&optimizer, &StepConfig::default(), |inputs| {
    ///     let context = ForwardContext {
    ///         first_keys: Some(FirstKeys::new(&inputs.get("first_keys")?)?),
    ///         dropout: Some(DropoutKey::input("key")?),
    ///         ..Default::default()
    ///     };
    ///     model.loss_with(&inputs.get("tokens")?, &inputs.get("targets")?, &context, Some(0))
    /// })?;
    ///
    /// let text = Tensor::new(&[[7u32, 9, 3, 0, 8, 8, 5, 0, 6], [4, 4, 0, 1, 2, 3, 4, 5, 6]], &device)?;
    /// let (tokens, targets) = (text.narrow(1, 0, 8)?, text.narrow(1, 1, 8)?);
    /// // Documents end with 0, which nothing has to predict.
    /// let first_keys = FirstKeys::of_documents(&tokens, 0)?;
    /// let context = ForwardContext {
    ///     first_keys: Some(first_keys), dropout: Some(DropoutKey::new(42, 0)?),
    ///     ..Default::default()
    /// };
    /// let eager = model.loss_with(&tokens, &targets, &context, Some(0))?.to_scalar::<f32>()?;
    /// let (first_keys, key) = (context.first_keys.unwrap(), context.dropout.unwrap());
    /// let inputs = [
    ///     ("tokens", &tokens), ("targets", &targets),
    ///     ("first_keys", first_keys.tensor()), ("key", key.tensor()),
    /// ];
    /// let loss = step.run(&mut optimizer, inputs)?;
    /// assert!((loss - eager).abs() < 1e-5);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`loss`](Self::loss) and [`forward_with`](Self::forward_with); targets that are all ignored.
    pub fn loss_with(
        &self,
        tokens: &Tensor,
        targets: &Tensor,
        context: &ForwardContext,
        ignore: Option<i64>,
    ) -> Result<Tensor> {
        let config = CrossEntropyConfig {
            ignore_index: ignore,
            ..Default::default()
        };
        self.reduced_loss(tokens, targets, context, &config)
    }

    /// Computes the loss with options.
    pub(super) fn reduced_loss(
        &self,
        tokens: &Tensor,
        targets: &Tensor,
        context: &ForwardContext,
        config: &CrossEntropyConfig,
    ) -> Result<Tensor> {
        let hidden = self.hidden_states(tokens, context)?; // (B, T, D)
        let head = self.lm_head.weight();
        in_module(HEAD, || match self.config.logit_soft_cap {
            None => ops::linear_cross_entropy_with(&hidden, head, targets, config),
            Some(_) => ops::cross_entropy_with(&self.logits(&hidden)?, targets, config),
        })
    }

    /// Computes the hidden states, (B, T, D): the output of the last norm, which the [head](Self::head) maps to logits.
    /// With f32 parameters they are f32, under autocast too.
    ///
    /// For a loss of your own, such as a cross-entropy and a contrastive term:
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::nn::ForwardContext;
    /// use tallow::ops;
    ///
    /// # let device = tallow::device("cpu")?;
    /// # let config = TransformerConfig {
    /// #     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16, ..Default::default()
    /// # };
    /// # let model = TransformerLM::new(&config, 0, &device)?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4], [5, 6, 7, 8]], &device)?; // (B, T)
    /// let targets = Tensor::new(&[[2u32, 3, 4, 5], [6, 7, 8, 9]], &device)?;
    /// let hidden = model.hidden_states(&tokens, &ForwardContext::default())?; // (B, T, D)
    /// let next_token = ops::linear_cross_entropy(&hidden, model.head().weight(), &targets)?;
    /// assert_eq!(next_token.to_scalar::<f32>()?, model.loss(&tokens, &targets)?.to_scalar::<f32>()?);
    ///
    /// let pooled = ops::mean_over(&hidden, 1)?; // (B, D)
    /// let (a, b) = (pooled.narrow(0, 0, 1)?, pooled.narrow(0, 1, 1)?); // the halves of the batch
    /// let pairs = Tensor::new(&[0u32], &device)?; // row i of a belongs to row i of b
    /// let contrastive = ops::cross_entropy(&ops::matmul_transposed(&a, &b)?, &pairs)?;
    /// let loss = ops::add_scaled(&next_token, &contrastive, 0.1)?;
    /// # assert_eq!(loss.rank(), 0);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`forward_with`](Self::forward_with).
    pub fn hidden_states(&self, tokens: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let limit = self.config.context_length;
        match *tokens.dims() {
            [batch, length] if batch > 0 && (1..=limit).contains(&length) => {}
            _ => {
                return Err(
                    Error::shape("TransformerLM", format!("{:?}", tokens.dims())).must_be(
                        format!("tokens (B, T) with B from 1 and T from 1 to {limit}"),
                        "shorten the sequence, or build the model with a longer context_length",
                    ),
                );
            }
        }
        let embed = || self.token_embeddings.forward(tokens);
        let mut x = in_module("token_embeddings", embed)?; // (B, T, D)
        if let Some(scale) = &self.embedding_scale {
            x = in_module("token_embeddings", || ops::mul(&x, scale))?;
        }
        if let Some(positions) = &self.position_embeddings {
            let first = positions.weight().narrow(0, 0, tokens.dim(1)?)?; // (T, D)
            x = in_module("position_embeddings", || ops::add(&x, &first))?;
        }
        let mut x = context.apply_dropout(x, self.config.dropout.embedding)?;
        if x.track_op() {
            depth::check(self.layers.len())?;
        }
        let checkpointing = self.checkpointing;
        let numbered: Vec<_> = self.layers.iter().enumerate().collect();
        let again = checkpointing.recomputed_blocks(self.layers.len());
        let (again, rest) = numbered.split_at(again);
        let segment = checkpointing.segment_blocks(self.layers.len());
        for blocks in again.chunks(segment.map_or(1, NonZeroUsize::get)) {
            let blocks: Vec<_> = blocks
                .iter()
                .map(|(i, block)| (*i, (*block).clone()))
                .collect(); // the same parameters
            let context = context.clone();
            let forward = move |[x]: [&Tensor; 1]| {
                let mut blocks = blocks.iter();
                blocks.try_fold(x.clone(), |x, (i, block)| {
                    forward_in_range(*i, block, &x, &context)
                })
            };
            x = nn::checkpoint(forward, [&x])?; // (B, T, D)
        }
        for (i, block) in rest {
            x = forward_in_range(*i, block, &x, context)?; // (B, T, D)
        }
        in_module("ln_final", || self.ln_final.forward(&x))
    }
}

/// A block's forward, in the range of its name.
fn forward_in_range(
    i: usize,
    block: &TransformerBlock,
    x: &Tensor,
    context: &ForwardContext,
) -> Result<Tensor> {
    let _range = probe::module(|| format!("layers.{i}"));
    block.forward_with(x, &context.at(4 * i + 1))
}

/// Refuses a model in f32 that the device's memory cannot hold: its weights, and the largest one once more while it
/// becomes a variable.
pub(super) fn check_available(config: &TransformerConfig, device: &Device) -> Result<()> {
    let positions = if config.is_gpt2() {
        config.context_length
    } else {
        0
    };
    let sizes = [config.vocab_size, positions, config.d_ff, config.d_model];
    let rows = sizes.into_iter().fold(0, usize::max);
    let largest = (rows as u64).saturating_mul(config.d_model as u64);
    let elements = config.num_parameters() as u64;
    let wanted_bytes = elements.saturating_add(largest).saturating_mul(4);
    let what = format!("a model of {elements} parameters");
    hardware::check_available(&what, wanted_bytes, hardware::available_bytes_on(device))
}

/// Parameters are trained: integers are not.
pub(super) fn check_float(dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::dtype("TransformerLM", dtype.as_str()).must_be(
        "parameters of a floating-point dtype",
        "build or load it as f32, say",
    ))
}

impl Layer for TransformerLM {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.token_embeddings
            .visit(&join(path, "token_embeddings"), visit);
        if let Some(positions) = &self.position_embeddings {
            positions.visit(&join(path, "position_embeddings"), visit);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            layer.visit(&join(path, &format!("layers.{i}")), visit);
        }
        self.ln_final.visit(&join(path, "ln_final"), visit);
        self.lm_head.visit(&join(path, HEAD), visit);
    }
}
