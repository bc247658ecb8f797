//! Rules: how a parameter is updated from its gradient. Each has a file.

mod adamw;
mod lion;
mod muon;
mod sgd;

pub use adamw::{AdamWConfig, Moments};
pub use lion::LionConfig;
pub(crate) use muon::batches;
pub use muon::{IterationDType, MuonConfig, Scaling, is_hidden_matrix, muon_for_matrices};
pub use sgd::SgdConfig;

use super::MissingGradients;
use crate::inplace::wide;
use crate::kernels::{Coefficients, Update};
use crate::ops::info::OpInfo;
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::fmt;

/// Defines the enum of rules, and what it asks of the rule's configuration.
macro_rules! rules {
    ($($(#[$attribute:meta])* $Rule:ident($Config:ident) in $module:ident),+) => {
        /// How a parameter is updated, with the hyperparameters: AdamW by default.
        ///
        /// A configuration converts into a rule, so [`Optimizer::new`](super::Optimizer::new) accepts either.
        ///
        /// ```
        /// use tallow::optim::{AdamWConfig, Rule};
        ///
        /// let rule = Rule::from(AdamWConfig { lr: 1e-4, ..Default::default() });
        /// assert_eq!((rule.name(), rule.lr()), ("adamw", 1e-4));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(tag = "rule", rename_all = "lowercase"))]
        #[non_exhaustive]
        pub enum Rule {
            $($(#[$attribute])* $Rule($Config),)+
        }

        $(
            impl From<$Config> for Rule {
                fn from(config: $Config) -> Self {
                    Self::$Rule(config)
                }
            }
        )+

        /// Describes the rule: `AdamW, betas 0.9 and 0.95, weight decay 0.1`.
        impl fmt::Display for Rule {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$Rule(config) => config.fmt(f),)+
                }
            }
        }

        impl Rule {
            /// Checks the hyperparameters.
            ///
            /// # Errors
            /// Those of the configuration's `validate`.
            pub fn validate(&self) -> Result<()> {
                match self {
                    $(Self::$Rule(config) => config.validate(),)+
                }
            }

            /// Returns the learning rate.
            pub fn lr(&self) -> f64 {
                match self {
                    $(Self::$Rule(config) => config.lr,)+
                }
            }

            /// Returns the rule with another learning rate.
            pub fn with_lr(mut self, lr: f64) -> Self {
                match &mut self {
                    $(Self::$Rule(config) => config.lr = lr,)+
                }
                self
            }

            /// Returns the weight decay.
            pub fn weight_decay(&self) -> f64 {
                match self {
                    $(Self::$Rule(config) => config.weight_decay,)+
                }
            }

            /// Returns the rule with another weight decay.
            pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
                match &mut self {
                    $(Self::$Rule(config) => config.weight_decay = weight_decay,)+
                }
                self
            }

            /// Returns how a step treats a parameter without a gradient.
            pub fn missing_gradients(&self) -> MissingGradients {
                match self {
                    $(Self::$Rule(config) => config.missing_gradients,)+
                }
            }

            /// Returns the name and the cost of an update.
            pub(crate) fn info(&self) -> &'static OpInfo {
                match self {
                    $(Self::$Rule(config) => config.info(),)+
                }
            }

            /// Returns the tensors of state of a parameter of this dtype, without its master value.
            pub(crate) fn states(&self, parameter: DType) -> Vec<State> {
                match self {
                    $(Self::$Rule(config) => config.states(parameter),)+
                }
            }

            /// Returns the coefficients of step `step`, counted from 1, for the parameter with index `parameter` and
            /// these dimensions.
            pub(crate) fn update(&self, step: usize, parameter: usize, dims: &[usize]) -> Update {
                match self {
                    $(Self::$Rule(config) => config.update(step, parameter, dims),)+
                }
            }

            /// Checks that the rule can update a variable.
            ///
            /// # Errors
            /// A dtype or shape that the rule does not support, with the variable's name.
            pub(super) fn check(&self, name: &str, var: &Var) -> Result<()> {
                match self {
                    $(Self::$Rule(config) => config.check(name, var),)+
                }
            }
        }

        /// Returns the value `p` and the states of a parameter after a step, by candle's ops. All have the dtype of the
        /// computation.
        pub(super) fn reference(
            rule: &Coefficients,
            p: Tensor,
            g: &Tensor,
            states: &[Tensor],
        ) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
            match rule {
                $(Coefficients::$Rule(rule) => $module::reference(rule, p, g, states),)+
            }
        }

        /// The descriptions of all rules.
        pub(crate) const INFOS: &[OpInfo] = &[$($module::INFO),+];
    };
}

rules! {
    /// SGD with momentum.
    Sgd(SgdConfig) in sgd,
    /// Lion.
    Lion(LionConfig) in lion,
    /// Muon, for matrices.
    Muon(MuonConfig) in muon,
    /// AdamW.
    #[cfg_attr(feature = "serde", serde(untagged))] // as files have it from before there were other rules
    AdamW(AdamWConfig) in adamw
}

impl Default for Rule {
    fn default() -> Self {
        Self::AdamW(AdamWConfig::default())
    }
}

impl Rule {
    /// Returns the name in reports: `adamw`.
    pub fn name(&self) -> &'static str {
        self.info().op
    }

    /// Returns name and dtype of each tensor of state of a parameter of this dtype. Each has the parameter's shape.
    ///
    /// ```
    /// use candle_core::DType;
    /// use tallow::optim::Rule;
    ///
    /// let state = Rule::default().state(DType::BF16);
    /// assert_eq!(state[0], ("exp_avg", DType::F32));
    /// assert_eq!(state[2], ("master", DType::F32)); // the value; the bf16 parameter is its rounding
    /// ```
    pub fn state(&self, parameter: DType) -> Vec<(&'static str, DType)> {
        let states = self.states(parameter).into_iter();
        let states = states.map(|state| (state.name, state.dtype));
        states
            .chain(master(parameter).map(|dtype| (MASTER, dtype)))
            .collect()
    }

    /// Returns the bytes of state of a parameter's element.
    pub(crate) fn state_bytes(&self, parameter: DType) -> usize {
        let state = self.state(parameter).into_iter();
        state.map(|(_, dtype)| dtype.size_in_bytes()).sum()
    }

    /// Returns the scratch memory of an eager step of the parameters of `all` with this rule, in bytes.
    pub(crate) fn step_bytes<'p>(
        &self,
        all: impl Iterator<Item = (&'p str, &'p [usize])>,
        parameter: DType,
        on_gpu: bool,
    ) -> usize {
        match self {
            Self::Muon(muon) => {
                let own = all.filter(|(name, dims)| self.of_parameter(name, dims) == *self);
                muon.step_bytes(own.map(|(_, dims)| dims), parameter, on_gpu)
            }
            _ => 0,
        }
    }

    /// Returns the rule of a parameter in [`usual_groups`](super::usual_groups), whose weight decay may be 0 instead.
    pub(crate) fn of_parameter(&self, name: &str, dims: &[usize]) -> Self {
        match self {
            Self::Muon(muon) if dims.len() != 2 || !is_hidden_matrix(name, dims) => {
                muon.rest().into()
            }
            rule => *rule,
        }
    }

    /// Returns whether a plan for this rule can run `other`: the same rule with the same state.
    pub(crate) fn is_planned_as(&self, other: &Self) -> bool {
        self.describe_state() == other.describe_state()
    }

    /// Returns the rule's name with the names of its state, and what else a plan depends on: `adamw (exp_avg,
    /// exp_avg_sq)`.
    pub(crate) fn describe_state(&self) -> String {
        let states = self.states(DType::F32).into_iter().map(|state| state.name);
        let state = format!("{} ({})", self.name(), Vec::from_iter(states).join(", "));
        match self {
            Self::Muon(muon) => format!("{state}, {}", muon.describe_iteration()),
            _ => state,
        }
    }
}

/// The name of the value in f32 of a parameter in half precision, which all rules keep.
pub(super) const MASTER: &str = "master";

/// Returns the dtype of the master value of a parameter of this dtype, if it has one.
pub(super) fn master(parameter: DType) -> Option<DType> {
    matches!(parameter, DType::F16 | DType::BF16).then_some(wide(parameter))
}

/// A tensor of a parameter's state, of the parameter's shape.
pub(crate) struct State {
    /// The name, before that of the parameter.
    pub name: &'static str,
    pub dtype: DType,
    /// The values that it can have.
    pub numbers: Numbers,
}

impl State {
    /// Returns a tensor in the dtype of the computation.
    fn wide(name: &'static str, parameter: DType, numbers: Numbers) -> Self {
        Self::new(name, wide(parameter), numbers)
    }

    fn new(name: &'static str, dtype: DType, numbers: Numbers) -> Self {
        Self {
            name,
            dtype,
            numbers,
        }
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

/// Checks that a rate is at least 0 and under 1.
fn under_one(config: &'static str, field: &'static str, rate: f64, hint: &str) -> Result<()> {
    if (0.0..1.0).contains(&rate) {
        return Ok(());
    }
    Err(Error::config(config, field, rate).must_be("at least 0 and under 1", hint))
}

/// Checks that `1 - lr * weight_decay` is finite in f32.
fn finite_decay(config: &'static str, lr: f64, weight_decay: f64) -> Result<()> {
    let decay = lr * weight_decay;
    if is_finite_in_f32(decay) {
        return Ok(());
    }
    Err(Error::config(config, "weight_decay", weight_decay).must_be(
        format!("such that lr * weight_decay, {decay:e}, is finite in f32"),
        "a step multiplies weights by 1 - lr * weight_decay; usual values are up to 0.1",
    ))
}

/// Whether a number is finite in f32, in which updates are computed.
fn is_finite_in_f32(value: f64) -> bool {
    (value as f32).is_finite()
}
