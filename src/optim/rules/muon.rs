//! Muon.

use super::{State, at_least_zero, finite_decay, is_finite_in_f32, under_one};
use crate::inplace::wide;
use crate::kernels::Update;
use crate::kernels::cpu::update::{Muon, muon};
use crate::ops::info::OpInfo;
use crate::optim::cost::elementwise;
use crate::optim::{AdamWConfig, MissingGradients, ParameterGroup, Rule};
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::fmt;

/// Muon: momentum, made orthogonal by a Newton-Schulz iteration. For matrices only.
///
/// For a parameter `p` (rows, columns) with gradient `g`, and the momentum buffer `b` starting at 0:
///
/// ```text
/// b = momentum b + (1 - momentum) g
/// d = momentum b + (1 - momentum) g            (Nesterov, the default; else d = b)
/// X = d / (|d| + eps), |d| the Frobenius norm, transposed if rows > columns
/// `steps` times: A = X X^T;  X = 3.4445 X + (-4.7750 A + 2.0315 A^2) X
/// p = (1 - lr * weight_decay) p - lr * scale * X
/// ```
///
/// [`Scaling`] is the scale. The result has singular values of about 0.7 to 1.2 instead of 1, which trains as well.
///
/// The state is `momentum_buffer`, f32 or, for an f64 parameter, f64. A step needs scratch memory of two to three
/// matrices. There is no kernel for GPUs: an eager step runs candle's ops there, and a planned step is refused.
///
/// Embeddings, heads, norms and biases are not for Muon; [`muon_for_matrices`] makes the groups.
///
/// Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable for
/// LLM Training", 2025, arXiv:2502.16982, section 2.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::{MuonConfig, Optimizer};
///
/// let weight = Var::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 7.0], (2, 3), &Device::Cpu)?;
/// let mut optimizer = Optimizer::new([("weight".to_string(), weight.clone())], MuonConfig::default())?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?;
/// optimizer.step(&gradients)?;
/// assert!(weight.sqr()?.sum_all()?.to_scalar::<f32>()? < 104.0);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MuonConfig {
    /// The learning rate.
    pub lr: f64,
    /// The decay rate of the momentum buffer.
    pub momentum: f64,
    /// Whether a step is by the gradient plus the decayed buffer (Nesterov's momentum).
    pub nesterov: bool,
    /// The decoupled weight decay: a step first multiplies a parameter by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// The eps that is added to the norm of the direction.
    pub eps: f64,
    /// The steps of the Newton-Schulz iteration.
    pub steps: usize,
    /// The scale of a step by the parameter's shape.
    pub scaling: Scaling,
    /// The dtype of the Newton-Schulz iteration.
    pub dtype: IterationDType,
    /// How a step treats a parameter without a gradient; an error by default.
    #[cfg_attr(feature = "serde", serde(default))]
    pub missing_gradients: MissingGradients,
}

/// The scale of Muon's step by the shape of the parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Scaling {
    /// `max(1, rows / columns)^0.5`, as in the original: the step has a spectral norm that suits the layer's width.
    #[default]
    SpectralNorm,
    /// `0.2 max(rows, columns)^0.5`, as in Moonlight: an element moves as far as with AdamW, so that both can have one
    /// learning rate.
    Moonlight,
}

impl Scaling {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns.max(1) as f64);
        match self {
            Self::SpectralNorm => (rows / columns).max(1.0).sqrt(),
            Self::Moonlight => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// The dtype of Muon's Newton-Schulz iteration. It is the same on all devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum IterationDType {
    /// f32, or f64 for f64 parameters.
    #[default]
    Wide,
    /// bf16, as in the original. Singular values are off by about 1%. Not for f64 parameters.
    Bf16,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            lr: 0.02,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.0,
            eps: 1e-7,
            steps: 5,
            scaling: Scaling::SpectralNorm,
            dtype: IterationDType::Wide,
            missing_gradients: MissingGradients::Error,
        }
    }
}

/// Describes the rule: `Muon, momentum 0.95 (Nesterov), weight decay 0.1`.
impl fmt::Display for MuonConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nesterov = if self.nesterov { " (Nesterov)" } else { "" };
        write!(
            f,
            "Muon, momentum {}{nesterov}, weight decay {}",
            self.momentum, self.weight_decay
        )
    }
}

impl MuonConfig {
    /// Checks the hyperparameters.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field: `lr`, `weight_decay` and their product must be at least 0 and finite in f32,
    /// `momentum` at least 0 and under 1, `eps` over 0 and finite in f32, `steps` 1 to 100.
    pub fn validate(&self) -> Result<()> {
        at_least_zero("MuonConfig", "lr", self.lr)?;
        under_one(
            "MuonConfig",
            "momentum",
            self.momentum,
            "the usual value is 0.95",
        )?;
        at_least_zero("MuonConfig", "weight_decay", self.weight_decay)?;
        finite_decay("MuonConfig", self.lr, self.weight_decay)?;
        if !(self.eps > 0.0 && is_finite_in_f32(self.eps)) {
            return Err(Error::config("MuonConfig", "eps", self.eps)
                .must_be("over 0, and finite in f32", "the usual value is 1e-7"));
        }
        if !(1..=100).contains(&self.steps) {
            return Err(Error::config("MuonConfig", "steps", self.steps)
                .must_be("from 1 to 100", "the usual value is 5"));
        }
        Ok(())
    }

    pub(super) fn update(&self, _: usize, _: usize, dims: &[usize]) -> Update {
        let [rows, columns] = dims.try_into().unwrap_or([dims.iter().product(), 1]); // `check` has refused others
        Muon {
            momentum: self.momentum,
            nesterov: self.nesterov,
            decay: 1.0 - self.lr * self.weight_decay,
            step_size: self.lr * self.scaling.factor(rows, columns),
            eps: self.eps,
            steps: self.steps,
            in_bf16: self.dtype == IterationDType::Bf16,
            shape: [rows, columns],
        }
        .into()
    }

    pub(super) fn info(&self) -> &'static OpInfo {
        &INFO
    }

    pub(super) fn states(&self, parameter: DType) -> Vec<State> {
        vec![State::wide("momentum_buffer", parameter, Numbers::Finite)]
    }

    /// Returns the scratch memory of an update on the CPU.
    pub(super) fn scratch(
        &self,
        dims: &[usize],
        parameter: DType,
    ) -> Vec<(&'static str, usize, DType)> {
        let &[rows, columns] = dims else {
            return Vec::new();
        };
        let computed = wide(parameter);
        let (is_wide, dtype) = match self.dtype {
            IterationDType::Wide => (true, computed),
            IterationDType::Bf16 => (false, DType::BF16),
        };
        let scratch = muon::scratch_elements([rows, columns], is_wide);
        vec![
            ("direction", rows * columns, computed),
            ("scratch", scratch, dtype),
        ]
    }

    pub(super) fn check(&self, name: &str, var: &Var) -> Result<()> {
        if var.rank() != 2 {
            return Err(
                Error::shape("Optimizer", format!("{:?}", var.dims())).must_be(
                    format!("parameter {name} with two dimensions, because Muon updates matrices"),
                    "make groups with muon_for_matrices; train fully sharded weights, whose shards have one dimension, \
                     with another rule",
                ),
            );
        }
        if var.dtype() == DType::F64 && self.dtype == IterationDType::Bf16 {
            return Err(Error::dtype("Optimizer", "f64").must_be(
                format!("parameter {name} in f16, bf16 or f32, with an iteration in bf16"),
                "leave MuonConfig::dtype as it is by default",
            ));
        }
        Ok(())
    }
}

/// Splits parameters into groups: matrices that `select` accepts for Muon, the rest for another rule.
///
/// The first group has the parameters of two dimensions for which `select` returns true, with `muon`. The second and
/// third have the rest with `rest`, vectors and scalars without weight decay, as by
/// [`decay_matrices_only`](crate::optim::decay_matrices_only). Any may be empty.
///
/// [`is_hidden_matrix`] selects all but embeddings and heads.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::optim::{AdamWConfig, MuonConfig, Optimizer, is_hidden_matrix, muon_for_matrices};
///
/// let weight = || Var::ones((3, 4), DType::F32, &Device::Cpu);
/// let parameters = vec![
///     ("token_embeddings.weight".to_string(), weight()?),
///     ("layers.0.attn.q_proj.weight".to_string(), weight()?),
/// ];
/// let (muon, adamw) = (MuonConfig::default(), AdamWConfig::default());
/// let groups = muon_for_matrices(parameters, muon, adamw, is_hidden_matrix);
/// assert_eq!(groups[0].parameters[0].0, "layers.0.attn.q_proj.weight");
/// assert_eq!(groups[1].parameters[0].0, "token_embeddings.weight");
/// let optimizer = Optimizer::with_groups(groups)?;
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn muon_for_matrices(
    parameters: impl IntoIterator<Item = (String, Var)>,
    muon: MuonConfig,
    rest: impl Into<Rule>,
    select: impl Fn(&str, &[usize]) -> bool,
) -> Vec<ParameterGroup> {
    let is_selected = |(name, var): &(String, Var)| var.rank() == 2 && select(name, var.dims());
    let (parameters, others) = parameters.into_iter().partition(is_selected);
    let rule = muon.into();
    let mut groups = vec![ParameterGroup { parameters, rule }];
    groups.extend(crate::optim::decay_matrices_only(others, rest));
    groups
}

/// Returns whether a parameter is not an embedding or a head by its name: no part of it contains `embed` or `head`, or
/// is `wte`, `wpe` or `output`.
pub fn is_hidden_matrix(name: &str, _: &[usize]) -> bool {
    !name.split('.').any(|part| {
        let is_named = ["wte", "wpe", "output"].contains(&part);
        is_named || part.contains("embed") || part.contains("head")
    })
}

impl MuonConfig {
    /// Returns the rule of the parameters that Muon does not update where no other is given: AdamW with the same
    /// learning rate and weight decay.
    pub(crate) fn rest(&self) -> AdamWConfig {
        AdamWConfig {
            lr: self.lr,
            weight_decay: self.weight_decay,
            missing_gradients: self.missing_gradients,
            ..Default::default()
        }
    }
}

/// A step in candle's ops.
pub(super) fn reference(
    rule: &Muon,
    p: Tensor,
    g: &Tensor,
    states: &[Tensor],
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let buffer = (&states[0] + ((g - &states[0])? * (1.0 - rule.momentum))?)?;
    let direction = match rule.nesterov {
        true => (g + ((&buffer - g)? * rule.momentum)?)?,
        false => buffer.clone(),
    };
    let norm = direction.sqr()?.sum_all()?.sqrt()?;
    let x = direction.broadcast_div(&(norm + rule.eps)?)?;
    let is_tall = rule.shape[0] > rule.shape[1];
    let x = if is_tall { x.t()?.contiguous()? } else { x };
    let computed = x.dtype();
    let mut x = if rule.in_bf16 {
        x.to_dtype(DType::BF16)?
    } else {
        x
    };
    let [a, b, c] = muon::COEFFICIENTS_OF_A_STEP;
    for _ in 0..rule.steps {
        let gram = x.matmul(&x.t()?.contiguous()?)?;
        let square = ((gram.matmul(&gram)? * c)? + (gram * b)?)?;
        x = ((&x * a)? + square.matmul(&x)?)?;
    }
    let x = x.to_dtype(computed)?;
    let x = if is_tall { x.t()?.contiguous()? } else { x };
    let p = ((p * rule.decay)? - (x * rule.step_size)?)?;
    Ok((p, vec![buffer]))
}

pub(super) const INFO: OpInfo = OpInfo::new("muon").costing(
    "12 a parameter, without the iteration",
    "gradient; weight and momentum buffer, read and written",
    |o| elementwise(o, 12.0),
    None,
);
