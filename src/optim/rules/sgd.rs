//! SGD with momentum.

use super::{State, at_least_zero, under_one};
use crate::kernels::Update;
use crate::kernels::cpu::update::{Elementwise, Sgd};
use crate::ops::info::OpInfo;
use crate::optim::MissingGradients;
use crate::optim::cost::elementwise;
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::fmt;

/// Stochastic gradient descent, with PyTorch's meaning and defaults.
///
/// For a parameter `p` with gradient `g`, and the momentum buffer `b`:
///
/// ```text
/// g  = g + weight_decay p
/// b  = momentum b + (1 - dampening) g        (b = g in the first step)
/// p -= lr g                                  without momentum
/// p -= lr b                                  with momentum
/// p -= lr (g + momentum b)                   with nesterov
/// ```
///
/// The state is `momentum_buffer`, f32 or, for an f64 parameter, f64. Without momentum there is none.
///
/// Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, section 2.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::{Optimizer, SgdConfig};
///
/// let weight = Var::from_slice(&[1f32, -1.0], 2, &Device::Cpu)?;
/// let config = SgdConfig { lr: 0.1, momentum: 0.9, nesterov: true, ..Default::default() };
/// let mut optimizer = Optimizer::new([("weight".to_string(), weight.clone())], config)?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?; // 2 and -2
/// optimizer.step(&gradients)?;
/// let moved = weight.to_vec1::<f32>()?;
/// assert!((moved[0] - 0.62).abs() < 1e-6); // 1 - 0.1 (2 + 0.9 * 2)
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SgdConfig {
    /// The learning rate.
    pub lr: f64,
    /// The decay rate of the momentum buffer. With 0 there is none.
    pub momentum: f64,
    /// The part of the gradient that does not enter the momentum buffer after the first step.
    pub dampening: f64,
    /// Whether a step is by the gradient plus the decayed momentum buffer (Nesterov's momentum).
    pub nesterov: bool,
    /// The coupled weight decay: `weight_decay * p` is added to the gradient.
    pub weight_decay: f64,
    /// How a step treats a parameter without a gradient; an error by default.
    #[cfg_attr(feature = "serde", serde(default))]
    pub missing_gradients: MissingGradients,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            missing_gradients: MissingGradients::Error,
        }
    }
}

/// Describes the rule: `SGD, momentum 0.9, weight decay 0.1`.
impl fmt::Display for SgdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nesterov = if self.nesterov { " (Nesterov)" } else { "" };
        write!(f, "SGD, momentum {}{nesterov}", self.momentum)?;
        if self.dampening != 0.0 {
            write!(f, ", dampening {}", self.dampening)?;
        }
        write!(f, ", weight decay {}", self.weight_decay)
    }
}

impl SgdConfig {
    /// Checks the hyperparameters.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `lr` and `weight_decay` must be at least 0 and finite in f32, `momentum` and
    /// `dampening` at least 0 and under 1. Nesterov's momentum needs momentum and no dampening.
    pub fn validate(&self) -> Result<()> {
        at_least_zero("SgdConfig", "lr", self.lr)?;
        under_one(
            "SgdConfig",
            "momentum",
            self.momentum,
            "usual values are 0 and 0.9",
        )?;
        under_one(
            "SgdConfig",
            "dampening",
            self.dampening,
            "the usual value is 0",
        )?;
        at_least_zero("SgdConfig", "weight_decay", self.weight_decay)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let got = format!(
                "true, with momentum {} and dampening {}",
                self.momentum, self.dampening
            );
            return Err(Error::config("SgdConfig", "nesterov", got).must_be(
                "false without momentum or with dampening",
                "set momentum, such as 0.9, and dampening 0",
            ));
        }
        Ok(())
    }

    pub(super) fn update(&self, step: usize, _: usize, _: &[usize]) -> Update {
        let share = match step {
            1 => 1.0,
            _ => 1.0 - self.dampening,
        };
        Sgd {
            lr: self.lr,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            share,
            nesterov: self.nesterov,
        }
        .into()
    }

    pub(super) fn info(&self) -> &'static OpInfo {
        &INFO
    }

    pub(super) fn states(&self, parameter: DType) -> Vec<State> {
        let names = <Sgd as Elementwise<1>>::STATES.into_iter();
        let names = names.filter(|_| self.momentum != 0.0);
        names
            .map(|name| State::wide(name, parameter, Numbers::Finite))
            .collect()
    }

    pub(super) fn check(&self, _: &str, _: &Var) -> Result<()> {
        Ok(())
    }
}

/// A step in candle's ops.
pub(super) fn reference(
    rule: &Sgd,
    p: Tensor,
    g: &Tensor,
    states: &[Tensor],
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let g = (g + (&p * rule.weight_decay)?)?;
    let Some(buffer) = states.first() else {
        return Ok(((&p - (g * rule.lr)?)?, Vec::new()));
    };
    let buffer = ((buffer * rule.momentum)? + (&g * rule.share)?)?;
    let step = match rule.nesterov {
        true => (g + (&buffer * rule.momentum)?)?,
        false => buffer.clone(),
    };
    Ok(((&p - (step * rule.lr)?)?, vec![buffer]))
}

pub(super) const INFO: OpInfo = OpInfo::new("sgd").on_gpu_up_to(usize::MAX).costing(
    "8 a parameter",
    "gradient; weight and momentum buffer, read and written",
    |o| elementwise(o, if o.inputs.len() > 1 { 8.0 } else { 4.0 }),
    None,
);
