//! What an op says of a call before it runs.

use crate::graph::{Attribute, MemoryStep, Room, Target};
use crate::probe::Operand;
use candle_core::{DType, Result, Shape, Tensor};

/// All that a trace needs of an op.
pub(crate) trait Spec {
    /// Shape and dtype of its output, from its inputs'.
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType);

    /// Its parameters.
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        Vec::new()
    }

    /// What it reads beside its inputs.
    fn reads(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// [`reads`](Self::reads) as backward has them, of these inputs: what forward has dropped is made again.
    fn reads_again(&self, _inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(self.reads())
    }

    /// What it keeps for backward beside its inputs and its output: names, shapes and dtypes.
    fn kept(&self, _inputs: &[Operand<'_>], _on: Target) -> Vec<(&'static str, Shape, DType)> {
        Vec::new()
    }

    /// An operand as its kernels read it: with its elements in order, unless they take strides.
    fn readable(&self, x: Tensor) -> Result<Tensor> {
        x.contiguous()
    }

    /// An eager forward is done: says what stays beside, hands out what the op's caller wants.
    fn has_kept(&self, _kept: &[Tensor]) {}

    /// What it holds beside tensors for as long as it is there.
    fn holds(&self) -> Option<Room> {
        None
    }

    /// Whether forward drops the one of its reads with this index.
    fn drops_read(&self, _index: usize) -> bool {
        false
    }

    /// What forward does to memory on `target`, where that is not read off its lowering: of an op that computes itself.
    /// By default it makes what it keeps and its output, and takes nothing else.
    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        made(self, inputs, target)
    }

    /// As [`forward_steps`](Self::forward_steps), of backward, where these inputs are tracked. By default it makes a
    /// gradient for each.
    fn backward_steps(
        &self,
        inputs: &[Operand<'_>],
        _tracked: &[bool],
        _target: Target,
    ) -> Vec<MemoryStep> {
        (0..inputs.len()).map(MemoryStep::Gradient).collect()
    }

    /// Drops what forward does not leave for backward.
    fn forwarded(&self) {}
}

/// Forward makes what `op` keeps, and its output.
pub(crate) fn made<S: Spec + ?Sized>(
    op: &S,
    inputs: &[Operand<'_>],
    target: Target,
) -> Vec<MemoryStep> {
    let kept = op.kept(inputs, target).len();
    let mut steps: Vec<MemoryStep> = (0..kept).map(MemoryStep::Keep).collect();
    steps.push(MemoryStep::Output);
    steps
}

/// How many elements, in f64: no overflow.
pub(crate) fn elements_of(dims: &[usize]) -> f64 {
    dims.iter().map(|dim| *dim as f64).product()
}

/// An output like the first input: what most ops have.
pub(crate) fn like_first(inputs: &[Operand<'_>]) -> (Shape, DType) {
    (inputs[0].dims.into(), inputs[0].dtype)
}

/// An operand of this shape.
pub(super) fn shaped(shape: &Shape, dtype: DType) -> Operand<'_> {
    Operand {
        dims: shape.dims(),
        dtype,
    }
}
