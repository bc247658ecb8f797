//! Launches single calls on a GPU.

use super::super::op::Op;
use super::super::op::{BufferRange, Call};
use super::super::plan::Plan;
use super::device_pointers::DevicePointers;
use super::exchanges::{Exchange, Exchanges};
use super::run_values::RunValues;
use super::update::Updates;
use crate::attention::planned_flash_sizes;
use crate::kernels::cuda::matmul::CublasLt;
use crate::kernels::cuda::{View, flash_attention, source, update};
use crate::ops::lowering::{Multiplier, Named, Operands};
use crate::optim::orthogonalize_on_gpu;
use crate::{Error, Result};
use candle_core::cuda_backend::CudaDevice;
use std::cell::RefCell;
use std::ops::Range;

/// Launches the calls of one micro-batch.
pub(super) struct Launcher<'a> {
    pub gpu: &'a CudaDevice,
    pub plan: &'a Plan,
    pub device_pointers: &'a DevicePointers,
    pub run_values: &'a RunValues,
    pub cublas_lt: &'a mut CublasLt,
    pub updates: Option<&'a Updates>,
    pub exchanges: &'a mut Exchanges,
    pub micro_batch: usize,
    /// Whether gradients are checked for infinities and NaN when the plan unscales them.
    pub checks: bool,
    /// The calls before this index have been launched. (One launch may run several consecutive updates.)
    pub launched: usize,
    /// The end of this launcher's range of calls.
    pub end: usize,
}

impl<'a> Launcher<'a> {
    pub(super) fn view(&self, operand: &BufferRange) -> View<'a> {
        self.device_pointers
            .view(self.plan, operand, self.micro_batch)
    }

    pub(super) fn operands(&self, call: &Call) -> [Named<View<'a>>; 2] {
        [&call.reads, &call.writes].map(|operands| operands.map(|operand| self.view(operand)))
    }

    pub(super) fn reads<const N: usize>(&self, call: &Call, names: [&str; N]) -> [View<'a>; N] {
        names.map(|name| self.view(call.reads.operand(name)))
    }

    pub(super) fn writes<const N: usize>(&self, call: &Call, names: [&str; N]) -> [View<'a>; N] {
        names.map(|name| self.view(call.writes.operand(name)))
    }
}

impl<'a> Launcher<'a> {
    /// Launches a call, unless it has been launched already.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn launch(&mut self, index: usize, call: &Call) -> Result<()> {
        if index < self.launched {
            return Ok(());
        }
        self.launched = index + 1;
        let gpu = self.gpu;
        self.wait_for_exchanged(index, call)?;
        match &call.op {
            Op::Kernel(kernel) => {
                let [reads, writes] = self.operands(call);
                kernel.launch(&Operands {
                    gpu,
                    multiplier: Multiplier::Planned(RefCell::new(&mut *self.cublas_lt)),
                    reads,
                    writes,
                    micro_batch: self.micro_batch,
                    loss_gradient: self.run_values.loss_gradient(),
                })?;
            }
            Op::AllReduce { .. }
            | Op::Reduce { .. }
            | Op::Broadcast { .. }
            | Op::AllGather { .. }
            | Op::ReduceScatter { .. } => self.start_exchanges(index)?,
            Op::Unscale { .. }
            | Op::SumOfSquares { .. }
            | Op::Momentum { .. }
            | Op::Update { .. } => self.launch_fused_updates(index)?,
            Op::Orthogonalize { rule, shape, .. } => {
                let [_, writes] = self.operands(call);
                let multiplier = Multiplier::Planned(RefCell::new(&mut *self.cublas_lt));
                orthogonalize_on_gpu(gpu, &multiplier, &rule.iteration(shape), &writes)?;
            }
            Op::CheckOverflow { .. } => {
                let [flags] = self.reads(call, ["found"]);
                let [first, clip] = self.writes(call, ["first", "factor"]);
                update::check_overflow(gpu, flags, first, clip)?;
            }
            Op::ClipFactor { .. } => {
                let [squares] = self.reads(call, ["squares"]);
                let [clip] = self.writes(call, ["factor"]);
                update::clip_factor(gpu, squares, self.run_values.clip_norm(), clip)?;
            }
        }
        Ok(())
    }

    /// Makes a call wait for the exchanges of its operands. A call after the micro-batches waits for all exchanges,
    /// because one launch covers all parameters; only updates wait for their own operands.
    fn wait_for_exchanged(&mut self, index: usize, call: &Call) -> Result<()> {
        if index >= self.plan.per_micro_batch().end && !call.op.is_update() {
            return self.exchanges.wait_for_all(self.gpu);
        }
        let mut operands = call.operands();
        operands.try_for_each(|operand| self.exchanges.wait_for(self.gpu, operand.buffer))
    }

    fn exchanges_of(&self, call: &Call) -> Vec<Exchange<'a>> {
        let x = call.writes.operand("x");
        let collectives = call.op.collectives(self.exchanges.world_size()).into_iter();
        let exchanges = collectives.map(|(collective, elements)| {
            let start = x.elements.start;
            let some = BufferRange {
                buffer: x.buffer,
                elements: start + elements.start..start + elements.end,
            };
            Exchange {
                collective,
                buffer: x.buffer,
                x: self.view(&some),
            }
        });
        exchanges.collect()
    }

    /// Starts the exchange `index` and those of its group.
    fn start_exchanges(&mut self, index: usize) -> Result<()> {
        let group = self.plan.exchanged_at_once(index, self.end);
        self.launched = group.end;
        let calls = self.plan.calls()[group].iter();
        let exchanges: Vec<_> = calls.flat_map(|call| self.exchanges_of(call)).collect();
        self.exchanges.start(self.gpu, &exchanges)
    }

    /// Launches call `index` and the calls after it that do the same to other parameters, in one launch. With several
    /// ranks, only calls whose gradients were exchanged together are joined.
    fn launch_fused_updates(&mut self, index: usize) -> Result<()> {
        let Some(updates) = self.updates else {
            panic!("an update was launched before the optimizer's state was set");
        };
        let calls = &self.plan.calls()[index..self.end];
        let kind = |call: &Call| {
            let gradient = call.reads.get("gradient").map(|gradient| gradient.buffer);
            let bucket = gradient.filter(|gradient| self.exchanges.is_open(*gradient));
            (std::mem::discriminant(&call.op), bucket)
        };
        let first = kind(&calls[0]);
        let same = |call: &&Call| kind(call) == first;
        let count = calls.iter().take_while(same).count();
        let calls = &calls[..count];
        self.launched = index + count;
        let gpu = self.gpu;
        let gradients = || match &updates.gradients {
            Some(gradients) => gradients,
            None => unreachable!("the plan checks gradients"),
        };
        let joined = |name: &str| {
            let operands: Vec<&BufferRange> =
                calls.iter().map(|call| call.writes.operand(name)).collect();
            self.view(&whole_of(&operands))
        };
        match calls[0].op {
            Op::Unscale { .. } => {
                let flags = joined("found");
                match self.checks {
                    true => {
                        let inverse = self.run_values.inverse_scale();
                        gradients().unscale(gpu, 0..count, inverse, flags)?
                    }
                    false => crate::kernels::cuda::set_to_zero(gpu, flags)?,
                }
            }
            Op::SumOfSquares { .. } => {
                let (chunks, squares) = (joined("chunks"), joined("square"));
                gradients().sums_of_squares(gpu, 0..count, chunks, squares)?;
            }
            _ => {
                let first = updates.entry(index);
                let clip = calls[0].reads.get("factor").map(|clip| self.view(clip));
                let entries: Range<usize> = first..first + count;
                updates
                    .tables
                    .update(gpu, entries, self.run_values.updates(), clip)?;
            }
        }
        Ok(())
    }
}

/// Returns consecutive operands of a buffer as one operand.
fn whole_of(operands: &[&BufferRange]) -> BufferRange {
    let (first, last) = (operands[0], operands[operands.len() - 1]);
    for pair in operands.windows(2) {
        let follows =
            pair[0].buffer == pair[1].buffer && pair[0].elements.end == pair[1].elements.start;
        assert!(follows, "{pair:?}");
    }
    BufferRange {
        buffer: first.buffer,
        elements: first.elements.start..last.elements.end,
    }
}

/// Checks that the GPU has kernels for all calls of a plan. `tf32` selects TF32 for matmuls in f32.
///
/// # Errors
/// [`Error::Placement`] with the requirement that is not met.
pub(super) fn check(plan: &Plan, gpu: &CudaDevice, tf32: bool) -> Result<()> {
    let refuse = |what: &str, got: String, hint: &str| {
        Err(Error::placement("compile", got)
            .must_be(format!("{what}, for a step that is planned on a GPU"), hint))
    };
    if !source::is_supported(gpu) {
        let got = "an older GPU".into();
        return refuse(
            "compute capability 8.0 or later",
            got,
            "run the model eagerly there",
        );
    }
    for call in plan.calls() {
        let dtype = plan.dtype_of(call);
        let flash = call.op.kernel().and_then(planned_flash_sizes);
        if let Some(sizes) = flash
            && !flash_attention::supports(gpu, dtype, tf32, &sizes)
        {
            let got = format!(
                "heads of {} in {}, scale {}, {} rows",
                sizes.head_dim,
                dtype.as_str(),
                sizes.scale,
                sizes.batch * sizes.heads * sizes.queries
            );
            let wanted = "flash attention of heads of a multiple of 8 (f32: of 4) up to 256, \
                 whose tiles fit the GPU's shared memory, with a scale above 0, of fewer than 2^31 rows";
            return refuse(wanted, got, "plan naive attention");
        }
    }
    Ok(())
}
