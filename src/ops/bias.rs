//! Kernels of a linear layer's bias.

use super::cpu::for_stored;
use super::lowering::{
    Accumulate, Calls, Kernel, Signature, Slot, Workspace, converted, kernel, on_gpu,
};
use crate::graph::Target;
use crate::kernels::cpu::parallel::block_sums;
use crate::kernels::cpu::{Stored, rows::bias as kernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::bias as cuda_kernel;
use crate::kernels::workspace;
use candle_core::{DType, WithDType};

/// Reads a bias (out), in y's dtype or in f32; writes it to every row of y (N, out).
pub(super) fn bias() -> Kernel {
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

/// Reads dy (N, out); writes dbias (out), the sum of its rows in the dtype `wide`, and on a GPU `partials`. N is
/// `rows`, out is `columns`.
fn bias_gradient(rows: usize, columns: usize, wide: DType) -> Kernel {
    let kernel = kernel!("bias_backward", |T, k, s| {
        kernel::gradient::<T>(s.x("dy")?, s.y("dbias")?, s.adds(k, "dbias"));
    });
    let kernel = kernel.with_workspace(Workspace {
        what: "partial sums of a bias",
        formula: "BTD / 32",
        elements: block_sums(rows, columns),
        element_bytes: wide.size_in_bytes(),
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (dy, db, adds) = (l.x("dy")?, l.y("dbias")?, l.adds(k, "dbias"));
        cuda_kernel::gradient(l.gpu, dy, db, adds, l.y("partials")?)
    });
    kernel.summing("dbias", Accumulate::Never)
}

/// Adds the calls that compute the bias gradient, in the bias's dtype.
pub(super) fn push_bias_gradient(signature: &Signature<'_>, calls: &mut Calls) {
    let (bias, wide) = (&signature.inputs[2], signature.output.wide_dtype());
    let sum = match bias.dtype == wide {
        true => Slot::Gradient(2),
        false => calls.scratch(bias.dims, wide),
    };
    let mut writes = vec![("dbias", sum)];
    if signature.target == Target::Cuda {
        let partials = workspace::bias_backward(signature.output.rows(), bias.dims[0]);
        writes.push(("partials", calls.scratch(&[partials], DType::F32)));
    }
    let kernel = bias_gradient(signature.output.rows(), bias.dims[0], wide);
    calls.push(kernel, [("dy", Slot::OutputGradient)], writes);
    if bias.dtype != wide {
        calls.push(converted(), [("x", sum)], [("y", Slot::Gradient(2))]);
    }
}
