//! Linear maps with bias, y = x W^T + b.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?; // (..., in)
//! let weight = Tensor::ones((5, 4), DType::F32, &Device::Cpu)?; // (out, in)
//! let bias = Tensor::ones(5, DType::F32, &Device::Cpu)?; // (out)
//! let y = ops::linear_bias(&x, &weight, &bias)?;
//! assert_eq!(y.dims(), [2, 3, 5]);
//! assert_eq!(y.max_all()?.to_scalar::<f32>()?, 5.0);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cpu::{elements, for_stored, output, tensor, view};
use super::dispatch::{Path, check_same, check_same_or_f32, choose};
use super::info::OpInfo;
use super::linear::{Linear, rows_of, with_last_dim};
use super::lowering::{Kernel, kernel, on_gpu};
use super::operand::{check_size, operand, zeros_of};
use super::record::{Op, Spec, apply, composed, contiguous, exactly, wide_input};
use super::weight::with_copies;
use crate::graph::{MemoryStep, Room, Target};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::kernels::cpu::parallel::block_sums;
use crate::kernels::cpu::{Stored, rows::bias as kernel};
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Shape, Tensor, WithDType};
#[cfg(feature = "cuda")]
use {
    super::cuda,
    crate::kernels::cuda::{bias as cuda_kernel, matmul::Matrix},
    crate::kernels::workspace,
    candle_core::CudaStorage,
};

/// A linear map with a bias: `y = x W^T + b`, with x (..., in), W (out, in), b (out), y (..., out).
///
/// Backward: `dx = dy W`, `dW = dy^T x`, `db` the sum of dy's rows, in f32 at least, rounded once. Kept for backward: x
/// and W. The product is added to the bias where it lies, so that half precision is rounded once.
///
/// Autocast: lower under both policies, as [`linear`](super::linear()). The bias may be in f32 beside an x in half
/// precision, and stays so in a region: it is rounded to x's dtype on the way, as PyTorch rounds it, and its gradient
/// is not.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let w = Tensor::new(&[[1f32, 0.0], [1.0, 1.0]], &Device::Cpu)?;
/// let b = Tensor::new(&[10f32, 20.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::linear_bias(&x, &w, &b)?.to_vec2::<f32>()?, [[11.0, 23.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A weight that is not a matrix, a last dimension that is not the weight's `in`, a bias that is not (out), mixed
/// dtypes (but for f32 biases beside half precision) or devices.
pub fn linear_bias(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (x, [weight], [copy]) = with_copies("linear_bias", x, [weight])?;
    let bias = operand("linear_bias", bias)?;
    check(&x, &copy.of(&weight), &bias)?;
    match choose("linear_bias", &x)? {
        Path::Kernel => {
            let product = Linear { copy };
            let (x, weight) = (contiguous(&x)?, contiguous(&weight)?);
            let inputs = [&x, &weight, &contiguous(&bias)?];
            Ok(apply(&inputs, LinearBias { product })?)
        }
        Path::Reference => {
            let output = (with_last_dim(x.dims(), weight.dims()[0]), x.dtype());
            composed("linear_bias", &[&x, &weight, &bias], output, || {
                reference(&x, &weight, &bias)
            })
        }
    }
}

/// [`linear_bias()`] in candle's own ops: half precision is widened, and the sum rounded once.
///
/// # Errors
/// As [`linear_bias()`].
pub fn reference(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    check(x, weight, bias)?;
    let dtype = x.dtype();
    let [x, weight, wide_bias] = [x, weight, bias].map(|x| wide_input("linear_bias", x));
    let (x, weight, bias) = (x?, weight?, wide_bias?);
    let (out, depth) = weight.dims2()?;
    let shape = with_last_dim(x.dims(), out);
    let product = match depth {
        0 => zeros_of("linear_bias", shape, x.dtype(), &[&x, &weight])?,
        _ => x
            .reshape((rows_of(&shape), depth))?
            .matmul(&weight.t()?)?
            .reshape(shape)?,
    };
    Ok(product.broadcast_add(&bias)?.to_dtype(dtype)?)
}

fn check(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<()> {
    check_same("linear_bias", &[("x", x), ("weight", weight)])?;
    check_same_or_f32("linear_bias", &[("x", x), ("bias", bias)])?;
    let wanted = match (weight.dims(), x.dims().last()) {
        ([out, depth], Some(last)) if depth == last && bias.dims() == [*out] => {
            let shape = with_last_dim(x.dims(), *out);
            return check_size("linear_bias", &shape, x.dtype(), x.device());
        }
        ([out, depth], _) => {
            format!(
                "x (..., {depth}) and bias ({out},) for the weight {:?}",
                weight.dims()
            )
        }
        _ => "weight (out, in)".into(),
    };
    Err(Error::Shape {
        op: "linear_bias",
        expected: wanted,
        got: format!(
            "x {:?}, weight {:?}, bias {:?}",
            x.dims(),
            weight.dims(),
            bias.dims()
        ),
        hint: "weights are stored (out, in)".into(),
    })
}

pub(super) const INFO: OpInfo = OpInfo::new("linear_bias")
    .autocast_as("linear")
    .on_gpu()
    .costing(
        "2 N in out, 1 an element of y besides; backward 4 and 1",
        "x, W, b, y; backward x, W, dy, dx, dW, db",
        |o| o.products(o.output.size(), 2.0, 1.0),
        Some(|o| o.products_backward(o.output.size(), 4.0, 1.0)),
    );

/// Reads a bias (out), in y's dtype or in f32; writes it to every row of y (N, out).
pub(crate) fn bias() -> Kernel {
    let kernel = Kernel::new("bias", |_, s| {
        for_stored!(s.dtype_of("y")?, T => {
            let bias = s.wide_x::<<T as Stored>::Wide>("bias")?;
            let mut stored = vec![<T as WithDType>::from_f64(0.0); bias.len()]; // (out): small
            <T as Stored>::store(&bias, &mut stored);
            kernel::fill(&stored, s.y::<T>("y")?);
            Ok(())
        })
    });
    on_gpu!(kernel, |_, l| cuda_kernel::fill(
        l.gpu,
        l.x("bias")?,
        l.y("y")?
    ))
}

/// Reads dy (N, out); writes dbias (out), the sum of its rows in the dtype that sums are computed in, and on a GPU
/// partials.
pub(crate) fn bias_gradient() -> Kernel {
    let kernel = kernel!("bias_backward", |T, _, s| {
        kernel::gradient::<T>(s.x("dy")?, s.y("dbias")?);
    });
    on_gpu!(kernel, |_, l| cuda_kernel::gradient(
        l.gpu,
        l.x("dy")?,
        l.y("dbias")?,
        l.y("partials")?
    ))
}

struct LinearBias {
    product: Linear,
}

impl Spec for LinearBias {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        self.product.output(inputs)
    }

    fn reads(&self) -> Vec<Tensor> {
        self.product.reads()
    }

    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        self.product.forward_steps(inputs, target)
    }

    /// On the CPU the bias's gradient first, then those of the product; on a GPU after them.
    fn backward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let [x, weight] = [&inputs[0], &inputs[1]];
        let partial = (target == Target::Cpu).then(|| Room {
            what: "partial sums of a bias",
            formula: "BTD / 32",
            elements: block_sums(x.rows(), weight.dims[0]),
            element_bytes: x.wide_dtype().size_in_bytes(),
        });
        let of_bias = MemoryStep::Gradient {
            of: 2,
            if_tracked: true,
            taking: partial,
        };
        let of_product = self.product.backward_steps(inputs, target);
        match target {
            Target::Cpu => [vec![of_bias], of_product].concat(),
            Target::Cuda => [of_product, vec![of_bias]].concat(),
        }
    }

    fn forwarded(&self) {
        self.product.forwarded();
    }
}

#[cfg(feature = "cuda")]
impl LinearBias {
    fn bias_gradient_on_gpu(&self, bias: &Tensor, dy: &Tensor) -> candle_core::Result<Tensor> {
        let (gpu, out) = (cuda::gpu(dy)?, bias.elem_count());
        let rows = rows_of(dy.dims());
        let db = cuda::alloc_uninit(gpu, DType::F32, out)?;
        let partial = cuda::alloc_uninit(gpu, DType::F32, workspace::bias_backward(rows, out))?;
        let (to, partial) = (cuda::whole(&db)?, cuda::whole(&partial)?);
        cuda_kernel::gradient(gpu, cuda::elements(dy)?, to, partial)?;
        cuda::tensor(db, out).to_dtype(bias.dtype())
    }
}

impl Op for LinearBias {
    fn name(&self) -> &'static str {
        "linear_bias"
    }

    fn cpu_fwd(
        &self,
        inputs: &[(&CpuStorage, &Layout)],
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let [(x, x_layout), (weight, weight_layout), (bias, bias_layout)] = exactly(inputs)?;
        let (out, depth) = weight_layout.shape().dims2()?;
        let shape = with_last_dim(x_layout.dims(), out);
        let rows = rows_of(&shape); // N
        for_stored!(x.dtype(), T => {
            let x = MatRef::new(view::<T>(x, x_layout)?, rows, depth); // (N, in)
            let bias = stored::<T>(bias, bias_layout)?;
            self.product.copy.read::<T, _>(weight, weight_layout, |weight| {
                let weight = MatRef::new(weight, out, depth); // (out, in)
                output(shape, |y| {
                    kernel::fill(&bias, y);
                    if depth > 0 {
                        matmul(x, weight.t(), y, true, Threads::All);
                    }
                })
            })
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        inputs: &[(&CudaStorage, &Layout)],
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let [(x, x_layout), (weight, weight_layout), (bias, bias_layout)] = exactly(inputs)?;
        let (out, depth) = weight_layout.shape().dims2()?;
        let shape = with_last_dim(x_layout.dims(), out);
        let rows = rows_of(&shape); // N
        let y = cuda::alloc_uninit(&x.device, x.dtype(), rows * out)?;
        cuda_kernel::fill(&x.device, cuda::view(bias, bias_layout)?, cuda::whole(&y)?)?;
        let of_x = Matrix::new(cuda::view(x, x_layout)?, rows, depth); // (N, in)
        self.product
            .copy
            .add_product_on_gpu(of_x, weight, weight_layout, cuda::whole(&y)?)?;
        Ok((y, shape.into()))
    }

    fn bwd(
        &self,
        inputs: &[&Tensor],
        _y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<Vec<Option<Tensor>>> {
        let ([x, weight, bias], dy) = (exactly(inputs)?, dy.contiguous()?);
        #[cfg(feature = "cuda")]
        if dy.device().is_cuda() {
            let mut gradients = self.product.gradients(x, weight, &dy)?;
            let db = bias
                .track_op()
                .then(|| self.bias_gradient_on_gpu(bias, &dy));
            gradients.push(db.transpose()?);
            return Ok(gradients);
        }
        let db = bias.track_op().then(|| {
            for_stored!(dy.dtype(), T => {
                let dy = elements::<T>(&dy)?;
                let db = tensor::<<T as Stored>::Wide>(bias.shape(), |db| {
                    kernel::gradient::<T>(&dy, db)
                })?;
                db.to_dtype(bias.dtype())
            })
        });
        let db = db.transpose()?;
        let mut gradients = self.product.gradients(x, weight, &dy)?;
        gradients.push(db);
        Ok(gradients)
    }
}

/// The bias as y has it: rounded, where it is in f32 beside half precision.
fn stored<T: Stored>(bias: &CpuStorage, layout: &Layout) -> candle_core::Result<Vec<T>> {
    match bias.dtype() == T::DTYPE {
        true => Ok(view::<T>(bias, layout)?.to_vec()),
        false => {
            let wide = view::<f32>(bias, layout)?.iter();
            Ok(wide.map(|b| T::from_f64(f64::from(*b))).collect())
        }
    }
}
