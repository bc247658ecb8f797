//! Eager execution of ops by the kernel calls that they lower to, the same that plans run.

use super::apply::{ForwardResult, Op, Storages, applied, composed, traced};
use super::input::contiguous;
use super::run::{OperandView, Run};
use super::spec::{Spec, shaped};
use crate::graph::{self, Target};
use crate::ops::cpu;
use crate::ops::dispatch::{Path, choose};
use crate::ops::info::OpInfo;
use crate::ops::lowering::{Lowering, Signature, Slot};
use crate::probe::Operand;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use std::sync::{Mutex, MutexGuard, PoisonError};
#[cfg(feature = "cuda")]
use {crate::ops::cuda, candle_core::CudaStorage};

/// Runs `op` on `inputs` by its kernels, or as `reference` composes it if there is no kernel for the first input.
pub(crate) fn run<const N: usize>(
    op: &'static OpInfo,
    call: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
    reference: impl FnOnce() -> crate::Result<Tensor>,
) -> crate::Result<Tensor> {
    match choose(op, inputs[0])? {
        Path::Kernel => by_kernels(op, call, inputs),
        Path::Reference => {
            let output = call.output(&inputs.map(Into::into));
            composed(op, &inputs, output, reference)
        }
    }
}

/// Runs `op` on `inputs` by its kernels, or records the call in the open trace.
pub(crate) fn by_kernels<const N: usize>(
    op: &'static OpInfo,
    call: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
) -> crate::Result<Tensor> {
    let mut inputs = inputs.map(Tensor::clone);
    for x in &mut inputs {
        *x = contiguous(x)?;
    }
    by_strided_kernels(op, call, inputs.each_ref())
}

/// Runs [`by_kernels`] without making the inputs contiguous, for kernels that accept strides.
pub(crate) fn by_strided_kernels<const N: usize>(
    op: &'static OpInfo,
    call: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
) -> crate::Result<Tensor> {
    let Some(lowering) = &op.lowering else {
        return Err(candle_core::Error::msg(format!("{} has no kernels", op.op)).into());
    };
    if graph::is_tracing() {
        return traced(op.op, call, &inputs, false);
    }
    let op = Lowered {
        op,
        spec: call,
        lowering,
        saved: Mutex::default(),
    };
    Ok(applied(&inputs, op)?)
}

struct Lowered<S> {
    op: &'static OpInfo,
    spec: S,
    lowering: &'static Lowering,
    /// The values saved for backward, as the spec lists them; `None` once a backward has overwritten them.
    saved: Mutex<Option<Box<[Tensor]>>>,
}

impl<S: Spec> Lowered<S> {
    fn saved(&self) -> MutexGuard<'_, Option<Box<[Tensor]>>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the output and what is saved for backward. The closure returns the elements of an input; `reads` are the
    /// extra inputs.
    fn forward<'a>(
        &self,
        device: &Device,
        inputs: &[Operand<'_>],
        view: impl Fn(usize) -> Result<OperandView<'a>>,
        reads: Vec<Tensor>,
    ) -> Result<(Storage, Shape, Box<[Tensor]>)> {
        let target = Target::of(device);
        let (shape, dtype) = self.spec.output(inputs);
        let saved = self.spec.saved(inputs, target);
        let reads = to_device(reads, device)?;
        self.spec.free_after_forward(); // drops the spec's references, so that `run` can free what it read last
        let shapes = reads.iter().map(|x| (x.shape().clone(), x.dtype()));
        let shapes: Vec<(Shape, DType)> = shapes.collect();
        let attributes = self.spec.attributes();
        let signature = Signature {
            attributes: &attributes,
            inputs: inputs.to_vec(),
            extra_inputs: shapes.iter().map(|(x, dtype)| shaped(x, *dtype)).collect(),
            output: shaped(&shape, dtype),
            saved: saved
                .iter()
                .map(|(_, x, dtype)| shaped(x, *dtype))
                .collect(),
            target,
            plan: None,
        };
        let calls = (self.lowering.forward)(&signature);
        let mut run = Run::new(device, &signature, &calls, reads);
        for input in 0..inputs.len() {
            // An input that is read through a copy may have no elements here.
            if calls.reads(Slot::Input(input)) {
                run.operands.push((Slot::Input(input), view(input)?));
            }
        }
        if shape.elem_count() > 0 {
            run.run(|_| true)?;
        }
        let mut tensors = Vec::with_capacity(saved.len());
        for (i, (_, shape, _)) in saved.iter().enumerate() {
            tensors.push(run.tensor(Slot::Saved(i), shape)?);
        }
        self.spec.on_saved(&tensors);
        let output = run.storage(Slot::Output)?;
        Ok((output, shape.clone(), tensors.into()))
    }

    /// Recomputes what forward saved, after an earlier backward has overwritten it.
    fn recompute_saved(&self, inputs: &[&Tensor]) -> Result<Box<[Tensor]>> {
        let operands: Vec<Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
        let guards: Vec<_> = inputs.iter().map(|x| x.storage_and_layout()).collect();
        let view = |i: usize| OperandView::of(&guards[i].0, guards[i].1);
        let reads = self.spec.extra_inputs_for_backward(inputs)?;
        let (_, _, saved) = self.forward(inputs[0].device(), &operands, view, reads)?;
        Ok(saved) // and do not store it: other threads may be here too
    }
}

impl<S: Spec + Send + Sync + 'static> Op for Lowered<S> {
    fn name(&self) -> &'static str {
        self.op.op
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> ForwardResult<CpuStorage> {
        let operands = inputs.iter().map(|(x, layout)| operand_of(*x, layout));
        let view = |i: usize| Ok(OperandView::Cpu(cpu::slice(inputs[i].0, inputs[i].1)?));
        let operands: Vec<_> = operands.collect();
        let (output, shape, saved) =
            self.forward(&Device::Cpu, &operands, view, self.spec.extra_inputs())?;
        *self.saved() = Some(saved);
        match output {
            Storage::Cpu(output) => Ok((output, shape)),
            _ => bail!(
                "{}: expected the output on the device of the inputs",
                self.op.op
            ),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> ForwardResult<CudaStorage> {
        let operands = inputs.iter().map(|(x, layout)| operand_of(*x, layout));
        let view = |i: usize| Ok(OperandView::Cuda(cuda::strided(inputs[i].0, inputs[i].1)?));
        let device = Device::Cuda(inputs[0].0.device.clone());
        let operands: Vec<_> = operands.collect();
        let (output, shape, saved) =
            self.forward(&device, &operands, view, self.spec.extra_inputs())?;
        *self.saved() = Some(saved);
        match output {
            Storage::Cuda(output) => Ok((output, shape)),
            _ => bail!(
                "{}: expected the output on the device of the inputs",
                self.op.op
            ),
        }
    }

    fn bwd(&self, inputs: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if y.elem_count() == 0 {
            return inputs.iter().map(|x| x.zeros_like().map(Some)).collect();
        }
        let (device, dy) = (dy.device(), self.spec.readable(dy.detach())?);
        let left = self.saved().take();
        let saved = match left {
            Some(saved) => saved,
            None => self.recompute_saved(inputs)?,
        };
        let reads = to_device(self.spec.extra_inputs_for_backward(inputs)?, device)?;
        let shapes = reads.iter().map(|x| (x.shape().clone(), x.dtype()));
        let shapes: Vec<(Shape, DType)> = shapes.collect();
        let attributes = self.spec.attributes();
        let signature = Signature {
            attributes: &attributes,
            inputs: inputs.iter().map(|x| (*x).into()).collect(),
            extra_inputs: shapes.iter().map(|(x, dtype)| shaped(x, *dtype)).collect(),
            output: y.into(),
            saved: saved.iter().map(Into::into).collect(),
            target: Target::of(device),
            plan: None,
        };
        let calls = (self.lowering.backward)(&signature);
        let given = [(Slot::Output, y), (Slot::OutputGradient, &dy)].into_iter();
        let of_inputs = inputs.iter().enumerate();
        let of_inputs = of_inputs.map(|(i, x)| (Slot::Input(i), *x));
        let of_kept = saved.iter().enumerate();
        let given = given
            .chain(of_inputs.filter(|(slot, _)| calls.reads(*slot)))
            .chain(of_kept.map(|(i, x)| (Slot::Saved(i), x)));
        let guards = given.map(|(slot, x)| (slot, x.storage_and_layout()));
        let guards: Vec<_> = guards.collect();
        let mut run = Run::new(device, &signature, &calls, reads);
        for (slot, (storage, layout)) in &guards {
            run.push_operand(*slot, storage, layout)?;
        }
        run.run(|input| inputs[input].track_op())?;
        let gradient = |(i, x): (usize, &&Tensor)| match Slot::Gradient(i) {
            _ if calls.aliases.iter().any(|(same, _)| *same == i) => Ok(Some(dy.clone())),
            slot if run.has(slot) => run.tensor(slot, x.shape()).map(Some),
            _ => Ok(None),
        };
        let gradients = inputs.iter().enumerate().map(gradient).collect();
        if !calls.overwrites_saved() {
            drop(run);
            drop(guards);
            *self.saved() = Some(saved);
        }
        gradients
    }
}

/// Moves extra inputs to the device of the inputs; checked ids are on the host.
fn to_device(reads: Vec<Tensor>, device: &Device) -> Result<Vec<Tensor>> {
    reads.iter().map(|x| x.to_device(device)).collect()
}

fn operand_of<'a, S: BackendStorage>(storage: &S, layout: &'a Layout) -> Operand<'a> {
    shaped(layout.shape(), storage.dtype())
}
