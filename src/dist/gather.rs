//! All of a weight that every rank has a part of, as ops of eager steps.

use super::{Collective, Communicator, Shard};
use crate::graph::{self, MemoryStep, Room, Target};
use crate::no_grad;
use crate::ops::cpu::{self, for_stored};
use crate::ops::lowering::{Slice, Slices, StepState, converted};
use crate::ops::record::{Made, Op, Spec, Storages, apply};
use crate::ops::{Divided, divided, forget, stands_for};
use crate::probe::Operand;
#[cfg(feature = "cuda")]
use crate::{kernels::cuda, ops::cuda as on_gpu};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, Var, WithDType};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// A rank's part of a weight.
#[derive(Debug)]
pub(super) struct Part {
    /// (elements, 1, ...), of as many dimensions as the weight: what decays matrices alone knows it as one.
    pub var: Var,
    /// Of the weight's shape.
    pub hollow: Tensor,
    pub communicator: Communicator,
    /// What gradients are rounded to for the exchange.
    pub dtype: Option<DType>,
}

impl Part {
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
            exchanged: self.dtype,
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
        let gather = Gather {
            whole: self.whole(),
            dtype,
        };
        Ok(no_grad(|| apply(&[&self.var.detach()], gather))?)
    }

    fn node(&self) -> crate::Result<Tensor> {
        let gather = Gather {
            whole: self.whole(),
            dtype: self.var.dtype(),
        };
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
    /// What gradients are rounded to for the exchange.
    exchanged: Option<DType>,
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
        // A copy: it is exchanged in place.
        let whole = match self.exchanged.filter(|dtype| *dtype != dy.dtype()) {
            Some(dtype) => dy.to_dtype(dtype)?.contiguous()?,
            None => dy.force_contiguous()?,
        };
        let whole = whole.flatten_all()?;
        let (elements, world_size) = (whole.elem_count(), self.communicator.world_size());
        for (collective, some) in Collective::scattering(world_size, elements) {
            let some = whole.narrow(0, some.start, some.len())?;
            self.communicator.start(collective, &some)?.wait()?;
        }
        let own = self.own();
        let own = whole.narrow(0, own.start, own.len())?.force_contiguous()?; // frees the rest
        let own = own.to_dtype(part.dtype())?.reshape(part.shape())?;
        Ok(vec![Some(own)])
    }

    /// What [`scattered`](Self::scattered) does to memory: a copy of the gradient to exchange, and the own part of it,
    /// in another dtype than the weight's before it is the part's gradient.
    fn scattering_steps(&self, part: DType) -> Vec<MemoryStep> {
        let dtype = self.exchanged.unwrap_or(part);
        let room = |what, formula, elements: usize| {
            MemoryStep::Take(Room {
                what,
                formula,
                elements: elements as f64,
                element_bytes: dtype.size_in_bytes(),
            })
        };
        let exchanged = room("exchanged gradient", "of a weight", self.shape.elem_count());
        let own = room("own part of it", "of a part", self.own().len());
        let own = (dtype != part).then_some(own);
        let taken = [exchanged].into_iter().chain(own);
        taken.chain([MemoryStep::Gradient(0)]).collect()
    }
}

/// A part, to all of the weight in this dtype.
struct Gather {
    whole: Whole,
    dtype: DType,
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
        for_stored!(self.dtype, T => {
            let mut exchanged = Ok(());
            let whole = cpu::output::<T>(self.whole.shape.clone(), |whole| {
                exchanged = place(part, layout, &mut whole[self.whole.own()]).and_then(|()| {
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
        let (whole, own) = (on_gpu::whole(&storage)?, self.whole.own());
        let own = whole.part(own.start, own.len());
        match part.dtype == self.dtype {
            true => cuda::copy(gpu, part, own)?,
            false => cuda::cast::cast(gpu, part, own)?,
        }
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

/// Writes a part where it belongs in the whole, in its dtype.
fn place<T: WithDType>(part: &CpuStorage, layout: &Layout, own: &mut [T]) -> Result<()> {
    let x = cpu::slice(part, layout)?;
    // SAFETY: the elements are lent for as long as this runs, and nothing else uses them.
    let y = unsafe { Slice::new(own.as_mut_ptr().cast(), own.len(), T::DTYPE) };
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
