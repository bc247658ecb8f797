//! What ranks exchange in a run: on the communicator's stream, beside the plan's own.

use super::super::buffer::BufferId;
use crate::Result;
use crate::distributed::{Collective, Communicator};
use crate::kernels::cuda::View;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::sync::Arc;

/// The ranks of a job, and what the plan's stream has still to wait for before it touches a buffer.
#[derive(Default)]
pub(super) struct Exchanges {
    communicator: Option<Communicator>,
    /// In the order in which they come to an end.
    open: Vec<(BufferId, Arc<CudaEvent>)>,
}

/// What is exchanged at once with others.
pub(super) struct Exchange<'a> {
    pub collective: Collective,
    pub buffer: BufferId,
    pub x: View<'a>,
}

impl Exchanges {
    /// Whose collectives the runs from now on are.
    pub(super) fn join_job(&mut self, communicator: Option<&Communicator>) {
        self.communicator = communicator.cloned();
    }

    /// How many ranks there are.
    pub(super) fn world_size(&self) -> usize {
        self.communicator
            .as_ref()
            .map_or(1, Communicator::world_size)
    }

    /// Has buffers' elements exchanged, once the plan's stream has made them; it goes on meanwhile.
    pub(super) fn start(&mut self, gpu: &CudaDevice, exchanges: &[Exchange<'_>]) -> Result<()> {
        let queue = self.communicator.as_ref().and_then(Communicator::gpu_queue);
        let Some(queue) = queue else {
            return Ok(()); // a rank alone has everything
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

    /// Whether a buffer has still to be waited for.
    pub(super) fn is_open(&self, buffer: BufferId) -> bool {
        self.open.iter().any(|(open, _)| *open == buffer)
    }

    /// Has the plan's stream wait for a buffer, if it is exchanged: and so for all that was begun before.
    pub(super) fn wait_for(&mut self, gpu: &CudaDevice, buffer: BufferId) -> Result<()> {
        match self.open.iter().rposition(|(open, _)| *open == buffer) {
            Some(last) => self.wait_until(gpu, last),
            None => Ok(()),
        }
    }

    /// Has the plan's stream wait for all that was begun.
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
