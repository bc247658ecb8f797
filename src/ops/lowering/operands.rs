//! The operands of a call on a GPU.

use super::{Kernel, Named};
use crate::kernels::cuda::matmul::{CublasLt, Matrix, Product};
use crate::kernels::cuda::{View, cublas};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, bail};
use std::cell::RefCell;

/// The implementation of matmuls on a GPU.
pub(crate) enum Multiplier<'a> {
    /// For a plan, whose stream may be captured.
    Planned(RefCell<&'a mut CublasLt>),
    /// With candle's cuBLAS handle.
    Eager,
}

impl Multiplier<'_> {
    /// Computes `c = a b`, or `c += a b` if `adds`, for a batch of `count`.
    pub fn multiply(
        &self,
        gpu: &CudaDevice,
        factors: [Matrix; 2],
        c: Matrix,
        count: usize,
        adds: bool,
    ) -> Result<()> {
        self.multiply_add(gpu, Product::of(factors, c, count, adds))
    }

    /// Computes matmuls whose result is scaled, and added to scaled matrices.
    pub fn multiply_add(&self, gpu: &CudaDevice, product: Product) -> Result<()> {
        match self {
            Self::Planned(cublas_lt) => cublas_lt.borrow_mut().multiply(gpu, product),
            Self::Eager => cublas::multiply(gpu, product),
        }
    }
}

/// The operands of one call on a GPU.
pub(crate) struct Operands<'a> {
    pub gpu: &'a CudaDevice,
    pub multiplier: Multiplier<'a>,
    pub reads: Named<View<'a>>,
    pub writes: Named<View<'a>>,
    /// The index of the micro-batch in its step.
    pub micro_batch: usize,
    /// The initial gradient of a step's loss, (1) in f32: the loss scale, divided by the number of targets if the loss
    /// is a sum.
    pub loss_gradient: View<'a>,
}

impl<'a> Operands<'a> {
    /// Returns whether a call adds to its output `name`.
    pub fn adds(&self, kernel: &Kernel, name: &str) -> bool {
        kernel.adds(name, self.micro_batch)
    }

    /// Returns whether f32 matmuls of attention use TF32: by the plan's setting, or by the call's attribute.
    pub fn tf32(&self, kernel: &Kernel) -> bool {
        match &self.multiplier {
            Multiplier::Planned(cublas_lt) => cublas_lt.borrow().tf32(),
            Multiplier::Eager => kernel.flag("tf32"),
        }
    }

    /// Returns the input `name`, which must be contiguous.
    pub fn x(&self, name: &str) -> Result<View<'a>> {
        match self.strided(name)? {
            View { strides: None, .. } => self.strided(name),
            _ => bail!("{name} is read by strides"),
        }
    }

    /// Returns the input `name`, contiguous or with strides.
    pub fn strided(&self, name: &str) -> Result<View<'a>> {
        match self.reads.get(name) {
            Some(view) => Ok(*view),
            None => bail!("{name} is not read"),
        }
    }

    /// Returns the output `name`.
    pub fn y(&self, name: &str) -> Result<View<'a>> {
        match self.writes.get(name) {
            Some(view) => Ok(*view),
            None => bail!("{name} is not written"),
        }
    }

    /// Returns a function that computes `c = a b` for a batch: from [a, b], c and the batch size.
    pub fn multiply_batch(&self) -> impl FnMut([Matrix; 2], Matrix, usize) -> Result<()> {
        |factors, c, count| self.multiplier.multiply(self.gpu, factors, c, count, false)
    }

    /// Returns the input `name`, if the call has it.
    pub fn some_x(&self, name: &str) -> Option<View<'a>> {
        self.reads.get(name).copied()
    }

    /// Returns the output `name`, if the call has it.
    pub fn some_y(&self, name: &str) -> Option<View<'a>> {
        self.writes.get(name).copied()
    }
}
