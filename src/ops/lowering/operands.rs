//! What a call has on a GPU.

use super::{Kernel, Named};
use crate::kernels::cuda::matmul::{Matrix, Products};
use crate::kernels::cuda::{View, cublas};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, bail};
use std::cell::RefCell;

/// What multiplies matrices on a GPU.
pub(crate) enum Multiplier<'a> {
    /// For a plan, whose stream may be recorded.
    Planned(RefCell<&'a mut Products>),
    /// With candle's handle.
    Eager,
}

impl Multiplier<'_> {
    /// `c = a b`, or `c += a b` where it `adds`, `count` times.
    pub fn multiply(
        &self,
        gpu: &CudaDevice,
        factors: [Matrix; 2],
        c: Matrix,
        count: usize,
        adds: bool,
    ) -> Result<()> {
        match self {
            Self::Planned(products) => {
                let mut products = products.borrow_mut();
                products.multiply(gpu, factors, c, count, adds)
            }
            Self::Eager => cublas::multiply(gpu, factors, c, count, adds),
        }
    }
}

/// The operands of one call on a GPU.
pub(crate) struct Operands<'a> {
    pub gpu: &'a CudaDevice,
    pub products: Multiplier<'a>,
    pub reads: Named<View<'a>>,
    pub writes: Named<View<'a>>,
    /// Of the micro-batches of a step, the one whose calls these are.
    pub micro_batch: usize,
    /// What the gradient of a step's loss begins with: the loss scale, over the targets of a loss that is a sum: (1) in
    /// f32.
    pub loss_gradient: View<'a>,
}

impl<'a> Operands<'a> {
    /// Whether a call adds to what it writes as `name`.
    pub fn adds(&self, kernel: &Kernel, name: &str) -> bool {
        kernel.adds(name, self.micro_batch)
    }

    /// Whether products of f32 in attention are TF32: as they are in the plan, or as the call says.
    pub fn tf32(&self, kernel: &Kernel) -> bool {
        match &self.products {
            Multiplier::Planned(products) => products.borrow().tf32(),
            Multiplier::Eager => kernel.flag("tf32"),
        }
    }

    /// What is read as `name`.
    pub fn x(&self, name: &str) -> Result<View<'a>> {
        match self.lying(name)? {
            View { strides: None, .. } => self.lying(name),
            _ => bail!("{name} is read by strides"),
        }
    }

    /// As [`x`](Self::x), perhaps by strides.
    pub fn lying(&self, name: &str) -> Result<View<'a>> {
        match self.reads.get(name) {
            Some(view) => Ok(*view),
            None => bail!("{name} is not read"),
        }
    }

    /// What is written as `name`.
    pub fn y(&self, name: &str) -> Result<View<'a>> {
        match self.writes.get(name) {
            Some(view) => Ok(*view),
            None => bail!("{name} is not written"),
        }
    }

    /// What computes `c = a b`, so many times: from [a, b], c and their number.
    pub fn multiplier(&self) -> impl FnMut([Matrix; 2], Matrix, usize) -> Result<()> {
        |factors, c, count| self.products.multiply(self.gpu, factors, c, count, false)
    }

    /// What is read as `name`, if the call has it.
    pub fn some_x(&self, name: &str) -> Option<View<'a>> {
        self.reads.get(name).copied()
    }

    /// What is written as `name`, if the call has it.
    pub fn some_y(&self, name: &str) -> Option<View<'a>> {
        self.writes.get(name).copied()
    }
}
