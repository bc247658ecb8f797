//! A rank's part of a weight, which its layer has a hollow tensor in place of.

use super::{Collective, Communicator, Shard};
use crate::Result;
use crate::inplace::with_mut_memory;
use crate::ops::cpu;
use crate::ops::lowering::{Slice, Slices, StepState, converted};
use crate::ops::{Divided, forget, stands_for};
#[cfg(feature = "cuda")]
use crate::{kernels::cuda, ops::cuda as on_gpu};
#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{DType, Storage, Tensor, Var};
use std::sync::{Arc, Weak};

/// A rank's part of a weight.
#[derive(Debug)]
pub(super) struct Part {
    /// (elements, 1, ...), of as many dimensions as the weight: what decays matrices alone knows it as one.
    pub var: Var,
    /// Of the weight's shape.
    pub hollow: Tensor,
    pub communicator: Communicator,
}

impl Part {
    /// Has ops take the hollow weight for it.
    pub fn shared(self) -> Arc<Self> {
        let part = Arc::new(self);
        let weight: Weak<Self> = Arc::downgrade(&part);
        stands_for(&part.hollow, weight);
        part
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        forget(&self.hollow);
    }
}

impl Divided for Part {
    fn gathered(&self, dtype: DType) -> Result<Tensor> {
        let (shape, ranks) = (self.hollow.shape(), &self.communicator);
        let (rank, world_size) = (ranks.rank(), ranks.world_size());
        let whole = crate::ops::zeros(shape, dtype, ranks.device())?;
        let flat = whole.flatten_all()?;
        let own = Shard { rank, world_size }.part(shape.elem_count());
        write(&self.var, &flat.narrow(0, own.start, own.len())?)?;
        let collectives = Collective::gathering(world_size, shape.elem_count());
        let collectives = collectives.into_iter().map(|(collective, some)| {
            let some = flat.narrow(0, some.start, some.len())?;
            Ok((collective, some))
        });
        let collectives = collectives.collect::<Result<Vec<_>>>()?;
        for pending in ranks.start_all(&collectives)? {
            pending.wait()?;
        }
        Ok(whole)
    }
}

/// Writes x where y lies, in y's dtype: contiguous tensors of one size, on storages of their own.
fn write(x: &Tensor, y: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = y.device() {
        return Ok(cuda::cast::cast(
            gpu,
            on_gpu::elements(x)?,
            on_gpu::elements(y)?,
        )?);
    }
    let (x, layout) = x.storage_and_layout();
    let Storage::Cpu(x) = &*x else {
        let elsewhere = "dist::FullyShard: a part on another device".into();
        return Err(candle_core::Error::Msg(elsewhere).into());
    };
    let x = cpu::slice(x, layout)?;
    let step = StepState {
        micro_batch: 0,
        loss_gradient: 1.0,
    };
    let mut written = Ok(());
    with_mut_memory(y, |start, elements| {
        // SAFETY: the elements are lent for as long as this runs, and nothing else uses them.
        let y = unsafe { Slice::new(start, elements, y.dtype()) };
        written = converted().run(&Slices::new(step, [("x", x)].into(), &[("y", y)].into()));
    })?;
    Ok(written?)
}
