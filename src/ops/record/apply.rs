//! Ops as custom ops of candle: nodes of its graph that are also on the tape, or neither under `no_grad`. Both passes
//! report a range to the profiler.

use super::attach::{Attach, Slot, token};
use super::spec::{CallSpec, Spec};
use crate::grad::is_grad_enabled;
use crate::graph::{self, Call};
use crate::ops::info::OpInfo;
use crate::ops::operand::zeros_of;
use crate::probe::{self, Kind, Operand, Operands, Path};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, MetalStorage, Result,
    Shape, Storage, Tensor, TensorId, bail,
};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// The inputs of a forward: storage and layout.
pub(crate) type Storages<'a, S> = &'a [(&'a S, &'a Layout)];

pub(crate) type ForwardResult<S> = Result<(S, Shape)>;

/// The computation of an op of one input or more, all on one device.
pub(crate) trait Op: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> ForwardResult<CpuStorage>;

    fn cuda_fwd(&self, _inputs: Storages<'_, CudaStorage>) -> ForwardResult<CudaStorage> {
        bail!("{} has no kernel for NVIDIA GPUs", self.name())
    }

    fn metal_fwd(&self, _inputs: Storages<'_, MetalStorage>) -> ForwardResult<MetalStorage> {
        bail!("{} has no kernel for Metal GPUs", self.name())
    }

    /// Returns a gradient for each input, from the output and its gradient.
    fn bwd(&self, inputs: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// Converts a list of inputs or gradients to the number that an op has.
fn exactly<const N: usize, T>(all: impl TryInto<[T; N]> + AsRef<[T]>) -> Result<[T; N]> {
    let got = all.as_ref().len();
    match all.try_into() {
        Ok(all) => Ok(all),
        Err(_) => bail!("expected {N} operands, got {got}"),
    }
}

pub(crate) trait Node: Send + Sync {
    fn inputs(&self) -> Vec<Tensor>;

    /// Returns a gradient for each input, from the output and its gradient. A gradient has its own storage, or is `dy`
    /// itself.
    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// The nodes of the outputs that are alive, by the ids of the outputs.
static NODES: LazyLock<Mutex<HashMap<TensorId, Weak<dyn Node>>>> = LazyLock::new(Mutex::default);

fn nodes() -> MutexGuard<'static, HashMap<TensorId, Weak<dyn Node>>> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The entry of a node on the tape. The node owns it, so that both are dropped together.
#[derive(Default)]
pub(crate) struct Entry(OnceLock<TensorId>);

impl Entry {
    /// Records that `node`, which owns this entry, computed `y`.
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

/// Returns the node that computed `y`, if it is this crate's.
pub(crate) fn node_of(y: &Tensor) -> Option<Arc<dyn Node>> {
    nodes().get(&y.id())?.upgrade()
}

/// An op with its inputs and tape entry, which reports a range when its forward and backward run.
struct Ranged<C> {
    op: C,
    path: Path,
    /// The inputs, which live as long as candle's references to them; empty without a graph.
    inputs: Box<[Tensor]>,
    entry: Entry,
}

impl<C: Op> Ranged<C> {
    fn forward<S: BackendStorage>(
        &self,
        inputs: Storages<'_, S>,
        forward: fn(&C, Storages<'_, S>) -> ForwardResult<S>,
    ) -> ForwardResult<S> {
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
        fn $forward(&self, $($storage: &$Storage, $layout: &Layout),+) -> ForwardResult<$Storage> {
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

/// Applies `op` to `inputs`, or records the call in the open trace.
pub(crate) fn apply<C: Spec + Op>(inputs: &[&Tensor], op: C) -> Result<Tensor> {
    match graph::is_tracing() {
        true => Ok(traced(op.name(), op, inputs, true)?), // no kernel computes it
        false => applied(inputs, op),
    }
}

pub(super) fn applied<C: Op>(inputs: &[&Tensor], op: C) -> Result<Tensor> {
    let name = op.name();
    let path = probe::op_path(name);
    let keeps_graph = is_grad_enabled();
    if inputs.len() > 3 {
        return applied_to_many(inputs, op, path);
    }
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
        _ => bail!("{name}: expected one to three inputs, got {}", inputs.len()),
    };
    let y = y.map_err(|error| graph::meta_tensor_error(name, inputs, error))?;
    node.entry.write(&y, &node);
    Ok(y)
}

/// Applies an op of more than three inputs, which candle's ops do not have. In candle's graph its input is a token; its
/// inputs are [attached](Attach) to that.
fn applied_to_many<C: Op>(inputs: &[&Tensor], op: C, path: Path) -> Result<Tensor> {
    let name = op.name();
    let mut token = token(inputs[0])?;
    let mut slots = Vec::with_capacity(inputs.len());
    for x in inputs {
        let slot = (is_grad_enabled() && x.track_op()).then(Arc::<Slot>::default);
        if let Some(slot) = &slot {
            token = token.apply_op2(x, Attach(Arc::clone(slot)))?;
        }
        slots.push(slot);
    }
    let node = Arc::new(Ranged {
        op,
        path,
        inputs: inputs.iter().map(|x| (*x).clone()).collect(),
        entry: Entry::default(),
    });
    let op = OfMany {
        node: Arc::clone(&node),
        slots,
    };
    let y = match token.track_op() {
        true => token.apply_op1(op),
        false => token.apply_op1_no_bwd(&op),
    };
    let y = y.map_err(|error| graph::meta_tensor_error(name, inputs, error))?;
    node.entry.write(&y, &node);
    Ok(y)
}

/// An op of many inputs in candle's graph: maps a token to the output.
struct OfMany<C> {
    node: Arc<Ranged<C>>,
    /// A slot for each input that is attached.
    slots: Vec<Option<Arc<Slot>>>,
}

macro_rules! forward_of_many {
    ($forward:ident, $Device:ident, $Storage:ident) => {
        fn $forward(&self, _: &$Storage, _: &Layout) -> ForwardResult<$Storage> {
            let inputs = self.node.inputs.iter().map(Tensor::storage_and_layout);
            let inputs: Vec<_> = inputs.collect();
            let storages = inputs.iter().map(|(storage, layout)| match &**storage {
                Storage::$Device(storage) => Ok((storage, *layout)),
                _ => bail!("{}: expected all inputs on one device", self.node.op.name()),
            });
            let storages = storages.collect::<Result<Vec<_>>>()?;
            self.node.forward(&storages, C::$forward)
        }
    };
}

impl<C: Op> CustomOp1 for OfMany<C> {
    fn name(&self) -> &'static str {
        self.node.op.name()
    }

    forward_of_many!(cpu_fwd, Cpu, CpuStorage);
    forward_of_many!(cuda_fwd, Cuda, CudaStorage);
    forward_of_many!(metal_fwd, Metal, MetalStorage);

    fn bwd(&self, token: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let gradients = Node::backward(&*self.node, y, dy)?;
        for (slot, gradient) in self.slots.iter().zip(gradients) {
            if let Some(slot) = slot {
                slot.put(gradient);
            }
        }
        Ok(Some(token.zeros_like()?))
    }
}

/// Records a call of `op` on `inputs` in the open trace, and returns its output, a meta tensor. `composed` is whether
/// it is computed by candle's own ops.
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
    let (reads, attributes) = (op.extra_inputs(), op.attributes());
    let saved = op.saved(&operands, target);
    let y = graph::record(Call {
        name,
        attributes,
        composed,
        inputs,
        extra_inputs: &reads,
        output,
        saved,
        is_tracked: false,
        held: op.clone(),
    })?;
    op.free_after_forward();
    Ok(y)
}

/// Runs `f`, candle's own ops that stand for `op` on `inputs` and return an `output` of this shape and dtype. Backward
/// is candle's, and reports no range. An empty output is made of zeros that depend on all inputs, without running `f`:
/// candle's own result would depend on the first input or on none, and candle divides by zero on a GPU.
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
