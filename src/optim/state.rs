//! The optimizer's state by name: taken out, put back.

use super::adamw::AdamW;
use super::inplace::storage_address;
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use std::collections::{HashMap, HashSet};

/// Why a state does not fit: an entry's name, what the optimizer has there, what was given.
pub(super) struct Misfit {
    pub(super) name: String,
    pub(super) expected: String,
    pub(super) got: String,
    pub(super) hint: String,
}

impl AdamW {
    /// The state, named after the parameters: `exp_avg.<name>`, `exp_avg_sq.<name>`, and `master.<name>` for a parameter in
    /// half precision; in the parameters' order. [`AdamW::steps`] belongs to it.
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
    /// [`Error::Data`] names an entry that is missing, unexpected, or of another shape or dtype; nothing has changed then.
    pub fn load_state(
        &mut self,
        state: impl IntoIterator<Item = (String, Tensor)>,
        steps: usize,
    ) -> Result<()> {
        let state: HashMap<String, Tensor> = state.into_iter().collect();
        self.check_state(&state).map_err(|misfit| Error::Data {
            what: format!("optimizer state {}", misfit.name),
            expected: misfit.expected,
            got: misfit.got,
            hint: misfit.hint,
        })?;
        self.put_state(&state, steps)
    }

    /// Overwrites the state with one that has passed [`AdamW::check_state`], from whatever device.
    pub(super) fn put_state(
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

    /// Whether these entries have the names, shapes and dtypes of this optimizer's state.
    pub(super) fn check_state(
        &self,
        given: &HashMap<String, Tensor>,
    ) -> std::result::Result<(), Misfit> {
        let describe = |t: &Tensor| format!("{} {:?}", t.dtype().as_str(), t.dims());
        let mut own = HashSet::new();
        for (name, var) in self.state_vars() {
            let (got, hint) = match given.get(&name) {
                None => ("nothing".to_string(), "was it saved with another model?"),
                Some(tensor) if tensor.dtype() != var.dtype() || tensor.dims() != var.dims() => (
                    describe(tensor),
                    "give the model the sizes and dtypes it was saved with",
                ),
                Some(_) => {
                    own.insert(name);
                    continue;
                }
            };
            return Err(Misfit {
                name,
                expected: describe(var),
                got,
                hint: hint.into(),
            });
        }
        let others = given.iter().filter(|(name, _)| !own.contains(*name));
        match others.min_by_key(|(name, _)| *name) {
            None => Ok(()),
            Some((name, tensor)) => Err(Misfit {
                name: name.clone(),
                expected: "no entry of this name".into(),
                got: describe(tensor),
                hint: "does the optimizer have all parameters that it was saved with?".into(),
            }),
        }
    }

    /// Every variable of the state with its name.
    pub(super) fn state_vars(&self) -> impl Iterator<Item = (String, &Var)> {
        self.parameters()
            .zip(&self.slots)
            .flat_map(|((name, _), slot)| {
                let kinds = ["exp_avg", "exp_avg_sq", "master"];
                kinds
                    .into_iter()
                    .zip(slot.vars())
                    .map(move |(kind, var)| (format!("{kind}.{name}"), var))
            })
    }
}
