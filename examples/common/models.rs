//! The flags that select models.

use super::values;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::hf;
use tallow::model::TransformerConfig;
use tallow::report::{Fields, group_digits};

/// Flags of every example that measures models by preset or by sizes.
#[derive(Args, Clone, Debug)]
pub struct ModelFlags {
    /// Sizes and context of CS336's handout, 2025 or 2026
    #[arg(long, value_enum, value_name = "YEAR")]
    pub handout: Option<Handout>,

    /// tiny, small, medium, large, xl, wide, 2.7b, 10b [default: tiny]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "NAME")]
    size: Vec<String>,

    /// Folders with a config.json, or org/name in the hub's cache
    #[arg(long, hide_short_help = true, num_args = 1.., value_name = "FOLDER")]
    family: Vec<PathBuf>,

    #[command(flatten)]
    sizes: SizeFlags,

    /// Number of token ids
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
}

/// Flags for the sizes of a model.
#[derive(Args, Clone, Debug)]
pub struct SizeFlags {
    /// Width of the residual stream, instead of the preset's
    #[arg(long, value_name = "N")]
    d_model: Option<usize>,

    /// Width of the feed-forward network
    #[arg(long, value_name = "N")]
    d_ff: Option<usize>,

    /// Number of blocks
    #[arg(long, value_name = "N")]
    num_layers: Option<usize>,

    /// Number of attention heads
    #[arg(long, value_name = "N", alias = "heads")]
    num_heads: Option<usize>,
}

impl SizeFlags {
    fn is_any_given(&self) -> bool {
        let sizes = [self.d_model, self.d_ff, self.num_layers, self.num_heads];
        sizes != [None; 4]
    }

    /// Returns `base` with the given sizes in place of its own.
    fn apply(&self, base: TransformerConfig) -> TransformerConfig {
        TransformerConfig {
            d_model: self.d_model.unwrap_or(base.d_model),
            d_ff: self.d_ff.unwrap_or(base.d_ff),
            num_layers: self.num_layers.unwrap_or(base.num_layers),
            num_heads: self.num_heads.unwrap_or(base.num_heads),
            ..base
        }
    }
}

/// Flags of the model that an example trains.
#[derive(Args, Clone, Debug)]
pub struct TrainedModelFlags {
    /// tiny to 10b [default: width 128, 4 layers, 4 heads]
    #[arg(long, value_name = "NAME")]
    size: Option<String>,

    #[command(flatten)]
    sizes: SizeFlags,

    /// naive or flash
    #[arg(long, value_name = "NAME", default_value_t = Algorithm::Naive)]
    pub attention: Algorithm,

    /// Tokens in a sequence
    #[arg(long, value_name = "N", default_value_t = 64, alias = "sequence-length", value_parser = values::count())]
    pub context_length: usize,
}

impl TrainedModelFlags {
    /// Returns the model's configuration.
    ///
    /// # Errors
    /// A preset that does not exist, sizes that do not fit together, and heads too wide for the attention.
    pub fn config(&self, vocab_size: usize) -> Result<TransformerConfig> {
        let base = match &self.size {
            Some(name) => TransformerConfig::preset(name)?,
            None => TransformerConfig {
                d_model: 128,
                d_ff: 320,
                num_layers: 4,
                num_heads: 4,
                ..Default::default()
            },
        };
        let config = TransformerConfig {
            vocab_size,
            context_length: self.context_length,
            ..self.sizes.apply(base)
        };
        config.validate()?;
        config.check_attention(self.attention)?;
        Ok(config)
    }
}

/// An edition of CS336's second assignment. Both have a model `xl`, of different sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Handout {
    #[value(name = "2025")]
    Of2025,
    #[value(name = "2026")]
    Of2026,
}

impl Handout {
    /// Returns the names of the models in its table.
    fn sizes(self) -> [&'static str; 5] {
        match self {
            Self::Of2025 => ["small", "medium", "large", "xl", "2.7b"],
            Self::Of2026 => ["small", "medium", "large", "xl", "10b"],
        }
    }

    /// Returns the preset of one of its models: the xl of 2026 is the 2.7b of 2025.
    fn preset(self, name: &str) -> Result<TransformerConfig> {
        match (self, name) {
            (Self::Of2026, "xl") => TransformerConfig::preset("2.7b"),
            _ => TransformerConfig::preset(name),
        }
    }
}

/// A model to measure.
pub struct Model {
    /// The name of its preset, or `custom`.
    pub name: String,
    pub config: TransformerConfig,
}

impl ModelFlags {
    /// Returns whether a flag names a preset or a folder.
    pub fn names_a_preset(&self) -> bool {
        self.handout.is_some() || !self.size.is_empty() || !self.family.is_empty()
    }

    /// Returns whether a flag other than --handout names a model or one of its sizes.
    pub fn names_a_single_model(&self) -> bool {
        self.sizes.is_any_given() || !self.size.is_empty() || !self.family.is_empty()
    }

    /// Returns `model` with the given sizes in place of its own.
    pub fn resized(&self, model: TransformerConfig) -> TransformerConfig {
        TransformerConfig {
            vocab_size: self.vocab_size.unwrap_or(model.vocab_size),
            ..self.sizes.apply(model)
        }
    }

    /// Returns the models to measure: presets or folders, with the sizes of the flags and with this context length.
    /// Every algorithm of `attention` must support them.
    pub fn models(&self, context_length: usize, attention: &[Algorithm]) -> Result<Vec<Model>> {
        let custom = self.sizes.is_any_given();
        let names = match (self.size.is_empty() && self.family.is_empty(), self.handout) {
            (true, Some(handout)) => handout.sizes().map(String::from).to_vec(),
            (true, None) => vec!["tiny".to_string()],
            _ => self.size.clone(),
        };
        let handout = self.handout.unwrap_or(Handout::Of2025);
        let presets = names.into_iter().map(|name| (handout.preset(&name), name));
        let families = self.family.iter().map(|folder| {
            let name = folder.file_name().unwrap_or(folder.as_os_str());
            let config = hf::find(folder).and_then(hf::config);
            (config, name.to_string_lossy().into_owned())
        });
        let models = presets.chain(families).map(|(preset, name)| {
            let config = self.resized(TransformerConfig {
                context_length,
                ..preset?
            });
            config.validate()?;
            for &attention in attention {
                config.check_attention(attention)?;
            }
            let name = if custom { "custom".into() } else { name };
            Ok(Model { name, config })
        });
        models.collect()
    }
}

/// Returns the models' sizes, for a report's configuration.
pub fn describe(models: &[Model]) -> Fields {
    let models = models.iter();
    models
        .map(|model| (format!("model {}", model.name), sizes(&model.config)))
        .collect()
}

/// Describes a model's sizes.
pub fn sizes(config: &TransformerConfig) -> String {
    let parameters = group_digits(config.num_parameters() as u64);
    let heads = match (config.num_heads, config.num_kv_heads()) {
        (all, of_kv) if all == of_kv => all.to_string(),
        (all, of_kv) => format!("{all} ({of_kv} of k and v)"),
    };
    format!(
        "d_model {}, d_ff {}, layers {}, heads {heads}, vocabulary {}: {parameters} parameters",
        config.d_model, config.d_ff, config.num_layers, config.vocab_size
    )
}
