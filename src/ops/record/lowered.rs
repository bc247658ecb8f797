//! Ops that compute eagerly what plans compute: the calls of kernels that they lower to.

use super::apply::{Op, applied};
use super::composed::composed;
use super::input::contiguous;
use super::spec::Spec;
use crate::graph::{self, MemoryStep, Target};
use crate::ops::dispatch::{Path, choose};
use crate::ops::lowering::{Calls, KernelCall, Lowering, Named, Signature, Slice, Slices};
use crate::ops::lowering::{Slot, StepState};
use crate::ops::{cpu, info};
use crate::probe::{self, Operand};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use std::sync::OnceLock;
#[cfg(feature = "cuda")]
use {
    crate::kernels::cuda::View,
    crate::ops::{
        cuda,
        lowering::{Multiplier, Operands},
    },
    candle_core::CudaStorage,
};

/// `op` on `inputs`: by the kernels that it lowers to or, where they are not for the first, as `reference` composes it
/// of candle's own ops.
pub(crate) fn run<const N: usize>(
    name: &'static str,
    op: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
    reference: impl FnOnce() -> crate::Result<Tensor>,
) -> crate::Result<Tensor> {
    match choose(name, inputs[0])? {
        Path::Kernel => by_kernels(name, op, inputs),
        Path::Reference => {
            let output = op.output(&inputs.map(Into::into));
            composed(name, &inputs, output, reference)
        }
    }
}

/// `op` on `inputs` by the kernels that it lowers to, or written down in the trace that is open.
pub(crate) fn by_kernels<const N: usize>(
    name: &'static str,
    op: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
) -> crate::Result<Tensor> {
    let mut inputs = inputs.map(Tensor::clone);
    for x in &mut inputs {
        *x = contiguous(x)?;
    }
    let inputs = inputs.each_ref();
    if graph::is_tracing() {
        return graph::record(name, op, &inputs, false);
    }
    let Some(lowering) = info::of(name).and_then(|info| info.lowering) else {
        return Err(candle_core::Error::msg(format!("{name} lowers to nothing")).into());
    };
    let op = Lowered {
        name,
        spec: op,
        lowering,
        kept: OnceLock::new(),
    };
    Ok(applied(&inputs, op)?)
}

struct Lowered<S> {
    name: &'static str,
    spec: S,
    lowering: Lowering,
    /// What forward has left for backward, as the spec lists it.
    kept: OnceLock<Vec<Tensor>>,
}

impl<S: Spec> Lowered<S> {
    fn forward<'a>(
        &self,
        device: &Device,
        inputs: &[Operand<'_>],
        lying: impl Iterator<Item = Result<Lying<'a>>>,
    ) -> Result<(Storage, Shape)> {
        let target = target_of(device);
        let (shape, dtype) = self.spec.output(inputs);
        let kept = self.spec.kept(inputs, target);
        let (attributes, reads) = (self.spec.attributes(), self.reads(device)?);
        let kept_operands = kept.iter().map(|(_, shape, dtype)| Operand {
            dims: shape.dims(),
            dtype: *dtype,
        });
        let signature = Signature {
            attributes: &attributes,
            inputs: inputs.to_vec(),
            reads: reads.iter().map(Into::into).collect(),
            output: Operand {
                dims: shape.dims(),
                dtype,
            },
            kept: kept_operands.collect(),
            target,
        };
        let calls = (self.lowering.forward)(&signature);
        let guards: Vec<_> = reads.iter().map(Tensor::storage_and_layout).collect();
        let mut run = Run::new(device, &signature, &calls);
        for (i, operand) in lying.enumerate() {
            run.operands.push((Slot::Input(i), operand?));
        }
        for (i, (storage, layout)) in guards.iter().enumerate() {
            let operand = Lying::of(storage, layout)?;
            run.operands.push((Slot::Read(i), operand));
        }
        if shape.elem_count() > 0 {
            run.run(|_| true)?;
        }
        run.make(Slot::Output)?;
        let mut tensors = Vec::with_capacity(kept.len());
        for (i, (what, shape, _)) in kept.iter().enumerate() {
            run.make(Slot::Kept(i))?;
            let tensor = run.taken(Slot::Kept(i), shape)?;
            probe::kept(what, &tensor);
            tensors.push(tensor);
        }
        self.spec.has_kept(&tensors);
        let _ = self.kept.set(tensors); // empty until now: an op runs forward once
        let output = run.storage(Slot::Output)?;
        drop(run);
        Ok((output, shape))
    }

    /// What is read beside the inputs, on their device: checked ids are on the host.
    fn reads(&self, device: &Device) -> Result<Vec<Tensor>> {
        let reads = self.spec.reads().into_iter();
        reads.map(|x| x.to_device(device)).collect()
    }
}

impl<S: Spec + Send + Sync + 'static> Op for Lowered<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, inputs: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
        let operands: Vec<_> = inputs
            .iter()
            .map(|(x, layout)| operand(*x, layout))
            .collect();
        let lying = inputs.iter();
        let lying = lying.map(|(x, layout)| Ok(Lying::Cpu(cpu::slice(x, layout)?)));
        match self.forward(&Device::Cpu, &operands, lying)? {
            (Storage::Cpu(output), shape) => Ok((output, shape)),
            _ => bail!("{}: an output elsewhere", self.name),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let operands: Vec<_> = inputs
            .iter()
            .map(|(x, layout)| operand(*x, layout))
            .collect();
        let lying = inputs.iter();
        let lying = lying.map(|(x, layout)| Ok(Lying::Cuda(cuda::view(x, layout)?)));
        let device = Device::Cuda(inputs[0].0.device.clone());
        match self.forward(&device, &operands, lying)? {
            (Storage::Cuda(output), shape) => Ok((output, shape)),
            _ => bail!("{}: an output elsewhere", self.name),
        }
    }

    fn bwd(&self, inputs: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if y.elem_count() == 0 {
            return inputs.iter().map(|x| x.zeros_like().map(Some)).collect();
        }
        let Some(kept) = self.kept.get() else {
            bail!("{}: backward before forward", self.name);
        };
        let (device, dy) = (dy.device(), dy.detach().contiguous()?);
        let (attributes, reads) = (self.spec.attributes(), self.reads(device)?);
        let signature = Signature {
            attributes: &attributes,
            inputs: inputs.iter().map(|x| (*x).into()).collect(),
            reads: reads.iter().map(Into::into).collect(),
            output: y.into(),
            kept: kept.iter().map(Into::into).collect(),
            target: target_of(device),
        };
        let calls = (self.lowering.backward)(&signature);
        let of_inputs = inputs.iter().enumerate();
        let of_reads = reads.iter().enumerate();
        let of_kept = kept.iter().enumerate();
        let given = [(Slot::Output, y), (Slot::OutputGradient, &dy)].into_iter();
        let given = given
            .chain(of_inputs.map(|(i, x)| (Slot::Input(i), *x)))
            .chain(of_reads.map(|(i, x)| (Slot::Read(i), x)))
            .chain(of_kept.map(|(i, x)| (Slot::Kept(i), x)));
        let guards: Vec<_> = given
            .map(|(slot, x)| (slot, x.storage_and_layout()))
            .collect();
        let mut run = Run::new(device, &signature, &calls);
        for (slot, (storage, layout)) in &guards {
            run.operands.push((*slot, Lying::of(storage, layout)?));
        }
        let steps = self
            .spec
            .backward_steps(&signature.inputs, signature.target);
        run.run(|input| inputs[input].track_op() || !steps.iter().any(|step| asks(step, input)))?;
        let gradient = |(i, x): (usize, &&Tensor)| match calls.same.contains(&i) {
            true => Ok(Some(dy.clone())),
            false if run.has(Slot::Gradient(i)) => {
                run.taken(Slot::Gradient(i), x.shape()).map(Some)
            }
            false => Ok(None),
        };
        inputs.iter().enumerate().map(gradient).collect()
    }
}

/// Whether the gradient of `input` is made for a tracked one alone.
fn asks(step: &MemoryStep, input: usize) -> bool {
    matches!(step, MemoryStep::Gradient { of, if_tracked: true, .. } if *of == input)
}

fn target_of(device: &Device) -> Target {
    match device.is_cuda() {
        true => Target::Cuda,
        false => Target::Cpu,
    }
}

fn operand<'a, S: BackendStorage>(storage: &S, layout: &'a Layout) -> Operand<'a> {
    Operand {
        dims: layout.dims(),
        dtype: storage.dtype(),
    }
}

/// Where the elements of an operand are.
#[derive(Clone, Copy)]
enum Lying<'a> {
    Cpu(Slice<'a>),
    #[cfg(feature = "cuda")]
    Cuda(View<'a>),
}

impl<'a> Lying<'a> {
    fn of(storage: &'a Storage, layout: &Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self::Cpu(cpu::slice(storage, layout)?)),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => Ok(Self::Cuda(cuda::view(storage, layout)?)),
            other => bail!("no kernel on {:?}", other.device().location()),
        }
    }
}

/// The calls of one pass: what is read lies somewhere, and what is written is made when it is first written.
struct Run<'a> {
    device: &'a Device,
    signature: &'a Signature<'a>,
    calls: &'a Calls,
    operands: Vec<(Slot, Lying<'a>)>,
    made: Vec<(Slot, Storage)>,
}

impl<'a> Run<'a> {
    fn new(device: &'a Device, signature: &'a Signature<'a>, calls: &'a Calls) -> Self {
        Self {
            device,
            signature,
            calls,
            operands: Vec::new(),
            made: Vec::new(),
        }
    }

    /// Runs the calls, but those that write nothing but gradients of inputs that want none.
    fn run(&mut self, wants: impl Fn(usize) -> bool) -> Result<()> {
        let unwanted = |slot: &Slot| matches!(slot, Slot::Gradient(input) if !wants(*input));
        for call in &self.calls.calls {
            if !call.writes.iter().all(unwanted) {
                call.writes.iter().try_for_each(|slot| self.make(*slot))?;
                self.call(call)?;
            }
        }
        Ok(())
    }

    /// Room for what is written, unless it is there, or empty.
    fn make(&mut self, slot: Slot) -> Result<()> {
        if self.operands.iter().any(|(other, _)| *other == slot) {
            return Ok(());
        }
        let signature = self.signature;
        let (dims, dtype): (&[usize], DType) = match slot {
            Slot::Input(i) | Slot::Gradient(i) => of(&signature.inputs[i]),
            Slot::Output | Slot::OutputGradient => of(&signature.output),
            Slot::Read(i) => of(&signature.reads[i]),
            Slot::Kept(i) => of(&signature.kept[i]),
            Slot::Scratch(i) => (&self.calls.scratch[i].0, self.calls.scratch[i].1),
        };
        let (storage, lying) = match self.device {
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let storage = cuda::alloc_uninit(gpu, dtype, dims.iter().product())?;
                // What it points to lasts as long as the storage, which lasts as long as this.
                let View {
                    pointer,
                    dtype,
                    len,
                    ..
                } = cuda::whole(&storage)?;
                (
                    Storage::Cuda(storage),
                    Lying::Cuda(View::new(pointer, dtype, len)),
                )
            }
            _ => {
                // SAFETY: the storage lasts as long as this, and nothing else uses it until it is taken.
                let (storage, slice) = unsafe { cpu::room(dims, dtype)? };
                (Storage::Cpu(storage), Lying::Cpu(slice))
            }
        };
        self.operands.push((slot, lying));
        self.made.push((slot, storage));
        Ok(())
    }

    fn call(&self, call: &KernelCall) -> Result<()> {
        let lying = |slot: &Slot| {
            let mut operands = self.operands.iter();
            operands.find_map(|(other, lying)| (other == slot).then_some(*lying))
        };
        let operands = [&call.reads, &call.writes];
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = self.device {
            let view = |slot: &Slot| match lying(slot) {
                Some(Lying::Cuda(view)) => Some(view),
                _ => None,
            };
            let [Some(reads), Some(writes)] = operands.map(|named| named.try_map(view)) else {
                bail!("{}: operands elsewhere", call.kernel.name());
            };
            return call.kernel.launch(&Operands {
                gpu,
                products: Multiplier::Eager,
                reads,
                writes,
                micro_batch: 0,
                loss_scale: View::new(0, DType::F32, 0), // no op lowers to what reads it
            });
        }
        let slice = |slot: &Slot| match lying(slot) {
            Some(Lying::Cpu(slice)) => Some(slice),
            _ => None,
        };
        let [Some(reads), Some(writes)] = operands.map(|named: &Named<Slot>| named.try_map(slice))
        else {
            bail!("{}: operands elsewhere", call.kernel.name());
        };
        let step = StepState {
            micro_batch: 0,
            loss_scale: 1.0,
        };
        call.kernel.run(&Slices::new(step, reads, &writes))
    }

    fn has(&self, slot: Slot) -> bool {
        self.made.iter().any(|(other, _)| *other == slot)
    }

    /// What was written, for good.
    fn storage(&mut self, slot: Slot) -> Result<Storage> {
        match self.made.iter().position(|(other, _)| *other == slot) {
            Some(place) => Ok(self.made.swap_remove(place).1),
            None => bail!("{slot:?} was not written"),
        }
    }

    /// As a tensor of no graph.
    fn taken(&mut self, slot: Slot, shape: &Shape) -> Result<Tensor> {
        let (storage, shape) = (self.storage(slot)?, shape.clone());
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

fn of<'a>(operand: &Operand<'a>) -> (&'a [usize], DType) {
    (operand.dims, operand.dtype)
}
