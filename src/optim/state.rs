//! The optimizer's state by name: taken out, put back.

use super::adamw::AdamW;
use super::slot::KINDS;
use crate::inplace::storage_address;
use crate::saved::{Numbers, describe};
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use std::collections::{BTreeMap, HashMap};

/// Why a state does not fit: an entry's name, what the optimizer has there, what was given.
pub(super) enum Misfit {
    Entry {
        name: String,
        expected: String,
        got: String,
        hint: String,
    },
    Other(Error),
}

impl From<Error> for Misfit {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// What the elements of the state called `name` can be.
pub(super) fn numbers_of(name: &str) -> Numbers {
    match name.starts_with("exp_avg_sq.") {
        true => Numbers::NotNegative, // a mean of squares
        false => Numbers::Finite,
    }
}

/// Whether a state has numbers that a step can go on with.
pub(super) fn check_numbers(state: &HashMap<String, Tensor>) -> std::result::Result<(), Misfit> {
    let mut names: Vec<&String> = state.keys().collect();
    names.sort(); // the same error for the same state
    for name in names {
        let numbers = numbers_of(name);
        if let Some(got) = numbers.misfit(&state[name])? {
            return Err(Misfit::Entry {
                name: name.clone(),
                expected: numbers.expected().into(),
                got,
                hint: "it was damaged, or saved by a run that had diverged; take an earlier one"
                    .into(),
            });
        }
    }
    Ok(())
}

impl AdamW {
    /// The state, named after the parameters: `exp_avg.<name>`, `exp_avg_sq.<name>`, and `master.<name>` for a
    /// parameter in half precision; in the parameters' order. [`AdamW::steps`] belongs to it. Of an optimizer that is
    /// [divided](AdamW::shard) among ranks it is this rank's part.
    ///
    /// As in PyTorch these tensors are the optimizer's own, which the next step changes; [`Tensor::copy`] keeps one.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let entries = self.state_vars();
        entries.map(|(name, var)| (name, var.detach())).collect()
    }

    /// Puts a state back that [`AdamW::state`] gave, taken after `steps` steps. With equal parameters, gradients and
    /// hyperparameters, later steps then have the same bits.
    ///
    /// # Errors
    /// [`Error::Data`] names an entry that is missing, unexpected, of another shape or dtype, or with an element that
    /// is not finite or, in `exp_avg_sq`, negative; nothing has changed then.
    pub fn load_state(
        &mut self,
        state: impl IntoIterator<Item = (String, Tensor)>,
        steps: usize,
    ) -> Result<()> {
        let state: HashMap<String, Tensor> = state.into_iter().collect();
        let given = state.iter().map(|(name, t)| (name.clone(), describe(t)));
        self.check_layout(given.collect())
            .and_then(|()| check_numbers(&state))
            .map_err(|misfit| match misfit {
                Misfit::Entry {
                    name,
                    expected,
                    got,
                    hint,
                } => Error::Data {
                    what: format!("optimizer state {name}"),
                    expected,
                    got,
                    hint,
                },
                Misfit::Other(error) => error,
            })?;
        self.put_state(&state, steps)
    }

    /// Overwrites the state with one that has passed [`AdamW::check_layout`], from whatever device.
    pub(crate) fn put_state(
        &mut self,
        state: &HashMap<String, Tensor>,
        steps: usize,
    ) -> Result<()> {
        for (name, var) in self.state_vars() {
            let Some(tensor) = state.get(&name) else {
                continue; // not after the check
            };
            // Its own state, put back as it is: nothing to do, and candle refuses to copy a variable onto itself.
            if storage_address(tensor) != storage_address(var) {
                var.set(&tensor.to_device(var.device())?)?;
            }
        }
        self.steps = steps;
        Ok(())
    }

    /// Whether these descriptions by name are those of this optimizer's state.
    pub(super) fn check_layout(
        &self,
        mut given: BTreeMap<String, String>,
    ) -> std::result::Result<(), Misfit> {
        for (name, var) in self.state_vars() {
            let expected = describe(var);
            let (got, hint) = match given.remove(&name) {
                None => ("nothing".to_string(), "was it saved with another model?"),
                Some(got) if got != expected => {
                    (got, "give the model the sizes and dtypes it was saved with")
                }
                Some(_) => continue,
            };
            return Err(Misfit::Entry {
                name,
                expected,
                got,
                hint: hint.into(),
            });
        }
        match given.pop_first() {
            None => Ok(()),
            Some((name, got)) => Err(Misfit::Entry {
                name,
                expected: "no entry of this name".into(),
                got,
                hint: "does the optimizer have all parameters that it was saved with?".into(),
            }),
        }
    }

    /// Every variable of the state with its name.
    pub(super) fn state_vars(&self) -> impl Iterator<Item = (String, &Var)> {
        self.parameters()
            .zip(&self.slots)
            .filter_map(|((name, _), slot)| Some((name, slot.as_ref()?)))
            .flat_map(|(name, slot)| {
                let vars = KINDS.into_iter().zip(slot.vars());
                vars.map(move |(kind, var)| (format!("{kind}.{name}"), var))
            })
    }
}
