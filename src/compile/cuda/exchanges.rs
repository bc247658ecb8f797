//! What ranks exchange in a run: on the communicator's stream, beside the plan's own.

use super::super::buffer::BufferId;
use crate::Result;
use crate::dist::{Collective, Communicator, Reduce};
use crate::kernels::cuda::View;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

/// The ranks of a job, and what the plan's stream has still to wait for before it reads a buffer.
#[derive(Default)]
pub(super) struct Exchanges {
    communicator: Option<Communicator>,
    open: Vec<(BufferId, CudaEvent)>,
}

impl Exchanges {
    /// Whose collectives the runs from now on are.
    pub(super) fn join_job(&mut self, communicator: Option<&Communicator>) {
        self.communicator = communicator.cloned();
    }

    /// Has a buffer's elements averaged over the ranks, once the plan's stream has made them; it goes on meanwhile.
    pub(super) fn start(&mut self, gpu: &CudaDevice, buffer: BufferId, x: View) -> Result<()> {
        let queue = self.communicator.as_ref().and_then(Communicator::gpu_queue);
        let Some(queue) = queue else {
            return Ok(()); // a rank alone has its mean
        };
        let mean = Collective::AllReduce(Reduce::Mean);
        let over = queue.start(mean, (x.pointer, x.len, x.dtype), &gpu.cuda_stream())?;
        self.open.push((buffer, over));
        Ok(())
    }

    /// Whether a buffer has still to be waited for.
    pub(super) fn is_open(&self, buffer: BufferId) -> bool {
        self.open.iter().any(|(open, _)| *open == buffer)
    }

    /// Has the plan's stream wait for a buffer, if it is exchanged.
    pub(super) fn wait_for(&mut self, gpu: &CudaDevice, buffer: BufferId) -> Result<()> {
        let place = self.open.iter().position(|(open, _)| *open == buffer);
        match place.map(|place| self.open.swap_remove(place)) {
            Some((_, over)) => Ok(gpu.cuda_stream().wait(&over).w()?),
            None => Ok(()),
        }
    }

    /// Has the plan's stream wait for all that was begun.
    pub(super) fn wait_for_all(&mut self, gpu: &CudaDevice) -> Result<()> {
        let stream = gpu.cuda_stream();
        self.open
            .drain(..)
            .try_for_each(|(_, over)| Ok(stream.wait(&over).w()?))
    }
}
