//! Eager steps of Muon: batches of matrices of one shape.

use super::MuonConfig;
use super::rules::batches;
use super::slot::{Slot, direction, orthogonalize, step_cpu, with_slices};
use crate::Result;
use crate::inplace::wide;
use crate::kernels::Update;
use crate::kernels::cpu::update::muon::Iteration;
use crate::ops::cost::cost;
use crate::ops::reserve_scratch;
use crate::probe::{self, Kind, Operand, Operands};
use candle_core::{DType, Device, DeviceLocation, Tensor, Var};

/// A matrix to be updated, with its gradient, which is contiguous.
pub(super) struct Matrix<'a> {
    pub var: &'a Var,
    pub gradient: &'a Tensor,
    pub slot: &'a Slot,
    pub rule: &'a MuonConfig,
    pub update: Update,
}

impl Matrix<'_> {
    fn iteration(&self) -> Iteration {
        self.rule.iteration(self.var.dims())
    }

    /// Returns what the matrices of a batch have in common.
    fn kind(&self) -> (Iteration, DType, (DType, DeviceLocation)) {
        let (dtype, location) = (self.var.dtype(), self.var.device().location());
        (self.iteration(), wide(dtype), (dtype, location))
    }
}

/// Updates matrices by the kernels of their devices.
pub(super) fn step(matrices: &[Matrix<'_>]) -> Result<()> {
    let kinds: Vec<_> = matrices.iter().map(Matrix::kind).collect();
    for batch in batches(&kinds) {
        let batch: Vec<&Matrix<'_>> = batch.into_iter().map(|number| &matrices[number]).collect();
        let (iteration, device) = (batch[0].iteration(), batch[0].var.device());
        if iteration.elements() == 0 {
            continue;
        }
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => super::cuda::step_muon(gpu, &iteration, &batch)?,
            _ => step_on_cpu(&iteration, &batch)?,
        }
    }
    Ok(())
}

fn step_on_cpu(iteration: &Iteration, batch: &[&Matrix<'_>]) -> candle_core::Result<()> {
    let (count, n) = (batch.len(), iteration.elements());
    let wide = wide(batch[0].var.dtype());
    let directions = Tensor::zeros((count, n), wide, &Device::Cpu)?;
    for (i, matrix) in batch.iter().enumerate() {
        let own = directions.get(i)?;
        let states = matrix.slot.states.iter();
        let states = states.map(|(name, state)| (*name, state.as_tensor()));
        let written: Vec<_> = [("direction", &own)].into_iter().chain(states).collect();
        let update = &matrix.update;
        with_slices(Some(matrix.gradient), &written, |s| {
            direction(s, 1.0, update)
        })?;
    }
    reserve_scratch(iteration.in_bf16)?;
    let scratch = iteration.scratch(count, wide, false).into_iter();
    let scratch = scratch.map(|(name, elements, dtype)| {
        let zeros = Tensor::zeros(elements, dtype, &Device::Cpu)?;
        Ok((name, zeros))
    });
    let scratch = scratch.collect::<candle_core::Result<Vec<_>>>()?;
    let written = scratch.iter().map(|(name, tensor)| (*name, tensor));
    let written: Vec<_> = [("directions", &directions)]
        .into_iter()
        .chain(written)
        .collect();
    in_range(iteration, count, wide, || {
        with_slices(None, &written, |s| orthogonalize(s, iteration))
    })?;
    for (i, matrix) in batch.iter().enumerate() {
        step_cpu(matrix.var, &directions.get(i)?, matrix.slot, &matrix.update)?;
    }
    Ok(())
}

/// Iterates `count` matrices inside a profiling range.
pub(super) fn in_range(
    iteration: &Iteration,
    count: usize,
    wide: DType,
    iterate: impl FnOnce() -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let range = probe::op(Kind::Op, ITERATION, probe::op_path(ITERATION));
    iterate()?;
    let [rows, columns] = iteration.shape;
    let (dims, dtype) = (&[count, rows, columns], wide);
    let directions = Operand { dims, dtype };
    let operands = Operands {
        inputs: &[directions],
        output: directions,
    };
    let (_, bytes) = directions.size();
    let matmul_flops = count as f64 * iteration.flops();
    if let Some(cost) = cost(matmul_flops, 0.0, bytes, bytes) {
        range.leave_costing(operands, cost);
    }
    Ok(())
}

/// The name of the iteration in profiles, eager and planned.
pub(crate) const ITERATION: &str = "orthogonalize";
