//! Ops as custom ops of candle's, in its graph and on the tape or outside of both under `no_grad`, with a range around
//! their passes.

use super::spec::{CallSpec, Spec};
use crate::grad::is_grad_enabled;
use crate::graph::{self, Call};
use crate::ops::info::OpInfo;
use crate::ops::operand::zeros_of;
use crate::probe::{self, Kind, Operand, Operands, Path};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, MetalStorage, Result,
    Shape, Tensor, TensorId, bail,
};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// The inputs of a forward, where they lie.
pub(crate) type Storages<'a, S> = &'a [(&'a S, &'a Layout)];

pub(crate) type Made<S> = Result<(S, Shape)>;

/// What computes an op of one, two or three inputs, all on one device.
pub(crate) trait Op: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage>;

    fn cuda_fwd(&self, _inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        bail!("{} has no kernel for NVIDIA GPUs", self.name())
    }

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

pub(crate) trait Node: Send + Sync {
    fn inputs(&self) -> Vec<Tensor>;

    /// A gradient for each input, from the output and its gradient: of a storage of its own, or `dy` itself.
    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// The nodes of outputs that are alive, by the outputs' ids.
static NODES: LazyLock<Mutex<HashMap<TensorId, Weak<dyn Node>>>> = LazyLock::new(Mutex::default);

fn nodes() -> MutexGuard<'static, HashMap<TensorId, Weak<dyn Node>>> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node's place on the tape. The node has it, so that both go together.
#[derive(Default)]
pub(crate) struct Entry(OnceLock<TensorId>);

impl Entry {
    /// Says that `node`, whose entry this is, made `y`.
    pub fn write(&self, y: &Tensor, node: &Arc<impl Node + 'static>) {
        if y.track_op() && self.0.set(y.id()).is_ok() {
            let node: Weak<dyn Node> = Arc::downgrade(node) as Weak<dyn Node>;
            nodes().insert(y.id(), node);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(id) = self.0.get() {
            nodes().remove(id);
        }
    }
}

/// The node behind `y`, if it is one of this crate's.
pub(crate) fn node_of(y: &Tensor) -> Option<Arc<dyn Node>> {
    nodes().get(&y.id())?.upgrade()
}

/// An op that says when it runs, forward and backward, and where it was put into the graph.
struct Ranged<C> {
    op: C,
    path: Path,
    /// Of the node, for as long as candle has them too; none where there is no graph.
    inputs: Box<[Tensor]>,
    entry: Entry,
}

impl<C: Op> Ranged<C> {
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

    fn gradients(
        &self,
        inputs: &[&Tensor],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let range = probe::op(Kind::OpBackward, self.op.name(), self.path);
        let gradients = self.op.bwd(inputs, y, dy)?;
        if probe::is_listening() {
            leave(range, inputs, y);
        }
        Ok(gradients)
    }
}

impl<C: Op> Node for Ranged<C> {
    fn inputs(&self) -> Vec<Tensor> {
        self.inputs.to_vec()
    }

    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let inputs: Vec<&Tensor> = self.inputs.iter().collect();
        self.gradients(&inputs, y, dy)
    }
}

struct InGraph<C>(Arc<Ranged<C>>);

macro_rules! custom_op {
    ($Op:ident, $given:ident => $gradients:expr, $Gradients:ty, $($x:ident $storage:ident $layout:ident)+) => {
        impl<C: Op> $Op for InGraph<C> {
            fn name(&self) -> &'static str {
                self.0.op.name()
            }

            custom_op!(forward cpu_fwd CpuStorage $($storage $layout)+);
            custom_op!(forward cuda_fwd CudaStorage $($storage $layout)+);
            custom_op!(forward metal_fwd MetalStorage $($storage $layout)+);

            fn bwd(&self, $($x: &Tensor,)+ y: &Tensor, dy: &Tensor) -> Result<$Gradients> {
                let $given = exactly(self.0.gradients(&[$($x),+], y, dy)?)?;
                Ok($gradients)
            }
        }
    };
    (forward $forward:ident $Storage:ident $($storage:ident $layout:ident)+) => {
        fn $forward(&self, $($storage: &$Storage, $layout: &Layout),+) -> Made<$Storage> {
            self.0.forward(&[$(($storage, $layout)),+], C::$forward)
        }
    };
}

custom_op!(CustomOp1, one => { let [dx] = one; dx }, Option<Tensor>, x s l);
custom_op!(CustomOp2, two => <[_; 2]>::into(two), (Option<Tensor>, Option<Tensor>), x1 s1 l1 x2 s2 l2);
custom_op!(
    CustomOp3, three => <[_; 3]>::into(three), (Option<Tensor>, Option<Tensor>, Option<Tensor>),
    x1 s1 l1 x2 s2 l2 x3 s3 l3
);

/// Applies `op` to `inputs`, or writes the call down in the trace that is open.
pub(crate) fn apply<C: Spec + Op>(inputs: &[&Tensor], op: C) -> Result<Tensor> {
    match graph::is_tracing() {
        true => Ok(traced(op.name(), op, inputs, true)?), // no kernel has made it
        false => applied(inputs, op),
    }
}

pub(super) fn applied<C: Op>(inputs: &[&Tensor], op: C) -> Result<Tensor> {
    let name = op.name();
    let path = probe::op_path(name);
    let keeps_graph = is_grad_enabled();
    let node = Arc::new(Ranged {
        op,
        path,
        inputs: match keeps_graph {
            true => inputs.iter().map(|x| (*x).clone()).collect(),
            false => Box::default(),
        },
        entry: Entry::default(),
    });
    let op = InGraph(Arc::clone(&node));
    let y = match (keeps_graph, inputs) {
        (true, [x]) => x.apply_op1(op),
        (true, [x1, x2]) => x1.apply_op2(x2, op),
        (true, [x1, x2, x3]) => x1.apply_op3(x2, x3, op),
        (false, [x]) => x.apply_op1_no_bwd(&op),
        (false, [x1, x2]) => x1.apply_op2_no_bwd(x2, &op),
        (false, [x1, x2, x3]) => x1.apply_op3_no_bwd(x2, x3, &op),
        _ => bail!("{name}: an op of {} inputs", inputs.len()),
    };
    let y = y.map_err(|error| graph::refuse_hollow(name, inputs, error))?;
    node.entry.write(&y, &node);
    Ok(y)
}

/// Writes down a call of `op` on `inputs`, and returns its hollow output. `composed` is whether candle's own ops
/// compute it.
pub(crate) fn traced<C: Spec + Send + Sync + 'static>(
    name: &'static str,
    op: C,
    inputs: &[&Tensor],
    composed: bool,
) -> crate::Result<Tensor> {
    let target = graph::target().unwrap_or_default();
    let operands: Vec<Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
    let output = op.output(&operands);
    let op = Arc::new(op);
    let (reads, attributes) = (op.reads(), op.attributes());
    let kept = op.kept(&operands, target);
    let y = graph::record(Call {
        name,
        attributes,
        composed,
        inputs,
        reads: &reads,
        output,
        kept,
        is_tracked: false,
        held: op.clone(),
    })?;
    op.forwarded();
    Ok(y)
}

/// Runs `f`, candle's own ops that stand for `op` on `inputs`, and make an `output` of this shape and
/// dtype. Their backward is candle's, and says nothing. A result without elements depends on all inputs by zeros, and
/// `f` is not run: candle's own depends on the first or on none, and divides by zero on a GPU.
pub(crate) fn composed<E: From<candle_core::Error>>(
    op: &OpInfo,
    inputs: &[&Tensor],
    output: (impl Into<Shape>, DType),
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    composed_as(op, inputs, CallSpec::new(output.0, output.1), f)
}

pub(in crate::ops) fn composed_as<E: From<candle_core::Error>>(
    op: &OpInfo,
    inputs: &[&Tensor],
    call: CallSpec,
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    if graph::is_tracing() {
        return Ok(traced(op.op, call, inputs, true).map_err(candle_core::Error::from)?);
    }
    let operands: Vec<Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
    let (shape, dtype) = call.output(&operands);
    let range = probe::op(Kind::Op, op.op, probe::op_path(op.op));
    let y = match shape.dims().contains(&0) {
        true => zeros_of(op.op, shape, dtype, inputs)?,
        false => f()?,
    };
    if probe::is_listening() {
        leave(range, inputs, &y);
    }
    Ok(y)
}

fn leave(range: probe::RangeGuard, inputs: &[&Tensor], output: &Tensor) {
    let inputs: Vec<Operand<'_>> = inputs.iter().map(|input| (*input).into()).collect();
    range.leave(Operands {
        inputs: &inputs,
        output: output.into(),
    });
}
