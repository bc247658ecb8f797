//! Gradients of whole weights on their way: each rank gets its part of their mean while backward goes on.

use super::gather::write;
use super::{Collective, Communicator, Pending};
use crate::Result;
use crate::backward::{Unfinished, finish_later};
use candle_core::{DType, Tensor};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// So many are exchanged at once: about the weights of a block.
pub(crate) const EXCHANGED_AT_ONCE: usize = 8;

/// The exchanges of a rank's gradients, in the order in which they were begun.
#[derive(Debug)]
pub(super) struct Scattering {
    /// What gradients are rounded to for it.
    exchanged: Option<DType>,
    begun: Mutex<VecDeque<Begun>>,
}

#[derive(Debug)]
struct Begun {
    pending: Vec<Pending>,
    /// The own part of what is exchanged, (elements).
    own: Tensor,
    /// Where it goes, a part of a weight in shape and dtype.
    gradient: Tensor,
}

impl Scattering {
    pub fn new(exchanged: Option<DType>) -> Self {
        let begun = Mutex::default();
        Self { exchanged, begun }
    }

    /// What the gradient of a weight is exchanged in.
    pub fn dtype(&self, weight: DType) -> DType {
        self.exchanged.unwrap_or(weight)
    }

    /// The `own` elements of the mean over all ranks of `dy`, all of a weight's gradient: the gradient of the `part`.
    /// In [`backward`](crate::backward()) its elements come later.
    pub fn start(
        self: &Arc<Self>,
        communicator: &Communicator,
        own: Range<usize>,
        part: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        self.finish_all_but(EXCHANGED_AT_ONCE - 1)?;
        // A copy: it is exchanged in place.
        let dtype = self.dtype(dy.dtype());
        let whole = match dtype == dy.dtype() {
            true => dy.force_contiguous()?,
            false => dy.to_dtype(dtype)?.contiguous()?,
        };
        let whole = whole.flatten_all()?;
        // SAFETY: all elements are written when the exchange is finished, and nothing reads them before.
        let gradient = unsafe { Tensor::empty(part.shape(), part.dtype(), part.device())? };
        let world_size = communicator.world_size();
        let collectives = Collective::scattering(world_size, whole.elem_count()).into_iter();
        let collectives = collectives.map(|(collective, some)| {
            let some = whole.narrow(0, some.start, some.len())?;
            Ok((collective, some))
        });
        let collectives: Vec<_> = collectives.collect::<Result<_>>()?;
        let begun = Begun {
            pending: communicator.start_all(&collectives)?,
            own: whole.narrow(0, own.start, own.len())?,
            gradient: gradient.clone(),
        };
        self.queue(|queue| queue.push_back(begun));
        if !finish_later(self) {
            self.finish()?;
        }
        Ok(gradient)
    }

    /// Finishes the first that were begun, until so many are left.
    fn finish_all_but(&self, left: usize) -> Result<()> {
        let next = |queue: &mut VecDeque<Begun>| match queue.len() > left {
            true => queue.pop_front(),
            false => None,
        };
        while let Some(begun) = self.queue(next) {
            begun.finish()?;
        }
        Ok(())
    }

    fn queue<R>(&self, f: impl FnOnce(&mut VecDeque<Begun>) -> R) -> R {
        f(&mut self.begun.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Unfinished for Scattering {
    fn finish(&self) -> Result<()> {
        self.finish_all_but(0)
    }
}

impl Begun {
    fn finish(self) -> Result<()> {
        for pending in self.pending {
            pending.wait()?;
        }
        Ok(write(&self.own, &self.gradient)?)
    }
}
