//! Groups of parameters that share a rule.

use super::{Rule, is_hidden_matrix, muon_for_matrices};
use candle_core::Var;
use candle_nn::VarMap;
use std::sync::PoisonError;

/// Parameters that are updated by the same rule. Groups of one optimizer may have different rules.
///
/// [`decay_matrices_only`] makes the two usual groups. Other groups are passed to
/// [`Optimizer::with_groups`](super::Optimizer::with_groups) likewise:
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::optim::{AdamWConfig, Optimizer, ParameterGroup};
///
/// let group = |name: &str, lr| -> tallow::Result<ParameterGroup> {
///     let weight = Var::zeros((3, 4), DType::F32, &Device::Cpu)?;
///     Ok(ParameterGroup {
///         parameters: vec![(name.to_string(), weight)],
///         rule: AdamWConfig { lr, ..Default::default() }.into(),
///     })
/// };
/// let optimizer = Optimizer::with_groups(vec![group("embedding", 1e-4)?, group("head", 1e-3)?])?;
/// assert_eq!(optimizer.groups()[1].rule.lr(), 1e-3);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParameterGroup {
    /// The parameters with their names.
    pub parameters: Vec<(String, Var)>,
    /// Their rule, with its hyperparameters.
    pub rule: Rule,
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
/// use tallow::optim::{AdamWConfig, Optimizer, parameters_of};
///
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let model = [Linear::new(4, 8, vb.pp("up"))?, Linear::new(8, 2, vb.pp("down"))?];
/// let parameters = parameters_of(&variables);
/// assert_eq!(parameters[0].0, "down.weight");
/// let optimizer = Optimizer::new(parameters, AdamWConfig::default())?;
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

/// Splits parameters into the groups of the [trainer](crate::train::Trainer): those of [`decay_matrices_only`], or for
/// Muon those of [`muon_for_matrices`](super::muon_for_matrices). Muon then updates the
/// [hidden matrices](super::is_hidden_matrix), and AdamW the rest, with Muon's learning rate and weight decay. These
/// suit both with [`Scaling::Moonlight`](super::Scaling::Moonlight).
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::model::{TransformerConfig, TransformerLM};
/// use tallow::optim::{MuonConfig, Optimizer, Scaling, usual_groups};
///
/// let config = TransformerConfig {
///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
///     ..Default::default()
/// };
/// let model = TransformerLM::new(&config, 0, &Device::Cpu)?;
/// let muon = MuonConfig {
///     lr: 1e-3, weight_decay: 0.1, scaling: Scaling::Moonlight,
///     ..Default::default()
/// };
/// let groups = usual_groups(model.parameters(), muon);
/// assert_eq!(groups[0].parameters.len(), 7); // q, k, v, out, w1, w2, w3
/// let optimizer = Optimizer::with_groups(groups)?;
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn usual_groups(
    parameters: impl IntoIterator<Item = (String, Var)>,
    rule: impl Into<Rule>,
) -> Vec<ParameterGroup> {
    match rule.into() {
        Rule::Muon(muon) => muon_for_matrices(parameters, muon, muon.rest(), is_hidden_matrix),
        rule => decay_matrices_only(parameters, rule),
    }
}

/// Splits parameters into two groups, so that weight decay applies to matrices only.
///
/// The first group has the parameters of two and more dimensions (weights of linear layers and embeddings), with the
/// weight decay of `rule`. The second has vectors and scalars (weights of norms, biases), without weight decay.
/// Either may be empty.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use tallow::optim::{AdamWConfig, Optimizer, decay_matrices_only};
///
/// let parameters = vec![
///     ("linear.weight".to_string(), Var::zeros((3, 4), DType::F32, &Device::Cpu)?),
///     ("norm.weight".to_string(), Var::ones(4, DType::F32, &Device::Cpu)?),
/// ];
/// let optimizer = Optimizer::with_groups(decay_matrices_only(parameters, AdamWConfig::default()))?;
/// assert_eq!(optimizer.groups()[0].rule.weight_decay(), 0.01);
/// assert_eq!(optimizer.groups()[1].rule.weight_decay(), 0.0);
/// assert_eq!(optimizer.groups()[1].parameters[0].0, "norm.weight");
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn decay_matrices_only(
    parameters: impl IntoIterator<Item = (String, Var)>,
    rule: impl Into<Rule>,
) -> Vec<ParameterGroup> {
    let rule = rule.into();
    let (matrices, vectors) = parameters.into_iter().partition(|(_, var)| var.rank() >= 2);
    vec![
        ParameterGroup {
            parameters: matrices,
            rule,
        },
        ParameterGroup {
            parameters: vectors,
            rule: rule.with_weight_decay(0.0),
        },
    ]
}
