//! Collectives on GPU memory: NCCL's, on a separate stream.

use super::Collective;
use super::nccl::NcclBackend;
use crate::Result;
use crate::hardware;
use crate::ops::cuda;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// Address of the elements, their number and dtype.
pub(crate) type Elements = (u64, usize, DType);

/// An NCCL communicator, and the stream that it uses.
pub(crate) struct GpuQueue {
    nccl: Arc<NcclBackend>,
    stream: Arc<CudaStream>,
}

impl GpuQueue {
    pub(super) fn new(nccl: Arc<NcclBackend>, gpu: &CudaDevice) -> Result<Self> {
        let _lock = hardware::cuda::lock_captures();
        let stream = gpu.cuda_stream().context().new_stream().w()?;
        Ok(Self { nccl, stream })
    }

    /// Runs a collective after earlier work in the tensor's stream, which then waits for it.
    pub(super) fn run_on(&self, collective: Collective, tensor: &Tensor) -> Result<()> {
        let view = cuda::elements(tensor)?;
        let elements = (view.pointer, view.len, view.dtype);
        let stream = cuda::gpu(tensor)?.cuda_stream();
        let done = self.start_all(&[(collective, elements)], &stream)?;
        Ok(stream.wait(&done).w()?)
    }

    /// Starts collectives on elements of a dtype as one group, after earlier work in the stream `after`, so that ranks
    /// may send and receive at the same time. The event occurs when all are done. Everything here can be captured in a
    /// CUDA graph.
    pub(crate) fn start_all(
        &self,
        collectives: &[(Collective, Elements)],
        after: &CudaStream,
    ) -> Result<CudaEvent> {
        self.stream.join(after).w()?;
        let stream = self.stream.cu_stream().cast();
        let mut all = collectives.iter();
        let mut run_all = || {
            all.try_for_each(|(collective, (pointer, elements, dtype))| {
                let (nccl, elements) = (&self.nccl, *elements);
                nccl.run(*collective, *pointer, elements, *dtype, stream)
            })
        };
        match collectives.len() {
            1 => run_all()?,
            _ => self.nccl.group(run_all)?,
        }
        Ok(self.stream.record_event(None).w()?)
    }

    /// Checks the collectives that were started, as far as NCCL knows.
    pub(super) fn check(&self) -> Result<()> {
        self.nccl.async_error()
    }
}
