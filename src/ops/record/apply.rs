//! Ops as custom ops of candle's, in its graph or outside of it under `no_grad`, with a range around their passes.

use super::spec::Spec;
use crate::grad::is_grad_enabled;
use crate::graph;
use crate::probe::{self, Kind, Operand, Operands, Path};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape,
    Tensor, bail,
};

/// The inputs of a forward, where they lie.
pub(crate) type Storages<'a, S> = &'a [(&'a S, &'a Layout)];

/// The output of a forward, and its shape.
pub(crate) type Made<S> = Result<(S, Shape)>;

/// What computes an op of one, two or three inputs, all on one device.
pub(crate) trait Op: Send + Sync + 'static {
    /// As ranges, errors and nodes have it.
    fn name(&self) -> &'static str;

    /// The output, on the CPU.
    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage>;

    /// The output, on an NVIDIA GPU.
    fn cuda_fwd(&self, _inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        bail!("{} has no kernel for NVIDIA GPUs", self.name())
    }

    /// The output, on a Metal GPU.
    fn metal_fwd(&self, _inputs: Storages<'_, MetalStorage>) -> Made<MetalStorage> {
        bail!("{} has no kernel for Metal GPUs", self.name())
    }

    /// A gradient for each input, from the output and its gradient.
    fn bwd(&self, inputs: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// As many as an op has of each: inputs, gradients.
pub(crate) fn exactly<const N: usize, T>(all: impl TryInto<[T; N]>) -> Result<[T; N]> {
    match all.try_into() {
        Ok(all) => Ok(all),
        Err(_) => bail!("an op of {N} inputs was given another number of operands"),
    }
}

/// An op that says when it runs, forward and backward, and where it was put into the graph.
struct Ranged<C> {
    op: C,
    path: Path,
}

impl<C: Op> Ranged<C> {
    /// Runs `forward` of the op.
    fn forward<S: BackendStorage>(
        &self,
        inputs: Storages<'_, S>,
        forward: fn(&C, Storages<'_, S>) -> Made<S>,
    ) -> Made<S> {
        let range = probe::op(Kind::Op, self.op.name(), self.path);
        let (storage, shape) = forward(&self.op, inputs)?;
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

    fn backward<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let range = probe::op(Kind::OpBackward, self.op.name(), self.path);
        let gradients = self.op.bwd(&inputs, y, dy)?;
        if probe::is_listening() {
            leave(range, &inputs, y);
        }
        exactly(gradients)
    }
}

/// candle's trait for a number of inputs.
macro_rules! custom_op {
    ($Op:ident, $given:ident => $gradients:expr, $Gradients:ty, $($x:ident $storage:ident $layout:ident)+) => {
        impl<C: Op> $Op for Ranged<C> {
            fn name(&self) -> &'static str {
                self.op.name()
            }

            custom_op!(forward cpu_fwd CpuStorage $($storage $layout)+);
            custom_op!(forward cuda_fwd CudaStorage $($storage $layout)+);
            custom_op!(forward metal_fwd MetalStorage $($storage $layout)+);

            fn bwd(&self, $($x: &Tensor,)+ y: &Tensor, dy: &Tensor) -> Result<$Gradients> {
                let $given = self.backward([$($x),+], y, dy)?;
                Ok($gradients)
            }
        }
    };
    (forward $forward:ident $Storage:ident $($storage:ident $layout:ident)+) => {
        fn $forward(&self, $($storage: &$Storage, $layout: &Layout),+) -> Made<$Storage> {
            self.forward(&[$(($storage, $layout)),+], C::$forward)
        }
    };
}

custom_op!(CustomOp1, one => one.into_iter().flatten().next(), Option<Tensor>, x s l);
custom_op!(CustomOp2, two => two.into(), (Option<Tensor>, Option<Tensor>), x1 s1 l1 x2 s2 l2);
custom_op!(
    CustomOp3, three => three.into(), (Option<Tensor>, Option<Tensor>, Option<Tensor>),
    x1 s1 l1 x2 s2 l2 x3 s3 l3
);

/// Applies `op` to `inputs`, or writes the call down in the trace that is open.
pub(crate) fn apply<C: Spec + Op>(inputs: &[&Tensor], op: C) -> Result<Tensor> {
    match graph::is_tracing() {
        true => Ok(graph::record(op.name(), op, inputs, false)?),
        false => applied(inputs, op),
    }
}

/// Applies `op` to `inputs`: outside of traces.
pub(super) fn applied<C: Op>(inputs: &[&Tensor], op: C) -> Result<Tensor> {
    let name = op.name();
    let path = probe::op_path(name);
    let op = Ranged { op, path };
    let y = match (is_grad_enabled(), inputs) {
        (true, [x]) => x.apply_op1(op),
        (true, [x1, x2]) => x1.apply_op2(x2, op),
        (true, [x1, x2, x3]) => x1.apply_op3(x2, x3, op),
        (false, [x]) => x.apply_op1_no_bwd(&op),
        (false, [x1, x2]) => x1.apply_op2_no_bwd(x2, &op),
        (false, [x1, x2, x3]) => x1.apply_op3_no_bwd(x2, x3, &op),
        _ => bail!("{name}: an op of {} inputs", inputs.len()),
    };
    let y = y.map_err(|error| graph::refuse_hollow(name, inputs, error))?;
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
