//! Functions that are recomputed in backward, instead of keeping their graph.
//!
//! A whole function becomes one op, which keeps the means to make its graph again. What the function depends on is
//! found in that graph: its inputs, and the variables that it reads.

mod run;
mod segment;

use crate::grad::is_grad_enabled;
use crate::{Error, Result, graph};
use candle_core::Tensor;
use run::{Input, Run};
use segment::{Conditions, Segment};

/// `f(inputs)`, of which nothing is kept for backward but the inputs: backward runs `f` again, and then back through it
/// (activation checkpointing, as PyTorch's `torch.utils.checkpoint`).
///
/// `f` may be any composition of this crate's ops and candle's own. The variables that it reads need not be named: they
/// are found in its graph, and each gets its gradient. Tensors with a graph of their own should come as `inputs`; one
/// that `f` captures is differentiated too, but back through all of its past. Calls nest.
///
/// Gradients have the bits that they would have without, where an input or a variable is used by `f` alone; where
/// others use it too, the sum of its gradients may be taken in another order. For that `f` runs again under what held
/// in forward, wherever backward is called: the autocast policy, the kernel policy. It must compute the same again;
/// values that have changed in between, a weight's say, give gradients at the new ones. Backward may be called again.
///
/// Under [`no_grad`](crate::no_grad()) it is `f`.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use tallow::{nn, ops};
///
/// let x = Var::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let w = Var::ones((5, 3), DType::F32, &Device::Cpu)?;
/// let weight = w.clone(); // the same variable
/// let y = nn::checkpoint(move |[x]| ops::relu(&ops::linear(x, &weight)?), [&x])?;
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?, [[5.0; 3]; 2]);
/// assert_eq!(gradients.get(&w).unwrap().to_vec2::<f32>()?, [[2.0; 3]; 5]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of `f`. Backward's: those of `f` run again, and [`Error::Order`] if it then reads other variables or makes
/// another shape or dtype.
pub fn checkpoint<const N: usize>(
    f: impl Fn([&Tensor; N]) -> Result<Tensor> + Send + Sync + 'static,
    inputs: [&Tensor; N],
) -> Result<Tensor> {
    if !is_grad_enabled() {
        return f(inputs);
    }
    if graph::is_tracing() {
        return graph::checkpoint(inputs, f);
    }
    let f = move |inputs: &[Tensor]| f(std::array::from_fn(|i| &inputs[i]));
    let conditions = Conditions::here();
    let kept = inputs.map(Input::new);
    let run = Run::new(&f, kept.iter().cloned())?;
    let sources = run.sources();
    let output = run.into_output(); // and its graph is gone
    let function = (Box::new(f) as _, kept.into());
    Segment::apply(function, conditions, output, sources, &inputs)
}

/// As ranges, errors and traces have it.
const NAME: &str = graph::CHECKPOINT;

fn refuse(problem: impl Into<String>, hint: &str) -> Error {
    Error::order(NAME, problem, hint)
}
