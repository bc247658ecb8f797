//! Scaling of rotary frequencies, for contexts longer than in pretraining.

use crate::{Error, Result};
use std::f64::consts::PI;

/// The scaling of the frequencies of rotary embedding, `theta^(-2i / Dh)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase", tag = "type"))]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    None,
    /// All frequencies are divided by the factor.
    ///
    /// Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// The scaling of Llama 3.1. Frequencies with wavelengths above `original_context / low_freq_factor` are divided by
    /// the factor, those below `original_context / high_freq_factor` are unchanged; in between the two are
    /// interpolated.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Sets the wavelength above which frequencies are divided.
        low_freq_factor: f64,
        /// Sets the wavelength below which frequencies are unchanged; larger than `low_freq_factor`.
        high_freq_factor: f64,
        /// The context length of pretraining.
        original_context: usize,
    },
    /// YaRN. Frequencies with fewer than `beta_slow` turns in the original context are divided by the factor, those
    /// with more than `beta_fast` turns are unchanged; in between the two are interpolated, linearly in the pair's
    /// index. Cosines and sines are multiplied by `attention_factor`.
    ///
    /// Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, section 3.
    Yarn {
        /// At least 1.
        factor: f64,
        /// The context length of pretraining.
        original_context: usize,
        /// A number of turns; 32 in the paper.
        beta_fast: f64,
        /// A number of turns; 1 in the paper.
        beta_slow: f64,
        /// `0.1 ln(factor) + 1` in the paper.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// Returns [`Yarn`](Self::Yarn) with the settings of the paper.
    pub fn yarn(factor: f64, original_context: usize) -> Self {
        Self::Yarn {
            factor,
            original_context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 0.1 * factor.ln() + 1.0,
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// A factor below 1; an original context of 0; factors or turns that are not positive and in order.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String| {
            Err(Error::config("RopeScaling", field, got)
                .must_be(expected, "use the value in the model's configuration file"))
        };
        let is_positive = |x: f64| x > 0.0 && x.is_finite();
        let (factor, original_context, ordered) = match *self {
            Self::None => return Ok(()),
            Self::Linear { factor } => (factor, 1, true),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } => (
                factor,
                original_context,
                is_positive(low) && is_positive(high) && low < high,
            ),
            Self::Yarn {
                factor,
                original_context,
                beta_fast: fast,
                beta_slow: slow,
                attention_factor,
            } => {
                if !is_positive(attention_factor) {
                    let got = attention_factor.to_string();
                    return refuse("attention_factor", "positive and finite", got);
                }
                (
                    factor,
                    original_context,
                    is_positive(slow) && is_positive(fast) && slow < fast,
                )
            }
        };
        if !(factor >= 1.0 && factor.is_finite()) {
            return refuse("factor", "at least 1, and finite", factor.to_string());
        }
        if original_context == 0 {
            return refuse("original_context", "positive", "0".into());
        }
        match ordered {
            true => Ok(()),
            false => refuse(
                "low and high",
                "positive, the low or slow one the smaller",
                format!("{self:?}"),
            ),
        }
    }

    /// Returns the angle by which each pair turns from one position to the next, (Dh / 2).
    pub(super) fn frequencies(&self, theta: f64, head_dim: usize) -> Vec<f64> {
        let width = head_dim as f64;
        let pairs = 0..head_dim / 2;
        let unscaled = |i: usize| theta.powf(-2.0 * i as f64 / width);
        // The average of the frequency, weighted by `kept`, and the divided one.
        let mixed = |frequency: f64, factor: f64, kept: f64| {
            kept * frequency + (1.0 - kept) * frequency / factor
        };
        match *self {
            Self::None => pairs.map(unscaled).collect(),
            Self::Linear { factor } => pairs.map(|i| unscaled(i) / factor).collect(),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } => {
                let scaled = |i| {
                    let frequency = unscaled(i);
                    let turns = original_context as f64 * frequency / (2.0 * PI);
                    mixed(
                        frequency,
                        factor,
                        ((turns - low) / (high - low)).clamp(0.0, 1.0),
                    )
                };
                pairs.map(scaled).collect()
            }
            Self::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                ..
            } => {
                // The index, as a real number, of the pair with this number of turns in the original context.
                let pair = |turns: f64| {
                    let wavelength = original_context as f64 / (turns * 2.0 * PI);
                    width * wavelength.ln() / (2.0 * theta.ln())
                };
                let first = pair(beta_fast).floor().max(0.0);
                let last = pair(beta_slow).ceil().min(width - 1.0);
                let length = if first == last { 0.001 } else { last - first };
                let scaled = |i: usize| {
                    let passed = ((i as f64 - first) / length).clamp(0.0, 1.0);
                    mixed(unscaled(i), factor, 1.0 - passed)
                };
                pairs.map(scaled).collect()
            }
        }
    }

    /// Returns the factor of cosines and sines.
    pub(super) fn amplitude(&self) -> f64 {
        match *self {
            Self::Yarn {
                attention_factor, ..
            } => attention_factor,
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: &[f64], wanted: &[(usize, f64)]) {
        for (i, wanted) in wanted {
            let error = (found[*i] - wanted).abs() / wanted;
            assert!(error < 3e-6, "{i}: {} for {wanted}", found[*i]);
        }
    }

    /// Llama 3.2's, with pairs that stay, that are mixed and that are divided: values of `transformers` 5.23, in f32.
    #[test]
    fn llama3_is_that_of_transformers() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let wanted = [
            (0, 1.0),
            (1, 0.663_601_279_258_728),
            (14, 0.003_211_446_106_433_868_4),
            (15, 0.001_290_548_010_729_253_3),
            (16, 0.000_429_556_705_057_621),
            (17, 9.708_286_233_944_818e-5),
            (18, 1.946_163_865_795_824_7e-5),
            (31, 9.418_306_490_260_875e-8),
        ];
        near(&scaling.frequencies(500_000.0, 64), &wanted);
    }

    /// YaRN, with values of `transformers` 5.23.
    #[test]
    fn yarn_is_that_of_transformers() {
        let scaling = RopeScaling::yarn(4.0, 2048);
        let wanted = [
            (1, 0.749_894_201_755_523_7),
            (14, 0.011_627_212_166_786_194),
            (16, 0.005_384_615_156_799_555),
            (20, 0.000_973_008_573_055_267_3),
            (24, 0.000_250_000_011_874_362_8),
            (31, 3.333_803_761_051_968e-5),
        ];
        near(&scaling.frequencies(10_000.0, 64), &wanted);
        assert!((scaling.amplitude() - 1.138_629_436_111_989).abs() < 1e-15);
    }
}
