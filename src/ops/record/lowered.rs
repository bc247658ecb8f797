//! Ops that compute eagerly what plans compute: the calls of kernels that they lower to.

use super::apply::{Made, Op, Storages, applied};
use super::composed::composed;
use super::copy::contiguous;
use super::spec::{Spec, shaped};
use super::traced::traced;
use crate::graph::{self, Target};
use crate::ops::cpu;
use crate::ops::dispatch::{Path, choose};
use crate::ops::info::OpInfo;
use crate::ops::lowering::{
    Calls, KernelCall, Lowering, Signature, Slice, Slices, Slot, StepState,
};
use crate::probe::{self, Operand};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use std::sync::{Mutex, MutexGuard, PoisonError};
#[cfg(feature = "cuda")]
use {
    crate::kernels::cuda::View,
    crate::ops::{
        cuda,
        lowering::{Multiplier, Operands},
    },
    candle_core::CudaStorage,
};

/// A call of `op` on `inputs`: by the kernels that it lowers to or, where they are not for the first, as `reference`
/// composes it of candle's own ops.
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

/// A call of `op` on `inputs` by the kernels that it lowers to, or written down in the trace that is open.
pub(crate) fn by_kernels<const N: usize>(
    op: &'static OpInfo,
    call: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
) -> crate::Result<Tensor> {
    let mut inputs = inputs.map(Tensor::clone);
    for x in &mut inputs {
        *x = contiguous(x)?;
    }
    as_they_lie(op, call, inputs.each_ref())
}

/// As [`by_kernels`], of inputs that kernels read as they lie.
pub(crate) fn as_they_lie<const N: usize>(
    op: &'static OpInfo,
    call: impl Spec + Send + Sync + 'static,
    inputs: [&Tensor; N],
) -> crate::Result<Tensor> {
    let Some(lowering) = &op.lowering else {
        return Err(candle_core::Error::msg(format!("{} lowers to nothing", op.op)).into());
    };
    if graph::is_tracing() {
        return traced(op.op, call, &inputs, Some(*lowering), false);
    }
    let op = Lowered {
        op,
        spec: call,
        lowering,
        kept: Mutex::default(),
    };
    Ok(applied(&inputs, op)?)
}

struct Lowered<S> {
    op: &'static OpInfo,
    spec: S,
    lowering: &'static Lowering,
    /// What forward has left for backward, as the spec lists it; none once a backward has written over it.
    kept: Mutex<Option<Box<[Tensor]>>>,
}

impl<S: Spec> Lowered<S> {
    fn kept(&self) -> MutexGuard<'_, Option<Box<[Tensor]>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From inputs as they lie, and what is read beside them.
    fn forward<'a>(
        &self,
        device: &Device,
        inputs: &[Operand<'_>],
        lying: impl Iterator<Item = Result<Lying<'a>>>,
        reads: Vec<Tensor>,
    ) -> Made<Storage> {
        let target = Target::of(device);
        let (shape, dtype) = self.spec.output(inputs);
        let kept = self.spec.kept(inputs, target);
        let reads = moved(reads, device)?;
        self.spec.forwarded(); // what goes with forward goes when it was read last
        let shapes = reads.iter().map(|x| (x.shape().clone(), x.dtype()));
        let shapes: Vec<(Shape, DType)> = shapes.collect();
        let attributes = self.spec.attributes();
        let signature = Signature {
            attributes: &attributes,
            inputs: inputs.to_vec(),
            reads: shapes.iter().map(|(x, dtype)| shaped(x, *dtype)).collect(),
            output: shaped(&shape, dtype),
            kept: kept.iter().map(|(_, x, dtype)| shaped(x, *dtype)).collect(),
            target,
        };
        let calls = (self.lowering.forward)(&signature);
        let mut run = Run::new(device, &signature, &calls, reads);
        for (i, operand) in lying.enumerate() {
            run.operands.push((Slot::Input(i), operand?));
        }
        if shape.elem_count() > 0 {
            run.run(|_| true)?;
        }
        let mut tensors = Vec::with_capacity(kept.len());
        for (i, (what, shape, _)) in kept.iter().enumerate() {
            let tensor = run.tensor(Slot::Kept(i), shape)?;
            probe::kept(what, &tensor);
            tensors.push(tensor);
        }
        self.spec.has_kept(&tensors);
        *self.kept() = Some(tensors.into());
        let output = run.storage(Slot::Output)?;
        Ok((output, shape.clone()))
    }

    /// What forward leaves, where a backward before this one has written over it.
    fn forward_again(&self, inputs: &[&Tensor]) -> Result<Box<[Tensor]>> {
        let operands: Vec<Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
        let guards: Vec<_> = inputs.iter().map(|x| x.storage_and_layout()).collect();
        let lying = guards.iter();
        let lying = lying.map(|(storage, layout)| Lying::of(storage, layout));
        let reads = self.spec.reads_again(inputs)?;
        self.forward(inputs[0].device(), &operands, lying, reads)?;
        match self.kept().take() {
            Some(kept) => Ok(kept),
            None => bail!("{}: forward has left nothing", self.op.op),
        }
    }
}

impl<S: Spec + Send + Sync + 'static> Op for Lowered<S> {
    fn name(&self) -> &'static str {
        self.op.op
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let operands = inputs.iter().map(|(x, layout)| lent(*x, layout));
        let lying = inputs.iter();
        let lying = lying.map(|(x, layout)| Ok(Lying::Cpu(cpu::slice(x, layout)?)));
        let operands: Vec<_> = operands.collect();
        match self.forward(&Device::Cpu, &operands, lying, self.spec.reads())? {
            (Storage::Cpu(output), shape) => Ok((output, shape)),
            _ => bail!("{}: an output elsewhere", self.op.op),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        let operands = inputs.iter().map(|(x, layout)| lent(*x, layout));
        let lying = inputs.iter();
        let lying = lying.map(|(x, layout)| Ok(Lying::Cuda(cuda::lying(x, layout)?)));
        let device = Device::Cuda(inputs[0].0.device.clone());
        let operands: Vec<_> = operands.collect();
        match self.forward(&device, &operands, lying, self.spec.reads())? {
            (Storage::Cuda(output), shape) => Ok((output, shape)),
            _ => bail!("{}: an output elsewhere", self.op.op),
        }
    }

    fn bwd(&self, inputs: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if y.elem_count() == 0 {
            return inputs.iter().map(|x| x.zeros_like().map(Some)).collect();
        }
        let (device, dy) = (dy.device(), self.spec.readable(dy.detach())?);
        let left = self.kept().take();
        let kept = match left {
            Some(kept) => kept,
            None => self.forward_again(inputs)?,
        };
        let reads = moved(self.spec.reads_again(inputs)?, device)?;
        let shapes = reads.iter().map(|x| (x.shape().clone(), x.dtype()));
        let shapes: Vec<(Shape, DType)> = shapes.collect();
        let attributes = self.spec.attributes();
        let signature = Signature {
            attributes: &attributes,
            inputs: inputs.iter().map(|x| (*x).into()).collect(),
            reads: shapes.iter().map(|(x, dtype)| shaped(x, *dtype)).collect(),
            output: y.into(),
            kept: kept.iter().map(Into::into).collect(),
            target: Target::of(device),
        };
        let calls = (self.lowering.backward)(&signature);
        let given = [(Slot::Output, y), (Slot::OutputGradient, &dy)].into_iter();
        let of_inputs = inputs.iter().enumerate();
        let of_kept = kept.iter().enumerate();
        let given = given
            .chain(of_inputs.map(|(i, x)| (Slot::Input(i), *x)))
            .chain(of_kept.map(|(i, x)| (Slot::Kept(i), x)));
        let guards = given.map(|(slot, x)| (slot, x.storage_and_layout()));
        let guards: Vec<_> = guards.collect();
        let mut run = Run::new(device, &signature, &calls, reads);
        for (slot, (storage, layout)) in &guards {
            run.give(*slot, storage, layout)?;
        }
        run.run(|input| inputs[input].track_op())?;
        let gradient = |(i, x): (usize, &&Tensor)| match Slot::Gradient(i) {
            _ if calls.same.contains(&i) => Ok(Some(dy.clone())),
            slot if run.has(slot) => run.tensor(slot, x.shape()).map(Some),
            _ => Ok(None),
        };
        let gradients = inputs.iter().enumerate().map(gradient).collect();
        if !calls.writes_over_kept() {
            drop(run);
            drop(guards);
            *self.kept() = Some(kept);
        }
        gradients
    }
}

/// What is read beside the inputs, on their device: checked ids are on the host.
fn moved(reads: Vec<Tensor>, device: &Device) -> Result<Vec<Tensor>> {
    reads.iter().map(|x| x.to_device(device)).collect()
}

fn lent<'a, S: BackendStorage>(storage: &S, layout: &'a Layout) -> Operand<'a> {
    shaped(layout.shape(), storage.dtype())
}

/// Where the elements of an operand are.
#[derive(Clone, Copy)]
enum Lying<'a> {
    Cpu(Slice<'a>),
    #[cfg(feature = "cuda")]
    Cuda(View<'a>),
}

impl<'a> Lying<'a> {
    fn of(storage: &'a Storage, layout: &'a Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self::Cpu(cpu::slice(storage, layout)?)),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => Ok(Self::Cuda(cuda::lying(storage, layout)?)),
            other => bail!("no kernel on {:?}", other.device().location()),
        }
    }
}

/// The calls of one pass. What is written is made when it is first written; what is read beside the inputs, and what is
/// there for the calls alone, goes when it was read last.
pub(super) struct Run<'a> {
    device: &'a Device,
    signature: &'a Signature<'a>,
    calls: &'a Calls,
    /// The op's inputs, what it kept, and what was made.
    operands: Vec<(Slot, Lying<'a>)>,
    reads: Vec<Option<Tensor>>,
    made: Vec<(Slot, Storage)>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        device: &'a Device,
        signature: &'a Signature<'a>,
        calls: &'a Calls,
        reads: Vec<Tensor>,
    ) -> Self {
        let given = signature.inputs.len() + signature.kept.len() + 2; // and the output and its gradient
        let written = calls.calls.iter().map(|call| call.writes.entries().len());
        Self {
            device,
            signature,
            calls,
            operands: Vec::with_capacity(given + written.sum::<usize>()),
            reads: reads.into_iter().map(Some).collect(),
            made: Vec::new(),
        }
    }

    /// What is there beforehand.
    pub(super) fn give(
        &mut self,
        slot: Slot,
        storage: &'a Storage,
        layout: &'a Layout,
    ) -> Result<()> {
        self.operands.push((slot, Lying::of(storage, layout)?));
        Ok(())
    }

    /// Runs the calls, but those that nothing comes of but gradients of inputs that want none.
    pub(super) fn run(&mut self, wants: impl Fn(usize) -> bool) -> Result<()> {
        for (call, last) in self.calls.needed(wants) {
            call.writes.iter().try_for_each(|slot| self.make(*slot))?;
            self.call(call)?;
            for slot in last {
                match slot {
                    Slot::Read(i) => self.reads[i] = None,
                    Slot::Scratch(_) => {
                        self.operands.retain(|(other, _)| *other != slot);
                        self.made.retain(|(other, _)| *other != slot);
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Room for what is written, unless it is there.
    fn make(&mut self, slot: Slot) -> Result<()> {
        if self.operands.iter().any(|(other, _)| *other == slot) {
            return Ok(());
        }
        let signature = self.signature;
        let operand = match slot {
            Slot::Input(i) | Slot::Gradient(i) => &signature.inputs[i],
            Slot::Output | Slot::OutputGradient => &signature.output,
            Slot::Read(i) => &signature.reads[i],
            Slot::Kept(i) => &signature.kept[i],
            Slot::Scratch(i) => &Operand {
                dims: &self.calls.scratch[i].0,
                dtype: self.calls.scratch[i].1,
            },
        };
        let (storage, lying) = room(self.device, operand)?;
        self.operands.push((slot, lying));
        self.made.push((slot, storage));
        Ok(())
    }

    fn call(&self, call: &KernelCall) -> Result<()> {
        let reads = self.reads.iter();
        let reads = reads.map(|x| x.as_ref().map(Tensor::storage_and_layout));
        let reads: Vec<_> = reads.collect();
        let lying = |slot: &Slot| match slot {
            Slot::Read(i) => {
                let (storage, layout) = reads[*i].as_ref()?;
                Lying::of(storage, layout).ok()
            }
            _ => {
                let mut operands = self.operands.iter();
                operands.find_map(|(other, lying)| (other == slot).then_some(*lying))
            }
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
        let [Some(reads), Some(writes)] = operands.map(|named| named.try_map(slice)) else {
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

    /// What was written, for good; room, where nothing was.
    fn storage(&mut self, slot: Slot) -> Result<Storage> {
        self.make(slot)?;
        match self.made.iter().position(|(other, _)| *other == slot) {
            Some(place) => Ok(self.made.swap_remove(place).1),
            None => bail!("{slot:?} was given"),
        }
    }

    /// As a tensor of no graph.
    pub(super) fn tensor(&mut self, slot: Slot, shape: &Shape) -> Result<Tensor> {
        let storage = self.storage(slot)?;
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

/// Room for what a kernel writes all of before anybody reads it, and where it lies: used while the storage is there.
fn room<'a>(device: &Device, operand: &Operand<'_>) -> Result<(Storage, Lying<'a>)> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = device {
        let elements = operand.dims.iter().product();
        let storage = cuda::alloc_uninit(gpu, operand.dtype, elements)?;
        let pointer = cuda::whole(&storage)?.pointer;
        let lying = Lying::Cuda(View::new(pointer, operand.dtype, elements));
        return Ok((Storage::Cuda(storage), lying));
    }
    if !device.is_cpu() {
        bail!("no kernel on {:?}", device.location());
    }
    // SAFETY: as above.
    let (storage, slice) = unsafe { cpu::room(operand.dims, operand.dtype)? };
    Ok((Storage::Cpu(storage), Lying::Cpu(slice)))
}
