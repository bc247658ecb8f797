//! How ops are planned: an op's forward and its backward as calls of kernels, as data.
//!
//! What lives here: what such a call is ([`Kernel`], [`Slices`]), and the list of the ops that have one. Each op's own is in
//! its own file, beside its eager form, and runs the same kernels. What does not: buffers and their places, which are
//! [`compile`](crate::compile)'s.

use crate::attention::{self, Mask};
use crate::graph::{self, Attribute};
use crate::kernels::cpu::Real;
use crate::probe::Operand;
use candle_core::{DType, Result, WithDType, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use {
    crate::kernels::cuda::{View, matmul::Products},
    candle_core::cuda_backend::CudaDevice,
    std::cell::RefCell,
};

/// A kernel by name, of what it does with its parameters and slices; `$T` is the type of its first operand's elements.
macro_rules! kernel {
    ($name:expr, |$T:ident, $k:pat_param, $s:ident| $body:expr) => {
        $crate::ops::lowering::Kernel::new($name, |$k, $s| {
            $crate::ops::cpu::for_stored!($s.dtype(0), $T => {
                $body;
                Ok(())
            })
        })
    };
}
pub(crate) use kernel;

/// A kernel with what launches it on a GPU; `$l` are its operands there, and what launches take.
macro_rules! on_gpu {
    ($kernel:expr, |$k:pat_param, $l:ident| $body:expr) => {{
        let kernel = $kernel.with_gpu_kernel();
        #[cfg(feature = "cuda")]
        let kernel = kernel.launched_by(|$k, $l| {
            $body?;
            Ok(())
        });
        kernel
    }};
}
pub(crate) use on_gpu;

/// The lowering of an op.
pub(crate) struct Lowering {
    /// The op's name, as nodes have it.
    pub op: &'static str,
    /// Its output, and what it keeps.
    pub forward: fn(&Signature<'_>) -> Calls,
    /// The gradients of its inputs, from that of its output.
    pub backward: fn(&Signature<'_>) -> Calls,
}

/// The lowering of the op with this name.
pub(crate) fn of(op: &str) -> Option<&'static Lowering> {
    all().find(|lowering| lowering.op == op)
}

/// Whether an op is planned so, too, where it is composed of candle's own ops: of the same inputs, with nothing kept.
pub(crate) fn takes_composed(op: &str) -> bool {
    const ELEMENTWISE: &[&str] = &[
        "add",
        "sub",
        "mul",
        "div",
        "add_scaled",
        "exp",
        "log",
        "pow",
        "rsqrt",
        "relu",
        "tanh",
        "sigmoid",
        "silu",
        "gelu",
        "gelu_tanh",
        "swiglu",
    ];
    const OTHERS: &[&str] = &[
        "sum",
        "mean",
        "log_softmax",
        "concat",
        "cast",
        "weight_cast",
        "to_dtype",
        "contiguous",
        "copy",
    ];
    ELEMENTWISE.contains(&op) || OTHERS.contains(&op)
}

/// Every op that can be planned.
pub(crate) fn all() -> impl Iterator<Item = &'static Lowering> {
    let several = [
        super::activation::LOWERINGS,
        super::arithmetic::LOWERINGS,
        super::cast::LOWERINGS,
        super::elementwise::LOWERINGS,
        super::heads::LOWERINGS,
        super::record::LOWERINGS,
        super::reduce::LOWERINGS,
    ];
    let single = [
        &super::concat::LOWERING,
        &super::cross_entropy::LOWERING,
        &super::embedding::LOWERING,
        &super::layer_norm::LOWERING,
        &super::linear::LOWERING,
        &super::linear_bias::LOWERING,
        &super::linear_cross_entropy::LOWERING,
        &super::matmul::LOWERING,
        &super::relu::LOWERING,
        &super::repeat_heads::LOWERING,
        &super::rms_norm::LOWERING,
        &super::rope::LOWERING,
        &super::softmax::LOWERING,
        &super::swiglu::LOWERING,
        &super::swiglu_linear::LOWERING,
        &attention::NAIVE_LOWERING,
        &attention::FLASH_LOWERING,
    ];
    several.into_iter().flatten().chain(single)
}

/// What a lowering knows of a call: attributes, shapes and dtypes.
pub(crate) struct Signature<'a> {
    pub attributes: &'a [(&'static str, Attribute)],
    pub inputs: Vec<Operand<'a>>,
    pub reads: Vec<Operand<'a>>,
    pub output: Operand<'a>,
    pub kept: Vec<Operand<'a>>,
    /// Whose kernels run.
    pub target: graph::Target,
}

impl Signature<'_> {
    /// The attribute with this name.
    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        find(self.attributes, name)
    }
}

/// What a kernel reads or writes, in terms of the op's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// An input of the op.
    Input(usize),
    /// What the op reads beside its inputs.
    Read(usize),
    /// The op's output.
    Output,
    /// What the op keeps for backward.
    Kept(usize),
    /// The gradient of the output.
    OutputGradient,
    /// The gradient of an input, in its shape and dtype.
    Gradient(usize),
    /// What [`Calls::scratch`] has made.
    Scratch(usize),
}

/// Ids that are read, to be checked before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ids {
    /// Which of the op's [`reads`](Signature::reads).
    pub read: usize,
    /// All are under it.
    pub bound: usize,
    /// But this one.
    pub ignore: Option<u32>,
}

/// A forward or a backward.
#[derive(Default)]
pub(crate) struct Calls {
    pub calls: Vec<KernelCall>,
    /// Buffers for these calls alone.
    pub scratch: Vec<(Vec<usize>, DType)>,
    /// Forward: the output is this input's elements. Backward: the gradient of this input is the output's.
    pub same: Vec<usize>,
    pub ids: Option<Ids>,
}

/// A kernel, and its operands.
pub(crate) struct KernelCall {
    pub kernel: Kernel,
    pub reads: Vec<Slot>,
    pub writes: Vec<Slot>,
}

impl Calls {
    /// With one more call.
    pub fn call(mut self, kernel: Kernel, reads: &[Slot], writes: &[Slot]) -> Self {
        self.push(kernel, reads, writes);
        self
    }

    /// As [`call`](Self::call), in place.
    pub fn push(&mut self, kernel: Kernel, reads: &[Slot], writes: &[Slot]) {
        self.calls.push(KernelCall {
            kernel,
            reads: reads.to_vec(),
            writes: writes.to_vec(),
        });
    }

    /// With input `input` passed on as it is.
    pub fn same(mut self, input: usize) -> Self {
        self.same.push(input);
        self
    }

    /// With ids to be checked.
    pub fn ids(self, ids: Ids) -> Self {
        Self {
            ids: Some(ids),
            ..self
        }
    }

    /// A backward of one kernel, which writes the gradient of input 0 in its dtype and those of the inputs `wide` in the one that
    /// is computed in: rounded after, where these are half precision.
    pub fn with_wide_gradients(
        signature: &Signature<'_>,
        kernel: Kernel,
        reads: &[Slot],
        wide: &[usize],
    ) -> Self {
        let (mut calls, mut writes) = (Self::default(), vec![Slot::Gradient(0)]);
        let mut rounded = Vec::new();
        for input in wide {
            let (weight, dtype) = (&signature.inputs[*input], signature.inputs[0].wide_dtype());
            writes.push(match weight.dtype == dtype {
                true => Slot::Gradient(*input),
                false => {
                    let sum = calls.scratch(weight.dims, dtype);
                    rounded.push((sum, Slot::Gradient(*input)));
                    sum
                }
            });
        }
        let calls = calls.call(kernel, reads, &writes);
        rounded.into_iter().fold(calls, |calls, (sum, gradient)| {
            calls.call(super::cast::converted(), &[sum], &[gradient])
        })
    }

    /// A buffer for these calls.
    pub fn scratch(&mut self, shape: &[usize], dtype: DType) -> Slot {
        self.scratch.push((shape.to_vec(), dtype));
        Slot::Scratch(self.scratch.len() - 1)
    }
}

/// What computes a call.
type Run = fn(&Kernel, &Slices<'_>) -> Result<()>;

/// What launches a kernel on a GPU.
#[cfg(feature = "cuda")]
type Launch = fn(&Kernel, &Operands<'_>) -> Result<()>;

/// The operands of one call on a GPU.
#[cfg(feature = "cuda")]
pub(crate) struct Operands<'a> {
    pub card: &'a CudaDevice,
    /// What multiplies matrices.
    pub products: RefCell<&'a mut Products>,
    pub reads: Vec<View<'a>>,
    pub writes: Vec<View<'a>>,
}

/// A kernel as a planned call has it: its name, its parameters, and the function that runs it on the CPU, and where it has one,
/// what launches it on a GPU.
#[derive(Clone)]
pub struct Kernel {
    name: &'static str,
    attributes: Vec<(&'static str, Attribute)>,
    view: Option<graph::View>,
    flops: f64,
    run: Run,
    is_on_gpu: bool,
    #[cfg(feature = "cuda")]
    launch: Option<Launch>,
}

impl Kernel {
    pub(crate) fn new(name: &'static str, run: Run) -> Self {
        Self {
            name,
            attributes: Vec::new(),
            view: None,
            flops: 0.0,
            run,
            is_on_gpu: false,
            #[cfg(feature = "cuda")]
            launch: None,
        }
    }

    /// Of which a GPU has one too: see [`on_gpu`].
    pub(crate) fn with_gpu_kernel(self) -> Self {
        Self {
            is_on_gpu: true,
            ..self
        }
    }

    /// With what launches it there.
    #[cfg(feature = "cuda")]
    pub(crate) fn launched_by(self, launch: Launch) -> Self {
        Self {
            launch: Some(launch),
            ..self
        }
    }

    /// Whether a GPU has this kernel.
    pub fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// With a parameter.
    pub(crate) fn with(mut self, name: &'static str, value: Attribute) -> Self {
        self.attributes.push((name, value));
        self
    }

    /// With all of these.
    pub(crate) fn with_all(mut self, attributes: &[(&'static str, Attribute)]) -> Self {
        self.attributes.extend(attributes);
        self
    }

    /// With sizes.
    pub(crate) fn sized<const N: usize>(mut self, sizes: [(&'static str, usize); N]) -> Self {
        let sizes = sizes.map(|(name, size)| (name, Attribute::Count(size)));
        self.attributes.extend(sizes);
        self
    }

    /// With the places of elements.
    pub(crate) fn viewing(self, view: graph::View) -> Self {
        Self {
            view: Some(view),
            ..self
        }
    }

    /// With what its matrix products cost.
    pub(crate) fn costing(self, flops: f64) -> Self {
        Self { flops, ..self }
    }

    /// As reports call it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its parameters.
    pub fn attributes(&self) -> &[(&'static str, Attribute)] {
        &self.attributes
    }

    /// FLOPs of its matrix products: the model's work, whatever the kernel leaves out.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// Rows, columns and depth, if it is one matrix product.
    pub(crate) fn product_sizes(&self) -> Option<[usize; 3]> {
        let count = |name| self.count(name).ok();
        let (rows, cols) = (count("rows")?, count("cols")?);
        let factor = count("a_rows")? * count("a_cols")?;
        Some([rows, cols, factor.checked_div(rows)?])
    }

    pub(crate) fn view(&self) -> Result<&graph::View> {
        match &self.view {
            Some(view) => Ok(view),
            None => bail!("{}: no view", self.name),
        }
    }

    pub(crate) fn count(&self, name: &str) -> Result<usize> {
        match find(&self.attributes, name) {
            Some(Attribute::Count(count)) => Ok(count),
            _ => bail!("{}: no {name}", self.name),
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<f64> {
        match find(&self.attributes, name) {
            Some(Attribute::Number(number)) => Ok(number),
            _ => bail!("{}: no {name}", self.name),
        }
    }

    pub(crate) fn mask(&self) -> Result<Mask> {
        match find(&self.attributes, "mask") {
            Some(Attribute::Mask(mask)) => Ok(mask),
            _ => bail!("{}: no mask", self.name),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        matches!(find(&self.attributes, name), Some(Attribute::Flag(true)))
    }

    /// Launches a call on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn launch(&self, operands: &Operands<'_>) -> Result<()> {
        if operands.reads.iter().any(|x| x.dtype == DType::F64) {
            bail!("{}: kernels on GPUs take f32 at most, not f64", self.name);
        }
        match self.launch {
            Some(launch) => launch(self, operands),
            None => bail!("{} was planned for the CPU", self.name),
        }
    }

    /// Computes a call.
    pub(crate) fn run(&self, slices: &Slices<'_>) -> Result<()> {
        (self.run)(self, slices)
    }
}

fn find(attributes: &[(&'static str, Attribute)], name: &str) -> Option<Attribute> {
    let mut attributes = attributes.iter();
    attributes.find_map(|(other, value)| (*other == name).then_some(*value))
}

/// By name and parameters: the function follows from the name.
impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.attributes == other.attributes && self.view == other.view
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name, self.attributes, self.view)
    }
}

/// Elements that one call reads or writes, of a dtype.
#[derive(Clone, Copy)]
pub(crate) struct Slice<'a> {
    start: *mut u8,
    elements: usize,
    dtype: DType,
    lent: PhantomData<&'a ()>,
}

impl<'a> Slice<'a> {
    /// # Safety
    /// So many initialised elements of the dtype are there for as long as `'a`; what is handed to [`Slices::new`] to be
    /// written, nobody else uses.
    pub unsafe fn new(start: *mut u8, elements: usize, dtype: DType) -> Self {
        Self {
            start,
            elements,
            dtype,
            lent: PhantomData,
        }
    }

    fn check<T: WithDType>(&self) -> Result<*mut T> {
        if self.dtype != T::DTYPE {
            bail!("planned as {:?}, used as {:?}", self.dtype, T::DTYPE);
        }
        Ok(self.start.cast())
    }
}

/// The operands of one call.
pub(crate) struct Slices<'a> {
    reads: Vec<Slice<'a>>,
    /// Empty where it was handed out: a second time it would be written twice at once.
    writes: Vec<Cell<Option<Slice<'a>>>>,
}

impl<'a> Slices<'a> {
    pub fn new(reads: Vec<Slice<'a>>, writes: Vec<Slice<'a>>) -> Self {
        let writes = writes.into_iter().map(|slice| Cell::new(Some(slice)));
        Self {
            reads,
            writes: writes.collect(),
        }
    }

    /// Of what is read at `place`.
    pub fn dtype(&self, place: usize) -> DType {
        self.reads[place].dtype
    }

    /// Of what is written at `place`, before it is.
    pub fn dtype_written(&self, place: usize) -> Result<DType> {
        match self.writes[place].get() {
            Some(slice) => Ok(slice.dtype),
            None => bail!("operand {place} is written already"),
        }
    }

    /// How many are read.
    pub fn count(&self) -> usize {
        self.reads.len()
    }

    /// How many are written.
    pub fn count_written(&self) -> usize {
        self.writes.len()
    }

    /// What is read at `place`.
    pub fn x<T: WithDType>(&self, place: usize) -> Result<&'a [T]> {
        let slice = &self.reads[place];
        let start = slice.check::<T>()?;
        // SAFETY: by `Slice::new`; nothing that is read is written by the same call.
        Ok(unsafe { std::slice::from_raw_parts(start, slice.elements) })
    }

    /// What is written at `place`, once.
    pub fn y<T: WithDType>(&self, place: usize) -> Result<&'a mut [T]> {
        let Some(slice) = self.writes[place].take() else {
            bail!("operand {place} is written already");
        };
        let start = slice.check::<T>()?;
        // SAFETY: by `Slice::new`; handed out this once.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, slice.elements) })
    }

    /// As [`x`](Self::x), in the type computed in: for small operands, which half precision is widened to as a whole.
    pub fn wide_x<R: Real>(&self, place: usize) -> Result<Cow<'a, [R]>> {
        fn widened<T: WithDType, R: Real>(elements: &[T]) -> Vec<R> {
            elements.iter().map(|x| R::real(x.to_f64())).collect()
        }
        Ok(match self.dtype(place) {
            DType::F16 => Cow::Owned(widened(self.x::<f16>(place)?)),
            DType::BF16 => Cow::Owned(widened(self.x::<bf16>(place)?)),
            _ => Cow::Borrowed(self.x::<R>(place)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{self, AttentionConfig};
    use crate::graph::{Graph, Node, Target, input, trace};
    use crate::ops;
    use candle_core::Tensor;
    use std::collections::HashSet;

    /// What a lowering is told of a node.
    fn signature<'g>(graph: &'g Graph, node: &'g Node) -> Signature<'g> {
        let of = |dims: &'g [usize], value| Operand {
            dims,
            dtype: graph.value(value).dtype,
        };
        let made = |value| of(&graph.value(value).shape, value);
        let read = |operands: &'g [graph::Operand]| {
            let operands = operands.iter().map(|x| of(graph.shape_of(x), x.value));
            operands.collect()
        };
        Signature {
            attributes: &node.attributes,
            inputs: read(&node.inputs),
            reads: read(&node.reads),
            output: made(node.output),
            kept: node.kept.iter().map(|kept| made(kept.value)).collect(),
            target: Target::Cuda,
        }
    }

    /// Something of every op, from x (2, 3, 8) in this dtype.
    fn of_every_op(dtype: DType) -> crate::Result<Tensor> {
        let hollow = |name: &str, dims: &[usize]| input(name, dims, dtype);
        let x = hollow("x", &[2, 3, 8])?;
        let table = |name: &str, dims: &[usize]| input(name, dims, DType::F32);
        let (weight, bias) = (table("weight", &[8])?, table("bias", &[8])?);
        let (w1, w3) = (hollow("w1", &[8, 8])?, hollow("w3", &[8, 8])?);
        let ids = input("ids", (2, 3), DType::U32)?;
        let row = hollow("row", &[1, 8])?;
        let mut h = ops::embedding(&ids, &w1)?;
        h = ops::add(&ops::sub(&ops::mul(&h, &x)?, &row)?, &ops::div(&x, &row)?)?;
        h = ops::add_scaled(&h, &ops::div(&x, &h)?, 0.5)?;
        h = ops::add_scaled(&h, &ops::sub(&x, &h)?, 0.5)?;
        h = ops::cast(&h, dtype)?;
        h = ops::log(&ops::exp(&ops::rsqrt(&ops::pow(&h, 2.0)?)?)?)?;
        h = ops::relu(&ops::tanh(&ops::sigmoid(&ops::silu(&h)?)?)?)?;
        h = ops::gelu(&ops::gelu(&h, ops::Gelu::Tanh)?, ops::Gelu::Erf)?;
        h = ops::rms_norm(&ops::layer_norm(&h, &weight, &bias, 1e-5)?, &weight, 1e-5)?;
        h = ops::linear(&ops::linear_bias(&h, &w1, &bias)?, &w3)?;
        h = ops::swiglu(&ops::swiglu_linear(&h, &w1, &w3)?, &h)?;
        let heads = ops::split_heads(&h, 4)?; // (2, 4, 3, 2)
        let angles = table("angles", &[3, 1])?;
        let heads = ops::rope(&ops::repeat_heads(&heads, 2)?, &angles, &angles)?;
        let config = AttentionConfig::default();
        let heads = attention::naive(&heads, &heads, &heads, &config)?;
        let heads = attention::flash(&heads, &heads, &heads, &config)?;
        h = ops::merge_heads(&heads)?.narrow(2, 0, 8)?; // (2, 3, 8)
        let scores = ops::matmul_transposed(&h, &h)?;
        let p = ops::softmax(&scores, 1.0, Mask::Causal)?;
        h = ops::matmul(&p, &ops::contiguous(&h.transpose(0, 1)?.transpose(0, 1)?)?)?;
        h = ops::concat(&[&h, &ops::log_softmax(&h)?], 1)?.narrow(1, 0, 3)?;
        let h = ops::contiguous(&h)?;
        let losses = [
            ops::linear_cross_entropy(&h, &w1, &ids)?,
            ops::cross_entropy(&h, &ids)?,
            ops::cross_entropy_ignoring(&h, &ids, 1)?,
            ops::cast(&ops::sum(&h)?, DType::F32)?,
            ops::cast(&ops::mean(&h)?, DType::F32)?,
        ];
        let half = ops::cast(&losses[0], DType::BF16)?;
        let mut losses = losses.into_iter();
        losses.try_fold(half, |sum, loss| ops::add(&sum, &loss))
    }

    #[test]
    fn gpus_have_kernels_for_every_op() {
        let mut seen = HashSet::new();
        for dtype in [DType::F32, DType::BF16] {
            let graph = trace(Target::Cuda, || of_every_op(dtype)).unwrap();
            for node in graph.nodes() {
                let lowering = of(node.op).unwrap_or_else(|| panic!("no lowering of {}", node.op));
                let composed = node.composed && !takes_composed(node.op);
                assert!(!composed, "{} is composed", node.op);
                seen.insert(node.op);
                let signature = signature(&graph, node);
                for calls in [lowering.forward, lowering.backward].map(|half| half(&signature)) {
                    for KernelCall { kernel, .. } in &calls.calls {
                        assert!(kernel.is_on_gpu(), "{}: {}", node.op, kernel.name());
                    }
                }
            }
        }
        let beside = [
            "copy",
            "checkpoint",
            "release",
            "to_dtype",
            super::super::WEIGHT_CAST,
        ];
        for op in all().map(|lowering| lowering.op) {
            assert!(seen.contains(op) || beside.contains(&op), "{op}");
        }
    }
}
