//! All of a weight that every rank has a part of, as ops of eager steps.

use super::ahead::Place;
use super::scattering::Scattering;
use super::{Collective, Communicator, Shard};
use crate::graph::{self, MemoryStep, Room, Target};
use crate::inplace::with_mut_memory;
use crate::no_grad;
use crate::ops::cpu::{self, for_stored};
use crate::ops::lowering::{Slice, Slices, StepState, converted};
use crate::ops::record::{Made, Op, Spec, Storages, apply};
use crate::ops::{Divided, Reading, divided, forget, forward_reading, stands_for};
use crate::probe::Operand;
#[cfg(feature = "cuda")]
use crate::{kernels::cuda, ops::cuda as on_gpu};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, Var, WithDType};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, Device};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

/// A rank's part of a weight.
#[derive(Debug)]
pub(super) struct Part {
    /// (elements, 1, ...), of as many dimensions as the weight: what decays matrices alone knows it as one.
    pub var: Var,
    /// Of the weight's shape.
    pub hollow: Tensor,
    pub communicator: Communicator,
    pub scattering: Arc<Scattering>,
    /// Among weights that are gathered ahead.
    pub place: OnceLock<Place>,
}

impl Part {
    /// What a hollow tensor stands for.
    pub fn of(hollow: &Tensor) -> Option<Arc<Self>> {
        let weight: Arc<dyn Any + Send + Sync> = divided(hollow)?;
        weight.downcast().ok()
    }

    /// Has ops take the hollow weight for it.
    pub fn shared(self) -> Arc<Self> {
        let part = Arc::new(self);
        let weight: Weak<Self> = Arc::downgrade(&part);
        stands_for(&part.hollow, weight);
        part
    }

    fn whole(&self) -> Whole {
        Whole {
            communicator: self.communicator.clone(),
            shape: self.hollow.shape().clone(),
            scattering: Arc::clone(&self.scattering),
        }
    }

    /// Whether products read it: of more than one dimension.
    pub fn is_matrix(&self) -> bool {
        self.hollow.rank() > 1
    }

    /// Room for all of it in `dtype`.
    pub fn room(&self, dtype: DType) -> Result<Tensor> {
        match self.is_on_paper() {
            true => graph::constant(self.hollow.shape(), dtype),
            false => Tensor::zeros(self.hollow.shape(), dtype, self.communicator.device()),
        }
    }

    /// Writes the part where it belongs in `all` of the weight; what gathers the others there.
    pub fn gathering_in(&self, all: &Tensor) -> Result<Vec<(Collective, Tensor)>> {
        if self.is_on_paper() {
            return Ok(Vec::new());
        }
        let (whole, all) = (self.whole(), all.flatten_all()?);
        let some = |range: Range<usize>| all.narrow(0, range.start, range.len());
        write(&self.var, &some(whole.own())?)?;
        let collectives = whole.gathering().into_iter();
        collectives
            .map(|(collective, range)| Ok((collective, some(range)?)))
            .collect()
    }

    fn gather(&self, dtype: DType, lent: Option<Tensor>) -> Gather {
        Gather {
            whole: self.whole(),
            dtype,
            lent,
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        forget(&self.hollow);
    }
}

impl Divided for Part {
    fn gathered(&self, dtype: DType) -> crate::Result<Tensor> {
        let gather = self.gather(dtype, None);
        Ok(no_grad(|| apply(&[&self.var.detach()], gather))?)
    }

    fn lent(&self, dtype: DType, reading: Reading) -> crate::Result<Option<Tensor>> {
        match self.place.get() {
            Some(place) => place.lent(dtype, reading),
            None => Ok(None),
        }
    }

    fn node(&self) -> crate::Result<Tensor> {
        let dtype = self.var.dtype();
        let gather = self.gather(dtype, self.lent(dtype, forward_reading())?);
        Ok(apply(&[self.var.as_tensor()], gather)?)
    }

    fn empty_node(&self) -> crate::Result<Tensor> {
        Ok(apply(&[self.var.as_tensor()], Empty(self.whole()))?)
    }

    fn is_on_paper(&self) -> bool {
        graph::is_hollow(&self.var)
    }
}

/// All of a weight whose [parts](super::FullyShard) the ranks of a job have, for what a layer of your own does with it
/// in candle's ops or in views; it is kept for backward. Any other tensor itself, and in a
/// [trace](crate::graph::trace()) of a plan that of the weight too.
///
/// This crate's products ([`linear`](crate::ops::linear()) and its kin) take the layer's weight as it is, gather it for
/// as long as they read it, and again in backward: give them that.
///
/// Every rank has to call it, and gets the same. The gradient of what comes is averaged over the ranks, and a rank's
/// part of it is that of its part of the weight.
///
/// # Errors
/// [`Error::Rank`](crate::Error::Rank).
pub fn gathered(weight: &Tensor) -> crate::Result<Tensor> {
    match divided(weight) {
        Some(weight) => weight.node(),
        None => Ok(weight.clone()), // which ops outside of traces refuse, if it is hollow
    }
}

/// A gather, as nodes name it.
pub(crate) const ALL_GATHER: &str = "all_gather";

/// All of a weight.
struct Whole {
    communicator: Communicator,
    shape: Shape,
    scattering: Arc<Scattering>,
}

impl Whole {
    fn own(&self) -> Range<usize> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        Shard { rank, world_size }.part(self.shape.elem_count())
    }

    /// What gives every rank all of it.
    fn gathering(&self) -> Vec<(Collective, Range<usize>)> {
        Collective::gathering(self.communicator.world_size(), self.shape.elem_count())
    }

    /// The gradient of the own `part` from that of the whole: this rank's part of the mean over all ranks.
    fn scattered(&self, part: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let communicator = &self.communicator;
        let gradient = self.scattering.start(communicator, self.own(), part, dy)?;
        Ok(vec![Some(gradient)])
    }

    /// What [`scattered`](Self::scattered) does to memory: a copy of the gradient to exchange, and the own part of it.
    fn scattering_steps(&self, part: DType) -> Vec<MemoryStep> {
        let exchanged = Room {
            what: "exchanged gradient",
            formula: "of a weight",
            elements: self.shape.elem_count() as f64,
            element_bytes: self.scattering.dtype(part).size_in_bytes(),
        };
        vec![MemoryStep::Exchange(exchanged), MemoryStep::Gradient(0)]
    }
}

/// A part, to all of the weight in this dtype.
struct Gather {
    whole: Whole,
    dtype: DType,
    /// The same, if it was gathered: it is copied then.
    lent: Option<Tensor>,
}

impl Spec for Gather {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.whole.shape.clone(), self.dtype)
    }

    fn backward_steps(&self, inputs: &[Operand<'_>], _: &[bool], _: Target) -> Vec<MemoryStep> {
        self.whole.scattering_steps(inputs[0].dtype)
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
                Storage::Cpu(lent) => Ok((lent.try_clone(layout)?, self.whole.shape.clone())),
                _ => candle_core::bail!("{ALL_GATHER}: gathered on another device"),
            };
        }
        for_stored!(self.dtype, T => {
            let mut exchanged = Ok(());
            let whole = cpu::output::<T>(self.whole.shape.clone(), |whole| {
                let own = &mut whole[self.whole.own()];
                // SAFETY: nothing else uses them while this runs.
                let own = unsafe { Slice::new(own.as_mut_ptr().cast(), own.len(), T::DTYPE) };
                exchanged = write_on_host(part, layout, own).and_then(|()| {
                    let mut collectives = self.whole.gathering().into_iter();
                    collectives.try_for_each(|(collective, some)| {
                        let communicator = &self.whole.communicator;
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
        let (gpu, elements) = (&part.device, self.whole.shape.elem_count());
        let part = on_gpu::view(part, layout)?;
        let storage = on_gpu::alloc_uninit(gpu, self.dtype, elements)?;
        if let Some(lent) = &self.lent {
            cuda::copy(gpu, on_gpu::elements(lent)?, on_gpu::whole(&storage)?)?;
            return Ok((storage, self.whole.shape.clone()));
        }
        let (whole, own) = (on_gpu::whole(&storage)?, self.whole.own());
        let own = whole.part(own.start, own.len());
        cuda::cast::cast(gpu, part, own)?;
        if let Some(queue) = self.whole.communicator.gpu_queue() {
            self.whole.communicator.check()?;
            let collectives = self.whole.gathering().into_iter();
            let collectives = collectives.map(|(collective, some)| {
                let some = whole.part(some.start, some.len());
                (collective, (some.pointer, some.len, some.dtype))
            });
            let collectives: Vec<_> = collectives.collect();
            let over = queue.start_all(&collectives, &gpu.cuda_stream())?;
            gpu.cuda_stream().wait(&over).w()?;
        }
        Ok((storage, self.whole.shape.clone()))
    }

    fn bwd(&self, inputs: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.whole.scattered(inputs[0], dy)
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
        loss_scale: 1.0,
    };
    converted().run(&Slices::new(step, [("x", x)].into(), &[("y", y)].into()))
}

/// A part, to the whole without its elements.
struct Empty(Whole);

impl Spec for Empty {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (self.0.shape.clone(), inputs[0].dtype)
    }

    fn forward_steps(&self, _: &[Operand<'_>], _: Target) -> Vec<MemoryStep> {
        Vec::new()
    }

    fn backward_steps(&self, inputs: &[Operand<'_>], _: &[bool], _: Target) -> Vec<MemoryStep> {
        self.0.scattering_steps(inputs[0].dtype)
    }
}

impl Op for Empty {
    fn name(&self) -> &'static str {
        "divided_weight"
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let none = graph::empty(inputs[0].0.dtype())?;
        Ok((none, self.0.shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        let part = inputs[0].0;
        let none = on_gpu::alloc_uninit(&part.device, part.dtype(), 0)?;
        Ok((none, self.0.shape.clone()))
    }

    fn bwd(&self, inputs: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.0.scattered(inputs[0], dy)
    }
}
