//! The GPU addresses of a plan's buffers.

use super::super::buffer::{Buffer, Location};
use super::super::executor::Tensors;
use super::super::op::BufferRange;
use super::super::plan::Plan;
use super::Executor;
use crate::Result;
use crate::kernels::cuda::View;
use crate::ops::cuda::elements;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};

/// The GPU addresses of buffers, except for the optimizer's state, which only [`Updates`](super::update::Updates)
/// reads.
#[derive(Debug, PartialEq)]
pub(super) struct DevicePointers {
    pub arena: u64,
    tables: Vec<u64>,
    output: u64,
    parameters: Vec<u64>,
    /// The addresses of the current run's arguments. The executor does not replay graphs recorded with other addresses.
    pub arguments: Vec<u64>,
}

pub(super) fn start_of<T>(slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

impl DevicePointers {
    pub(super) fn new(executor: &Executor, tensors: &Tensors<'_>) -> Result<Self> {
        let parameters = tensors.parameters.iter();
        let parameters = parameters.map(|(_, var)| Ok(elements(var)?.pointer));
        Ok(Self {
            arena: executor.arena.as_ref().map_or(0, start_of),
            tables: executor.tables.iter().map(start_of).collect(),
            output: executor.output.as_ref().map_or(0, start_of),
            parameters: parameters.collect::<Result<_>>()?,
            arguments: Vec::new(),
        })
    }

    fn start(&self, buffer: &Buffer, micro_batch: usize) -> u64 {
        match buffer.location {
            Location::Arena { offset_bytes } => self.arena + offset_bytes,
            Location::Parameter(number) => self.parameters[number],
            Location::State { parameter, .. } => {
                panic!("the state of parameter {parameter} is in the table of updates")
            }
            Location::Table(number) => self.tables[number],
            Location::Output => self.output,
            Location::Input(number) => self.arguments[number] + micro_batch as u64 * buffer.bytes(),
            Location::Argument(number) => self.arguments[number],
        }
    }

    pub(super) fn view(&self, plan: &Plan, operand: &BufferRange, micro_batch: usize) -> View<'_> {
        let buffer = plan.buffer_of(operand);
        let first = operand.elements.start * buffer.dtype.size_in_bytes();
        let start = self.start(buffer, micro_batch) + first as u64;
        View::new(start, buffer.dtype, operand.elements.len())
    }
}
