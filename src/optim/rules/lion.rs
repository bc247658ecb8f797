//! Lion.

use super::{State, at_least_zero, finite_decay, under_one};
use crate::Result;
use crate::kernels::Update;
use crate::kernels::cpu::update::{Elementwise, Lion};
use crate::ops::info::OpInfo;
use crate::optim::MissingGradients;
use crate::optim::cost::elementwise;
use crate::saved::Numbers;
use candle_core::{DType, Tensor, Var};
use std::fmt;

/// Lion: steps of one length for all elements, in the direction of the sign of a running mean.
///
/// For a parameter `p` with gradient `g`, and the running mean `m` (`exp_avg`) starting at 0:
///
/// ```text
/// c = beta1 m + (1 - beta1) g
/// p = (1 - lr * weight_decay) p - lr sign(c)
/// m = beta2 m + (1 - beta2) g
/// ```
///
/// The state is `exp_avg`, f32 or, for an f64 parameter, f64: half of AdamW's. Its authors use a learning rate 3 to 10
/// times smaller than AdamW's, and a weight decay as many times larger.
///
/// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::{LionConfig, Optimizer};
///
/// let weight = Var::from_slice(&[1f32, -3.0], 2, &Device::Cpu)?;
/// let config = LionConfig { lr: 0.1, ..Default::default() };
/// let mut optimizer = Optimizer::new([("weight".to_string(), weight.clone())], config)?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?;
/// optimizer.step(&gradients)?;
/// assert_eq!(weight.to_vec1::<f32>()?, [0.9, -2.9]); // 0.1 each, whatever the gradient
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LionConfig {
    /// The learning rate: the length of a step of an element.
    pub lr: f64,
    /// The decay rates of the mean whose sign is the direction, and of the running mean.
    pub betas: (f64, f64),
    /// The decoupled weight decay: a step first multiplies a parameter by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// How a step treats a parameter without a gradient; an error by default.
    #[cfg_attr(feature = "serde", serde(default))]
    pub missing_gradients: MissingGradients,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self {
            lr: 1e-4,
            betas: (0.9, 0.99),
            weight_decay: 0.0,
            missing_gradients: MissingGradients::Error,
        }
    }
}

/// Describes the rule: `Lion, betas 0.9 and 0.99, weight decay 0.1`.
impl fmt::Display for LionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (beta1, beta2) = self.betas;
        write!(
            f,
            "Lion, betas {beta1} and {beta2}, weight decay {}",
            self.weight_decay
        )
    }
}

impl LionConfig {
    /// Checks the hyperparameters.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) naming the field: `lr`, `weight_decay` and their product must be at
    /// least 0 and finite in f32, both betas at least 0 and under 1.
    pub fn validate(&self) -> Result<()> {
        at_least_zero("LionConfig", "lr", self.lr)?;
        for (field, beta) in [("betas.0", self.betas.0), ("betas.1", self.betas.1)] {
            under_one("LionConfig", field, beta, "usual values are 0.9 to 0.99")?;
        }
        at_least_zero("LionConfig", "weight_decay", self.weight_decay)?;
        finite_decay("LionConfig", self.lr, self.weight_decay)
    }

    pub(super) fn update(&self, _: usize, _: usize, _: &[usize]) -> Update {
        Lion {
            decay: 1.0 - self.lr * self.weight_decay,
            one_minus_beta1: 1.0 - self.betas.0,
            one_minus_beta2: 1.0 - self.betas.1,
            lr: self.lr,
        }
        .into()
    }

    pub(super) fn info(&self) -> &'static OpInfo {
        &INFO
    }

    pub(super) fn states(&self, parameter: DType) -> Vec<State> {
        Lion::STATES
            .map(|name| State::wide(name, parameter, Numbers::Finite))
            .into()
    }

    pub(super) fn check(&self, _: &str, _: &Var) -> Result<()> {
        Ok(())
    }
}

/// A step in candle's ops.
pub(super) fn reference(
    rule: &Lion,
    p: Tensor,
    g: &Tensor,
    states: &[Tensor],
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let m = &states[0];
    let difference = (g - m)?;
    let c = (m + (&difference * rule.one_minus_beta1)?)?;
    let sign = c.eq(&c)?.where_cond(&c.sign()?, &c)?; // NaN stays
    let p = ((p * rule.decay)? - (sign * rule.lr)?)?;
    let m = (m + (difference * rule.one_minus_beta2)?)?;
    Ok((p, vec![m]))
}

pub(super) const INFO: OpInfo = OpInfo::new("lion").on_gpu_up_to(usize::MAX).costing(
    "9 a parameter",
    "gradient; weight and running mean, read and written",
    |o| elementwise(o, 9.0),
    None,
);
