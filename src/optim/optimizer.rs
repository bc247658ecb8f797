//! The optimizer: parameters, state and step.

use super::shards::Shards;
use super::slot::{STEP, Slot, step_cpu, step_reference};
use super::{MissingGradients, ParameterGroup, Rule, muon};
use crate::gradients::{find_gradient, missing};
use crate::inplace::{storage_address, wide};
use crate::kernels::Update;
use crate::ops::{Path, check_granted_on, choose, try_contiguous};
use crate::probe::{self, Kind, Operand, Operands};
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var, backprop::GradStore};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// Updates parameters from their gradients, each group by its [`Rule`].
///
/// | rule | update | state of an f32 parameter |
/// |---|---|---|
/// | [`AdamW`](super::AdamWConfig) | by running means of the gradient and its square | 8 bytes, or 4 in bf16 |
/// | [`Lion`](super::LionConfig) | by the sign of a running mean | 4 bytes |
/// | [`Muon`](super::MuonConfig) | by the momentum, made orthogonal; matrices only | 4 bytes |
/// | [`Sgd`](super::SgdConfig) | by the gradient, or its momentum | none, or 4 bytes |
///
/// State is f32 for every parameter dtype except f64, where it is f64. A parameter in f16 or bf16 also has
/// `master`, a copy of its value in f32 (4 bytes); the parameter is the rounded copy. Without it, a step of 1e-3 would
/// never change a bf16 weight of 1. If such a parameter is set from outside, its `master` starts again from the new
/// value.
///
/// On the CPU a step is one pass in place without allocations, with the same bits for any number of threads. On CUDA
/// all parameters of a rule in f32 are updated in one launch. Muon's matrices are updated
/// [in batches](super::MuonConfig#cost) instead, with scratch memory. On other devices a step is composed of candle's
/// own ops ([`Optimizer::step_reference`]).
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::optim::{AdamWConfig, Optimizer};
///
/// let weight = Var::from_slice(&[1f32, -1.0], 2, &Device::Cpu)?;
/// let config = AdamWConfig { lr: 0.1, weight_decay: 0.0, ..Default::default() };
/// let mut optimizer = Optimizer::new([("weight".to_string(), weight.clone())], config)?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?;
/// optimizer.step(&gradients)?;
/// let moved = weight.to_vec1::<f32>()?; // the first step is lr long, whatever the gradient
/// assert!((moved[0] - 0.9).abs() < 1e-6 && (moved[1] + 0.9).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// It also implements [`candle_nn::Optimizer`]. With that trait in scope, calls of `step` and of the learning rate
/// still mean the methods of this type:
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer as _;
/// use tallow::optim::{AdamWConfig, Optimizer};
///
/// let weight = Var::from_slice(&[1f32, -1.0], 2, &Device::Cpu)?;
/// let mut optimizer =
///     Optimizer::new([("weight".to_string(), weight.clone())], AdamWConfig::default())?;
/// let gradients = weight.sqr()?.sum_all()?.backward()?;
/// optimizer.step(&gradients)?;
/// optimizer.set_learning_rate(1e-4);
/// assert_eq!(optimizer.learning_rate(), 1e-4);
/// optimizer.backward_step(&weight.sqr()?.sum_all()?)?; // a method of the trait
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct Optimizer {
    pub(super) groups: Vec<ParameterGroup>,
    /// The state of each parameter, in the groups' order; `None` if another rank has it.
    pub(super) slots: Vec<Option<Slot>>,
    pub(super) steps: usize,
    /// The number of [skipped](MissingGradients::Skip) steps of each parameter.
    pub(super) skipped: Vec<usize>,
    /// The owners of the state, if it is sharded.
    pub(super) shards: Option<Shards>,
    /// A number that no other optimizer has. [`shard`](Self::shard) changes it.
    pub(super) id: u64,
}

impl Optimizer {
    /// Creates an optimizer of `parameters` with one rule, such as an [`AdamWConfig`](super::AdamWConfig).
    ///
    /// # Errors
    /// [`Error::Config`] if [`Rule::validate`] refuses the configuration, if there are no parameters, or if a
    /// name or a variable occurs twice (the message has both names); [`Error::DType`] for a parameter that is not
    /// `f16`, `bf16`, `f32` or `f64`.
    pub fn new(
        parameters: impl IntoIterator<Item = (String, Var)>,
        rule: impl Into<Rule>,
    ) -> Result<Self> {
        let (parameters, rule) = (parameters.into_iter().collect(), rule.into());
        Self::with_groups(vec![ParameterGroup { parameters, rule }])
    }

    /// Creates an optimizer of several groups of parameters, each with its rule.
    ///
    /// # Errors
    /// Those of [`Optimizer::new`]. A group may be empty, but not all of them.
    pub fn with_groups(groups: Vec<ParameterGroup>) -> Result<Self> {
        if groups.iter().all(|group| group.parameters.is_empty()) {
            return Err(Error::config("Optimizer", "parameters", "none").must_be(
                "at least one",
                "pass the model's parameters, for example model.parameters()",
            ));
        }
        Self::of_any_groups(groups)
    }

    /// Creates an optimizer of groups that may all be empty.
    pub(super) fn of_any_groups(groups: Vec<ParameterGroup>) -> Result<Self> {
        for group in &groups {
            group.rule.validate()?;
        }
        refuse_duplicates(&groups)?;
        let slots = groups.iter().flat_map(|group| {
            let parameters = group.parameters.iter();
            parameters.map(|(name, var)| Slot::new(name, var, &group.rule).map(Some))
        });
        let slots = slots.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            groups,
            skipped: vec![0; slots.len()],
            slots,
            steps: 0,
            shards: None,
            id: next_id(),
        })
    }

    /// Updates every parameter from its gradient. [`Rule::missing_gradients`] decides about parameters without one.
    ///
    /// Gradients may have another float dtype than their parameters, and any layout.
    ///
    /// # Errors
    /// [`Error::MissingGradient`] names a parameter without a gradient, if its group does not allow this; a gradient of
    /// another shape, on another device, or that is not a float; an invalid learning rate. All of this is checked
    /// before anything changes.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        // All paths are chosen before the first update: an error must leave everything unchanged.
        #[cfg(feature = "cuda")]
        let mut on_gpu = super::cuda::Batch::default();
        for entry in self.entries() {
            match (choose(entry.rule.info(), entry.var)?, entry.var.device()) {
                #[cfg(feature = "cuda")]
                (Path::Kernel, candle_core::Device::Cuda(gpu)) => {
                    on_gpu.prepare(gpu, entry.rule)?
                }
                _ => {}
            }
        }
        let gradients = self.begin_step(gradients)?;
        let mut names: Vec<&str> = self.groups.iter().map(|group| group.rule.name()).collect();
        names.dedup();
        let mut done = HashSet::new();
        for name in names.into_iter().filter(|name| done.insert(*name)) {
            let range = probe::op(Kind::Op, name, probe::op_path(name));
            let of_rule = |entry: &Entry<'_>| entry.rule.name() == name;
            let updates = self.updates(&gradients);
            let mut matrices = Vec::new();
            for (entry, gradient, slot) in updates.filter(|(entry, ..)| of_rule(entry)) {
                let (var, update) = (entry.var, entry.update(self.steps, entry.var.dims()));
                match (choose(entry.rule.info(), var)?, var.device()) {
                    (Path::Kernel, _) if let Rule::Muon(rule) = entry.rule => {
                        matrices.push(muon::Matrix {
                            var,
                            gradient,
                            slot,
                            rule,
                            update,
                        });
                    }
                    #[cfg(feature = "cuda")]
                    (Path::Kernel, candle_core::Device::Cuda(_)) => {
                        on_gpu.add(var, gradient, slot, &update);
                    }
                    (Path::Kernel, _) => {
                        step_cpu(var, gradient, slot, &update)?;
                    }
                    (Path::Reference, _) => step_reference(var, gradient, slot, &update)?,
                }
            }
            muon::step(&matrices)?;
            #[cfg(feature = "cuda")]
            std::mem::take(&mut on_gpu).step()?;
            if probe::is_listening() {
                leave(range, self.entries().filter(of_rule));
            }
        }
        self.gather_weights()
    }

    /// Updates every parameter with candle's own ops, on any device. It is slower than [`Optimizer::step`] and
    /// allocates temporaries.
    ///
    /// # Errors
    /// Those of [`Optimizer::step`].
    pub fn step_reference(&mut self, gradients: &GradStore) -> Result<()> {
        let gradients = self.begin_step(gradients)?;
        for (entry, gradient, slot) in self.updates(&gradients) {
            let update = entry.update(self.steps, entry.var.dims());
            step_reference(entry.var, gradient, slot, &update)?;
        }
        self.gather_weights()
    }

    /// Checks everything, then counts the step. Returns the gradients.
    fn begin_step(&mut self, gradients: &GradStore) -> Result<Vec<Gradient>> {
        for group in &self.groups {
            group.rule.validate()?;
        }
        let gradients = self.readable_gradients(gradients)?;
        self.steps += 1;
        crate::ops::clear_cached_casts(); // an autocast region around the step must not go on with the old ones
        for (skipped, gradient) in self.skipped.iter_mut().zip(&gradients) {
            *skipped += usize::from(matches!(gradient, Gradient::Skipped));
        }
        Ok(gradients)
    }

    /// Yields the parameters that this rank updates, with gradient and state.
    fn updates<'o>(
        &'o self,
        gradients: &'o [Gradient],
    ) -> impl Iterator<Item = (Entry<'o>, &'o Tensor, &'o Slot)> {
        let entries = self.entries().zip(gradients);
        entries.filter_map(|(entry, gradient)| match (gradient, entry.slot) {
            (Gradient::Given(gradient), Some(slot)) => Some((entry, gradient, slot)),
            _ => None,
        })
    }

    /// Returns the gradients as kernels read them: contiguous, of a dtype that the kernel accepts, and on storage that
    /// the step does not write. Usually nothing is copied.
    fn readable_gradients(&self, gradients: &GradStore) -> Result<Vec<Gradient>> {
        let parameters = self.parameters().map(|(_, var)| var);
        let state = self.slots.iter().flatten().flat_map(Slot::vars);
        let state = state.map(|(_, var)| var);
        let written = parameters.chain(state).map(|var| storage_address(var));
        let written: HashSet<usize> = written.collect();
        let readable = self.entries().map(|entry| {
            let var = entry.var;
            let found = find_gradient(STEP, gradients, entry.name, var)?;
            match (found, entry.rule.missing_gradients()) {
                (None, MissingGradients::Error) => return Err(missing(STEP, entry.name)),
                (None, MissingGradients::Skip) => return Ok(Gradient::Skipped),
                _ if entry.slot.is_none() => return Ok(Gradient::Elsewhere),
                _ => {}
            }
            let gradient = match found {
                Some(gradient) => gradient.detach(),
                None => Tensor::zeros(var.shape(), var.dtype(), var.device())?,
            };
            let dtype = match (var.dtype(), gradient.dtype()) {
                // The kernel for half precision reads these directly.
                (parameter @ (DType::F16 | DType::BF16), gradient) if gradient == parameter => {
                    gradient
                }
                (parameter, _) => wide(parameter),
            };
            if gradient.dtype() != dtype {
                check_granted_on(gradient.device(), gradient.dims(), dtype)?;
            }
            let gradient = try_contiguous(&gradient.to_dtype(dtype)?)?;
            match written.contains(&storage_address(&gradient)) {
                true => {
                    check_granted_on(gradient.device(), gradient.dims(), dtype)?;
                    Ok(Gradient::Given(gradient.force_contiguous()?))
                }
                false => Ok(Gradient::Given(gradient)),
            }
        });
        let mut all = Vec::with_capacity(self.slots.len()); // one that grows counts beside small tensors
        for gradient in readable {
            all.push(gradient?);
        }
        Ok(all)
    }

    /// Returns the parameters of all groups that have a gradient.
    ///
    /// # Errors
    /// Those of [`MissingGradients::with_gradients`] for each group; no gradients at all.
    pub(super) fn with_gradients(
        &self,
        op: &'static str,
        gradients: &GradStore,
    ) -> Result<Vec<(String, Var)>> {
        let mut present = Vec::new();
        for group in &self.groups {
            let policy = group.rule.missing_gradients();
            present.extend(policy.present(op, gradients, &group.parameters)?);
        }
        match (present.is_empty(), self.parameters().next()) {
            (true, Some((name, _))) => Err(missing(op, name)),
            _ => Ok(present),
        }
    }

    /// Iterates over all parameters, group by group.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &(String, Var)> {
        self.groups.iter().flat_map(|group| &group.parameters)
    }

    /// Iterates over all parameters with their groups and states, group by group.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let groups = self.groups.iter();
        let parameters = groups.flat_map(|group| {
            let parameters = group.parameters.iter();
            parameters.map(|(name, var)| (name, var, &group.rule))
        });
        let parameters = parameters.zip(self.slots.iter().zip(&self.skipped));
        let numbered = parameters.enumerate();
        numbered.map(|(number, ((name, var, rule), (slot, skipped)))| Entry {
            number,
            name,
            var,
            rule,
            slot: slot.as_ref(),
            skipped: *skipped,
        })
    }

    /// Returns the learning rate of the first group (0 if there is none).
    pub fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0.0, |group| group.rule.lr())
    }

    /// Sets the learning rate of every group. The next step returns an error if it is invalid.
    pub fn set_learning_rate(&mut self, lr: f64) {
        for group in &mut self.groups {
            group.rule = group.rule.with_lr(lr);
        }
    }

    /// Sets the learning rate of a group, by index.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such group, or the rate is not finite and at least 0.
    pub fn set_learning_rate_of(&mut self, group: usize, lr: f64) -> Result<()> {
        let count = self.groups.len();
        let Some(group) = self.groups.get_mut(group) else {
            return Err(Error::config("Optimizer", "group", group).must_be(
                format!("under the number of groups, {count}"),
                "groups count from 0, in the order they were given",
            ));
        };
        let rule = group.rule.with_lr(lr);
        rule.validate()?;
        group.rule = rule;
        Ok(())
    }

    /// Returns the number of steps taken.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Returns the groups of parameters with their rules, in order.
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

/// Ends a profiling range over the updates of these parameters.
fn leave<'o>(range: probe::RangeGuard, entries: impl Iterator<Item = Entry<'o>>) {
    let entries: Vec<_> = entries.filter(|entry| entry.slot.is_some()).collect();
    let Some(first) = entries.first() else {
        return;
    };
    let dims = [entries.iter().map(|entry| entry.var.elem_count()).sum()];
    let states = first.rule.states(first.var.dtype()).into_iter();
    let dtypes = [first.var.dtype()]
        .into_iter()
        .chain(states.map(|state| state.dtype));
    let operands: Vec<_> = dtypes.map(|dtype| Operand { dims: &dims, dtype }).collect();
    range.leave(Operands {
        inputs: &operands,
        output: operands[0],
    });
}

/// A parameter with its group and state.
pub(super) struct Entry<'o> {
    number: usize,
    pub name: &'o str,
    pub var: &'o Var,
    pub rule: &'o Rule,
    /// The state; `None` if another rank has it.
    pub slot: Option<&'o Slot>,
    skipped: usize,
}

impl Entry<'_> {
    /// Returns the coefficients of its update in step `step`. `dims` are those of the full parameter, if it is a part.
    pub fn update(&self, step: usize, dims: &[usize]) -> Update {
        self.rule.update(step - self.skipped, self.number, dims)
    }
}

/// The gradient of a parameter in a step.
enum Gradient {
    Given(Tensor),
    /// Another rank updates the parameter.
    Elsewhere,
    /// There is no gradient; the parameter is not updated.
    Skipped,
}

fn refuse_duplicates(groups: &[ParameterGroup]) -> Result<()> {
    let refuse = |got: String, hint: &str| {
        Err(Error::config("Optimizer", "parameters", got)
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

/// The update of a parameter in a planned step.
pub(crate) struct PlannedUpdate<'o> {
    /// The rule's tensors of state, with their names; `None` if another rank updates the parameter.
    pub states: Option<&'o [(&'static str, Var)]>,
    pub update: Update,
    /// The rule of its group.
    pub rule: Rule,
}

/// The state of an optimizer that a planned step has checked. While versions are equal, parameters, tensors of state
/// and rules are the same, except for learning rates.
#[derive(Debug, PartialEq)]
pub(crate) struct OptimizerVersion {
    id: u64,
    /// The groups' rules, with a learning rate of 0.
    rules: Vec<Rule>,
}

/// Returns a number that was not returned before in this process.
pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Optimizer {
    pub(crate) fn version(&self) -> OptimizerVersion {
        let rules = self.groups.iter().map(|group| group.rule.with_lr(0.0));
        OptimizerVersion {
            id: self.id,
            rules: rules.collect(),
        }
    }

    /// Returns the index of each of `parameters` in this optimizer.
    ///
    /// # Errors
    /// [`Error::Order`] if they are not exactly those of this optimizer.
    pub(crate) fn order_of(
        &self,
        op: &'static str,
        parameters: &[(String, Var)],
    ) -> Result<Vec<usize>> {
        let entries = self.entries().map(|entry| (entry.var.id(), entry));
        let mut found: HashMap<_, _> = entries.collect();
        let refuse = |name: &str, whose: &str, other: &str| Error::Order {
            op,
            problem: format!("parameter {name} is {whose}'s and not {other}'s"),
            hint: "plan for an optimizer of model.parameters(), all of them and no others".into(),
        };
        let order = parameters.iter().map(|(name, var)| {
            let entry = found.remove(&var.id());
            let entry = entry.ok_or_else(|| refuse(name, "the model", "the optimizer"))?;
            Ok(entry.number)
        });
        let order = order.collect::<Result<Vec<_>>>()?;
        match found.into_values().map(|entry| entry.name).min() {
            None => Ok(order),
            Some(name) => Err(refuse(name, "the optimizer", "the model")),
        }
    }

    /// Returns the updates of the parameters with these indices in the next step, without applying them. `dims` are
    /// those of the full parameters, if they are sharded.
    ///
    /// # Errors
    /// An invalid learning rate or configuration.
    pub(crate) fn planned_updates(
        &self,
        order: &[usize],
        dims: &[Vec<usize>],
    ) -> Result<Vec<PlannedUpdate<'_>>> {
        for group in &self.groups {
            group.rule.validate()?;
        }
        let entries: Vec<Entry<'_>> = self.entries().collect();
        let updates = order.iter().zip(dims).map(|(number, dims)| {
            let entry = &entries[*number];
            PlannedUpdate {
                states: entry.slot.map(|slot| &slot.states[..]),
                update: entry.update(self.steps + 1, dims),
                rule: *entry.rule,
            }
        });
        Ok(updates.collect())
    }

    /// Counts a planned step, in which the `skipped` variables were not updated.
    pub(crate) fn planned_step_taken<'a>(&mut self, skipped: impl Iterator<Item = &'a Var>) {
        self.steps += 1;
        for var in skipped {
            let number = self.parameters().position(|(_, own)| own.id() == var.id());
            if let Some(number) = number {
                self.skipped[number] += 1;
            }
        }
        crate::ops::clear_cached_casts(); // an autocast region around the step must not go on with the old ones
    }
}

/// For training loops that are generic over the trait.
impl candle_nn::Optimizer for Optimizer {
    type Config = Rule;

    /// Creates an optimizer of the variables that are floats; the others are ignored, as by candle's optimizers. A name
    /// consists of index and shape: `#3 [512, 1344]`.
    fn new(vars: Vec<Var>, rule: Rule) -> candle_core::Result<Self> {
        let parameters = vars
            .into_iter()
            .enumerate()
            .filter(|(_, var)| var.dtype().is_float())
            .map(|(i, var)| (format!("#{i} {:?}", var.dims()), var))
            .collect();
        // The trait's `empty` passes no variables.
        Ok(Self::of_any_groups(vec![ParameterGroup {
            parameters,
            rule,
        }])?)
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        Ok(Optimizer::step(self, gradients)?)
    }

    fn learning_rate(&self) -> f64 {
        Optimizer::learning_rate(self)
    }

    fn set_learning_rate(&mut self, lr: f64) {
        Optimizer::set_learning_rate(self, lr);
    }
}
