//! The optimizer's state by name: taken out, put back.

use super::adamw::AdamW;
use super::gradients::place;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
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
        let given = state
            .iter()
            .map(|(name, tensor)| (name.as_str(), (tensor.dtype(), tensor.dims().to_vec())))
            .collect();
        self.check_state(&given).map_err(|misfit| Error::Data {
            what: format!("optimizer state {}", misfit.name),
            expected: misfit.expected,
            got: misfit.got,
            hint: misfit.hint,
        })?;
        for (name, var) in self.state_vars() {
            let (own, given) = (var.device().location(), state[&name].device().location());
            if own != given {
                return Err(Error::Placement {
                    op: "AdamW::load_state",
                    expected: format!("{name} on {}", place(own)),
                    got: place(given),
                    hint: "move it with to_device".into(),
                });
            }
        }
        self.put_state(steps, |name| Ok(state[name].clone()))
    }

    /// Overwrites every entry with what `get` gives for its name, once [`AdamW::check_state`] has been passed.
    pub(super) fn put_state(
        &mut self,
        steps: usize,
        get: impl Fn(&str) -> Result<Tensor>,
    ) -> Result<()> {
        for (name, var) in self.state_vars() {
            let tensor = get(&name)?;
            // Its own state, put back as it is: nothing to do, and candle refuses to copy a variable onto itself.
            if super::inplace::storage_address(&tensor) != super::inplace::storage_address(var) {
                var.set(&tensor)?;
            }
        }
        self.steps = steps;
        Ok(())
    }

    /// Whether entries of these dtypes and shapes are this optimizer's state.
    pub(super) fn check_state(
        &self,
        given: &HashMap<&str, (DType, Vec<usize>)>,
    ) -> std::result::Result<(), Misfit> {
        let describe = |dtype: DType, dims: &[usize]| format!("{} {dims:?}", dtype.as_str());
        let mut own = HashSet::new();
        for (name, var) in self.state_vars() {
            let expected = describe(var.dtype(), var.dims());
            let (got, hint) = match given.get(name.as_str()) {
                None => ("nothing".to_string(), "was it saved with another model?"),
                Some((dtype, dims)) if *dtype != var.dtype() || dims != var.dims() => (
                    describe(*dtype, dims),
                    "give the model the sizes and dtypes it was saved with",
                ),
                Some(_) => {
                    own.insert(name);
                    continue;
                }
            };
            return Err(Misfit {
                name,
                expected,
                got,
                hint: hint.into(),
            });
        }
        let others = given.iter().filter(|(name, _)| !own.contains(**name));
        match others.min_by_key(|(name, _)| **name) {
            None => Ok(()),
            Some((name, (dtype, dims))) => Err(Misfit {
                name: name.to_string(),
                expected: "no entry of this name".into(),
                got: describe(*dtype, dims),
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
