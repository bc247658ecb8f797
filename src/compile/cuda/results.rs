//! What a run has left in the arena: copied to the host, or to a tensor of the model's device.

use super::super::plan::{BufferRange, Plan};
use super::Executor;
use super::device_pointers::start_of;
use crate::Result;
use crate::ops::cuda as ops;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result::{memcpy_dtod_async, memcpy_dtoh_async};
use candle_core::{Shape, Tensor, WithDType};

impl Executor {
    /// What a run has left in an operand that the plan keeps; waits for the GPU.
    pub fn read<T: WithDType>(&mut self, plan: &Plan, operand: &BufferRange) -> Result<Vec<T>> {
        let buffer = plan.buffer_of(operand);
        assert_eq!(buffer.dtype, T::DTYPE, "{}", buffer.name);
        let mut values = vec![T::zero(); operand.elements.len()];
        let from = self.address_of(plan, operand);
        let stream = self.gpu.cuda_stream();
        stream.context().bind_to_thread().w()?;
        // SAFETY: the operand lies within its buffer, and that in the arena; the host waits before it reads.
        unsafe { memcpy_dtoh_async(&mut values, from, stream.cu_stream()) }.w()?;
        stream.synchronize().w()?;
        Ok(values)
    }

    /// The same as a tensor of the model's device, copied in the order of its stream, which has waited for the run.
    pub fn copy(&self, plan: &Plan, operand: &BufferRange, shape: &Shape) -> Result<Tensor> {
        let dtype = plan.buffer_of(operand).dtype;
        let elements = operand.elements.len();
        let room = ops::alloc_uninit(&self.model_gpu, dtype, elements)?;
        let to = ops::whole(&room)?.pointer;
        let (from, bytes) = (
            self.address_of(plan, operand),
            elements * dtype.size_in_bytes(),
        );
        // SAFETY: the operand lies within its buffer, and that in the arena; the room has as many bytes.
        unsafe { memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }.w()?;
        Ok(ops::tensor(room, shape))
    }

    /// Where an operand of the arena begins.
    fn address_of(&self, plan: &Plan, operand: &BufferRange) -> u64 {
        let buffer = plan.buffer_of(operand);
        let Some(range) = buffer.arena_range() else {
            panic!("{} is not in the arena", buffer.name);
        };
        let first = operand.elements.start * buffer.dtype.size_in_bytes();
        let arena = self.arena.as_ref().map_or(0, start_of);
        arena + range.start + first as u64
    }
}
