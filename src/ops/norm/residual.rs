//! A norm on the residual stream of a plan, fused with the addition before it and the cast after it.
//!
//! Backward adds to the gradient of the residual stream in place. The output is not saved: backward recomputes it in
//! the buffer of its gradient.

use super::{backward_kernel, forward_kernel, partials};
use crate::graph::{Attribute, Target};
use crate::kernels::Norm;
use crate::ops::lowering::{Calls, Kernel, Named, Signature, Slot, converted};
use candle_core::DType;

/// A norm of x (N, D) in f32, or of s = x + branch: [`rms_norm`](crate::ops::rms_norm()) or
/// [`layer_norm`](crate::ops::layer_norm()) of s.
///
/// Inputs: x; the branch (N, D) in y's dtype, if there is one; w (D) and, for LayerNorm, b (D) in f32. Outputs: y (N,
/// D), possibly in half precision; s in f32, if there is a branch. Saved for backward: the statistics of each row, and
/// s, or x and the branch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ResidualNorm {
    pub norm: Norm,
    pub eps: f64,
    /// Whether there is a branch.
    pub adds: bool,
    /// Whether s is saved for backward; if not, x and the branch are.
    pub sum_stays: bool,
}

impl ResidualNorm {
    /// Returns the input that is w.
    fn weight(&self) -> usize {
        1 + usize::from(self.adds)
    }

    fn sizes(&self, signature: &Signature<'_>) -> [usize; 2] {
        let width = signature.inputs[self.weight()].dims[0];
        [signature.inputs[0].rows(), width]
    }

    /// Returns w and b as operands.
    fn affine(&self) -> Named<Slot> {
        let weight = self.weight();
        let bias = (self.norm == Norm::Layer).then_some(Slot::Input(weight + 1));
        Named::from([("weight", Slot::Input(weight))]).with_some("bias", bias)
    }

    fn kernel(&self, signature: &Signature<'_>) -> Kernel {
        let [rows, width] = self.sizes(signature);
        let kernel = forward_kernel(self.norm, width).sized([("rows", rows), ("width", width)]);
        kernel.with("eps", Attribute::Number(self.eps))
    }

    pub fn forward(&self, signature: &Signature<'_>) -> Calls {
        let branch = self.adds.then_some(Slot::Input(1));
        let reads = Named::from([("x", Slot::Input(0))]).with_some("branch", branch);
        let sum = self.adds.then_some(Slot::Second);
        let writes = Named::from([]).with_some("sum", sum);
        let writes = writes
            .with("y", Slot::Output)
            .with("statistics", Slot::Saved(0));
        let kernel = match (self.norm, self.adds) {
            (_, false) => self.kernel(signature),
            (Norm::Rms, true) => self.kernel(signature).named("add_rms_norm"),
            (Norm::OffsetRms, true) => self.kernel(signature).named("add_offset_rms_norm"),
            (Norm::Layer, true) => self.kernel(signature).named("add_layer_norm"),
        };
        Calls::default().call(kernel, reads.and(self.affine()), writes)
    }

    /// Returns the same norm with s saved.
    pub fn of_sum(self) -> Self {
        Self {
            sum_stays: true,
            ..self
        }
    }

    /// Recomputes y and the statistics from what is saved.
    pub fn recompute_output(&self, signature: &Signature<'_>) -> Calls {
        let reads = self.normed().and(self.affine());
        let writes = [("y", Slot::Output), ("statistics", Slot::Saved(0))];
        Calls::default().call(self.kernel(signature), reads, writes)
    }

    /// Returns s as operands: itself, or x and the branch.
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
        let has_dy = signature.plan.is_none_or(|plan| plan.has_grad[0]);
        let on_gpu = signature.target == Target::Cuda;
        let copies = has_dy && self.adds && is_half && on_gpu && signature.needs_grad(1);
        if has_dy {
            let sizes @ [rows, width] = self.sizes(signature);
            let partials = partials(self.norm, signature, &mut calls, sizes);
            let weight = self.weight();
            let bias = (self.norm == Norm::Layer).then_some(Slot::Gradient(weight + 1));
            let reads = self.normed().and(self.affine());
            let writes = Named::from([
                ("dy", Slot::OutputGradient),
                ("dx", dx),
                ("dweight", Slot::Gradient(weight)),
            ]);
            let writes = writes.with_some("dbias", bias).with("partials", partials);
            let copy = copies.then_some(Slot::Gradient(1));
            let kernel = backward_kernel(self.norm, width).in_place();
            let kernel = kernel.sized([("rows", rows), ("width", width)]);
            let reads = reads.with("statistics", Slot::Saved(0));
            calls.push(kernel, reads, writes.with_some("copy", copy));
        }
        if self.adds {
            calls.aliases.push((0, dx));
            match is_half {
                false => calls.aliases.push((1, dx)),
                true if copies => {}
                true => calls.push(converted(), [("x", dx)], [("y", Slot::Gradient(1))]),
            }
        }
        calls
    }
}
