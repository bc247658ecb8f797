//! What a planned step needs of AdamW: the state of given parameters, and the numbers of the next update.

use super::{AdamW, MissingGradients};
use crate::kernels::Update;
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use std::collections::HashMap;

/// One parameter's share of the next step.
pub(crate) struct PlannedUpdate {
    /// exp_avg and exp_avg_sq; none of a parameter that another rank updates.
    pub moments: Option<[Tensor; 2]>,
    pub update: Update,
    /// What its group does where it has no gradient.
    pub missing: MissingGradients,
}

impl AdamW {
    /// The next step's updates of `parameters`, in their order; nothing changes yet.
    ///
    /// # Errors
    /// A learning rate or another number that cannot work; parameters that are not exactly this optimizer's.
    pub(crate) fn planned_updates(
        &self,
        op: &'static str,
        parameters: &[(String, Var)],
    ) -> Result<Vec<PlannedUpdate>> {
        let mut found = HashMap::new();
        let mut slots = self.slots.iter().enumerate();
        for group in &self.groups {
            group.config.validate()?;
            for ((name, var), (number, slot)) in group.parameters.iter().zip(&mut slots) {
                let own_steps = self.steps + 1 - self.skipped[number];
                let update = group.config.update(own_steps, number);
                let missing = group.config.missing_gradients;
                found.insert(var.id(), (name, slot, update, missing));
            }
        }
        let refuse = |name: &str, whose: &str, other: &str| Error::Order {
            op,
            problem: format!("parameter {name} is {whose}'s and not {other}'s"),
            hint: "plan for an optimizer of model.parameters(), all of them and no others".into(),
        };
        let updates = parameters.iter().map(|(name, var)| {
            let Some((_, slot, update, missing)) = found.remove(&var.id()) else {
                return Err(refuse(name, "the model", "the optimizer"));
            };
            Ok(PlannedUpdate {
                moments: slot.as_ref().map(|slot| {
                    [&slot.exp_avg, &slot.exp_avg_sq].map(|var| var.as_tensor().clone())
                }),
                update,
                missing,
            })
        });
        let updates = updates.collect::<Result<Vec<_>>>()?;
        match found.into_values().map(|(name, ..)| name).min() {
            None => Ok(updates),
            Some(name) => Err(refuse(name, "the optimizer", "the model")),
        }
    }

    /// The planned step has been taken, in which `skipped` were not updated.
    pub(crate) fn planned_step_taken<'a>(&mut self, skipped: impl Iterator<Item = &'a Var>) {
        self.steps += 1;
        for var in skipped {
            let number = self.parameters().position(|(_, own)| own.id() == var.id());
            if let Some(number) = number {
                self.skipped[number] += 1;
            }
        }
        crate::ops::forget_weights(); // an autocast region around the step must not go on with the old ones
    }
}
