//! Summation of gradients: in place, and over the elements that a view repeats.

use super::run::Run;
use crate::graph::{Target, View};
use crate::kernels::cpu::arithmetic;
use crate::ops::cpu::view;
use crate::ops::lowering::{Calls, Signature, Slot, converted};
use crate::ops::operand::is_half;
use crate::ops::strided;
use crate::probe::Operand;
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, bail};
#[cfg(feature = "cuda")]
use {crate::kernels::cuda::arithmetic as cuda_kernel, crate::ops::cuda, candle_core::CudaStorage};

/// Computes `sum += x` in place, for contiguous tensors of one shape and dtype. Returns false, without doing anything,
/// if there is no kernel.
///
/// # Errors
/// Tensors that do not match; errors of the driver.
pub(crate) fn add_onto(sum: &Tensor, x: &Tensor) -> Result<bool> {
    let has_kernel = match sum.device() {
        device if device.is_cpu() => true,
        device => device.is_cuda() && sum.dtype() != DType::F64,
    };
    if has_kernel && sum.elem_count() > 0 {
        sum.inplace_op2(x, &AddOnto)?;
    }
    Ok(has_kernel)
}

struct AddOnto;

impl InplaceOp2 for AddOnto {
    fn name(&self) -> &'static str {
        "add_onto"
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        sum_layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        let Some((start, end)) = sum_layout.contiguous_offsets() else {
            bail!("add_onto: expected a contiguous sum, got {sum_layout:?}");
        };
        macro_rules! add {
            ($($dtype:ident),+) => {
                match sum {
                    $(CpuStorage::$dtype(sum) => {
                        arithmetic::add_onto(&mut sum[start..end], view(x, x_layout)?);
                    })+
                    other => bail!("add_onto: no kernel for {other:?}"),
                }
            };
        }
        add!(F32, F64, F16, BF16);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        sum: &mut CudaStorage,
        sum_layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        let gpu = sum.device.clone();
        let sum = cuda::view(sum, sum_layout)?;
        cuda_kernel::add(&gpu, sum, cuda::view(x, x_layout)?, sum)
    }
}

/// Returns the gradient of a tensor of this `shape`, given the gradient `dy` of a view of it: zeros, with `dy` added at
/// the offsets of `view`. Sums in half precision are rounded once.
///
/// # Errors
/// No kernel ([`can_scatter`]); no memory.
pub(crate) fn scattered(dy: &Tensor, view: View, shape: &[usize]) -> Result<Tensor> {
    let wide = match is_half(dy.dtype()) {
        true => DType::F32,
        false => dy.dtype(),
    };
    let (reads, kernel) = ([("dy", Slot::Input(0))], strided::scatter(view));
    let mut calls = Calls::default();
    match wide == dy.dtype() {
        true => calls.push(kernel, reads, [("dx", Slot::Output)]),
        false => {
            let sums = calls.scratch(shape, wide);
            calls.push(kernel, reads, [("dx", sums)]);
            calls.push(converted(), [("x", sums)], [("y", Slot::Output)]);
        }
    }
    let signature = Signature {
        attributes: &[],
        inputs: vec![dy.into()],
        extra_inputs: Vec::new(),
        output: Operand {
            dims: shape,
            dtype: dy.dtype(),
        },
        saved: Vec::new(),
        target: Target::of(dy.device()),
        plan: None,
    };
    let (storage, layout) = dy.storage_and_layout();
    let mut run = Run::new(dy.device(), &signature, &calls, Vec::new());
    run.push_operand(Slot::Input(0), &storage, layout)?;
    run.run(|_| true)?;
    run.tensor(Slot::Output, &shape.into())
}

/// Returns whether [`scattered`] has a kernel for views like `x`.
pub(crate) fn can_scatter(x: &Tensor) -> bool {
    let kernel = || strided::scatter(view_of(x));
    match x.device() {
        device if device.is_cpu() => true,
        device => device.is_cuda() && x.dtype() != DType::F64 && kernel().is_on_gpu(),
    }
}

/// Returns the view of its storage that `x` is.
pub(crate) fn view_of(x: &Tensor) -> View {
    let layout = x.layout();
    View {
        shape: layout.dims().to_vec(),
        stride: layout.stride().to_vec(),
        offset: layout.start_offset(),
    }
}
