//! Putting a custom op into candle's graph, or keeping it out under `no_grad`; with a range around its passes.

use super::info::OpInfo;
use super::lowering::{Calls, Lowering};
use super::operand::{check_float, check_supported, operand, zeros_of};
use crate::grad::is_grad_enabled;
use crate::graph::{self, Attribute, Step, Target};
use crate::probe::{self, Kind, Operand, Operands, Path};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, MetalStorage, Result,
    Shape, Tensor,
};

/// What is the elements of its input, which lie in order in a plan.
pub(super) const SAME: Lowering = Lowering {
    forward: |_| Calls::default().same(0),
    backward: |_| Calls::default().same(0),
};

/// What candle copies, and where segments end: no ops to time.
pub(super) const INFOS: &[OpInfo] = &[
    OpInfo::uncast("copy").planned_composed(SAME),
    OpInfo::uncast("checkpoint").planned(SAME),
    OpInfo::uncast("release").planned(SAME),
];

/// What an op says of a call before it runs: all that a trace needs.
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

    /// What it keeps for backward beside its inputs and its output: names, shapes and dtypes.
    fn kept(&self, _inputs: &[Operand<'_>]) -> Vec<(&'static str, Shape, DType)> {
        Vec::new()
    }

    /// What forward does to memory on `target`. By default it makes what it keeps and its output, and takes nothing
    /// else.
    fn forward_steps(&self, inputs: &[Operand<'_>], _target: Target) -> Vec<Step> {
        made(self, inputs)
    }

    /// What backward does to memory on `target`. By default it makes a gradient for each input.
    fn backward_steps(&self, inputs: &[Operand<'_>], _target: Target) -> Vec<Step> {
        (0..inputs.len()).map(Step::gradient).collect()
    }

    /// Whether a gradient reaches its output though its inputs are detached: it knows better where to send it.
    fn is_tracked(&self) -> bool {
        false
    }

    /// Drops what forward would drop.
    fn forwarded(&self) {}
}

/// Forward makes what `op` keeps, and its output.
pub(crate) fn made<S: Spec + ?Sized>(op: &S, inputs: &[Operand<'_>]) -> Vec<Step> {
    let kept = op.kept(inputs).len();
    let mut steps: Vec<Step> = (0..kept).map(Step::Keep).collect();
    steps.push(Step::Output);
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
    fn forward<S: candle_core::backend::BackendStorage>(
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

impl<C: CustomOp1> CustomOp1 for Ranged<C> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward(self.op.name(), &[(s, l)], || self.op.cpu_fwd(s, l))
    }

    fn cuda_fwd(&self, s: &CudaStorage, l: &Layout) -> Result<(CudaStorage, Shape)> {
        self.forward(self.op.name(), &[(s, l)], || self.op.cuda_fwd(s, l))
    }

    fn metal_fwd(&self, s: &MetalStorage, l: &Layout) -> Result<(MetalStorage, Shape)> {
        self.forward(self.op.name(), &[(s, l)], || self.op.metal_fwd(s, l))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        self.backward(self.op.name(), &[x], y, || self.op.bwd(x, y, dy))
    }
}

impl<C: CustomOp2> CustomOp2 for Ranged<C> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(self.op.name(), &[(s1, l1), (s2, l2)], || {
            self.op.cpu_fwd(s1, l1, s2, l2)
        })
    }

    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.forward(self.op.name(), &[(s1, l1), (s2, l2)], || {
            self.op.cuda_fwd(s1, l1, s2, l2)
        })
    }

    fn metal_fwd(
        &self,
        s1: &MetalStorage,
        l1: &Layout,
        s2: &MetalStorage,
        l2: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.forward(self.op.name(), &[(s1, l1), (s2, l2)], || {
            self.op.metal_fwd(s1, l1, s2, l2)
        })
    }

    fn bwd(
        &self,
        x1: &Tensor,
        x2: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(self.op.name(), &[x1, x2], y, || self.op.bwd(x1, x2, y, dy))
    }
}

impl<C: CustomOp3> CustomOp3 for Ranged<C> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(self.op.name(), &[(s1, l1), (s2, l2), (s3, l3)], || {
            self.op.cpu_fwd(s1, l1, s2, l2, s3, l3)
        })
    }

    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.forward(self.op.name(), &[(s1, l1), (s2, l2), (s3, l3)], || {
            self.op.cuda_fwd(s1, l1, s2, l2, s3, l3)
        })
    }

    fn metal_fwd(
        &self,
        s1: &MetalStorage,
        l1: &Layout,
        s2: &MetalStorage,
        l2: &Layout,
        s3: &MetalStorage,
        l3: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.forward(self.op.name(), &[(s1, l1), (s2, l2), (s3, l3)], || {
            self.op.metal_fwd(s1, l1, s2, l2, s3, l3)
        })
    }

    fn bwd(
        &self,
        x1: &Tensor,
        x2: &Tensor,
        x3: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        self.backward(self.op.name(), &[x1, x2, x3], y, || {
            self.op.bwd(x1, x2, x3, y, dy)
        })
    }
}

pub(crate) fn apply1<C: Spec + CustomOp1 + Send + Sync + 'static>(
    x: &Tensor,
    op: C,
) -> Result<Tensor> {
    let name = op.name();
    if graph::is_tracing() {
        return Ok(graph::record(name, op, &[x], false)?);
    }
    let op = Ranged::new(name, op);
    apply(op, |op| x.apply_op1(op), |op| x.apply_op1_no_bwd(op))
        .map_err(|error| graph::refuse_hollow(name, &[x], error))
}

pub(crate) fn apply2<C: Spec + CustomOp2 + Send + Sync + 'static>(
    x1: &Tensor,
    x2: &Tensor,
    op: C,
) -> Result<Tensor> {
    let name = op.name();
    if graph::is_tracing() {
        return Ok(graph::record(name, op, &[x1, x2], false)?);
    }
    let op = Ranged::new(name, op);
    apply(
        op,
        |op| x1.apply_op2(x2, op),
        |op| x1.apply_op2_no_bwd(x2, op),
    )
    .map_err(|error| graph::refuse_hollow(name, &[x1, x2], error))
}

pub(crate) fn apply3<C: Spec + CustomOp3 + Send + Sync + 'static>(
    x1: &Tensor,
    x2: &Tensor,
    x3: &Tensor,
    op: C,
) -> Result<Tensor> {
    let name = op.name();
    if graph::is_tracing() {
        return Ok(graph::record(name, op, &[x1, x2, x3], false)?);
    }
    let op = Ranged::new(name, op);
    apply(
        op,
        |op| x1.apply_op3(x2, x3, op),
        |op| x1.apply_op3_no_bwd(x2, x3, op),
    )
    .map_err(|error| graph::refuse_hollow(name, &[x1, x2, x3], error))
}

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
fn leave(range: probe::RangeGuard, inputs: &[&Tensor], output: &Tensor) {
    let inputs: Vec<Operand<'_>> = inputs.iter().map(|input| (*input).into()).collect();
    range.leave(Operands {
        inputs: &inputs,
        output: output.into(),
    });
}

/// Runs `f`, candle's own ops that stand for the op called `name` on `inputs`, and make an `output` of this shape and
/// dtype. Their backward is candle's, and says nothing. A result without elements depends on all inputs by zeros, and
/// `f` is not run: candle's own depends on the first or on none, and divides by zero on a GPU.
pub(crate) fn composed<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    output: (impl Into<Shape>, DType),
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    composed_as(name, inputs, Composed::new(output.0, output.1), f)
}

/// As [`composed`], for ops whose backward passes the output's gradient through to all inputs, as candle's sum does.
pub(crate) fn composed_handing_on<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    output: (impl Into<Shape>, DType),
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    let op = Composed {
        passes_through: true,
        ..Composed::new(output.0, output.1)
    };
    composed_as(name, inputs, op, f)
}

/// As [`composed`], of this op.
pub(super) fn composed_as<E: From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    op: Composed,
    f: impl FnOnce() -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    if graph::is_tracing() {
        let y = graph::record(name, op, inputs, true).map_err(candle_core::Error::from)?;
        return Ok(y);
    }
    let (shape, dtype) = (op.shape, op.dtype);
    let path = probe::op_path(name);
    let range = probe::op(Kind::Op, name, path);
    let y = match shape.dims().contains(&0) {
        true => zeros_of(name, shape, dtype, inputs)?,
        false => f()?,
    };
    if probe::is_listening() {
        leave(range, inputs, &y);
        probe::produced(path, &y);
    }
    Ok(y)
}

/// What candle's ops make in an op's place.
pub(super) struct Composed {
    pub shape: Shape,
    pub dtype: DType,
    /// Backward makes nothing.
    pub passes_through: bool,
    pub attributes: Vec<(&'static str, Attribute)>,
}

impl Composed {
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            passes_through: false,
            attributes: Vec::new(),
        }
    }
}

impl Spec for Composed {
    fn output(&self, _: &[Operand<'_>]) -> (Shape, DType) {
        (self.shape.clone(), self.dtype)
    }

    /// Of one op. What several of candle's own keep and take between them is not known here.
    fn backward_steps(&self, inputs: &[Operand<'_>], _: Target) -> Vec<Step> {
        let step = match self.passes_through {
            true => Step::PassThrough,
            false => Step::gradient,
        };
        (0..inputs.len()).map(step).collect()
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.attributes.clone()
    }
}

/// `x` as candle's ops should take it: outside the graph under `no_grad`.
pub(crate) fn input(x: &Tensor) -> Tensor {
    // A view of nothing may begin beyond its storage: elsewhere, if there is room for nothing.
    let x = match x.dims().contains(&0) {
        true => operand("input", x).unwrap_or_else(|_| x.clone()),
        false => x.clone(),
    };
    // A trace knows by itself what has a graph, and follows a value by the node that detaching would leave behind.
    match is_grad_enabled() || graph::is_tracing() {
        true => x,
        false => x.detach(),
    }
}

/// `x` with its elements in order, one after another: candle's copy where they are not.
pub(crate) fn contiguous(x: &Tensor) -> Result<Tensor> {
    match x.is_contiguous() || !graph::is_tracing() {
        true => x.contiguous(),
        false => composed_handing_on("contiguous", &[x], (x.shape(), x.dtype()), || {
            x.contiguous()
        }),
    }
}

/// The [`input`] of a `reference`, which is public and so checks by itself that `x` is a float: integers would give
/// wrong results without an error.
pub(crate) fn float_input(op: &'static str, x: &Tensor) -> crate::Result<Tensor> {
    check_float(op, x)?;
    Ok(input(x))
}

/// As [`float_input`], widened to compute in.
pub(crate) fn wide_input(op: &'static str, x: &Tensor) -> crate::Result<Tensor> {
    check_supported(op, x)?;
    Ok(widen(&input(x))?)
}

/// `x` in a dtype fit for computing: half precision widened to f32.
///
/// # Errors
/// Other dtypes: integers have no gradient, and candle hardly converts floats of 8 bits.
pub(crate) fn widen(x: &Tensor) -> Result<Tensor> {
    check_supported("to compute", x)?;
    match x.dtype() {
        DType::F32 | DType::F64 => Ok(x.clone()),
        _ => to_dtype(x, DType::F32),
    }
}

/// `x` in `dtype`, by candle's own conversion.
pub(crate) fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    match graph::is_tracing() && x.dtype() != dtype {
        true => composed("to_dtype", &[x], (x.shape(), dtype), || x.to_dtype(dtype)),
        false => x.to_dtype(dtype),
    }
}
