//! Custom ops of candle's, in its graph or outside of it under `no_grad`, with a range around their passes.

use super::spec::Spec;
use crate::grad::is_grad_enabled;
use crate::graph;
use crate::probe::{self, Kind, Operand, Operands, Path};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape,
    Tensor,
};

/// An op that says when it runs, forward and backward, and where it was put into the graph.
struct Ranged<C> {
    op: C,
    path: Path,
}

impl<C> Ranged<C> {
    fn new(name: &'static str, op: C) -> Self {
        let path = probe::op_path(name);
        Self { op, path }
    }

    /// Runs `forward`, which gives a storage and its shape.
    fn forward<S: BackendStorage>(
        &self,
        name: &'static str,
        inputs: &[(&S, &Layout)],
        forward: impl FnOnce() -> Result<(S, Shape)>,
    ) -> Result<(S, Shape)> {
        let range = probe::op(Kind::Op, name, self.path);
        let (storage, shape) = forward()?;
        if probe::is_listening() {
            let operand = |storage: &S, dims| Operand {
                dims,
                dtype: storage.dtype(),
            };
            let inputs = inputs.iter();
            let inputs: Vec<_> = inputs.map(|(s, l)| operand(s, l.dims())).collect();
            range.leave(Operands {
                inputs: &inputs,
                output: operand(&storage, shape.dims()),
            });
        }
        Ok((storage, shape))
    }

    /// Runs `backward`.
    fn backward<G>(
        &self,
        name: &'static str,
        inputs: &[&Tensor],
        output: &Tensor,
        backward: impl FnOnce() -> Result<G>,
    ) -> Result<G> {
        let range = probe::op(Kind::OpBackward, name, self.path);
        let gradients = backward()?;
        if probe::is_listening() {
            leave(range, inputs, output);
        }
        Ok(gradients)
    }
}

/// For a number of inputs: the custom op of [`Ranged`], and the function that applies an op.
macro_rules! ops {
    (
        $Op:ident, $apply:ident, $in_graph:ident, $alone:ident, $Gradients:ty,
        $first:ident $($rest:ident)*, $($storage:ident $layout:ident)+
    ) => {
        impl<C: $Op> $Op for Ranged<C> {
            fn name(&self) -> &'static str {
                self.op.name()
            }

            ops!(forward cpu_fwd CpuStorage $($storage $layout)+);
            ops!(forward cuda_fwd CudaStorage $($storage $layout)+);
            ops!(forward metal_fwd MetalStorage $($storage $layout)+);

            fn bwd(
                &self,
                $first: &Tensor,
                $($rest: &Tensor,)*
                y: &Tensor,
                dy: &Tensor,
            ) -> Result<$Gradients> {
                self.backward(self.op.name(), &[$first, $($rest),*], y, || {
                    self.op.bwd($first, $($rest,)* y, dy)
                })
            }
        }

        /// Applies `op`, or writes the call down in the trace that is open.
        pub(crate) fn $apply<C: Spec + $Op + Send + Sync + 'static>(
            $first: &Tensor,
            $($rest: &Tensor,)*
            op: C,
        ) -> Result<Tensor> {
            let name = op.name();
            let inputs = [$first, $($rest),*];
            if graph::is_tracing() {
                return Ok(graph::record(name, op, &inputs, false)?);
            }
            apply(
                Ranged::new(name, op),
                |op| $first.$in_graph($($rest,)* op),
                |op| $first.$alone($($rest,)* op),
            )
            .map_err(|error| graph::refuse_hollow(name, &inputs, error))
        }
    };
    (forward $forward:ident $Storage:ident $($storage:ident $layout:ident)+) => {
        fn $forward(&self, $($storage: &$Storage, $layout: &Layout),+) -> Result<($Storage, Shape)> {
            self.forward(self.op.name(), &[$(($storage, $layout)),+], || {
                self.op.$forward($($storage, $layout),+)
            })
        }
    };
}

ops!(CustomOp1, apply1, apply_op1, apply_op1_no_bwd, Option<Tensor>, x, s l);
ops!(CustomOp2, apply2, apply_op2, apply_op2_no_bwd, (Option<Tensor>, Option<Tensor>), x1 x2, s1 l1 s2 l2);
ops!(
    CustomOp3, apply3, apply_op3, apply_op3_no_bwd, (Option<Tensor>, Option<Tensor>, Option<Tensor>),
    x1 x2 x3, s1 l1 s2 l2 s3 l3
);

/// Runs `op` `in_graph`, or `alone` under `no_grad`.
fn apply<C>(
    op: Ranged<C>,
    in_graph: impl FnOnce(Ranged<C>) -> Result<Tensor>,
    alone: impl FnOnce(&Ranged<C>) -> Result<Tensor>,
) -> Result<Tensor> {
    let path = op.path;
    let y = match is_grad_enabled() {
        true => in_graph(op)?,
        false => alone(&op)?,
    };
    probe::produced(path, &y);
    Ok(y)
}

/// Ends an op's range, and says what it has worked on.
pub(super) fn leave(range: probe::RangeGuard, inputs: &[&Tensor], output: &Tensor) {
    let inputs: Vec<Operand<'_>> = inputs.iter().map(|input| (*input).into()).collect();
    range.leave(Operands {
        inputs: &inputs,
        output: output.into(),
    });
}
