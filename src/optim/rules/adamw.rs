//! AdamW.

use super::{State, at_least_zero, finite_decay, is_finite_in_f32, under_one};
use crate::inplace::wide;
use crate::kernels::cpu::update::{AdamW, Elementwise};
use crate::kernels::{Update, stochastic};
use crate::ops::info::OpInfo;
use crate::optim::MissingGradients;
use crate::optim::cost::elementwise;
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::fmt;

/// AdamW (Adam with decoupled weight decay), with PyTorch's meaning and defaults.
///
/// At step `t`, for a parameter `p` with gradient `g`, and `m`, `v` (`exp_avg`, `exp_avg_sq`) starting at 0:
///
/// ```text
/// p *= 1 - lr * weight_decay
/// m  = beta1 m + (1 - beta1) g
/// v  = beta2 v + (1 - beta2) g^2
/// p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// The state is `exp_avg` and `exp_avg_sq`, f32 or, for an f64 parameter, f64; or bf16 ([`Moments::Bf16`]).
///
/// Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.
///
/// ```
/// use tallow::optim::AdamWConfig;
///
/// let config = AdamWConfig {
///     lr: 3e-4,
///     betas: (0.9, 0.95),
///     weight_decay: 0.1,
///     ..Default::default()
/// };
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

/// Describes the rule: `AdamW, betas 0.9 and 0.95, weight decay 0.1`.
impl fmt::Display for AdamWConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (beta1, beta2) = self.betas;
        write!(
            f,
            "AdamW, betas {beta1} and {beta2}, weight decay {}",
            self.weight_decay
        )?;
        match self.moments {
            Moments::Wide => Ok(()),
            Moments::Bf16 { .. } => write!(f, ", moments in bf16"),
        }
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

    /// Checks the hyperparameters.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `lr` and `weight_decay` must be at least 0, `eps` at least
    /// [`MIN_EPS`](Self::MIN_EPS), both betas at least 0 and under 1. These numbers, the largest step
    /// `lr / (1 - beta1)` and the product `lr * weight_decay` must be finite in f32, in which updates are computed.
    pub fn validate(&self) -> Result<()> {
        at_least_zero("AdamWConfig", "lr", self.lr)?;
        for (field, beta) in [("betas.0", self.betas.0), ("betas.1", self.betas.1)] {
            under_one(
                "AdamWConfig",
                field,
                beta,
                "usual values are 0.9 and 0.95 to 0.999",
            )?;
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
        finite_decay("AdamWConfig", self.lr, self.weight_decay)
    }
}

impl AdamWConfig {
    /// Returns the coefficients of step `step`, counted from 1, for the parameter with index `parameter`.
    pub(super) fn update(&self, step: usize, parameter: usize, _: &[usize]) -> Update {
        let rule = AdamW::new(self.lr, self.betas, self.eps, self.weight_decay, step);
        let rounding = match self.moments {
            Moments::Wide => 0,
            Moments::Bf16 { seed } => stochastic::key(seed, step, parameter),
        };
        Update {
            rounding,
            ..rule.into()
        }
    }

    pub(super) fn info(&self) -> &'static OpInfo {
        &INFO
    }

    pub(super) fn states(&self, parameter: DType) -> Vec<State> {
        let dtype = self.moments.dtype(parameter);
        let [first, second] = AdamW::STATES;
        vec![
            State::new(first, dtype, Numbers::Finite),
            State::new(second, dtype, Numbers::NotNegative), // a mean of squares
        ]
    }

    pub(super) fn check(&self, name: &str, var: &Var) -> Result<()> {
        if (var.dtype(), self.moments.dtype(var.dtype())) != (DType::F64, DType::BF16) {
            return Ok(());
        }
        Err(Error::dtype("Optimizer", "f64").must_be(
            format!("parameter {name} in f16, bf16 or f32, with moments in bf16"),
            "leave AdamWConfig::moments as it is by default",
        ))
    }
}

/// A step in candle's ops.
pub(super) fn reference(
    rule: &AdamW,
    p: Tensor,
    g: &Tensor,
    states: &[Tensor],
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let (m, v) = (&states[0], &states[1]);
    let m = (m + ((g - m)? * rule.one_minus_beta1)?)?;
    let v = ((v * rule.beta2)? + ((g * rule.one_minus_beta2)? * g)?)?;
    let denominator = ((v.sqrt()? / rule.second_correction)? + rule.eps)?;
    let p = ((p * rule.decay)? - ((&m * rule.step_size)? / denominator)?)?;
    Ok((p, vec![m, v]))
}

pub(super) const INFO: OpInfo = OpInfo::new("adamw").on_gpu_up_to(usize::MAX).costing(
    "14 a parameter",
    "gradient; weight and two moments, read and written",
    |o| elementwise(o, 14.0),
    None,
);
