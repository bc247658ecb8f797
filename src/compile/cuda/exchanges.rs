//! What ranks exchange in a run: on the communicator's stream, beside the plan's own.

use crate::Result;
use crate::dist::{Collective, Communicator, Reduce};
use crate::kernels::cuda::View;
use candle_core::cuda_backend::CudaDevice;

/// The ranks of a job, and whether the plan's stream has still to wait for what they exchange.
#[derive(Default)]
pub(super) struct Exchanges {
    communicator: Option<Communicator>,
    is_open: bool,
}

impl Exchanges {
    /// Whose collectives the runs from now on are.
    pub(super) fn join_job(&mut self, communicator: Option<&Communicator>) {
        self.communicator = communicator.cloned();
    }

    /// Has elements averaged over the ranks, once the plan's stream has made them; it goes on meanwhile.
    pub(super) fn start(&mut self, gpu: &CudaDevice, x: View) -> Result<()> {
        let queue = self.communicator.as_ref().and_then(Communicator::gpu_queue);
        let Some(queue) = queue else {
            return Ok(()); // a rank alone has its mean
        };
        let mean = Collective::AllReduce(Reduce::Mean);
        queue.start(mean, (x.pointer, x.len, x.dtype), &gpu.cuda_stream())?;
        self.is_open = true;
        Ok(())
    }

    /// Has the plan's stream wait for all that was begun.
    pub(super) fn join(&mut self, gpu: &CudaDevice) -> Result<()> {
        let queue = self.communicator.as_ref().and_then(Communicator::gpu_queue);
        if let (true, Some(queue)) = (self.is_open, queue) {
            queue.join(&gpu.cuda_stream())?;
        }
        self.is_open = false;
        Ok(())
    }
}
