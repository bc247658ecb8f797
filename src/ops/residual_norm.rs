//! RMSNorm on a residual stream, as plans have it: x stays in the wide dtype, the norm may be rounded for what follows.

use super::lowering::{Accumulate, Kernel, kernel, on_gpu};
use crate::graph::Attribute;
use crate::kernels::cpu::rows::residual_norm::{self as kernel, Gradients, Inputs, Outputs};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::rms_norm as cuda_kernel;
use crate::kernels::limits;

/// Reads `x` (N, D), `weight` (D) and, on a GPU where what is normed is a sum that did not stay, the `branch` that is
/// added to x (N, D); writes `y` (N, D), `rstd` (N).
pub(crate) fn norm([rows, width]: [usize; 2], eps: f64) -> Kernel {
    let kernel = kernel!("rms_norm", of "y", |T, k, s| {
        let (x, weight) = (s.x("x")?, s.x("weight")?);
        kernel::forward(x, weight, k.number("eps")?, s.y::<T>("y")?, s.y("rstd")?);
    });
    let kernel = match width <= limits::RMS_NORM_WIDTH {
        false => kernel,
        true => on_gpu!(kernel, |k, l| {
            let (x, weight, eps) = (l.x("x")?, l.x("weight")?, k.number("eps")?);
            let (y, rstd) = (l.y("y")?, l.y("rstd")?);
            match l.some_x("branch") {
                None => cuda_kernel::forward(l.gpu, x, weight, eps, y, rstd),
                Some(branch) => {
                    cuda_kernel::add_forward(l.gpu, [x, branch, weight], eps, None, [y, rstd])
                }
            }
        }),
    };
    sized(kernel, [rows, width]).with("eps", Attribute::Number(eps))
}

/// The norm of a sum. Reads `x` (N, D), `branch` (N, D), `weight` (D); writes `sum`, x + branch (N, D), `y` (N, D),
/// `rstd` (N).
pub(crate) fn add_norm([rows, width]: [usize; 2], eps: f64) -> Kernel {
    let kernel = kernel!("add_rms_norm", of "y", |T, k, s| {
        let outputs = Outputs {
            sum: s.y("sum")?,
            y: s.y("y")?,
            rstd: s.y("rstd")?,
        };
        let (x, branch, weight) = (s.x("x")?, s.x::<T>("branch")?, s.x("weight")?);
        kernel::add_forward(x, branch, weight, k.number("eps")?, outputs);
    });
    let kernel = match width <= limits::RMS_NORM_WIDTH {
        false => kernel,
        true => on_gpu!(kernel, |k, l| {
            let reads = [l.x("x")?, l.x("branch")?, l.x("weight")?];
            let (sum, writes) = (l.y("sum")?, [l.y("y")?, l.y("rstd")?]);
            cuda_kernel::add_forward(l.gpu, reads, k.number("eps")?, Some(sum), writes)
        }),
    };
    sized(kernel, [rows, width]).with("eps", Attribute::Number(eps))
}

/// Reads `x` (N, D), `weight` (D), `rstd` (N) and, on a GPU where x is not the sum that was normed, the `branch` that
/// was added to it (N, D); writes `dy` (N, D), which becomes the norm's output, `dx` (N, D), which is added to where it
/// `adds_dx`, `dweight` (D), `partials` and, on a GPU where the next product wants it, `copy`, which is dx in half
/// precision.
pub(crate) fn norm_backward(
    [rows, width]: [usize; 2],
    adds_dx: bool,
    accumulate: Accumulate,
) -> Kernel {
    let kernel = kernel!("rms_norm_backward", of "dy", |T, k, s| {
        let inputs = Inputs {
            x: s.x("x")?,
            weight: s.x("weight")?,
            rstd: s.x("rstd")?,
        };
        let gradients = Gradients {
            dx: s.y("dx")?,
            add_dx: k.flag("adds_dx"),
            dw: s.y("dweight")?,
            add_dw: s.adds(k),
        };
        kernel::backward(inputs, s.y::<T>("dy")?, gradients, s.y("partials")?);
    });
    let kernel = match width <= limits::RMS_NORM_WIDTH {
        false => kernel,
        true => on_gpu!(kernel, |k, l| {
            let dy = l.y("dy")?;
            let inputs = cuda_kernel::Inputs {
                dy,
                x: l.x("x")?,
                branch: l.some_x("branch"),
                weight: l.x("weight")?,
                rstd: l.x("rstd")?,
            };
            let gradients = cuda_kernel::Gradients {
                dx: l.y("dx")?,
                add_dx: k.flag("adds_dx"),
                copy: l.some_y("copy"),
                y: Some(dy), // where dy lies
                dw: l.y("dweight")?,
                add_dw: l.adds(k),
            };
            cuda_kernel::backward(l.gpu, inputs, gradients, l.y("partials")?)
        }),
    };
    let kernel = sized(kernel, [rows, width]).with("adds_dx", Attribute::Flag(adds_dx));
    kernel.in_place().accumulating(accumulate)
}

fn sized(kernel: Kernel, [rows, width]: [usize; 2]) -> Kernel {
    kernel.sized([("rows", rows), ("width", width)])
}
