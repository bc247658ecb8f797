//! Linear maps without bias, y = x W^T.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?; // (..., in)
//! let weight = Tensor::ones((5, 4), DType::F32, &Device::Cpu)?; // (out, in)
//! let y = ops::linear(&x, &weight)?;
//! assert_eq!(y.dims(), [2, 3, 5]);
//! assert_eq!(y.max_all()?.to_scalar::<f32>()?, 4.0);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cpu::{elements, for_stored, output, tensor, view};
use super::dispatch::{Path, check_same, choose};
use super::info::OpInfo;
use super::operand::{check_size, zeros_of};
use super::packing::LinearProduct;
use super::record::{Spec, apply2, composed, contiguous, float_input, made};
use super::weight::{WeightCopy, with_copies};
use crate::graph::{MemoryStep, Target};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Shape, Tensor};
#[cfg(feature = "cuda")]
use {super::cuda, crate::kernels::cuda::matmul::Matrix, candle_core::CudaStorage};

/// A linear map without bias: `y = x W^T`, with x (..., in), W (out, in), y (..., out).
///
/// Backward: `dx = dy W`, `dW = dy^T x`. Kept for backward: x and W. 2 * rows * in * out FLOPs forward, twice that
/// backward. The weight is used transposed by its strides: no copy. Half precision is summed in f32 and rounded once;
/// on the CPU it is widened for the product, but for bf16 where [`bf16_products`](crate::hardware::bf16_products) says
/// otherwise. Autocast: lower under both policies; the gradient of an f32 weight is not rounded to half precision, as
/// PyTorch's is.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let w = Tensor::new(&[[1f32, 0.0], [0.0, 1.0], [1.0, 1.0]], &Device::Cpu)?;
/// assert_eq!(tallow::ops::linear(&x, &w)?.to_vec2::<f32>()?, [[1.0, 2.0, 3.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A weight that is not a matrix, a last dimension that is not the weight's `in`, mixed dtypes or devices.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (x, [weight], [copy]) = with_copies("linear", x, [weight])?;
    check(&x, &copy.of(&weight))?;
    match choose("linear", &x)? {
        Path::Kernel => Ok(apply2(
            &contiguous(&x)?,
            &contiguous(&weight)?,
            Linear { copy },
        )?),
        Path::Reference => {
            let output = (with_last_dim(x.dims(), weight.dims()[0]), x.dtype());
            composed("linear", &[&x, &weight], output, || reference(&x, &weight))
        }
    }
}

/// [`linear()`] in candle's own ops: flatten, `matmul` with the transposed weight, restore the shape.
///
/// # Errors
/// As [`linear()`].
pub fn reference(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    check(x, weight)?;
    let (x, weight) = (float_input("linear", x)?, float_input("linear", weight)?);
    let (out, depth) = weight.dims2()?;
    let shape = with_last_dim(x.dims(), out);
    if depth == 0 {
        return Ok(zeros_of("linear", shape, x.dtype(), &[&x, &weight])?);
    }
    Ok(x.reshape((rows_of(&shape), depth))?
        .matmul(&weight.t()?)?
        .reshape(shape)?)
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    check_same("linear", &[("x", x), ("weight", weight)])?;
    let wanted = match (weight.dims(), x.dims().last()) {
        ([out, depth], Some(last)) if depth == last => {
            return check_size(
                "linear",
                &with_last_dim(x.dims(), *out),
                x.dtype(),
                x.device(),
            );
        }
        ([_, depth], _) => format!("x (..., {depth}) for the weight {:?}", weight.dims()),
        _ => "weight (out, in)".into(),
    };
    Err(Error::Shape {
        op: "linear",
        expected: wanted,
        got: format!("x {:?}, weight {:?}", x.dims(), weight.dims()),
        hint: "weights are stored (out, in)".into(),
    })
}

pub(super) const INFO: OpInfo = OpInfo::new("linear").on_gpu().costing(
    "2 N in out, backward 4",
    "x, W, y; backward x, W, dy, dx, dW",
    |o| o.products(o.output.size(), 2.0, 0.0),
    Some(|o| o.products_backward(o.output.size(), 4.0, 0.0)),
);

/// The product of x and a weight, as an op or as part of one.
pub(super) struct Linear {
    pub copy: WeightCopy,
}

#[cfg(feature = "cuda")]
impl Linear {
    fn gradients_on_gpu(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (gpu, dtype) = (cuda::gpu(dy)?, dy.dtype());
        let (out, depth) = weight.dims2()?;
        let rows = rows_of(dy.dims());
        let of_dy = cuda::matrix(dy, rows, out)?; // (N, out)
        let dx = x.track_op().then(|| {
            let weight = self.copy.for_backward(weight)?;
            let factors = [of_dy, cuda::matrix(&weight, out, depth)?];
            cuda::product(gpu, factors, 1, dtype, x.shape())
        });
        let dw = weight.track_op().then(|| {
            let factors = [of_dy.t(), cuda::matrix(x, rows, depth)?];
            self.copy.gradient_on_gpu(weight, factors)
        });
        Ok((dx.transpose()?, dw.transpose()?))
    }
}

impl Spec for Linear {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let [x, weight] = [&inputs[0], &inputs[1]];
        (with_last_dim(x.dims, weight.dims[0]).into(), x.dtype)
    }

    fn reads(&self) -> Vec<Tensor> {
        self.copy.tensor().into_iter().collect()
    }

    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let packed = linear_product(inputs).forward(target).map(MemoryStep::Pass);
        let steps = made(self, inputs).into_iter().chain(packed);
        steps.chain(self.copy.dropped(0)).collect()
    }

    fn backward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        linear_product(inputs).backward(target)
    }

    fn forwarded(&self) {
        self.copy.forwarded();
    }
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (out, depth) = weight_layout.shape().dims2()?;
        let shape = with_last_dim(x_layout.dims(), out);
        let rows = rows_of(&shape); // N
        for_stored!(x.dtype(), T => {
            let x = MatRef::new(view::<T>(x, x_layout)?, rows, depth); // (N, in)
            self.copy.read::<T, _>(weight, weight_layout, |weight| {
                let weight = MatRef::new(weight, out, depth); // (out, in)
                output(shape, |y| matmul(x, weight.t(), y, false, Threads::All))
            })
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let (out, depth) = weight_layout.shape().dims2()?;
        let rows = rows_of(x_layout.dims()); // N
        let of_x = Matrix::new(cuda::view(x, x_layout)?, rows, depth); // (N, in)
        let y = self.copy.product_on_gpu(of_x, weight, weight_layout)?;
        Ok((y, with_last_dim(x_layout.dims(), out).into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        self.gradients(x, weight, &dy.contiguous()?)
    }
}

impl Linear {
    /// Of x and the weight, those that are tracked: dy (..., out) contiguous.
    pub(super) fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if dy.device().is_cuda() {
            return self.gradients_on_gpu(x, weight, dy);
        }
        let (out, depth) = weight.dims2()?;
        let rows = rows_of(dy.dims());
        for_stored!(dy.dtype(), T => {
            let dy = elements::<T>(dy)?;
            let dy = MatRef::new(&dy, rows, out); // (N, out)
            let dx = x.track_op().then(|| {
                let weight = self.copy.for_backward(weight)?;
                let weight = elements::<T>(&weight)?;
                let weight = MatRef::new(&weight, out, depth);
                tensor(x.shape(), |dx| matmul(dy, weight, dx, false, Threads::All))
            });
            let dw = weight.track_op().then(|| {
                let x = elements::<T>(x)?;
                self.copy.gradient(weight, dy.t(), MatRef::new(&x, rows, depth))
            });
            Ok((dx.transpose()?, dw.transpose()?))
        })
    }
}

/// The product of x (..., in) with W (out, in), in x's dtype.
pub(super) fn linear_product(inputs: &[Operand<'_>]) -> LinearProduct {
    let [x, weight] = [&inputs[0], &inputs[1]];
    LinearProduct {
        rows: x.rows(),
        from: weight.dims[1],
        to: weight.dims[0],
        element_bytes: x.dtype.size_in_bytes(),
    }
}

/// N: how many rows a tensor of these dimensions has, empty ones too.
pub(crate) fn rows_of(dims: &[usize]) -> usize {
    dims.split_last()
        .map_or(1, |(_, leading)| leading.iter().product())
}

/// `dims` with another last dimension.
pub(crate) fn with_last_dim(dims: &[usize], last: usize) -> Vec<usize> {
    let leading = dims.len() - 1;
    [&dims[..leading], &[last]].concat()
}

/// The last dimension of `x`, for ops that work along it.
pub(super) fn last_dim(op: &'static str, x: &Tensor) -> Result<usize> {
    check_size(op, x.dims(), x.dtype(), x.device())?;
    x.dim(D::Minus1).map_err(|_| Error::Shape {
        op,
        expected: "at least one dimension".into(),
        got: "a scalar".into(),
        hint: "reshape it to one row".into(),
    })
}
