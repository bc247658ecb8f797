//! Configurations in a short notation of five sizes.

use std::str::FromStr;
use tallow::model::TransformerConfig;

/// A model and its batch.
#[derive(Clone, Debug)]
pub struct Configuration {
    pub name: String,
    pub batch_size: usize,
    /// The model, whose `context_length` is also the sequence length of the batch.
    pub model: TransformerConfig,
}

/// `B-T-D-L-H`: batch, tokens, width, layers, heads. The feed-forward network is four times as wide as the model.
impl FromStr for Configuration {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let sizes: Option<Vec<usize>> = name.split('-').map(|size| size.parse().ok()).collect();
        let Some(&[batch_size, context_length, d_model, num_layers, num_heads]) = sizes.as_deref()
        else {
            return Err("expected batch-tokens-width-layers-heads, such as 4-256-256-4-8".into());
        };
        if !(1..1 << 32).contains(&batch_size) {
            return Err("the batch must be at least 1 and under 2^32".into());
        }
        let model = TransformerConfig {
            context_length,
            d_model,
            d_ff: d_model.saturating_mul(4),
            num_layers,
            num_heads,
            ..Default::default()
        };
        model.validate().map_err(|error| error.to_string())?;
        Ok(Self {
            name: name.into(),
            batch_size,
            model,
        })
    }
}
