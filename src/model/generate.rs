//! Sampling text from a model.

use super::TransformerLM;
use crate::{Error, Result, no_grad};
use candle_core::{DType, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The configuration of sampling.
///
/// ```
/// use tallow::model::{GenerateConfig, TransformerConfig, TransformerLM};
///
/// let config = TransformerConfig {
///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
///     ..Default::default()
/// };
/// let model = TransformerLM::new(&config, 0, &tallow::device("cpu")?)?;
/// let sampled = GenerateConfig {
///     max_new_tokens: 8, temperature: 0.8, seed: 1,
///     ..Default::default()
/// };
/// assert_eq!(model.generate(&[1, 2], &sampled)?, model.generate(&[1, 2], &sampled)?);
/// let likeliest = GenerateConfig { temperature: 0.0, ..sampled };
/// assert_eq!(model.generate(&[1, 2], &likeliest)?.len(), 8);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// The largest number of new tokens.
    pub max_new_tokens: usize,
    /// The temperature: logits are divided by it. 0 selects the likeliest token.
    pub temperature: f64,
    /// Samples from this many likeliest tokens; `None` from all.
    pub top_k: Option<usize>,
    /// Then samples from the fewest likeliest tokens whose probabilities reach this sum; `None` from all.
    pub top_p: Option<f64>,
    /// The seed; the same seed gives the same tokens.
    pub seed: u64,
    /// Stops after this token, which is included in the output.
    pub stop_token: Option<u32>,
}

impl Default for GenerateConfig {
    /// Returns 256 tokens, temperature 1, no top-k or top-p, seed 0, no stop token.
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            temperature: 1.0,
            top_k: None,
            top_p: None,
            seed: 0,
            stop_token: None,
        }
    }
}

impl GenerateConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// A negative or infinite temperature, a top_k of 0, a top_p outside (0, 1]; each names its field.
    pub fn validate(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String| {
            Err(Error::config("GenerateConfig", field, got).must_be(
                expected,
                "leave it at its default to sample from the whole distribution",
            ))
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse(
                "temperature",
                "0 or more, and finite",
                self.temperature.to_string(),
            );
        }
        if self.top_k == Some(0) {
            return refuse("top_k", "positive", "0".into());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => refuse("top_p", "in (0, 1]", p.to_string()),
            _ => Ok(()),
        }
    }
}

impl TransformerLM {
    /// Continues `prompt`, one token at a time, and returns the new tokens only.
    ///
    /// Each new token is a forward pass over the last `context_length` tokens: there is no cache of keys and values.
    ///
    /// # Errors
    /// An empty prompt; an id outside the vocabulary; a configuration that [`GenerateConfig::validate`] refuses; logits
    /// that are not finite.
    pub fn generate(&self, prompt: &[u32], config: &GenerateConfig) -> Result<Vec<u32>> {
        config.validate()?;
        if prompt.is_empty() {
            return Err(Error::data("generate", "none").must_be(
                "a prompt of at least one token",
                "start from a newline, say",
            ));
        }
        let vocab_size = self.config().vocab_size;
        if let Some(position) = prompt.iter().position(|id| *id as usize >= vocab_size) {
            return Err(Error::TokenId {
                op: "generate",
                id: prompt[position].into(),
                position,
                vocab_size,
            });
        }
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
        let mut tokens = prompt.to_vec();
        for _ in 0..config.max_new_tokens {
            let window = &tokens[tokens.len().saturating_sub(self.config().context_length)..];
            let next = choose(&self.next_logits(window)?, config, rng.random())?;
            tokens.push(next);
            if Some(next) == config.stop_token {
                break;
            }
        }
        Ok(tokens.split_off(prompt.len()))
    }

    /// Returns the logits (V) after the last token of `window`.
    fn next_logits(&self, window: &[u32]) -> Result<Vec<f64>> {
        let tokens = Tensor::new(window, self.device())?.unsqueeze(0)?; // (1, T)
        let logits = no_grad(|| self.forward(&tokens))?; // (1, T, V)
        let last = logits.get(0)?.get(window.len() - 1)?;
        Ok(last.to_dtype(DType::F64)?.to_vec1::<f64>()?)
    }
}

/// Selects a token from `logits` by `uniform`, a number in [0, 1).
fn choose(logits: &[f64], config: &GenerateConfig, uniform: f64) -> Result<u32> {
    if let Some(id) = logits.iter().position(|logit| !logit.is_finite()) {
        return Err(Error::Data {
            what: "generate".into(),
            expected: "finite logits".into(),
            got: format!("{} for token {id}", logits[id]),
            hint: "the weights have diverged; train with a lower learning rate".into(),
        });
    }
    // Likeliest first; of equal ones the lower id first.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if config.temperature == 0.0 {
        return Ok(order[0] as u32);
    }
    order.truncate(config.top_k.unwrap_or(order.len()));
    let top = logits[order[0]];
    let weight = |id: usize| ((logits[id] - top) / config.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(|id| weight(*id)).collect();
    if let Some(top_p) = config.top_p {
        let reach = top_p * weights.iter().sum::<f64>();
        let mut total = 0.0;
        let nucleus = weights.iter().position(|weight| {
            total += weight;
            total >= reach
        });
        weights.truncate(nucleus.map_or(weights.len(), |last| last + 1));
    }
    let mut left = uniform * weights.iter().sum::<f64>();
    for (id, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return Ok(*id as u32);
        }
    }
    Ok(order[weights.len() - 1] as u32) // rounding left a crumb
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each of the tokens is chosen, over evenly spread draws.
    fn shares(logits: &[f64], config: &GenerateConfig) -> Vec<f64> {
        let draws = 10_000;
        let mut counts = vec![0.0; logits.len()];
        for i in 0..draws {
            let id = choose(logits, config, (f64::from(i) + 0.5) / f64::from(draws)).unwrap();
            counts[id as usize] += 1.0 / f64::from(draws);
        }
        counts
    }

    #[test]
    fn shares_follow_the_distribution_that_is_left() {
        let logits: Vec<f64> = [0.5f64, 0.1, 0.3, 0.1].iter().map(|p| p.ln()).collect();
        let near = |got: Vec<f64>, wanted: [f64; 4]| {
            for (got, wanted) in got.iter().zip(wanted) {
                assert!((got - wanted).abs() < 1e-3, "{got} {wanted}");
            }
        };
        let config = GenerateConfig::default();
        near(shares(&logits, &config), [0.5, 0.1, 0.3, 0.1]);
        let top_k = GenerateConfig {
            top_k: Some(2),
            ..config.clone()
        };
        near(shares(&logits, &top_k), [0.625, 0.0, 0.375, 0.0]);
        let top_p = GenerateConfig {
            top_p: Some(0.75),
            ..config.clone()
        };
        near(shares(&logits, &top_p), [0.625, 0.0, 0.375, 0.0]);
        let greedy = GenerateConfig {
            temperature: 0.0,
            ..config.clone()
        };
        near(shares(&logits, &greedy), [1.0, 0.0, 0.0, 0.0]);
        let sharp = GenerateConfig {
            temperature: 0.5,
            ..config
        };
        near(
            shares(&logits, &sharp),
            [0.25 / 0.36, 0.01 / 0.36, 0.09 / 0.36, 0.01 / 0.36],
        );
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        let error = choose(&[0.0, f64::NAN], &GenerateConfig::default(), 0.5).unwrap_err();
        assert!(error.to_string().contains("token 1"), "{error}");
    }
}
