//! What launches of calls need.

use super::super::plan::{BufferRange, Call, Plan};
use super::device_pointers::DevicePointers;
use super::exchanges::Exchanges;
use super::inputs::Inputs;
use super::update::Updates;
use crate::kernels::cuda::View;
use crate::kernels::cuda::matmul::Products;
use crate::ops::lowering::Named;
use candle_core::cuda_backend::CudaDevice;

/// What launches need, for the calls of one micro-batch.
pub(super) struct Launcher<'a> {
    pub gpu: &'a CudaDevice,
    pub plan: &'a Plan,
    pub device_pointers: &'a DevicePointers,
    pub inputs: &'a Inputs,
    pub products: &'a mut Products,
    pub updates: Option<&'a Updates>,
    pub exchanges: &'a mut Exchanges,
    pub micro_batch: usize,
    /// Whether gradients that are not finite are looked for where the plan unscales them.
    pub checks: bool,
    /// The calls before this one are launched: one launch does what several calls in a row say of one parameter each.
    pub launched: usize,
    /// The calls from this one on are another launcher's.
    pub end: usize,
}

impl<'a> Launcher<'a> {
    pub(super) fn view(&self, operand: &BufferRange) -> View<'a> {
        self.device_pointers
            .view(self.plan, operand, self.micro_batch)
    }

    /// All that a call reads, and all that it writes.
    pub(super) fn operands(&self, call: &Call) -> [Named<View<'a>>; 2] {
        [&call.reads, &call.writes].map(|operands| operands.map(|operand| self.view(operand)))
    }

    /// What a call reads by these names.
    pub(super) fn reads<const N: usize>(&self, call: &Call, names: [&str; N]) -> [View<'a>; N] {
        names.map(|name| self.view(call.reads.operand(name)))
    }

    /// What a call writes by these names.
    pub(super) fn writes<const N: usize>(&self, call: &Call, names: [&str; N]) -> [View<'a>; N] {
        names.map(|name| self.view(call.writes.operand(name)))
    }
}
