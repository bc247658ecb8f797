//! Execution of the kernel calls of one eager pass.

use crate::ops::cpu;
use crate::ops::lowering::{Calls, KernelCall, Signature, Slice, Slices, Slot, StepState};
use crate::probe::Operand;
use candle_core::op::BackpropOp;
use candle_core::{Device, Layout, Result, Shape, Storage, Tensor, bail};
#[cfg(feature = "cuda")]
use {
    crate::kernels::cuda::View,
    crate::ops::{
        cuda,
        lowering::{Multiplier, Operands},
    },
    candle_core::DType,
};

#[derive(Clone, Copy)]
pub(super) enum OperandView<'a> {
    Cpu(Slice<'a>),
    #[cfg(feature = "cuda")]
    Cuda(View<'a>),
}

impl<'a> OperandView<'a> {
    pub(super) fn of(storage: &'a Storage, layout: &'a Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self::Cpu(cpu::slice(storage, layout)?)),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => Ok(Self::Cuda(cuda::strided(storage, layout)?)),
            other => bail!("no kernel on {:?}", other.device().location()),
        }
    }
}

/// The execution of one pass. An output is allocated when it is first written. Extra inputs and scratch are freed after
/// they were last read.
pub(super) struct Run<'a> {
    device: &'a Device,
    signature: &'a Signature<'a>,
    calls: &'a Calls,
    /// The op's inputs, saved values and outputs.
    pub(super) operands: Vec<(Slot, OperandView<'a>)>,
    reads: Vec<Option<Tensor>>,
    allocated: Vec<(Slot, Storage)>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        device: &'a Device,
        signature: &'a Signature<'a>,
        calls: &'a Calls,
        reads: Vec<Tensor>,
    ) -> Self {
        let given = signature.inputs.len() + signature.saved.len() + 2; // and the output and its gradient
        let written = calls.calls.iter().map(|call| call.writes.entries().len());
        Self {
            device,
            signature,
            calls,
            operands: Vec::with_capacity(given + written.sum::<usize>()),
            reads: reads.into_iter().map(Some).collect(),
            allocated: Vec::new(),
        }
    }

    pub(super) fn push_operand(
        &mut self,
        slot: Slot,
        storage: &'a Storage,
        layout: &'a Layout,
    ) -> Result<()> {
        self.operands
            .push((slot, OperandView::of(storage, layout)?));
        Ok(())
    }

    /// Runs the calls, except those that only compute gradients nobody needs.
    pub(super) fn run(&mut self, wants: impl Fn(usize) -> bool) -> Result<()> {
        for (call, last) in self.calls.needed(wants) {
            call.writes
                .iter()
                .try_for_each(|slot| self.ensure_allocated(*slot))?;
            self.call(call)?;
            for slot in last {
                match slot {
                    Slot::ExtraInput(i) => self.reads[i] = None,
                    Slot::Scratch(_) => {
                        self.operands.retain(|(other, _)| *other != slot);
                        self.allocated.retain(|(other, _)| *other != slot);
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn ensure_allocated(&mut self, slot: Slot) -> Result<()> {
        if self.operands.iter().any(|(other, _)| *other == slot) {
            return Ok(());
        }
        let Some(operand) = self.calls.operand(slot, self.signature) else {
            bail!("{slot:?} occurs only in plans");
        };
        let (storage, view) = alloc_output(self.device, &operand)?;
        self.operands.push((slot, view));
        self.allocated.push((slot, storage));
        Ok(())
    }

    fn call(&self, call: &KernelCall) -> Result<()> {
        let reads = self.reads.iter();
        let reads = reads.map(|x| x.as_ref().map(Tensor::storage_and_layout));
        let reads: Vec<_> = reads.collect();
        let operand_view = |slot: &Slot| match slot {
            Slot::ExtraInput(i) => {
                let (storage, layout) = reads[*i].as_ref()?;
                OperandView::of(storage, layout).ok()
            }
            _ => {
                let mut operands = self.operands.iter();
                operands.find_map(|(other, view)| (other == slot).then_some(*view))
            }
        };
        let operands = [&call.reads, &call.writes];
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = self.device {
            let view = |slot: &Slot| match operand_view(slot) {
                Some(OperandView::Cuda(view)) => Some(view),
                _ => None,
            };
            let [Some(reads), Some(writes)] = operands.map(|named| named.try_map(view)) else {
                bail!(
                    "{}: expected all operands on one device",
                    call.kernel.name()
                );
            };
            return call.kernel.launch(&Operands {
                gpu,
                multiplier: Multiplier::Eager,
                reads,
                writes,
                micro_batch: 0,
                loss_gradient: View::new(0, DType::F32, 0), // no op's lowering reads it
            });
        }
        let slice = |slot: &Slot| match operand_view(slot) {
            Some(OperandView::Cpu(slice)) => Some(slice),
            _ => None,
        };
        let [Some(reads), Some(writes)] = operands.map(|named| named.try_map(slice)) else {
            bail!(
                "{}: expected all operands on one device",
                call.kernel.name()
            );
        };
        let step = StepState {
            micro_batch: 0,
            loss_gradient: 1.0,
        };
        call.kernel.run(&Slices::new(step, reads, &writes))
    }

    pub(super) fn has(&self, slot: Slot) -> bool {
        self.allocated.iter().any(|(other, _)| *other == slot)
    }

    /// Takes the storage of a slot that was written; uninitialised storage if none was.
    pub(super) fn storage(&mut self, slot: Slot) -> Result<Storage> {
        self.ensure_allocated(slot)?;
        match self.allocated.iter().position(|(other, _)| *other == slot) {
            Some(place) => Ok(self.allocated.swap_remove(place).1),
            None => bail!("{slot:?} is an input, not an output"),
        }
    }

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

/// Allocates storage that a kernel must write completely, and its elements, which may be used only while it is alive.
fn alloc_output<'a>(device: &Device, operand: &Operand<'_>) -> Result<(Storage, OperandView<'a>)> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = device {
        let elements = operand.dims.iter().product();
        let storage = cuda::alloc_uninit(gpu, operand.dtype, elements)?;
        let pointer = cuda::whole(&storage)?.pointer;
        let view = OperandView::Cuda(View::new(pointer, operand.dtype, elements));
        return Ok((Storage::Cuda(storage), view));
    }
    if !device.is_cpu() {
        bail!("no kernel on {:?}", device.location());
    }
    // SAFETY: the caller uses the slice only while it keeps the storage, as documented.
    let (storage, slice) = unsafe { cpu::alloc_output(operand.dims, operand.dtype)? };
    Ok((Storage::Cpu(storage), OperandView::Cpu(slice)))
}
