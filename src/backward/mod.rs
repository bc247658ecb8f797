//! Backward that frees the graph as it proceeds. The graph is candle's; `ops` records this crate's ops on a tape.

mod sums;

use crate::ops::record::{Attach, Slot, node_of, token};
use crate::{Error, Result};
use candle_core::{Tensor, backprop::GradStore};
use std::sync::Arc;
use sums::Sums;

pub(crate) use sums::empty_store;

/// Computes the gradients of `loss` with respect to its variables, like `loss.backward()` in less time and memory.
///
/// - The first gradient of a tensor is used directly, and later ones are added in place; candle adds each to zeros.
/// - The output and saved tensors of an op are freed as soon as its backward is done; candle's graph lives until the
///   end. The loss is taken by value for that: other handles of it or of a tensor in its graph keep that part alive.
///   `loss.detach()` is its value without the graph; a clone keeps the graph for a second backward.
///
/// candle does not expose its own ops. From the first of them that backward meets, candle computes the rest, with its
/// time and memory; for a loss that was scaled by candle's `*` that is all of it. Views are an exception.
///
/// The bits are those of `loss.backward()`, except for the sign of zeros (candle's sums begin at 0, and 0 + -0 is 0)
/// and for broadcasts, whose gradient is summed in another order, in f32 if it is in half precision.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use tallow::ops;
///
/// let w = Var::ones((3, 2), DType::F32, &Device::Cpu)?;
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let loss = ops::sum(&ops::linear(&x, &w)?)?;
/// let value = loss.detach();
/// let gradients = tallow::backward(loss)?;
/// assert_eq!(gradients.get(&w).unwrap().to_vec2::<f32>()?, [[1.0, 2.0]; 3]);
/// assert_eq!(value.to_scalar::<f32>()?, 9.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] for a loss of several elements, or of none; errors of the ops' backward; lack of memory.
pub fn backward(loss: Tensor) -> Result<GradStore> {
    if loss.elem_count() != 1 {
        return Err(
            Error::shape("backward", format!("{:?}", loss.dims())).must_be(
                "a loss of one element",
                "reduce it with ops::sum or ops::mean, or pass its gradient to backward_from",
            ),
        );
    }
    backward_from_ones(loss)
}

/// Computes the gradients from a gradient of ones, which is freed as soon as it is read.
pub(crate) fn backward_from_ones(output: Tensor) -> Result<GradStore> {
    let seed = output.ones_like()?;
    run(output, seed)
}

/// Computes the gradients from a given gradient of `output` (a vector-Jacobian product).
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let y = ops::mul(&x, &x)?;
/// let dy = Tensor::new(&[1f32, 10.0], &Device::Cpu)?;
/// let gradients = tallow::backward_from(y, &dy)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [2.0, 40.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`backward`]; [`Error::Shape`] and [`Error::DType`] for a gradient that does not match the output.
pub fn backward_from(output: Tensor, gradient: &Tensor) -> Result<GradStore> {
    check_gradient(&output, gradient)?;
    run(output, gradient.detach())
}

fn check_gradient(output: &Tensor, gradient: &Tensor) -> Result<()> {
    const OP: &str = "backward_from";
    if gradient.shape() != output.shape() {
        return Err(Error::shape(OP, format!("{:?}", gradient.dims())).must_be(
            format!("a gradient of the output's shape {:?}", output.dims()),
            "one number for each of the output's",
        ));
    }
    if gradient.dtype() != output.dtype() {
        return Err(Error::dtype(OP, gradient.dtype().as_str()).must_be(
            format!("a gradient in the output's {}", output.dtype().as_str()),
            "convert it with to_dtype",
        ));
    }
    Ok(())
}

/// Runs backward from `seed`, the gradient of `root`.
fn run(root: Tensor, seed: Tensor) -> Result<GradStore> {
    // candle's order, since the order of additions determines the bits of a sum.
    let mut graph: Vec<Tensor> = root.sorted_nodes().into_iter().cloned().collect();
    graph.reverse(); // the next is the last
    let mut sums = Sums::new(&graph);
    sums.add(&root, seed, false)?;
    drop(root);
    while let Some(y) = graph.pop() {
        if y.is_variable() {
            continue;
        }
        if let Some(node) = node_of(&y) {
            let inputs = node.inputs();
            if let Some(dy) = sums.take(&y) {
                let gradients = node.backward(&y, &dy.gradient)?;
                drop((node, y));
                sums.add_all(&inputs, gradients, dy)?;
            }
        } else if sums.is_view(&y) {
            if let Some(dy) = sums.take(&y) {
                sums.add_view(&y, dy)?;
            }
        } else if sums.has(&y) {
            graph.push(y);
            break;
        }
    }
    match graph.is_empty() {
        true => sums.into_store(),
        false => by_candle(&graph, sums),
    }
}

/// Lets candle run backward through the rest of `graph`, from the gradients so far.
fn by_candle(graph: &[Tensor], mut sums: Sums) -> Result<GradStore> {
    let variables = sums.variables().to_vec();
    let mut last: Option<Tensor> = None;
    for x in graph.iter().chain(&variables) {
        if let Some(sum) = sums.take(x) {
            let before = last.map_or_else(|| token(x), Ok)?;
            let slot = Arc::<Slot>::default();
            slot.put(Some(sum.gradient));
            last = Some(before.apply_op2(x, Attach(slot))?);
        }
    }
    match last {
        Some(last) => Ok(last.backward()?),
        None => sums.into_store(),
    }
}
