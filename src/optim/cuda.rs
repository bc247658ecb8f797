//! AdamW's step on a card: parameters are collected, and updated in one launch.

use super::slot::Slot;
use crate::Result;
use crate::kernels::cpu::adamw::Update;
use crate::kernels::cuda::adamw::{self, Parameter};
use crate::ops::cuda::{card, elements};
use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, Tensor, Var};

/// What the launch will update.
#[derive(Default)]
pub(super) struct Batch {
    /// Value, gradient, both moments, and which update; held until the launch.
    parameters: Vec<([Tensor; 4], usize)>,
    updates: Vec<Update>,
    /// The card that the kernel was last loaded for.
    prepared: Option<DeviceId>,
}

impl Batch {
    /// Compiles and loads the kernel for a card: what can fail fails before anything has changed.
    pub(super) fn prepare(&mut self, card: &CudaDevice) -> Result<()> {
        if self.prepared != Some(card.id()) {
            adamw::prepare(card)?;
            self.prepared = Some(card.id());
        }
        Ok(())
    }

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

    /// Updates what was added, in one launch a card.
    pub(super) fn step(&self) -> Result<()> {
        let mut by_card: Vec<(&CudaDevice, Vec<Parameter>)> = Vec::new();
        for ([value, gradient, m, v], update) in &self.parameters {
            let on = card(value)?;
            let parameter = Parameter {
                value: elements(value)?,
                gradient: elements(gradient)?,
                exp_avg: elements(m)?,
                exp_avg_sq: elements(v)?,
                update: *update,
            };
            match by_card.iter_mut().find(|(card, _)| card.id() == on.id()) {
                Some((_, parameters)) => parameters.push(parameter),
                None => by_card.push((on, vec![parameter])),
            }
        }
        for (card, parameters) in by_card {
            adamw::step(card, &parameters, &self.updates)?;
        }
        Ok(())
    }
}
