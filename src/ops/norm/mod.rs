//! The kernels of RMSNorm and LayerNorm, for the ops and for fused nodes of plans.

mod residual;

pub(crate) use residual::ResidualNorm;

#[cfg(feature = "cuda")]
use super::lowering::Operands;
use super::lowering::{Accumulate, Calls, Kernel, Named, Signature, Slices, Slot, kernel, on_gpu};
use super::record::Spec;
use crate::graph::{Attribute, Target};
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::rows::norm as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::norm as cuda_kernel;
use crate::kernels::{Norm, limits, workspace};
use crate::probe::Operand;
use candle_core::{DType, Result, Shape, WithDType};

/// A call of a norm as an op. It is small, because the graph of a model keeps many of them.
pub(super) struct NormCall {
    pub norm: Norm,
    pub eps: f64,
}

impl Spec for NormCall {
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        vec![("eps", Attribute::Number(self.eps))]
    }

    /// Saves for each row 1 / sqrt(mean(x^2) + eps), or the mean and 1 / sqrt(var(x) + eps).
    fn saved(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let (rows, dtype) = (inputs[0].rows(), inputs[0].wide_dtype());
        match self.norm {
            Norm::Rms | Norm::OffsetRms => vec![("rstd", rows.into(), dtype)],
            Norm::Layer => vec![("mean and rstd", (rows, 2).into(), dtype)],
        }
    }
}

/// Returns the forward of a norm as an op. Inputs: x, w and, for LayerNorm, b.
pub(super) fn forward(norm: Norm, signature: &Signature<'_>) -> Calls {
    let mut calls = Calls::default();
    let affine = |calls: &mut Calls, input| calls.widened_on_gpu(signature, input);
    let mut reads = Named::from([("x", Slot::Input(0))]);
    reads.push("weight", affine(&mut calls, 1));
    if norm == Norm::Layer {
        reads.push("bias", affine(&mut calls, 2));
    }
    let writes = [("y", Slot::Output), ("statistics", Slot::Saved(0))];
    let kernel = forward_kernel(norm, signature.inputs[1].dims[0]);
    calls.call(kernel.with_all(signature.attributes), reads, writes)
}

/// Returns the backward of a norm as an op.
pub(super) fn backward(norm: Norm, signature: &Signature<'_>) -> Calls {
    let mut calls = Calls::default();
    let reads = [
        ("dy", Slot::OutputGradient),
        ("x", Slot::Input(0)),
        ("weight", calls.widened_on_gpu(signature, 1)),
        ("statistics", Slot::Saved(0)),
    ];
    let (rows, width) = (signature.inputs[0].rows(), signature.inputs[1].dims[0]);
    let partials = partials(norm, signature, &mut calls, [rows, width]);
    let wide: &[_] = match norm {
        Norm::Rms | Norm::OffsetRms => &[("dweight", 1)],
        Norm::Layer => &[("dweight", 1), ("dbias", 2)],
    };
    calls.wide_gradients(
        signature,
        backward_kernel(norm, width),
        reads,
        wide,
        partials,
    )
}

/// Returns scratch for the partial sums of rows.
fn partials(
    norm: Norm,
    signature: &Signature<'_>,
    calls: &mut Calls,
    [rows, width]: [usize; 2],
) -> Slot {
    let elements = match signature.target {
        Target::Cuda => workspace::norm_partials(norm, rows, width),
        Target::Cpu => kernel::partials_len(norm, rows, width),
    };
    calls.scratch(&[elements], signature.inputs[0].wide_dtype())
}

/// Builds the kernel of one norm. `$on_cpu` computes it in the dtype of the operand `$of`, with x in that dtype or in
/// the compute dtype; `$on_gpu` is added if rows are not too wide for GPUs.
macro_rules! kernel_of {
    ($norm:ident, $name:literal of $of:literal, $width:expr, $on_cpu:ident, $on_gpu:ident) => {{
        let kernel = kernel!($name, of $of, |T, k, s| match s.dtype_of("x")? == T::DTYPE {
            true => $on_cpu::<T, T>(Norm::$norm, k, s)?,
            false => $on_cpu::<<T as Stored>::Wide, T>(Norm::$norm, k, s)?,
        });
        match $width <= limits::NORM_WIDTH {
            true => on_gpu!(kernel, |k, l| $on_gpu(Norm::$norm, k, l)),
            false => kernel,
        }
    }};
}

/// Reads `x` (N, D), optionally a `branch` (N, D) in y's dtype, `weight` (D) and, for LayerNorm, `bias` (D). Writes `y`
/// (N, D), `statistics` (N, 1 or 2) and, if there is a branch, `sum` = x + branch (N, D), which is optional on GPUs. x
/// is in y's dtype or in the dtype of the computation.
fn forward_kernel(norm: Norm, width: usize) -> Kernel {
    fn on_cpu<X: Stored<Wide = Y::Wide>, Y: Stored>(
        norm: Norm,
        k: &Kernel,
        s: &Slices<'_>,
    ) -> Result<()> {
        let (weight, bias) = (s.wide_x("weight")?, bias_of::<Y::Wide>(s)?);
        let inputs = kernel::Inputs {
            x: s.x::<X>("x")?,
            weight: &weight,
            bias: &bias,
        };
        let branch = match s.some_x::<Y>("branch")? {
            Some(branch) => Some(kernel::Branch {
                branch,
                sum: s.y("sum")?,
            }),
            None => None,
        };
        let outputs = kernel::Outputs {
            y: s.y::<Y>("y")?,
            statistics: s.y("statistics")?,
        };
        kernel::forward(norm, k.number("eps")?, inputs, branch, outputs);
        Ok(())
    }
    match norm {
        Norm::Rms => kernel_of!(Rms, "rms_norm" of "y", width, on_cpu, forward_on_gpu),
        Norm::OffsetRms => {
            kernel_of!(OffsetRms, "offset_rms_norm" of "y", width, on_cpu, forward_on_gpu)
        }
        Norm::Layer => kernel_of!(Layer, "layer_norm" of "y", width, on_cpu, forward_on_gpu),
    }
}

/// Returns the bias of LayerNorm, or an empty slice.
fn bias_of<'a, R: crate::kernels::cpu::Real>(s: &Slices<'a>) -> Result<std::borrow::Cow<'a, [R]>> {
    match s.has_x("bias") {
        true => s.wide_x("bias"),
        false => Ok(Default::default()),
    }
}

#[cfg(feature = "cuda")]
fn forward_on_gpu(norm: Norm, k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let outputs = cuda_kernel::Outputs {
        sum: l.some_y("sum"),
        y: l.y("y")?,
        statistics: l.y("statistics")?,
    };
    cuda_kernel::forward(l.gpu, norm, k.number("eps")?, inputs_on_gpu(l)?, outputs)
}

#[cfg(feature = "cuda")]
fn inputs_on_gpu<'a>(l: &Operands<'a>) -> Result<cuda_kernel::Inputs<'a>> {
    Ok(cuda_kernel::Inputs {
        x: l.x("x")?,
        branch: l.some_x("branch"),
        weight: l.x("weight")?,
        bias: l.some_x("bias"),
    })
}

/// Reads `dy` (N, D), or overwrites it with the norm's output. Reads `x` (N, D), on a GPU optionally the `branch` that
/// is added to it, `weight` (D), `statistics`, and `bias` (D) if LayerNorm's output is recomputed. Writes `dx` (N, D),
/// `dweight` (D) and `dbias` (D), or adds to them, `partials`, and on a GPU optionally `copy`, dx in dy's dtype.
fn backward_kernel(norm: Norm, width: usize) -> Kernel {
    fn on_cpu<X: Stored<Wide = Y::Wide>, Y: Stored>(
        norm: Norm,
        k: &Kernel,
        s: &Slices<'_>,
    ) -> Result<()> {
        let (weight, bias) = (s.wide_x("weight")?, bias_of::<Y::Wide>(s)?);
        let dy = match s.some_x::<Y>("dy")? {
            Some(dy) => kernel::OutputGradient::Read(dy),
            None => kernel::OutputGradient::Becomes(s.y("dy")?),
        };
        let inputs = kernel::Inputs {
            x: s.x::<X>("x")?,
            weight: &weight,
            bias: &bias,
        };
        let gradients = kernel::Gradients {
            dx: s.y("dx")?,
            add_dx: s.adds(k, "dx"),
            dw: s.y("dweight")?,
            add_dw: s.adds(k, "dweight"),
            db: s.some_y("dbias")?.unwrap_or_default(),
            add_db: s.adds(k, "dbias"),
        };
        let (statistics, partials) = (s.x("statistics")?, s.y("partials")?);
        kernel::backward(norm, dy, inputs, statistics, gradients, partials);
        Ok(())
    }
    let kernel = match norm {
        Norm::Rms => kernel_of!(Rms, "rms_norm_backward" of "dy", width, on_cpu, backward_on_gpu),
        Norm::OffsetRms => {
            kernel_of!(OffsetRms, "offset_rms_norm_backward" of "dy", width, on_cpu, backward_on_gpu)
        }
        Norm::Layer => {
            kernel_of!(Layer, "layer_norm_backward" of "dy", width, on_cpu, backward_on_gpu)
        }
    };
    let sums: &[&'static str] = match norm {
        Norm::Rms | Norm::OffsetRms => &["dx", "dweight"],
        Norm::Layer => &["dx", "dweight", "dbias"],
    };
    let sums = sums.iter();
    sums.fold(kernel, |kernel, sum| kernel.summing(sum, Accumulate::Never))
}

#[cfg(feature = "cuda")]
fn backward_on_gpu(norm: Norm, k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let becomes = l.some_y("dy");
    let dy = match becomes {
        Some(dy) => dy,
        None => l.x("dy")?,
    };
    let gradients = cuda_kernel::Gradients {
        dx: l.y("dx")?,
        add_dx: l.adds(k, "dx"),
        copy: l.some_y("copy"),
        y: becomes, // in the place of dy
        dw: l.y("dweight")?,
        add_dw: l.adds(k, "dweight"),
        db: l.some_y("dbias"),
        add_db: l.adds(k, "dbias"),
    };
    let (read, partials) = ([dy, l.x("statistics")?], l.y("partials")?);
    cuda_kernel::backward(l.gpu, norm, read, inputs_on_gpu(l)?, gradients, partials)
}
