//! The optimizer itself: its parameters, its state, and the step.

use super::MissingGradients;
use super::config::{AdamWConfig, ParameterGroup};
use super::reference;
use super::shards::Shards;
use super::slot::{STEP, Slot, step_cpu};
use crate::gradients::{find_gradient, missing};
use crate::inplace::{storage_address, wide};
use crate::kernels::Update;
use crate::ops::{Path, check_granted_on, choose, laid_out};
use crate::probe::{self, Kind, Operand, Operands};
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var, backprop::GradStore};
use std::collections::{HashMap, HashSet};

/// AdamW (Adam with decoupled weight decay), with PyTorch's semantics.
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
/// The state is `f32` whatever a parameter's dtype (`f64` for `f64` parameters): 8 bytes a parameter, or 4 in bf16
/// ([`Moments::Bf16`](super::Moments::Bf16)). A parameter in
/// `f16` or `bf16` has a third state, `master`, its value in `f32` (12 bytes in all), of which it is the rounding: a
/// step of 1e-3 would otherwise be rounded away from a `bf16` weight of 1 every time. Setting such a parameter from
/// outside is noticed, and its `master` starts from there.
///
/// On the CPU a step is one pass that writes in place and allocates nothing, with the same bits for any number of
/// threads. On CUDA all parameters in f32 are updated in one launch. On other devices it is composed of candle's own
/// ops ([`AdamW::step_reference`]).
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::{AdamW, AdamWConfig};
///
/// let weight = Var::from_slice(&[1f32, -1.0], 2, &Device::Cpu)?;
/// let config = AdamWConfig { lr: 0.1, weight_decay: 0.0, ..Default::default() };
/// let mut optimizer = AdamW::new([("weight".to_string(), weight.clone())], config)?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?;
/// optimizer.step(&gradients)?;
/// let moved = weight.to_vec1::<f32>()?; // the first step is lr long, whatever the gradient
/// assert!((moved[0] - 0.9).abs() < 1e-6 && (moved[1] + 0.9).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// It implements [`candle_nn::Optimizer`] too. With that trait in scope nothing becomes ambiguous, for a type's own
/// methods come first:
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer;
/// use tallow::optim::{AdamW, AdamWConfig};
///
/// let weight = Var::from_slice(&[1f32, -1.0], 2, &Device::Cpu)?;
/// let mut optimizer = AdamW::new([("weight".to_string(), weight.clone())], AdamWConfig::default())?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?;
/// optimizer.step(&gradients)?;
/// optimizer.set_learning_rate(1e-4);
/// assert_eq!(optimizer.learning_rate(), 1e-4);
/// optimizer.backward_step(&weight.sqr()?.sum_all()?)?; // the trait's own
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW {
    pub(super) groups: Vec<ParameterGroup>,
    /// One for each parameter, in the groups' order; none for one whose state another rank has.
    pub(super) slots: Vec<Option<Slot>>,
    pub(super) steps: usize,
    /// By parameter, in how many of the steps it was [skipped](MissingGradients::Skip).
    pub(super) skipped: Vec<usize>,
    /// Where the state is divided among ranks.
    pub(super) shards: Option<Shards>,
}

impl AdamW {
    /// An optimizer of `parameters` with one configuration for all.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration cannot work, if there are no parameters, or if a name or a variable comes
    /// twice (both names are in the message); [`Error::DType`] for a parameter that is not `f16`, `bf16`, `f32` or
    /// `f64`.
    pub fn new(
        parameters: impl IntoIterator<Item = (String, Var)>,
        config: AdamWConfig,
    ) -> Result<Self> {
        let parameters = parameters.into_iter().collect();
        Self::with_groups(vec![ParameterGroup { parameters, config }])
    }

    /// An optimizer of several groups of parameters, each with its configuration.
    ///
    /// # Errors
    /// As [`AdamW::new`]. A group may be empty, not all of them.
    pub fn with_groups(groups: Vec<ParameterGroup>) -> Result<Self> {
        if groups.iter().all(|group| group.parameters.is_empty()) {
            return Err(Error::config("AdamW", "parameters", "none").must_be(
                "at least one",
                "pass the model's parameters, for example model.parameters()",
            ));
        }
        Self::of_any_groups(groups)
    }

    /// As [`AdamW::with_groups`], where there may be nothing to optimize.
    pub(super) fn of_any_groups(groups: Vec<ParameterGroup>) -> Result<Self> {
        for group in &groups {
            group.config.validate()?;
        }
        refuse_duplicates(&groups)?;
        let slots = groups.iter().flat_map(|group| {
            let parameters = group.parameters.iter();
            parameters.map(|(name, var)| Slot::new(name, var, group.config.moments).map(Some))
        });
        let slots = slots.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            groups,
            skipped: vec![0; slots.len()],
            slots,
            steps: 0,
            shards: None,
        })
    }

    /// Updates every parameter from its gradient. What happens to one without a gradient is in
    /// [`AdamWConfig::missing_gradients`].
    ///
    /// Gradients may be of another float dtype than their parameters, and laid out in any way.
    ///
    /// # Errors
    /// [`Error::MissingGradient`] names a parameter without a gradient, unless its group's configuration takes it; a
    /// gradient of a wrong shape or dtype or on another device is an error, as is a learning rate that cannot work. All
    /// of this is checked before anything changes.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        let range = probe::op(Kind::Op, "adamw", probe::op_path("adamw"));
        // Asked for all first: where the policy is strict, a refusal must leave everything as it was.
        #[cfg(feature = "cuda")]
        let mut on_gpu = super::cuda::Batch::default();
        for (_, parameter) in self.parameters() {
            match (path(parameter)?, parameter.device()) {
                #[cfg(feature = "cuda")]
                (Path::Kernel, candle_core::Device::Cuda(gpu)) => on_gpu.prepare(gpu)?,
                _ => {}
            }
        }
        self.step_by(gradients, |parameter, gradient, slot, update| {
            match (path(parameter)?, parameter.device()) {
                #[cfg(feature = "cuda")]
                (Path::Kernel, candle_core::Device::Cuda(_)) => {
                    on_gpu.add(parameter, gradient, slot, update);
                    Ok(())
                }
                (Path::Kernel, _) => step_cpu(parameter, gradient, slot, update),
                (Path::Reference, _) => reference::step(parameter, gradient, slot, update),
            }
        })?;
        #[cfg(feature = "cuda")]
        on_gpu.step()?;
        self.gather_weights()?;
        let mut updated = self.parameters().zip(&self.slots);
        let first = updated.find_map(|((_, var), slot)| Some((var, slot.as_ref()?)));
        if let (true, Some((first, slot))) = (probe::is_listening(), first) {
            let slots = self.slots.iter().flatten();
            let dims = [slots.map(|slot| slot.exp_avg.elem_count()).sum()];
            let [own, moments] =
                [first.dtype(), slot.exp_avg.dtype()].map(|dtype| Operand { dims: &dims, dtype });
            range.leave(Operands {
                inputs: &[own, moments],
                output: own,
            });
        }
        Ok(())
    }

    /// As [`AdamW::step`], composed of candle's own ops: what the kernel is held against, and what devices without a
    /// kernel run. Slower, and it allocates temporaries.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn step_reference(&mut self, gradients: &GradStore) -> Result<()> {
        self.step_by(gradients, reference::step)?;
        self.gather_weights()
    }

    fn step_by(
        &mut self,
        gradients: &GradStore,
        mut step: impl FnMut(&Var, &Tensor, &Slot, &Update) -> Result<()>,
    ) -> Result<()> {
        for group in &self.groups {
            group.config.validate()?;
        }
        let gradients = self.readable_gradients(gradients)?;
        self.steps += 1;
        crate::ops::forget_weights(); // an autocast region around the step must not go on with the old ones
        let mut slots = self.slots.iter().zip(&gradients).enumerate();
        for group in &self.groups {
            for ((_, var), (number, (slot, gradient))) in group.parameters.iter().zip(&mut slots) {
                let gradient = match gradient {
                    Gradient::Given(gradient) => gradient,
                    Gradient::Elsewhere => continue,
                    Gradient::Skipped => {
                        self.skipped[number] += 1;
                        continue;
                    }
                };
                let Some(slot) = slot else {
                    continue; // another rank's
                };
                let own_steps = self.steps - self.skipped[number];
                let update = group.config.update(own_steps, number);
                step(var, gradient, slot, &update)?;
            }
        }
        Ok(())
    }

    /// Every parameter's gradient as a kernel can read it while parameters change: contiguous, of a dtype that goes
    /// with the parameter's, and on no storage that the step writes. Almost always the gradients as they are.
    fn readable_gradients(&self, gradients: &GradStore) -> Result<Vec<Gradient>> {
        let written: HashSet<usize> = self
            .parameters()
            .map(|(_, var)| var)
            .chain(self.slots.iter().flatten().flat_map(Slot::vars))
            .map(|var| storage_address(var))
            .collect();
        let policies = self.groups.iter().flat_map(|group| {
            let policy = group.config.missing_gradients;
            group.parameters.iter().map(move |_| policy)
        });
        self.parameters()
            .zip(&self.slots)
            .zip(policies)
            .map(|(((name, var), slot), policy)| {
                let found = find_gradient(STEP, gradients, name, var)?;
                match (found, policy) {
                    (None, MissingGradients::Error) => return Err(missing(STEP, name)),
                    (None, MissingGradients::Skip) => return Ok(Gradient::Skipped),
                    _ if slot.is_none() => return Ok(Gradient::Elsewhere),
                    _ => {}
                }
                let gradient = match found {
                    Some(gradient) => gradient.detach(),
                    None => Tensor::zeros(var.shape(), var.dtype(), var.device())?,
                };
                let dtype = match (var.dtype(), gradient.dtype()) {
                    // The kernel for half precision reads these as they are.
                    (parameter @ (DType::F16 | DType::BF16), gradient) if gradient == parameter => {
                        gradient
                    }
                    (parameter, _) => wide(parameter),
                };
                if gradient.dtype() != dtype {
                    check_granted_on(gradient.device(), gradient.dims(), dtype)?;
                }
                let gradient = laid_out(&gradient.to_dtype(dtype)?)?;
                match written.contains(&storage_address(&gradient)) {
                    true => {
                        check_granted_on(gradient.device(), gradient.dims(), dtype)?;
                        Ok(Gradient::Given(gradient.force_contiguous()?))
                    }
                    false => Ok(Gradient::Given(gradient)),
                }
            })
            .collect()
    }

    /// The parameters that have a gradient, of all groups: what a step unscales.
    ///
    /// # Errors
    /// Those of [`MissingGradients::with_gradients`] by each group's policy; no gradient for any parameter.
    pub(super) fn with_gradients(
        &self,
        op: &'static str,
        gradients: &GradStore,
    ) -> Result<Vec<(String, Var)>> {
        let mut present = Vec::new();
        for group in &self.groups {
            let policy = group.config.missing_gradients;
            present.extend(policy.present(op, gradients, &group.parameters)?);
        }
        match (present.is_empty(), self.parameters().next()) {
            (true, Some((name, _))) => Err(missing(op, name)),
            _ => Ok(present),
        }
    }

    /// All parameters with their names, group by group.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &(String, Var)> {
        self.groups.iter().flat_map(|group| &group.parameters)
    }

    /// The learning rate of the first group (0 if there is none).
    pub fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0.0, |group| group.config.lr)
    }

    /// Sets the learning rate of every group. A rate that cannot work is refused by the next step.
    pub fn set_learning_rate(&mut self, lr: f64) {
        for group in &mut self.groups {
            group.config.lr = lr;
        }
    }

    /// Sets the learning rate of group number `group`, the first being 0.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such group, or the rate is not finite and at least 0.
    pub fn set_learning_rate_of(&mut self, group: usize, lr: f64) -> Result<()> {
        let count = self.groups.len();
        let Some(group) = self.groups.get_mut(group) else {
            return Err(Error::config("AdamW", "group", group).must_be(
                format!("under the number of groups, {count}"),
                "groups count from 0, in the order they were given",
            ));
        };
        let config = AdamWConfig { lr, ..group.config };
        config.validate()?;
        group.config = config;
        Ok(())
    }

    /// How many steps have been taken.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The groups of parameters with their configurations, in the order they were given.
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

/// A parameter's gradient in a step.
enum Gradient {
    Given(Tensor),
    /// Another rank updates the parameter.
    Elsewhere,
    /// There is none, and the parameter is left as it is.
    Skipped,
}

/// An error if a variable or a name comes twice.
fn refuse_duplicates(groups: &[ParameterGroup]) -> Result<()> {
    let refuse = |got: String, hint: &str| {
        Err(Error::config("AdamW", "parameters", got)
            .must_be("every variable and every name once", hint))
    };
    let mut by_id = HashMap::new();
    let mut names = HashSet::new();
    for (name, var) in groups.iter().flat_map(|group| &group.parameters) {
        if let Some(first) = by_id.insert(var.id(), name) {
            return refuse(
                format!("one variable as {first} and as {name}"),
                "a tied weight belongs to one group, under one of its names",
            );
        }
        if !names.insert(name) {
            return refuse(
                format!("two variables with the name {name}"),
                "saved state is found by name: name them apart",
            );
        }
    }
    Ok(())
}

/// Kernel or reference: there is a kernel for every float dtype on the CPU, and for all but f64 on CUDA.
fn path(parameter: &Var) -> Result<Path> {
    choose(&super::cost::STEP_INFO, parameter)
}
