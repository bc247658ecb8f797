//! AdamW's step on a card: parameters are collected, and updated in one launch.

use super::slot::Slot;
use crate::Result;
use crate::kernels::cpu::adamw::Update;
use crate::kernels::cuda::adamw::{self, Parameter};
use crate::ops::cuda::{card, elements};
use candle_core::{Tensor, Var};

/// What the launch will update.
#[derive(Default)]
pub(super) struct Batch {
    /// Value, gradient, both moments, and which update; held until the launch.
    parameters: Vec<([Tensor; 4], usize)>,
    updates: Vec<Update>,
}

impl Batch {
    /// Adds a parameter in f32 with its gradient in f32.
    pub(super) fn add(&mut self, parameter: &Var, gradient: &Tensor, slot: &Slot, update: &Update) {
        if self.updates.last() != Some(update) {
            self.updates.push(*update);
        }
        let tensors = [
            parameter.as_tensor(),
            gradient,
            slot.exp_avg.as_tensor(),
            slot.exp_avg_sq.as_tensor(),
        ];
        self.parameters
            .push((tensors.map(Tensor::clone), self.updates.len() - 1));
    }

    /// Updates what was added.
    pub(super) fn step(&self) -> Result<()> {
        let Some(([first, ..], _)) = self.parameters.first() else {
            return Ok(());
        };
        let views = self
            .parameters
            .iter()
            .map(|([value, gradient, m, v], update)| {
                Ok(Parameter {
                    value: elements(value)?,
                    gradient: elements(gradient)?,
                    exp_avg: elements(m)?,
                    exp_avg_sq: elements(v)?,
                    update: *update,
                })
            });
        let views: Vec<_> = views.collect::<Result<_>>()?;
        Ok(adamw::step(card(first)?, &views, &self.updates)?)
    }
}
