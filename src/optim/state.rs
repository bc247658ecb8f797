//! The optimizer's state by name.

use super::Optimizer;
use super::slot::Slot;
use crate::inplace::storage_address;
use crate::saved::{Numbers, describe};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::{BTreeMap, HashMap};

/// Builds the error of a state that does not match, from the entry's name, what was expected, what came, and a hint.
pub(super) type Refuse<'r> = dyn Fn(String, String, String, &str) -> Error + 'r;

/// The prefix of the count of skipped steps.
pub(super) const SKIPPED: &str = "skipped.";

impl Optimizer {
    /// Returns which values the elements of the state `name` may have.
    pub(super) fn numbers_of(&self, name: &str) -> Numbers {
        let kind = name.split('.').next();
        let rules = self.groups.iter().map(|group| group.rule);
        let mut states = rules.flat_map(|rule| rule.states(DType::F32));
        let state = states.find(|state| Some(state.name) == kind);
        state.map_or(Numbers::Finite, |state| state.numbers)
    }

    /// Checks that the elements of a state are finite, and not negative where the rule has no negative ones.
    pub(super) fn check_numbers(
        &self,
        state: &HashMap<String, Tensor>,
        refuse: &Refuse<'_>,
    ) -> Result<()> {
        let mut names: Vec<&String> = state.keys().collect();
        names.sort(); // the same error for the same state
        for name in names {
            let numbers = self.numbers_of(name);
            if let Some(got) = numbers.misfit(&state[name])? {
                let hint =
                    "it was damaged, or saved by a run that had diverged; take an earlier one";
                return Err(refuse(name.clone(), numbers.expected().into(), got, hint));
            }
        }
        Ok(())
    }

    /// Returns the state by name, in the parameters' order: the tensors of [`Rule::state`](super::Rule::state), such as
    /// `exp_avg.<name>`, and last `master.<name>` for a parameter in half precision. Then `skipped.<name>` follows, an
    /// i64, the number of steps without an update ([`MissingGradients::Skip`](super::MissingGradients::Skip)), for each
    /// parameter with any. [`Optimizer::steps`] is the rest of the state. If the optimizer is
    /// [sharded](Optimizer::shard), this is the state of this rank.
    ///
    /// Except for the counts these are the optimizer's own tensors, which the next step changes, as in PyTorch;
    /// [`Tensor::copy`] copies one.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let entries = self.state_vars();
        let entries = entries.map(|(name, var)| (name, var.detach()));
        entries.chain(self.skipped_steps()).collect()
    }

    /// Returns the counts of skipped steps by name.
    pub(super) fn skipped_steps(&self) -> impl Iterator<Item = (String, Tensor)> {
        let counts = self.parameters().zip(&self.skipped);
        let counts = counts.filter(|(_, skipped)| **skipped > 0);
        counts.filter_map(|((name, _), skipped)| {
            let count = Tensor::new(*skipped as i64, &Device::Cpu).ok()?; // of one number
            Some((format!("{SKIPPED}{name}"), count))
        })
    }

    /// Restores a state of [`Optimizer::state`] that was taken after `steps` steps. With equal parameters, gradients
    /// and hyperparameters, later steps have the same bits.
    ///
    /// # Errors
    /// [`Error::Data`] names an entry that is missing, unexpected, of another shape or dtype, or with an element that
    /// is not finite or, in `exp_avg_sq`, negative; nothing changes then.
    pub fn load_state(
        &mut self,
        state: impl IntoIterator<Item = (String, Tensor)>,
        steps: usize,
    ) -> Result<()> {
        let state: HashMap<String, Tensor> = state.into_iter().collect();
        let given = state.iter().map(|(name, t)| (name.clone(), describe(t)));
        let refuse = |name: String, expected, got, hint: &str| {
            Error::data(format!("optimizer state {name}"), got).must_be(expected, hint)
        };
        self.check_layout(given.collect(), &refuse)?;
        self.check_numbers(&state, &refuse)?;
        self.put_state(&state, steps)
    }

    /// Overwrites the state with one that has passed [`Optimizer::check_layout`], from any device.
    pub(crate) fn put_state(
        &mut self,
        state: &HashMap<String, Tensor>,
        steps: usize,
    ) -> Result<()> {
        let skipped = self.parameters().map(|(name, _)| {
            let name = format!("{SKIPPED}{name}");
            let Some(count) = state.get(&name) else {
                return Ok(0);
            };
            let count = count.to_scalar::<i64>()?;
            match usize::try_from(count) {
                Ok(skipped) if skipped <= steps => Ok(skipped),
                _ => Err(Error::Data {
                    what: format!("optimizer state {name}"),
                    expected: format!("a count of skipped steps, of {steps}"),
                    got: count.to_string(),
                    hint: "it was damaged, or belongs to another step; take an earlier one".into(),
                }),
            }
        });
        let skipped = skipped.collect::<Result<_>>()?;
        for (name, var) in self.state_vars() {
            let Some(tensor) = state.get(&name) else {
                continue; // not after the check
            };
            // The same tensor: candle refuses to copy a variable onto itself.
            if storage_address(tensor) != storage_address(var) {
                var.set(&tensor.to_device(var.device())?)?;
            }
        }
        (self.steps, self.skipped) = (steps, skipped);
        Ok(())
    }

    /// Checks that names, shapes and dtypes are those of this optimizer's state.
    pub(super) fn check_layout(
        &self,
        mut given: BTreeMap<String, String>,
        refuse: &Refuse<'_>,
    ) -> Result<()> {
        for (name, var) in self.state_vars() {
            let expected = describe(var);
            let (got, hint) = match given.remove(&name) {
                None => ("nothing".to_string(), "was it saved with another model?"),
                Some(got) if got != expected => {
                    (got, "give the model the sizes and dtypes it was saved with")
                }
                Some(_) => continue,
            };
            return Err(refuse(name, expected, got, hint));
        }
        for (name, _) in self.parameters() {
            let name = format!("{SKIPPED}{name}");
            let other = given.remove(&name).filter(|got| got != "i64 []"); // 0 where there is none
            if let Some(got) = other {
                return Err(refuse(name, "i64 []".into(), got, "it is a count of steps"));
            }
        }
        match given.pop_first() {
            None => Ok(()),
            Some((name, got)) => {
                let hint = "does the optimizer have all parameters that it was saved with?";
                Err(refuse(name, "no entry of this name".into(), got, hint))
            }
        }
    }

    pub(super) fn state_vars(&self) -> impl Iterator<Item = (String, &Var)> {
        self.entries().flat_map(|entry| {
            let vars = entry.slot.into_iter().flat_map(Slot::vars);
            vars.map(move |(kind, var)| (format!("{kind}.{}", entry.name), var))
        })
    }
}
