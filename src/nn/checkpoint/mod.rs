//! Functions that are recomputed in backward instead of saving their graph.
//!
//! The function becomes one op, which can build the graph again. The inputs of the op are found in that graph: the
//! inputs of the function, and the variables that it reads.

mod run;
mod segment;

use crate::grad::is_grad_enabled;
use crate::{Error, Result, graph};
use candle_core::Tensor;
use run::{Input, Run};
use segment::{Conditions, Segment};

/// Computes `f(inputs)` and saves only the inputs; backward runs `f` again and differentiates it.
///
/// This is activation checkpointing, as in PyTorch's `torch.utils.checkpoint`. `f` may combine ops of this crate and of
/// candle. The variables that it reads are found in its graph and get their gradients. Pass tensors that have a graph
/// as `inputs`: a captured one is differentiated through its whole graph. Calls may be nested. Under
/// [`no_grad`](crate::no_grad()) this is a call of `f`.
///
/// The gradient of an input or a variable has the same bits as without checkpointing if only `f` uses it; otherwise the
/// sum of its gradients may be taken in another order. Backward runs `f` under the autocast and kernel policies of
/// forward. `f` must be deterministic. If a weight has changed since, the gradients are those at the new value.
/// Backward may be called more than once.
///
/// Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
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
/// Errors of `f`. In backward: errors of `f`, and [`Error::Order`] if it reads other variables or returns another shape
/// or dtype than in forward.
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
    let conditions = Conditions::current();
    let kept = inputs.map(Input::new);
    let run = Run::new(&f, kept.iter().cloned())?;
    let sources = run.sources();
    let output = run.into_output(); // its graph is freed
    let function = (Box::new(f) as _, kept.into());
    Segment::apply(function, conditions, output, sources, &inputs)
}

/// The name of the op in ranges, errors and traces.
const NAME: &str = graph::CHECKPOINT;

fn refuse(problem: impl Into<String>, hint: &str) -> Error {
    Error::order(NAME, problem, hint)
}
