//! A collective that has begun.

use super::host_queue::HostQueue;
use crate::Result;
use candle_core::Tensor;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::WrapErr;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use std::sync::mpsc::Receiver;

/// A collective that has begun on a tensor, whose elements are its own until [`wait`](Self::wait).
///
/// Dropped, it waits as well, and an error is lost: wait for it.
#[derive(Debug)]
#[must_use = "the tensor's elements are not defined before wait"]
pub struct Pending {
    tensor: Tensor,
    state: State,
}

#[derive(Debug)]
enum State {
    Done,
    OnHost(Receiver<Result<()>>),
    /// Comes when it is done.
    #[cfg(feature = "cuda")]
    OnGpu(CudaEvent),
}

impl Pending {
    pub(super) fn done(tensor: &Tensor) -> Self {
        Self::new(tensor, State::Done)
    }

    pub(super) fn on_host(tensor: &Tensor, done: Receiver<Result<()>>) -> Self {
        Self::new(tensor, State::OnHost(done))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(tensor: &Tensor, done: CudaEvent) -> Self {
        Self::new(tensor, State::OnGpu(done))
    }

    fn new(tensor: &Tensor, state: State) -> Self {
        let tensor = tensor.clone();
        Self { tensor, state }
    }

    /// Waits: on a GPU its stream does, not the host. Gives back the tensor.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank).
    pub fn wait(mut self) -> Result<Tensor> {
        self.end()?;
        Ok(self.tensor.clone())
    }

    fn end(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Done => Ok(()),
            State::OnHost(done) => HostQueue::wait(done),
            #[cfg(feature = "cuda")]
            State::OnGpu(event) => {
                let gpu = self.tensor.device().as_cuda_device()?;
                Ok(gpu.cuda_stream().wait(&event).w()?)
            }
        }
    }
}

impl Drop for Pending {
    /// The tensor's memory must not be used again before.
    fn drop(&mut self) {
        let _lost = self.end();
    }
}
