//! Steps on a GPU, with all parameters of a rule in one launch, and norms of gradients.

use super::Rule;
use super::muon::{Matrix, in_range};
use super::slot::Slot;
use crate::Result;
use crate::kernels::cpu::update::muon::{self, Iteration};
use crate::kernels::cuda::View;
use crate::kernels::cuda::newton_schulz::{self, Buffers};
use crate::kernels::cuda::update::{self, Entry, Tables};
use crate::kernels::{Update, workspace};
use crate::ops::cuda::{alloc_uninit, elements, gpu, whole};
use crate::ops::lowering::{Multiplier, Named};
use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, DType, Tensor, Var};

/// The parameters of a launch.
#[derive(Default)]
pub(super) struct Batch {
    parameters: Vec<Parameter>,
    updates: Vec<Update>,
    /// The GPU that the kernel was last loaded for.
    prepared: Option<DeviceId>,
}

/// A parameter of a launch.
struct Parameter {
    /// Its value in f32.
    value: Tensor,
    gradient: Tensor,
    states: Vec<Tensor>,
    /// The parameter in half precision, if it is.
    half: Option<Tensor>,
    /// The index of its update.
    update: usize,
}

impl Batch {
    /// Compiles and loads the kernels of a rule for a GPU, so that errors occur before anything changes.
    pub(super) fn prepare(&mut self, gpu: &CudaDevice, rule: &Rule) -> Result<()> {
        if matches!(rule, Rule::Muon(_)) {
            newton_schulz::prepare(gpu)?;
        }
        if self.prepared != Some(gpu.id()) {
            update::prepare(gpu)?;
            self.prepared = Some(gpu.id());
        }
        Ok(())
    }

    /// Adds a parameter with its gradient, which is f32 or, for a parameter in half precision, of its dtype.
    pub(super) fn add(&mut self, parameter: &Var, gradient: &Tensor, slot: &Slot, update: &Update) {
        if self.updates.last() != Some(update) {
            self.updates.push(*update);
        }
        let value = slot.master.as_ref().unwrap_or(parameter);
        self.parameters.push(Parameter {
            value: value.as_tensor().clone(),
            gradient: gradient.clone(),
            states: slot
                .states
                .iter()
                .map(|(_, var)| var.as_tensor().clone())
                .collect(),
            half: slot.master.as_ref().map(|_| parameter.as_tensor().clone()),
            update: self.updates.len() - 1,
        });
    }

    /// Updates the parameters: one launch for each GPU and combination of dtypes.
    pub(super) fn step(&self) -> Result<()> {
        /// The GPU and the dtypes that the parameters of a launch share.
        type Kind = (DeviceId, &'static str, [DType; 2], Option<DType>);

        let mut launches: Vec<(Kind, &CudaDevice, Vec<Entry>)> = Vec::new();
        for parameter in &self.parameters {
            let on = gpu(&parameter.value)?;
            let (half, rule) = (
                parameter.half.as_ref(),
                self.updates[parameter.update].rule.kernel(),
            );
            let mut states = parameter.states.iter().map(elements);
            let entry = Entry {
                value: elements(&parameter.value)?,
                gradient: elements(&parameter.gradient)?,
                states: [states.next().transpose()?, states.next().transpose()?],
                copy: half.map(elements).transpose()?,
                rule,
                update: parameter.update,
            };
            let state = parameter.states.first().map_or(DType::F32, Tensor::dtype);
            let dtypes = [parameter.gradient.dtype(), state];
            let kind = (on.id(), rule, dtypes, half.map(Tensor::dtype));
            match launches.iter_mut().find(|(other, ..)| *other == kind) {
                Some((.., entries)) => entries.push(entry),
                None => launches.push((kind, on, vec![entry])),
            }
        }
        for ((.., half), gpu, entries) in launches {
            update::step(gpu, &entries, &self.updates, half.is_some())?;
        }
        Ok(())
    }
}

/// Updates matrices by Muon: all are iterated together.
pub(super) fn step_muon(
    gpu: &CudaDevice,
    iteration: &Iteration,
    batch: &[&Matrix<'_>],
) -> Result<()> {
    let (count, n) = (batch.len(), iteration.elements());
    let directions = alloc_uninit(gpu, DType::F32, count * n)?;
    let directions = whole(&directions)?;
    let own = |i: usize| directions.slice(i * n, n);
    let gradients = batch
        .iter()
        .map(|matrix| matrix.gradient.to_dtype(DType::F32));
    let gradients = gradients.collect::<candle_core::Result<Vec<_>>>()?;
    let updates: Vec<Update> = batch.iter().map(|matrix| matrix.update).collect();
    let entries = batch.iter().zip(&gradients).enumerate();
    let entries = entries.map(|(i, (matrix, gradient))| {
        Ok(Entry {
            value: own(i),
            gradient: elements(gradient)?,
            states: [Some(elements(&matrix.slot.states[0].1)?), None],
            copy: None,
            rule: muon::DIRECTION,
            update: i,
        })
    });
    let entries = entries.collect::<Result<Vec<_>>>()?;
    update::step(gpu, &entries, &updates, false)?;
    drop(gradients); // the scratch memory may take its place
    let scratch = iteration.scratch(count, DType::F32, true).into_iter();
    let scratch =
        scratch.map(|(name, elements, dtype)| Ok((name, alloc_uninit(gpu, dtype, elements)?)));
    let scratch = scratch.collect::<Result<Vec<_>>>()?;
    let mut views = Named::from([("directions", directions)]);
    for (name, storage) in &scratch {
        views.push(name, whole(storage)?);
    }
    in_range(iteration, count, DType::F32, || {
        orthogonalize_on_gpu(gpu, &Multiplier::Eager, iteration, &views)
    })?;
    let entries = batch.iter().enumerate().map(|(i, matrix)| {
        let (var, master) = (matrix.var, matrix.slot.master.as_ref());
        Ok(Entry {
            value: elements(master.unwrap_or(var))?,
            gradient: own(i),
            states: [None; 2],
            copy: master.map(|_| elements(var)).transpose()?,
            rule: matrix.update.rule.kernel(),
            update: i,
        })
    });
    let has_master_weights = batch[0].slot.master.is_some();
    let entries = entries.collect::<Result<Vec<_>>>()?;
    Ok(update::step(gpu, &entries, &updates, has_master_weights)?)
}

/// Makes Muon's `directions` orthogonal, with the scratch memory of [`Iteration::scratch`].
pub(crate) fn orthogonalize_on_gpu(
    gpu: &CudaDevice,
    multiplier: &Multiplier<'_>,
    iteration: &Iteration,
    views: &Named<View<'_>>,
) -> candle_core::Result<()> {
    let buffers = Buffers {
        directions: *views.operand("directions"),
        x: views.get("x").copied(),
        next: *views.operand("next"),
        gram: *views.operand("gram"),
        square: *views.operand("square"),
        sums: *views.operand("sums"),
    };
    newton_schulz::orthogonalize(gpu, iteration, &buffers, |product| {
        multiplier.multiply_add(gpu, product)
    })
}

/// Returns the sum of squares of each tensor, in f64, by one launch and one synchronization. Returns `None` unless all
/// are on one GPU, in f32, bf16 or f16.
pub(super) fn sums_of_squares(tensors: &[&Tensor]) -> Result<Option<Vec<f64>>> {
    let Some(device) = tensors.first().map(|tensor| tensor.device()) else {
        return Ok(None);
    };
    let is_summed = |tensor: &&Tensor| {
        let same_gpu = tensor.device().is_cuda() && tensor.device().same_device(device);
        same_gpu && matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
    };
    if !tensors.iter().all(is_summed) {
        return Ok(None);
    }
    let tensors = tensors.iter().map(|tensor| tensor.contiguous());
    let tensors = tensors.collect::<candle_core::Result<Vec<Tensor>>>()?;
    let chunks = tensors
        .iter()
        .map(|tensor| workspace::chunks(tensor.elem_count()));
    let room = Tensor::zeros(chunks.sum::<usize>().max(1), DType::F64, device)?; // one for each chunk
    let squares = Tensor::zeros(tensors.len(), DType::F64, device)?;
    let views = tensors.iter().map(elements);
    let views = views.collect::<candle_core::Result<Vec<_>>>()?;
    let gpu = device.as_cuda_device()?;
    let tables = Tables::of_gradients(gpu, &views)?;
    tables.sums_of_squares(gpu, 0..views.len(), elements(&room)?, elements(&squares)?)?;
    Ok(Some(squares.to_vec1()?))
}
