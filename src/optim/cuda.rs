//! AdamW's step on a GPU: parameters are collected, and updated in one launch.

use super::slot::Slot;
use crate::Result;
use crate::kernels::Update;
use crate::kernels::cuda::adamw::{self, Entry};
use crate::ops::cuda::{elements, gpu};
use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, DType, Tensor, Var};

/// What the launch will update.
#[derive(Default)]
pub(super) struct Batch {
    parameters: Vec<Parameter>,
    updates: Vec<Update>,
    /// The GPU that the kernel was last loaded for.
    prepared: Option<DeviceId>,
}

/// A parameter, held until the launch.
struct Parameter {
    /// Its value in f32, gradient, and both moments.
    tensors: [Tensor; 4],
    /// Itself, where it is in half precision.
    half: Option<Tensor>,
    /// Which of the updates it takes.
    update: usize,
}

impl Batch {
    /// Compiles and loads the kernel for a GPU: what can fail fails before anything has changed.
    pub(super) fn prepare(&mut self, gpu: &CudaDevice) -> Result<()> {
        if self.prepared != Some(gpu.id()) {
            adamw::prepare(gpu)?;
            self.prepared = Some(gpu.id());
        }
        Ok(())
    }

    /// Adds a parameter with its gradient, in f32 or, beside a parameter in half precision, as that is.
    pub(super) fn add(&mut self, parameter: &Var, gradient: &Tensor, slot: &Slot, update: &Update) {
        if self.updates.last() != Some(update) {
            self.updates.push(*update);
        }
        let value = slot.master.as_ref().unwrap_or(parameter);
        let tensors = [
            value.as_tensor(),
            gradient,
            slot.exp_avg.as_tensor(),
            slot.exp_avg_sq.as_tensor(),
        ];
        self.parameters.push(Parameter {
            tensors: tensors.map(Tensor::clone),
            half: slot.master.as_ref().map(|_| parameter.as_tensor().clone()),
            update: self.updates.len() - 1,
        });
    }

    /// Updates what was added: one launch for what is on one GPU and of the same dtypes.
    pub(super) fn step(&self) -> Result<()> {
        /// What a launch's entries have in common.
        type Kind = (DeviceId, [DType; 2], Option<DType>);

        let mut launches: Vec<(Kind, &CudaDevice, Vec<Entry>)> = Vec::new();
        for parameter in &self.parameters {
            let [value, gradient, m, v] = &parameter.tensors;
            let on = gpu(value)?;
            let half = parameter.half.as_ref();
            let entry = Entry {
                value: elements(value)?,
                gradient: elements(gradient)?,
                exp_avg: elements(m)?,
                exp_avg_sq: elements(v)?,
                copy: half.map(elements).transpose()?,
                update: parameter.update,
            };
            let dtypes = [gradient.dtype(), m.dtype()];
            let kind = (on.id(), dtypes, half.map(Tensor::dtype));
            match launches.iter_mut().find(|(other, ..)| *other == kind) {
                Some((.., entries)) => entries.push(entry),
                None => launches.push((kind, on, vec![entry])),
            }
        }
        for ((_, _, half), gpu, entries) in launches {
            adamw::step(gpu, &entries, &self.updates, half.is_some())?;
        }
        Ok(())
    }
}
