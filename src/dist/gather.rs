//! All of a weight that every rank has a part of, as ops of eager steps.

use super::part::Part;
use crate::graph::{self, MemoryStep, Target};
use crate::inplace::with_mut_memory;
use crate::ops::cpu::{self, for_stored};
use crate::ops::lowering::{Slice, Slices, StepState, converted};
use crate::ops::record::{Made, Op, Spec, Storages};
use crate::probe::Operand;
#[cfg(feature = "cuda")]
use crate::{kernels::cuda, ops::cuda as on_gpu};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, WithDType};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, Device};
use std::sync::Arc;

/// A gather, as nodes name it.
pub(crate) const ALL_GATHER: &str = "all_gather";

/// A part, to all of the weight in this dtype.
pub(super) struct Gather {
    part: Arc<Part>,
    dtype: DType,
    /// The same, if it was gathered: it is copied then.
    lent: Option<Tensor>,
}

impl Gather {
    pub fn new(part: Arc<Part>, dtype: DType, lent: Option<Tensor>) -> Self {
        Self { part, dtype, lent }
    }
}

impl Spec for Gather {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.part.shape().clone(), self.dtype)
    }

    fn backward_steps(&self, _: &[Operand<'_>], _: &[bool], _: Target) -> Vec<MemoryStep> {
        self.part.scattering_steps()
    }
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        ALL_GATHER
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let (part, layout) = inputs[0];
        if let Some(lent) = &self.lent {
            let (lent, layout) = lent.storage_and_layout();
            return match &*lent {
                Storage::Cpu(lent) => Ok((lent.try_clone(layout)?, self.part.shape().clone())),
                _ => candle_core::bail!("{ALL_GATHER}: gathered on another device"),
            };
        }
        for_stored!(self.dtype, T => {
            let mut exchanged = Ok(());
            let whole = cpu::output::<T>(self.part.shape().clone(), |whole| {
                let own = &mut whole[self.part.own()];
                // SAFETY: nothing else uses them while this runs.
                let own = unsafe { Slice::new(own.as_mut_ptr().cast(), own.len(), T::DTYPE) };
                exchanged = write_on_host(part, layout, own).and_then(|()| {
                    let mut collectives = self.part.gathering().into_iter();
                    collectives.try_for_each(|(collective, some)| {
                        let communicator = &self.part.communicator;
                        Ok(communicator.run_on_host(collective, &mut whole[some])?)
                    })
                });
            })?;
            exchanged?;
            Ok(whole)
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        use candle_core::cuda_backend::WrapErr;
        let (part, layout) = inputs[0];
        let (gpu, elements) = (&part.device, self.part.shape().elem_count());
        let part = on_gpu::view(part, layout)?;
        let storage = on_gpu::alloc_uninit(gpu, self.dtype, elements)?;
        if let Some(lent) = &self.lent {
            cuda::copy(gpu, on_gpu::elements(lent)?, on_gpu::whole(&storage)?)?;
            return Ok((storage, self.part.shape().clone()));
        }
        let (whole, own) = (on_gpu::whole(&storage)?, self.part.own());
        let own = whole.part(own.start, own.len());
        cuda::cast::cast(gpu, part, own)?;
        if let Some(queue) = self.part.communicator.gpu_queue() {
            self.part.communicator.check()?;
            let collectives = self.part.gathering().into_iter();
            let collectives = collectives.map(|(collective, some)| {
                let some = whole.part(some.start, some.len());
                (collective, (some.pointer, some.len, some.dtype))
            });
            let collectives: Vec<_> = collectives.collect();
            let over = queue.start_all(&collectives, &gpu.cuda_stream())?;
            gpu.cuda_stream().wait(&over).w()?;
        }
        Ok((storage, self.part.shape().clone()))
    }

    fn bwd(&self, _: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.part.scattered(dy)
    }
}

/// Writes x where y lies, in y's dtype: contiguous tensors of one size, on storages of their own.
pub(super) fn write(x: &Tensor, y: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = y.device() {
        return cuda::cast::cast(gpu, on_gpu::elements(x)?, on_gpu::elements(y)?);
    }
    let (x, layout) = x.storage_and_layout();
    let Storage::Cpu(x) = &*x else {
        candle_core::bail!("{ALL_GATHER}: a part on another device");
    };
    let mut written = Ok(());
    with_mut_memory(y, |start, elements| {
        // SAFETY: the elements are lent for as long as this runs, and nothing else uses them.
        let y = unsafe { Slice::new(start, elements, y.dtype()) };
        written = write_on_host(x, layout, y);
    })?;
    written
}

fn write_on_host(x: &CpuStorage, layout: &Layout, y: Slice<'_>) -> Result<()> {
    let x = cpu::slice(x, layout)?;
    let step = StepState {
        micro_batch: 0,
        loss_gradient: 1.0,
    };
    converted().run(&Slices::new(step, [("x", x)].into(), &[("y", y)].into()))
}

/// A part, to the whole without its elements.
pub(super) struct Empty(pub Arc<Part>);

impl Spec for Empty {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (self.0.shape().clone(), inputs[0].dtype)
    }

    fn forward_steps(&self, _: &[Operand<'_>], _: Target) -> Vec<MemoryStep> {
        Vec::new()
    }

    fn backward_steps(&self, _: &[Operand<'_>], _: &[bool], _: Target) -> Vec<MemoryStep> {
        self.0.scattering_steps()
    }
}

impl Op for Empty {
    fn name(&self) -> &'static str {
        "divided_weight"
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let none = graph::empty(inputs[0].0.dtype())?;
        Ok((none, self.0.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        let part = inputs[0].0;
        let none = on_gpu::alloc_uninit(&part.device, part.dtype(), 0)?;
        Ok((none, self.0.shape().clone()))
    }

    fn bwd(&self, _: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.0.scattered(dy)
    }
}
