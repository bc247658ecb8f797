//! The gated half of a feed-forward network, two linear maps and the gate between them, as one op.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::randn(0f32, 1.0, (2, 4), &Device::Cpu)?; // (..., D)
//! let w1 = Tensor::randn(0f32, 1.0, (6, 4), &Device::Cpu)?; // (F, D)
//! let w3 = Tensor::randn(0f32, 1.0, (6, 4), &Device::Cpu)?; // (F, D)
//! let in_three_ops = ops::swiglu(&ops::linear(&x, &w1)?, &ops::linear(&x, &w3)?)?;
//! let difference = (ops::swiglu_linear(&x, &w1, &w3)? - in_three_ops)?;
//! assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cpu::{elements, for_stored, output, tensor, tensors, view};
use super::dispatch::{Path, check_same, choose};
use super::info::OpInfo;
use super::linear::{linear, linear_product, rows_of, with_last_dim};
use super::operand::check_size;
use super::record::{Op, Spec, apply, contiguous, elements_of, exactly};
use super::swiglu::swiglu;
use super::weight::{WeightCopy, with_copies};
use crate::graph::{MemoryStep, Room, Target};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::kernels::cpu::swiglu as kernel;
use crate::precision::without_autocast;
use crate::probe::{Operand, Operands};
use crate::{Error, Result, probe};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Shape, Tensor};
use std::sync::OnceLock;
#[cfg(feature = "cuda")]
use {
    super::cuda,
    crate::kernels::cuda::{cublas, matmul::Matrix, swiglu as cuda_kernel},
    candle_core::CudaStorage,
};

/// `y = silu(x W1^T) * (x W3^T)`: x (..., D), W1 and W3 (F, D), y (..., F).
///
/// The same as [`swiglu()`] of two [`linear()`]s. As one op, the gradients of gate and up are scratch instead of nodes
/// of candle's graph, each of which is added to zeros, and dx is summed inside the second product:
/// `dx = dgate W1 + dup W3`, `dW1 = dgate^T x`, `dW3 = dup^T x`. Kept for backward: x, W1, W3, and gate and up, both
/// (..., F). Autocast: lower under both policies, as [`linear()`] is; silu and product follow.
///
/// Shazeer, "GLU Variants Improve Transformer", 2020, equation 6, without its last product.
///
/// # Errors
/// Weights that are no matrices of one shape, a last dimension that is not their `in`, mixed dtypes or devices.
pub fn swiglu_linear(x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<Tensor> {
    let (x, [w1, w3], copies) = with_copies("swiglu_linear", x, [w1, w3])?;
    check(&x, &copies[0].of(&w1), &copies[1].of(&w3))?;
    match choose("swiglu_linear", &x)? {
        Path::Kernel => {
            let op = SwiGluLinear {
                copies,
                gate_up: OnceLock::new(),
            };
            let (x, w1, w3) = (contiguous(&x)?, contiguous(&w1)?, contiguous(&w3)?);
            Ok(apply(&[&x, &w1, &w3], op)?)
        }
        Path::Reference => without_autocast(|| reference(&x, &w1, &w3)),
    }
}

/// [`swiglu_linear()`] as the three ops it is made of.
///
/// # Errors
/// As [`swiglu_linear()`].
pub fn reference(x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<Tensor> {
    check(x, w1, w3)?;
    swiglu(&linear(x, w1)?, &linear(x, w3)?)
}

fn check(x: &Tensor, w1: &Tensor, w3: &Tensor) -> Result<()> {
    check_same("swiglu_linear", &[("x", x), ("w1", w1), ("w3", w3)])?;
    let fits = match (x.dims(), w1.dims()) {
        ([.., last], [_, depth]) => last == depth && w1.dims() == w3.dims(),
        _ => false,
    };
    if fits {
        return check_size(
            "swiglu_linear",
            &with_last_dim(x.dims(), w1.dims()[0]),
            x.dtype(),
            x.device(),
        );
    }
    Err(Error::Shape {
        op: "swiglu_linear",
        expected: match w1.dims() {
            [_, depth] => format!("x (..., {depth}), w1 and w3 (F, {depth})"),
            _ => "x (..., D), w1 and w3 (F, D)".into(),
        },
        got: format!("x {:?}, w1 {:?}, w3 {:?}", x.dims(), w1.dims(), w3.dims()),
        hint: "weights are stored (out, in)".into(),
    })
}

pub(super) const INFO: OpInfo = OpInfo::new("swiglu_linear")
    .autocast_as("linear")
    .on_gpu()
    .costing(
        "4 N D F, 6 an element of y besides; backward 8 and 12",
        "x, W1, W3, y, gate, up; backward those and dx, dW1, dW3",
        |o| o.products(made(o), 4.0, 6.0),
        Some(|o| o.products_backward(made(o), 8.0, 12.0)),
    )
    .holding("two products and the gate");

/// y, and gate and up of its shape, which are kept.
fn made(o: &Operands<'_>) -> (f64, f64) {
    (o.output.elements(), 3.0 * o.output.bytes())
}
struct SwiGluLinear {
    /// Of W1 and W3.
    copies: [WeightCopy; 2],
    /// x W1^T and x W3^T, (N, F) each.
    gate_up: OnceLock<(Tensor, Tensor)>,
}

/// (N, D) for x (..., D).
fn rows(x: &Shape) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or_default();
    (rows_of(x.dims()), width)
}

#[cfg(feature = "cuda")]
impl SwiGluLinear {
    fn backward_on_gpu(
        &self,
        [x, w1, w3]: [&Tensor; 3],
        [gate, up]: [&Tensor; 2],
        dy: &Tensor,
    ) -> candle_core::Result<[Tensor; 3]> {
        let (gpu, dtype) = (cuda::gpu(dy)?, dy.dtype());
        let ((rows, depth), (out, _)) = (rows(x.shape()), w1.dims2()?);
        let room = || cuda::alloc_uninit(gpu, dtype, dy.elem_count());
        let (dgate, dup) = (room()?, room()?); // (N, F)
        let (of_dgate, of_dup) = (cuda::whole(&dgate)?, cuda::whole(&dup)?);
        let read = [
            cuda::elements(dy)?,
            cuda::elements(gate)?,
            cuda::elements(up)?,
        ];
        cuda_kernel::backward(gpu, read, [of_dgate, of_dup])?;
        let [dgate, dup] = [of_dgate, of_dup].map(|view| Matrix::new(view, rows, out));
        let dx = cuda::alloc_uninit(gpu, dtype, x.elem_count())?;
        {
            let of_dx = Matrix::new(cuda::whole(&dx)?, rows, depth); // (N, D)
            let w1 = self.copies[0].for_backward(w1)?;
            let w3 = self.copies[1].for_backward(w3)?;
            let add = |factors: [Matrix; 2], adds| cublas::multiply(gpu, factors, of_dx, 1, adds);
            add([dgate, cuda::matrix(&w1, out, depth)?], false)?;
            add([dup, cuda::matrix(&w3, out, depth)?], true)?;
        }
        let of_x = cuda::matrix(x, rows, depth)?;
        let dw1 = self.copies[0].gradient_on_gpu(w1, [dgate.t(), of_x])?;
        let dw3 = self.copies[1].gradient_on_gpu(w3, [dup.t(), of_x])?;
        Ok([cuda::tensor(dx, x.shape()), dw1, dw3])
    }
}

impl Spec for SwiGluLinear {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let [x, w1] = [&inputs[0], &inputs[1]];
        (with_last_dim(x.dims, w1.dims[0]).into(), x.dtype)
    }

    fn kept(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let (y, dtype) = self.output(inputs);
        let (rows, width) = rows(&y);
        ["gate", "up"]
            .map(|name| (name, (rows, width).into(), dtype))
            .into()
    }

    fn reads(&self) -> Vec<Tensor> {
        self.copies.iter().filter_map(WeightCopy::tensor).collect()
    }

    /// One product after the other, each with its weight's copy; then the gate.
    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let packed = linear_product(inputs).forward(target).map(MemoryStep::Pass);
        let products = self.copies.iter().enumerate().flat_map(|(i, copy)| {
            let steps = [Some(MemoryStep::Keep(i)), packed, copy.dropped(i)];
            steps.into_iter().flatten()
        });
        products.chain([MemoryStep::Output]).collect()
    }

    /// The gradients of gate and up; then `dx`, `dW1` and `dW3` from them.
    fn backward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let (y, dtype) = self.output(inputs);
        let gradients = MemoryStep::Take(Room {
            what: "gradients of gate and up",
            formula: "2BTF",
            elements: 2.0 * elements_of(y.dims()),
            element_bytes: dtype.size_in_bytes(),
        });
        let product = linear_product(inputs);
        let (dx, dw) = (product.dx(target), product.dw(target));
        let made = [dx, dw, dw].into_iter().enumerate();
        let made = made.map(|(of, taking)| MemoryStep::Gradient {
            of,
            if_tracked: false,
            taking,
        });
        [gradients].into_iter().chain(made).collect()
    }

    fn forwarded(&self) {
        self.copies.iter().for_each(WeightCopy::forwarded);
    }
}

impl Op for SwiGluLinear {
    fn name(&self) -> &'static str {
        "swiglu_linear"
    }

    fn cpu_fwd(
        &self,
        inputs: &[(&CpuStorage, &Layout)],
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let [(x, x_layout), (w1, w1_layout), (w3, w3_layout)] = exactly(inputs)?;
        let (rows, depth) = rows(x_layout.shape());
        let (out, _) = w1_layout.shape().dims2()?;
        let shape = with_last_dim(x_layout.dims(), out);
        for_stored!(x.dtype(), T => {
            let x = MatRef::new(view::<T>(x, x_layout)?, rows, depth); // (N, D)
            let product = |weight: &[T]| {
                let weight = MatRef::new(weight, out, depth); // (F, D)
                tensor::<T>((rows, out), |y| matmul(x, weight.t(), y, false, Threads::All))
            };
            let gate = self.copies[0].read(w1, w1_layout, product)?;
            let up = self.copies[1].read(w3, w3_layout, product)?;
            let y = {
                let (gate, up) = (elements::<T>(&gate)?, elements::<T>(&up)?);
                output(shape, |y| kernel::forward(&gate, &up, y))
            };
            probe::kept("gate", &gate);
            probe::kept("up", &up);
            let _ = self.gate_up.set((gate, up)); // empty until now: an op runs forward once
            y
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        inputs: &[(&CudaStorage, &Layout)],
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let [(x, x_layout), (w1, w1_layout), (w3, w3_layout)] = exactly(inputs)?;
        let (gpu, (rows, depth)) = (&x.device, rows(x_layout.shape()));
        let (out, _) = w1_layout.shape().dims2()?;
        let of_x = Matrix::new(cuda::view(x, x_layout)?, rows, depth); // (N, D)
        let gate = self.copies[0].product_on_gpu(of_x, w1, w1_layout)?; // (N, F)
        let up = self.copies[1].product_on_gpu(of_x, w3, w3_layout)?;
        let y = cuda::alloc_uninit(gpu, x.dtype(), rows * out)?;
        let (of_gate, of_up) = (cuda::whole(&gate)?, cuda::whole(&up)?);
        cuda_kernel::forward(gpu, of_gate, of_up, cuda::whole(&y)?)?;
        let (gate, up) = (
            cuda::tensor(gate, (rows, out)),
            cuda::tensor(up, (rows, out)),
        );
        probe::kept("gate", &gate);
        probe::kept("up", &up);
        let _ = self.gate_up.set((gate, up)); // empty until now: an op runs forward once
        Ok((y, with_last_dim(x_layout.dims(), out).into()))
    }

    fn bwd(
        &self,
        inputs: &[&Tensor],
        _y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<Vec<Option<Tensor>>> {
        let [x, w1, w3] = exactly(inputs)?;
        let Some((gate, up)) = self.gate_up.get() else {
            candle_core::bail!("swiglu_linear: backward before forward");
        };
        let (rows, depth) = rows(x.shape());
        let (out, _) = w1.dims2()?;
        let dy = dy.contiguous()?;
        #[cfg(feature = "cuda")]
        if dy.device().is_cuda() {
            let gradients = self.backward_on_gpu([x, w1, w3], [gate, up], &dy)?;
            return Ok(gradients.map(Some).into());
        }
        let x_shape = x.shape();
        for_stored!(dy.dtype(), T => {
            let (dgate, dup) = {
                let dy = elements::<T>(&dy)?;
                let (gate, up) = (elements::<T>(gate)?, elements::<T>(up)?);
                tensors::<T>((rows, out), (rows, out), |dgate, dup| {
                    kernel::backward(&dy, &gate, &up, dgate, dup)
                })?
            };
            let (dgate, dup) = (elements::<T>(&dgate)?, elements::<T>(&dup)?);
            let dgate = MatRef::new(&dgate, rows, out); // (N, F)
            let dup = MatRef::new(&dup, rows, out); // (N, F)
            let dx = {
                let w1 = self.copies[0].for_backward(w1)?;
                let w3 = self.copies[1].for_backward(w3)?;
                let (w1, w3) = (elements::<T>(&w1)?, elements::<T>(&w3)?);
                let (w1, w3) = (MatRef::new(&w1, out, depth), MatRef::new(&w3, out, depth));
                tensor(x_shape, |dx| {
                    matmul(dgate, w1, dx, false, Threads::All);
                    matmul(dup, w3, dx, true, Threads::All);
                })?
            };
            let x = elements::<T>(x)?;
            let x = MatRef::new(&x, rows, depth);
            let dw1 = self.copies[0].gradient(w1, dgate.t(), x)?;
            let dw3 = self.copies[1].gradient(w3, dup.t(), x)?;
            Ok(vec![Some(dx), Some(dw1), Some(dw3)])
        })
    }
}
