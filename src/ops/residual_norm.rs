//! RMSNorm on a residual stream, as plans have it: with the addition before it, and rounded for what follows.
//!
//! The gradient of what is normed is added to in place, and the output does not stay: backward, which reads the same,
//! computes it again where its gradient lay.

use super::lowering::{
    Accumulate, Calls, Kernel, Named, Signature, Slot, converted, kernel, on_gpu,
};
use crate::graph::{Attribute, Target};
use crate::kernels::cpu::rows::residual_norm::{
    self as kernel, Gradients, Inputs, Outputs, partials_len,
};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::rms_norm as cuda_kernel;
use crate::kernels::{limits, workspace};
use candle_core::DType;

/// RMSNorm of x (N, D) in f32, or of the sum of x and a branch: `y = w * s / sqrt(mean(s^2) + eps)`, s = x + branch.
///
/// Inputs: x, the branch in y's dtype if there is one, w (D) in f32. Outputs: y (N, D), which may be in half precision,
/// and s in f32 if it is a sum. Kept: rstd (N), and s; or x and the branch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ResidualNorm {
    pub eps: f64,
    /// Whether it is of a sum.
    pub adds: bool,
    /// Whether the sum stays for backward, not what it is the sum of.
    pub sum_stays: bool,
    /// Whether the gradient of a branch in half precision is needed.
    pub branch_is_wanted: bool,
}

impl ResidualNorm {
    /// The weight's place among the inputs.
    fn weight(&self) -> usize {
        1 + usize::from(self.adds)
    }

    /// N and D.
    fn sizes(&self, signature: &Signature<'_>) -> [usize; 2] {
        let width = signature.inputs[self.weight()].dims[0];
        [signature.inputs[0].rows(), width]
    }

    pub fn forward(&self, signature: &Signature<'_>) -> Calls {
        let weight = ("weight", Slot::Input(self.weight()));
        let writes = [("y", Slot::Output), ("rstd", Slot::Kept(0))];
        let (sizes, x) = (self.sizes(signature), ("x", Slot::Input(0)));
        match self.adds {
            false => Calls::default().call(norm(sizes, self.eps), [x, weight], writes),
            true => {
                let reads = [x, ("branch", Slot::Input(1)), weight];
                let writes = Named::from([("sum", Slot::Second)]).and(writes);
                Calls::default().call(add_norm(sizes, self.eps), reads, writes)
            }
        }
    }

    /// As where the sum stays.
    pub fn of_sum(self) -> Self {
        Self {
            sum_stays: true,
            ..self
        }
    }

    /// y and rstd once more, from what stays.
    pub fn again(&self, signature: &Signature<'_>) -> Calls {
        let reads = self.normed().with("weight", Slot::Input(self.weight()));
        let writes = [("y", Slot::Output), ("rstd", Slot::Kept(0))];
        Calls::default().call(norm(self.sizes(signature), self.eps), reads, writes)
    }

    /// What is normed, as it stays.
    fn normed(&self) -> Named<Slot> {
        match (self.adds, self.sum_stays) {
            (false, _) => [("x", Slot::Input(0))].into(),
            (true, true) => [("x", Slot::Second)].into(),
            (true, false) => [("x", Slot::Input(0)), ("branch", Slot::Input(1))].into(),
        }
    }

    pub fn backward(&self, signature: &Signature<'_>) -> Calls {
        let mut calls = Calls::default();
        let dx = match self.adds {
            true => Slot::SecondGradient,
            false => Slot::Gradient(0),
        };
        let is_half = signature.output.dtype != DType::F32;
        let [has_dy, _] = signature.planned.unwrap_or([true, false]);
        let copies = has_dy && self.branch_is_wanted && signature.target == Target::Cuda;
        if has_dy {
            let sizes @ [rows, width] = self.sizes(signature);
            let partials = match signature.target {
                Target::Cuda => workspace::rms_norm_partials(rows, width),
                Target::Cpu => partials_len(rows, width),
            };
            let partials = calls.scratch(&[partials], DType::F32);
            let weight = self.weight();
            let reads = self.normed().with("weight", Slot::Input(weight));
            let writes = Named::from([
                ("dy", Slot::OutputGradient),
                ("dx", dx),
                ("dweight", Slot::Gradient(weight)),
                ("partials", partials),
            ]);
            let copy = copies.then_some(Slot::Gradient(1));
            let reads = reads.with("rstd", Slot::Kept(0));
            calls.push(norm_backward(sizes), reads, writes.with_some("copy", copy));
        }
        if self.adds {
            calls.same.push((0, dx));
            match is_half {
                false => calls.same.push((1, dx)),
                true if copies => {}
                true => calls.push(converted(), [("x", dx)], [("y", Slot::Gradient(1))]),
            }
        }
        calls
    }
}

/// Reads `x` (N, D), `weight` (D) and, on a GPU where what is normed is a sum that did not stay, the `branch` that is
/// added to x (N, D); writes `y` (N, D), `rstd` (N).
fn norm([rows, width]: [usize; 2], eps: f64) -> Kernel {
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
fn add_norm([rows, width]: [usize; 2], eps: f64) -> Kernel {
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
/// was added to it (N, D); writes `dy` (N, D), which becomes the norm's output, `dx` (N, D), `dweight` (D),
/// both of which it may add to, `partials` and, on a GPU where the next product wants it, `copy`, which is dx in half
/// precision.
fn norm_backward([rows, width]: [usize; 2]) -> Kernel {
    let kernel = kernel!("rms_norm_backward", of "dy", |T, k, s| {
        let inputs = Inputs {
            x: s.x("x")?,
            weight: s.x("weight")?,
            rstd: s.x("rstd")?,
        };
        let gradients = Gradients {
            dx: s.y("dx")?,
            add_dx: s.adds(k, "dx"),
            dw: s.y("dweight")?,
            add_dw: s.adds(k, "dweight"),
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
                add_dx: l.adds(k, "dx"),
                copy: l.some_y("copy"),
                y: Some(dy), // where dy lies
                dw: l.y("dweight")?,
                add_dw: l.adds(k, "dweight"),
            };
            cuda_kernel::backward(l.gpu, inputs, gradients, l.y("partials")?)
        }),
    };
    let kernel = sized(kernel, [rows, width]).in_place();
    let sums = ["dx", "dweight"].into_iter();
    sums.fold(kernel, |kernel, sum| kernel.summing(sum, Accumulate::Never))
}

fn sized(kernel: Kernel, [rows, width]: [usize; 2]) -> Kernel {
    kernel.sized([("rows", rows), ("width", width)])
}
