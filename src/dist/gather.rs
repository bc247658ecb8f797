//! All of a weight that every rank has a part of, as an op of eager steps.

use super::{Collective, Communicator, Shard};
use crate::graph::{self, MemoryStep, Room, Target};
use crate::ops::WeightMark;
use crate::ops::cpu::{self, for_stored};
use crate::ops::record::{Made, Op, Spec, Storages, apply};
use crate::probe::Operand;
#[cfg(feature = "cuda")]
use crate::{kernels::cuda::copy, ops::cuda};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Shape, Tensor, TensorId, Var};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

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

/// Parts that are there, by their hollow weights.
static PARTS: LazyLock<Mutex<HashMap<TensorId, Weak<Part>>>> = LazyLock::new(Mutex::default);

fn parts() -> MutexGuard<'static, HashMap<TensorId, Weak<Part>>> {
    PARTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Part {
    /// Has [`gathered`] find it.
    pub fn shared(self) -> Arc<Self> {
        let part = Arc::new(self);
        parts().insert(part.hollow.id(), Arc::downgrade(&part));
        part
    }

    /// All of the weight, on every rank.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank).
    pub fn gathered(&self) -> crate::Result<Tensor> {
        let mark = Arc::new(WeightMark::default());
        let op = Gather {
            communicator: self.communicator.clone(),
            shape: self.hollow.shape().clone(),
            dtype: self.dtype,
            _mark: Arc::clone(&mark),
        };
        let whole = apply(&[self.var.as_tensor()], op)?;
        mark.set(&whole);
        Ok(whole)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        parts().remove(&self.hollow.id());
    }
}

/// All of a weight whose [parts](super::FullyShard) the ranks of a job have: what a layer of your own passes on to ops.
/// Any other tensor itself, and in a [trace](crate::graph::trace()) of a plan that of the weight too.
///
/// Every rank has to call it, and gets the same. The gradient of what comes is averaged over the ranks, and a rank's
/// part of it is that of its part of the weight.
///
/// # Errors
/// [`Error::Rank`](crate::Error::Rank).
pub fn gathered(weight: &Tensor) -> crate::Result<Tensor> {
    if !graph::is_hollow(weight) {
        return Ok(weight.clone());
    }
    let part = parts().get(&weight.id()).and_then(Weak::upgrade);
    match part {
        // A plan gathers by itself. On paper, where parts are hollow too, the trace is of an eager step.
        Some(part) if !graph::is_tracing() || graph::is_hollow(&part.var) => part.gathered(),
        _ => Ok(weight.clone()), // which ops outside of traces refuse
    }
}

/// A gather, as nodes name it.
pub(crate) const ALL_GATHER: &str = "all_gather";

/// A part, to all of it.
struct Gather {
    communicator: Communicator,
    shape: Shape,
    dtype: Option<DType>,
    /// As long as a gradient may come: autocast then has it in f32, as a variable's.
    _mark: Arc<WeightMark>,
}

impl Gather {
    fn own(&self) -> std::ops::Range<usize> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        Shard { rank, world_size }.part(self.shape.elem_count())
    }
}

impl Spec for Gather {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (self.shape.clone(), inputs[0].dtype)
    }

    /// As `bwd` below: a copy of the gradient to exchange, and the own part of it, in another dtype than the weight's
    /// before it is the part's gradient.
    fn backward_steps(&self, inputs: &[Operand<'_>], _: &[bool], _: Target) -> Vec<MemoryStep> {
        let part = inputs[0].dtype;
        let dtype = self.dtype.unwrap_or(part);
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
        [exchanged]
            .into_iter()
            .chain(own)
            .chain([MemoryStep::Gradient(0)])
            .collect()
    }
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        ALL_GATHER
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let (part, layout) = inputs[0];
        let (elements, world_size) = (self.shape.elem_count(), self.communicator.world_size());
        for_stored!(part.dtype(), T => {
            let part = cpu::view::<T>(part, layout)?;
            let mut exchanged = Ok(());
            let whole = cpu::output::<T>(self.shape.clone(), |whole| {
                whole[self.own()].copy_from_slice(part);
                let collectives = Collective::gathering(world_size, elements);
                exchanged = collectives.into_iter().try_for_each(|(collective, some)| {
                    self.communicator.run_on_host(collective, &mut whole[some])
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
        let (gpu, elements) = (&part.device, self.shape.elem_count());
        let part = cuda::view(part, layout)?;
        let storage = cuda::alloc_uninit(gpu, part.dtype, elements)?;
        let (whole, own) = (cuda::whole(&storage)?, self.own());
        copy(gpu, part, whole.part(own.start, own.len()))?;
        if let Some(queue) = self.communicator.gpu_queue() {
            self.communicator.check()?;
            let collectives = Collective::gathering(self.communicator.world_size(), elements);
            let collectives = collectives.into_iter().map(|(collective, some)| {
                let some = whole.part(some.start, some.len());
                (collective, (some.pointer, some.len, some.dtype))
            });
            let collectives: Vec<_> = collectives.collect();
            let over = queue.start_all(&collectives, &gpu.cuda_stream())?;
            gpu.cuda_stream().wait(&over).w()?;
        }
        Ok((storage, self.shape.clone()))
    }

    fn bwd(&self, inputs: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let part = inputs[0];
        // A copy: it is exchanged in place.
        let whole = match self.dtype.filter(|dtype| *dtype != dy.dtype()) {
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
        Ok(vec![Some(
            own.to_dtype(part.dtype())?.reshape(part.shape())?,
        )])
    }
}
