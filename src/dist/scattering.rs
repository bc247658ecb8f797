//! Gradients of whole weights on their way: each rank gets its part of their mean while backward goes on.

use super::gather::write;
use super::{Collective, Communicator, Pending};
use crate::Result;
use crate::backward::{Unfinished, finish_later};
use candle_core::{DType, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// So many are exchanged as one: the fewer calls of a host that is the slower one, the better.
pub(crate) const EXCHANGED_TOGETHER: usize = 4;

/// The exchanges of a rank's gradients.
#[derive(Debug)]
pub(super) struct Scattering {
    communicator: Communicator,
    /// What gradients are rounded to for it.
    exchanged: Option<DType>,
    state: Mutex<State>,
}

/// In the order in which gradients came, the same on every rank.
#[derive(Debug, Default)]
struct State {
    /// Under way.
    begun: Group,
    /// To be begun together: fewer than [`EXCHANGED_TOGETHER`].
    waiting: Vec<Exchange>,
}

#[derive(Debug, Default)]
struct Group {
    pending: Vec<Pending>,
    exchanges: Vec<Exchange>,
}

#[derive(Debug)]
struct Exchange {
    collectives: Vec<(Collective, Tensor)>,
    /// The own part of what is exchanged, (elements).
    own: Tensor,
    /// Where it goes, a part of a weight in shape and dtype.
    gradient: Tensor,
}

impl Scattering {
    pub fn new(communicator: &Communicator, exchanged: Option<DType>) -> Self {
        Self {
            communicator: communicator.clone(),
            exchanged,
            state: Mutex::default(),
        }
    }

    /// What the gradient of a weight is exchanged in.
    pub fn dtype(&self, weight: DType) -> DType {
        self.exchanged.unwrap_or(weight)
    }

    /// The `own` elements of the mean over all ranks of `dy`, all of a weight's gradient: the gradient of the `part`.
    /// In [`backward`](crate::backward()) its elements come later.
    pub fn start(
        self: &Arc<Self>,
        own: Range<usize>,
        part: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        // SAFETY: all elements are written when the exchange is finished, and nothing reads them before.
        let gradient = unsafe { Tensor::empty(part.shape(), part.dtype(), part.device())? };
        // A copy: it is exchanged in place.
        let dtype = self.dtype(dy.dtype());
        let whole = match dtype == dy.dtype() {
            true => dy.force_contiguous()?,
            false => dy.to_dtype(dtype)?.contiguous()?,
        };
        let whole = whole.flatten_all()?;
        let world_size = self.communicator.world_size();
        let collectives = Collective::scattering(world_size, whole.elem_count()).into_iter();
        let collectives = collectives.map(|(collective, some)| {
            let some = whole.narrow(0, some.start, some.len())?;
            Ok((collective, some))
        });
        let exchange = Exchange {
            collectives: collectives.collect::<Result<_>>()?,
            own: whole.narrow(0, own.start, own.len())?,
            gradient: gradient.clone(),
        };
        let mut state = self.lock();
        state.waiting.push(exchange);
        if state.waiting.len() == EXCHANGED_TOGETHER {
            state.begin(&self.communicator)?;
        }
        drop(state);
        if !finish_later(self) {
            self.finish()?;
        }
        Ok(gradient)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unfinished for Scattering {
    fn finish(&self) -> Result<()> {
        let mut state = self.lock();
        if !state.waiting.is_empty() {
            state.begin(&self.communicator)?;
        }
        std::mem::take(&mut state.begun).finish()
    }
}

impl State {
    /// Begins what waits, and finishes what was begun before.
    fn begin(&mut self, communicator: &Communicator) -> Result<()> {
        let mut exchanges = std::mem::take(&mut self.waiting);
        let collectives = exchanges.iter_mut();
        let collectives =
            collectives.flat_map(|exchange| std::mem::take(&mut exchange.collectives));
        let collectives: Vec<_> = collectives.collect();
        let group = Group {
            pending: communicator.start_all(&collectives)?,
            exchanges,
        };
        std::mem::replace(&mut self.begun, group).finish()
    }
}

impl Group {
    fn finish(self) -> Result<()> {
        for pending in self.pending {
            pending.wait()?;
        }
        for exchange in self.exchanges {
            write(&exchange.own, &exchange.gradient)?;
        }
        Ok(())
    }
}
