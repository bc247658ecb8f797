//! Muon.

use super::{State, at_least_zero, finite_decay, is_finite_in_f32, under_one};
use crate::inplace::wide;
use crate::kernels::Update;
use crate::kernels::cpu::update::muon::{self, Iteration, Muon};
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
/// The state is `momentum_buffer`, f32 or, for an f64 parameter, f64.
///
/// # Cost
/// With s and l the smaller and the larger side of a matrix, the iteration computes `steps (4 s^2 l + 2 s^3)` FLOPs.
/// Matrices of one shape are iterated in batches, on a GPU by three batched matmuls of cuBLAS a step, in f32 exact or
/// TF32 by the process's [setting](crate::hardware::set_tf32). A batch needs `8 s l + 8 s^2` bytes of scratch memory
/// for a matrix, with an iteration in bf16 `8 s l + 4 s^2`. It has at most four times the scratch memory of the matrix
/// that needs most.
///
/// With [fully sharded](crate::distributed::FullyShard) weights each rank computes its part of the direction. The ranks
/// gather it (4 bytes a parameter and step, in addition to the exchange of weights and gradients), and each rank runs
/// the whole iteration. So the FLOPs of the iteration are those of one rank alone, on every rank. With a
/// [sharded](crate::optim::Optimizer::shard) optimizer a rank iterates its own matrices only. Fully sharded weights are
/// for [planned](crate::compile::Step::fully_sharded) steps: an eager step takes a part for a matrix of one column.
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
/// let mut optimizer =
///     Optimizer::new([("weight".to_string(), weight.clone())], MuonConfig::default())?;
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
        let iteration = self.iteration(dims);
        let [rows, columns] = iteration.shape;
        Muon {
            momentum: self.momentum,
            nesterov: self.nesterov,
            decay: 1.0 - self.lr * self.weight_decay,
            step_size: self.lr * self.scaling.factor(rows, columns),
            iteration,
        }
        .into()
    }

    /// Returns the iteration of a parameter with these dimensions.
    pub(crate) fn iteration(&self, dims: &[usize]) -> Iteration {
        Iteration {
            steps: self.steps,
            eps: self.eps,
            in_bf16: self.dtype == IterationDType::Bf16,
            shape: dims.try_into().unwrap_or([dims.iter().product(), 1]), // `check` has refused others
        }
    }

    /// Describes the settings that a plan depends on: `5 steps in f32, eps 1e-7`.
    pub(super) fn describe_iteration(&self) -> String {
        let dtype = match self.dtype {
            IterationDType::Wide => "f32",
            IterationDType::Bf16 => "bf16",
        };
        format!("{} steps in {dtype}, eps {:e}", self.steps, self.eps)
    }

    pub(super) fn info(&self) -> &'static OpInfo {
        &INFO
    }

    pub(super) fn states(&self, parameter: DType) -> Vec<State> {
        vec![State::wide("momentum_buffer", parameter, Numbers::Finite)]
    }

    pub(super) fn check(&self, name: &str, var: &Var) -> Result<()> {
        if var.rank() != 2 {
            return Err(
                Error::shape("Optimizer", format!("{:?}", var.dims())).must_be(
                    format!("parameter {name} with two dimensions, because Muon updates matrices"),
                    "make groups with muon_for_matrices",
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
    let iteration = &rule.iteration;
    let x = direction.broadcast_div(&(norm + iteration.eps)?)?;
    let is_tall = iteration.is_tall();
    let x = if is_tall { x.t()?.contiguous()? } else { x };
    let computed = x.dtype();
    let mut x = if iteration.in_bf16 {
        x.to_dtype(DType::BF16)?
    } else {
        x
    };
    let [a, b, c] = muon::COEFFICIENTS_OF_A_STEP;
    for _ in 0..iteration.steps {
        let gram = x.matmul(&x.t()?.contiguous()?)?;
        let square = ((gram.matmul(&gram)? * c)? + (gram * b)?)?;
        x = ((&x * a)? + square.matmul(&x)?)?;
    }
    let x = x.to_dtype(computed)?;
    let x = if is_tall { x.t()?.contiguous()? } else { x };
    let p = ((p * rule.decay)? - (x * rule.step_size)?)?;
    Ok((p, vec![buffer]))
}

/// The most scratch memory of a batch, as a multiple of that of the matrix that needs most. More would make the memory
/// of a step depend on the number of layers; with less, small matrices do not fill a GPU.
const BATCH_SCRATCH: usize = 4;

/// Splits matrices into batches that are iterated together, in the order of their first matrices. Matrices are given by
/// iteration and dtype of the computation. Those of a batch have both, and `key`, in common.
pub(crate) fn batches<K: PartialEq>(matrices: &[(Iteration, DType, K)]) -> Vec<Vec<usize>> {
    let bytes = |(iteration, wide, _): &(Iteration, DType, K)| scratch_bytes(iteration, *wide);
    let most = BATCH_SCRATCH * matrices.iter().map(bytes).max().unwrap_or(0);
    let mut alike: Vec<Vec<usize>> = Vec::new();
    for (number, matrix) in matrices.iter().enumerate() {
        match alike
            .iter_mut()
            .find(|others| matrices[others[0]] == *matrix)
        {
            Some(others) => others.push(number),
            None => alike.push(vec![number]),
        }
    }
    let batches = alike.into_iter().flat_map(|numbers| {
        let limit = (most / bytes(&matrices[numbers[0]]).max(1)).max(1);
        let each = numbers.len().div_ceil(numbers.len().div_ceil(limit)); // of about equal sizes
        let batches = numbers.chunks(each).map(<[usize]>::to_vec);
        batches.collect::<Vec<_>>()
    });
    batches.collect()
}

/// Returns the bytes that a matrix in a batch needs: its direction and its scratch memory.
fn scratch_bytes(iteration: &Iteration, wide: DType) -> usize {
    batch_bytes(iteration, 1, wide, false)
}

/// Returns the bytes of the directions and the scratch memory of a batch.
fn batch_bytes(iteration: &Iteration, count: usize, wide: DType, on_gpu: bool) -> usize {
    let scratch = iteration.scratch(count, wide, on_gpu).into_iter();
    let scratch = scratch.map(|(_, elements, dtype)| elements * dtype.size_in_bytes());
    count * iteration.elements() * wide.size_in_bytes() + scratch.sum::<usize>()
}

impl MuonConfig {
    /// Returns the scratch memory of an eager step of matrices with these dimensions and this dtype, in bytes: that of
    /// the batch that needs most.
    pub(super) fn step_bytes<'d>(
        &self,
        matrices: impl Iterator<Item = &'d [usize]>,
        parameter: DType,
        on_gpu: bool,
    ) -> usize {
        let matrices = matrices.map(|dims| (self.iteration(dims), wide(parameter), ()));
        let matrices: Vec<_> = matrices.collect();
        let batches = batches(&matrices).into_iter();
        let bytes = batches.map(|batch| {
            let (iteration, wide, ()) = &matrices[batch[0]];
            batch_bytes(iteration, batch.len(), *wide, on_gpu)
        });
        bytes.max().unwrap_or(0)
    }
}

pub(super) const INFO: OpInfo = OpInfo::new("muon")
    .costing(
        "12 a parameter; a step of the iteration of a matrix with sides s <= l: matmuls of 4 s^2 l + 2 s^3",
        "gradient; weight and momentum buffer, read and written",
        |o| elementwise(o, 12.0),
        None,
    )
    .on_gpu_up_to(usize::MAX);
