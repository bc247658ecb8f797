//! Exchanges between ranks, on the communicator's stream, concurrent with the plan's stream.

use super::super::buffer::BufferId;
use crate::Result;
use crate::distributed::{Collective, Communicator};
use crate::kernels::cuda::View;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::sync::Arc;

/// The communicator, and the exchanges that the plan's stream has not waited for yet.
#[derive(Default)]
pub(super) struct Exchanges {
    communicator: Option<Communicator>,
    /// The buffers being exchanged, in the order in which their exchanges end.
    open: Vec<(BufferId, Arc<CudaEvent>)>,
}

/// One collective of a group.
pub(super) struct Exchange<'a> {
    pub collective: Collective,
    pub buffer: BufferId,
    pub x: View<'a>,
}

impl Exchanges {
    pub(super) fn join_job(&mut self, communicator: Option<&Communicator>) {
        self.communicator = communicator.cloned();
    }

    pub(super) fn world_size(&self) -> usize {
        self.communicator
            .as_ref()
            .map_or(1, Communicator::world_size)
    }

    /// Starts a group of exchanges after the work so far on the plan's stream, which continues meanwhile.
    pub(super) fn start(&mut self, gpu: &CudaDevice, exchanges: &[Exchange<'_>]) -> Result<()> {
        let queue = self.communicator.as_ref().and_then(Communicator::gpu_queue);
        let Some(queue) = queue else {
            return Ok(()); // a single rank has nothing to exchange
        };
        let collectives = exchanges.iter();
        let collectives = collectives
            .map(|Exchange { collective, x, .. }| (*collective, (x.pointer, x.len, x.dtype)));
        let collectives: Vec<_> = collectives.collect();
        let over = Arc::new(queue.start_all(&collectives, &gpu.cuda_stream())?);
        let opened = exchanges.iter();
        self.open
            .extend(opened.map(|exchange| (exchange.buffer, Arc::clone(&over))));
        Ok(())
    }

    /// Returns whether the plan's stream has not yet waited for a buffer's exchange.
    pub(super) fn is_open(&self, buffer: BufferId) -> bool {
        self.open.iter().any(|(open, _)| *open == buffer)
    }

    /// Makes the plan's stream wait for the exchange of a buffer, if there is one, and for all that started before it.
    pub(super) fn wait_for(&mut self, gpu: &CudaDevice, buffer: BufferId) -> Result<()> {
        match self.open.iter().rposition(|(open, _)| *open == buffer) {
            Some(last) => self.wait_until(gpu, last),
            None => Ok(()),
        }
    }

    pub(super) fn wait_for_all(&mut self, gpu: &CudaDevice) -> Result<()> {
        match self.open.len().checked_sub(1) {
            Some(last) => self.wait_until(gpu, last),
            None => Ok(()),
        }
    }

    fn wait_until(&mut self, gpu: &CudaDevice, last: usize) -> Result<()> {
        gpu.cuda_stream().wait(&self.open[last].1).w()?;
        self.open.drain(..=last);
        Ok(())
    }
}
