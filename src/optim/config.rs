//! Hyperparameters of AdamW, and groups of parameters that share them.

use super::MissingGradients;
use crate::inplace::wide;
use crate::kernels::{Update, stochastic};
use crate::{Error, Result};
use candle_core::{DType, Var};
use candle_nn::VarMap;
use std::sync::PoisonError;

/// The hyperparameters of AdamW, with PyTorch's meaning and defaults.
///
/// ```
/// use tallow::optim::AdamWConfig;
///
/// let config = AdamWConfig { lr: 3e-4, betas: (0.9, 0.95), weight_decay: 0.1, ..Default::default() };
/// config.validate()?;
/// let error = AdamWConfig { eps: 0.0, ..config }.validate().unwrap_err();
/// assert!(error.to_string().contains("eps"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct AdamWConfig {
    /// The learning rate.
    pub lr: f64,
    /// The decay rates of the running means of the gradient and of its square.
    pub betas: (f64, f64),
    /// The eps that is added to the denominator, after the square root. At least [`MIN_EPS`](Self::MIN_EPS).
    pub eps: f64,
    /// The decoupled weight decay: a step first multiplies a parameter by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// How the running means are stored.
    #[cfg_attr(feature = "serde", serde(default))]
    pub moments: Moments,
    /// How a step treats a parameter without a gradient; an error by default.
    #[cfg_attr(feature = "serde", serde(default))]
    pub missing_gradients: MissingGradients,
}

/// The storage of AdamW's running means (moments). They are computed in f32, or in f64 for f64 parameters, in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Moments {
    /// In the dtype of the computation, as in PyTorch: 8 bytes a parameter in f32.
    #[default]
    Wide,
    /// In bf16 with stochastic rounding: 4 bytes a parameter. Rounded to nearest, a second moment would hardly change:
    /// with beta2 0.999 a step changes it by 0.1%, and numbers in bf16 are 0.4% to 0.8% apart. Stochastic rounding is
    /// right on average. The same seed gives the same bits on every device. Not for f64 parameters.
    Bf16 {
        /// The seed of stochastic rounding.
        seed: u64,
    },
}

impl Moments {
    /// Returns the dtype of the moments of a parameter of dtype `parameter`.
    pub fn dtype(self, parameter: DType) -> DType {
        match self {
            Self::Wide => wide(parameter),
            Self::Bf16 { .. } => DType::BF16,
        }
    }

    /// Returns the name in reports: `f32` or `bf16`.
    pub fn name(self) -> &'static str {
        self.dtype(DType::F32).as_str()
    }
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.01,
            moments: Moments::Wide,
            missing_gradients: MissingGradients::Error,
        }
    }
}

impl AdamWConfig {
    /// The smallest eps: the smallest normal f32, 2^-126. A smaller one may be 0 in f32, and a weight whose gradient
    /// has always been 0 (of a token that has not occurred) would become 0 / 0. PyTorch accepts that.
    pub const MIN_EPS: f64 = f32::MIN_POSITIVE as f64;

    /// Returns the coefficients of step `step`, counted from 1, for the parameter with index `parameter`.
    pub(super) fn update(&self, step: usize, parameter: usize) -> Update {
        let update = Update::new(self.lr, self.betas, self.eps, self.weight_decay, step);
        match self.moments {
            Moments::Wide => update,
            Moments::Bf16 { seed } => Update {
                rounding: stochastic::key(seed, step, parameter),
                ..update
            },
        }
    }

    /// Checks the hyperparameters.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `lr` and `weight_decay` must be at least 0, `eps` at least
    /// [`MIN_EPS`](Self::MIN_EPS), both betas at least 0 and under 1. These numbers, the largest step
    /// `lr / (1 - beta1)` and the product `lr * weight_decay` must be finite in f32, in which updates are computed.
    pub fn validate(&self) -> Result<()> {
        at_least_zero("AdamWConfig", "lr", self.lr)?;
        for (field, beta) in [("betas.0", self.betas.0), ("betas.1", self.betas.1)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::config("AdamWConfig", field, beta).must_be(
                    "at least 0 and under 1",
                    "usual values are 0.9 and 0.95 to 0.999",
                ));
            }
        }
        if !(self.eps >= Self::MIN_EPS && is_finite_in_f32(self.eps)) {
            return Err(Error::config("AdamWConfig", "eps", self.eps).must_be(
                format!("finite in f32 and at least {:e}", Self::MIN_EPS),
                "with 0, weights without a gradient become 0 / 0; the usual value is 1e-8",
            ));
        }
        at_least_zero("AdamWConfig", "weight_decay", self.weight_decay)?;
        let step = self.lr / (1.0 - self.betas.0);
        if !is_finite_in_f32(step) {
            return Err(Error::config("AdamWConfig", "lr", self.lr).must_be(
                format!("such that lr / (1 - beta1), {step:e}, is finite in f32"),
                "the first step would make weights infinite; usual values are 1e-5 to 1e-2",
            ));
        }
        let decay = self.lr * self.weight_decay;
        if !is_finite_in_f32(decay) {
            return Err(
                Error::config("AdamWConfig", "weight_decay", self.weight_decay).must_be(
                    format!("such that lr * weight_decay, {decay:e}, is finite in f32"),
                    "a step multiplies weights by 1 - lr * weight_decay; usual values are up to 0.1",
                ),
            );
        }
        Ok(())
    }
}

/// Checks that a value is at least 0 and finite in f32.
pub(super) fn at_least_zero(config: &'static str, field: &'static str, value: f64) -> Result<()> {
    if is_finite_in_f32(value) && value >= 0.0 {
        return Ok(());
    }
    Err(Error::config(config, field, value)
        .must_be("at least 0, and finite in f32", "use 0 to switch it off"))
}

/// Whether a number is finite in f32, in which updates are computed.
fn is_finite_in_f32(value: f64) -> bool {
    (value as f32).is_finite()
}

/// Parameters that are updated with the same hyperparameters.
///
/// [`decay_matrices_only`] makes the two usual groups. Other groups are passed to
/// [`AdamW::with_groups`](super::AdamW::with_groups) likewise:
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::optim::{AdamW, AdamWConfig, ParameterGroup};
///
/// let group = |name: &str, lr| -> tallow::Result<ParameterGroup> {
///     let weight = Var::zeros((3, 4), DType::F32, &Device::Cpu)?;
///     Ok(ParameterGroup {
///         parameters: vec![(name.to_string(), weight)],
///         config: AdamWConfig { lr, ..Default::default() },
///     })
/// };
/// let optimizer = AdamW::with_groups(vec![group("embedding", 1e-4)?, group("head", 1e-3)?])?;
/// assert_eq!(optimizer.groups()[1].config.lr, 1e-3);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParameterGroup {
    /// The parameters with their names.
    pub parameters: Vec<(String, Var)>,
    /// Their hyperparameters.
    pub config: AdamWConfig,
}

/// Returns the variables of a `VarMap`, sorted by name, as parameters of an optimizer.
///
/// A `VarMap` has no order of its own. An order that changes from run to run would change the last digits of a gradient
/// norm.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use tallow::nn::Linear;
/// use tallow::optim::{AdamW, AdamWConfig, parameters_of};
///
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let model = [Linear::new(4, 8, vb.pp("up"))?, Linear::new(8, 2, vb.pp("down"))?];
/// let parameters = parameters_of(&variables);
/// assert_eq!(parameters[0].0, "down.weight");
/// let optimizer = AdamW::new(parameters, AdamWConfig::default())?;
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn parameters_of(variables: &VarMap) -> Vec<(String, Var)> {
    let variables = variables.data().lock();
    let variables = variables.unwrap_or_else(PoisonError::into_inner);
    let named = variables
        .iter()
        .map(|(name, var)| (name.clone(), var.clone()));
    let mut parameters: Vec<_> = named.collect();
    parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
    parameters
}

/// Splits parameters into two groups, so that weight decay applies to matrices only.
///
/// The first group has the parameters of two and more dimensions (weights of linear layers and embeddings), with the
/// weight decay of `config`. The second has vectors and scalars (weights of norms, biases), without weight decay.
/// Either may be empty.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::optim::{AdamW, AdamWConfig, decay_matrices_only};
///
/// let parameters = vec![
///     ("linear.weight".to_string(), Var::zeros((3, 4), DType::F32, &Device::Cpu)?),
///     ("norm.weight".to_string(), Var::ones(4, DType::F32, &Device::Cpu)?),
/// ];
/// let optimizer = AdamW::with_groups(decay_matrices_only(parameters, AdamWConfig::default()))?;
/// assert_eq!(optimizer.groups()[0].config.weight_decay, 0.01);
/// assert_eq!(optimizer.groups()[1].config.weight_decay, 0.0);
/// assert_eq!(optimizer.groups()[1].parameters[0].0, "norm.weight");
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn decay_matrices_only(
    parameters: impl IntoIterator<Item = (String, Var)>,
    config: AdamWConfig,
) -> Vec<ParameterGroup> {
    let (matrices, vectors) = parameters.into_iter().partition(|(_, var)| var.rank() >= 2);
    let undecayed = AdamWConfig {
        weight_decay: 0.0,
        ..config
    };
    vec![
        ParameterGroup {
            parameters: matrices,
            config,
        },
        ParameterGroup {
            parameters: vectors,
            config: undecayed,
        },
    ]
}
