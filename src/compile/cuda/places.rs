//! Where the buffers of a plan are on the card.

use super::super::buffer::{Buffer, Home};
use super::super::executor::Tensors;
use super::super::plan::{Operand, Plan};
use super::Executor;
use crate::Result;
use crate::kernels::cuda::View;
use crate::ops::cuda::elements;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};

/// Addresses on the card.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Places {
    arena: u64,
    tables: Vec<u64>,
    output: u64,
    tokens: u64,
    targets: u64,
    parameters: Vec<u64>,
    /// Empty for as long as no run has had an update.
    exp_avg: Vec<u64>,
    exp_avg_sq: Vec<u64>,
    /// Of the run that is under way. The executor sees to it that what was recorded with others is not run.
    pub arguments: Vec<u64>,
}

/// Where a slice begins.
pub(super) fn start_of<T>(slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

impl Places {
    pub(super) fn new(executor: &Executor, tensors: &Tensors<'_>) -> Result<Self> {
        let parameters = tensors.parameters.iter();
        let parameters = parameters.map(|(_, var)| Ok(elements(var)?.pointer));
        let first = tensors.updates.iter();
        let first = first.map(|planned| Ok(elements(&planned.exp_avg)?.pointer));
        let second = tensors.updates.iter();
        let second = second.map(|planned| Ok(elements(&planned.exp_avg_sq)?.pointer));
        Ok(Self {
            arena: start_of(&executor.arena),
            tables: executor.tables.iter().map(start_of).collect(),
            output: executor.output.as_ref().map_or(0, start_of),
            tokens: executor.inputs.tokens(),
            targets: executor.inputs.targets(),
            parameters: parameters.collect::<Result<_>>()?,
            exp_avg: first.collect::<Result<_>>()?,
            exp_avg_sq: second.collect::<Result<_>>()?,
            arguments: Vec::new(),
        })
    }

    /// Whether all that `other` knows is here, arguments apart.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let other = Self {
            arguments: self.arguments.clone(),
            ..other.clone()
        };
        let other = match other.exp_avg.is_empty() {
            false => other,
            true => Self {
                exp_avg: self.exp_avg.clone(),
                exp_avg_sq: self.exp_avg_sq.clone(),
                ..other
            },
        };
        *self == other
    }

    fn start(&self, buffer: &Buffer, micro_batch: usize) -> u64 {
        let ids = |start: u64| start + 4 * (micro_batch * buffer.elements()) as u64;
        match buffer.home {
            Home::Arena { offset_bytes } => self.arena + offset_bytes,
            Home::Parameter(number) => self.parameters[number],
            Home::ExpAvg(number) => self.exp_avg[number],
            Home::ExpAvgSq(number) => self.exp_avg_sq[number],
            Home::Tokens => ids(self.tokens),
            Home::Targets => ids(self.targets),
            Home::Table(number) => self.tables[number],
            Home::Output => self.output,
            Home::Argument(number) => self.arguments[number],
        }
    }

    /// The elements of an operand, as kernels see them.
    pub(super) fn view(&self, plan: &Plan, operand: &Operand, micro_batch: usize) -> View<'_> {
        let buffer = plan.buffer(operand.buffer);
        let first = operand.elements.start * buffer.dtype.size_in_bytes();
        let start = self.start(buffer, micro_batch) + first as u64;
        View::new(start, buffer.dtype, operand.elements.len())
    }
}
