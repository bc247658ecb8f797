//! Meta tensors: tensors with a shape and a dtype, but no data.
//!
//! The storage of a meta tensor is a [`CpuStorage::F4`], which no kernel of candle accepts. The tensor itself reports
//! the dtype that it stands for. The bytes of the storage are not elements: they encode the tensor's [`Role`].

use crate::{Error, Result};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};

/// The role of a meta tensor, encoded in its storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Role {
    /// Made by [`input`]: name and shape.
    Input(String, Vec<usize>),
    /// Made by [`weights`]: name and shape.
    Weight(String, Vec<usize>),
    /// Made by [`constant`].
    Constant,
    /// Made by an op in a trace.
    Output,
}

impl Role {
    fn to_bytes(&self) -> Vec<u8> {
        let (kind, name, shape) = match self {
            Self::Input(name, shape) => (0, name.as_str(), &shape[..]),
            Self::Weight(name, shape) => (1, name.as_str(), &shape[..]),
            Self::Output => (2, "", &[][..]),
            Self::Constant => (3, "", &[][..]),
        };
        let mut bytes = vec![kind, shape.len() as u8];
        bytes.extend(shape.iter().flat_map(|dim| (*dim as u64).to_le_bytes()));
        bytes.extend(name.as_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let [kind, rank, rest @ ..] = bytes else {
            return Self::Output;
        };
        let (dims, name) = rest.split_at(rest.len().min(8 * usize::from(*rank)));
        let dims = dims.as_chunks::<8>().0.iter();
        let shape = dims.map(|dim| u64::from_le_bytes(*dim) as usize).collect();
        let name = String::from_utf8_lossy(name).into_owned();
        match kind {
            0 => Self::Input(name, shape),
            1 => Self::Weight(name, shape),
            3 => Self::Constant,
            _ => Self::Output,
        }
    }

    /// Returns the role of the meta tensor `x`, or `None` if `x` has data.
    pub(super) fn of(x: &Tensor) -> Option<Self> {
        let (storage, _) = x.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::F4(bytes)) if x.dtype() != DType::F4 => {
                Some(Self::from_bytes(bytes))
            }
            _ => None,
        }
    }
}

/// Creates a meta tensor called `name`, to pass to a function that is traced.
///
/// ```
/// use candle_core::DType;
/// use tallow::graph;
///
/// let tokens = graph::input("tokens", (4, 256), DType::U32)?; // (B, T)
/// assert_eq!(tokens.dims(), [4, 256]);
/// assert!(tokens.to_vec2::<u32>().is_err()); // it has no data
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype other than u8, u32, i64 and the floats f16, bf16, f32 and f64.
pub fn input(name: &str, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    let shape = shape.into();
    let role = Role::Input(name.into(), shape.dims().to_vec());
    Ok(meta_tensor(shape, dtype, role, false)?)
}

/// Creates a meta tensor in place of a constant, for a table that only a trace reads.
pub(crate) fn constant(shape: impl Into<Shape>, dtype: DType) -> candle_core::Result<Tensor> {
    meta_tensor(shape, dtype, Role::Constant, false)
}

/// Returns a builder of meta weights in `dtype`. Each weight is a variable with its own name and the requested shape.
///
/// A layer or a model built from it allocates no memory, however large its weights are. It can only be traced: running
/// it outside of a trace, saving it and passing it to an optimizer are errors.
///
/// ```
/// use candle_core::DType;
/// use tallow::graph;
///
/// // 1 GiB, if it were real.
/// let layer = tallow::nn::Linear::new(1 << 14, 1 << 14, graph::weights(DType::F32))?;
/// assert!(graph::is_meta(layer.weight()));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn weights(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(MetaWeights), dtype, Device::Cpu)
}

pub(crate) fn meta_weight(name: &str, shape: Shape, dtype: DType) -> candle_core::Result<Tensor> {
    let role = Role::Weight(name.into(), shape.dims().to_vec());
    meta_tensor(shape, dtype, role, true)
}

pub(crate) fn builds_meta(vb: &VarBuilder<'_>) -> bool {
    vb.get_unchecked(PROBE).is_ok_and(|x| is_meta(&x))
}

/// A name that no weight has; [`builds_meta`] asks the builder for it.
const PROBE: &str = "\u{0}meta?";

/// Returns whether `x` is a meta tensor or a view of one.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::graph;
///
/// let x = graph::input("x", (4, 256), DType::F32)?;
/// assert!(graph::is_meta(&x) && graph::is_meta(&x.narrow(0, 1, 2)?));
/// assert!(!graph::is_meta(&Tensor::zeros((4, 256), DType::F32, &Device::Cpu)?));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn is_meta(x: &Tensor) -> bool {
    Role::of(x).is_some()
}

/// Returns whether two tensors can be operands of one op. Meta tensors count as being on every device.
pub(crate) fn are_on_one_device(a: &Tensor, b: &Tensor) -> bool {
    a.device().same_device(b.device()) || is_meta(a) || is_meta(b)
}

/// Replaces `error` by one that a meta tensor has no data, if one of `inputs` is a meta tensor.
pub(crate) fn meta_tensor_error(
    op: &'static str,
    inputs: &[&Tensor],
    error: candle_core::Error,
) -> candle_core::Error {
    if !inputs.iter().any(|x| is_meta(x)) {
        return error;
    }
    let hint = "run it inside of graph::trace, or build the model with weights; what distributed::FullyShard gave runs \
                in compile::Step";
    Error::order(op, "a meta tensor has no data", hint).into()
}

pub(super) fn meta_tensor(
    shape: impl Into<Shape>,
    dtype: DType,
    role: Role,
    is_variable: bool,
) -> candle_core::Result<Tensor> {
    let storage = Storage::Cpu(empty(dtype)?);
    let x = Tensor::from_storage(storage, shape, BackpropOp::none(), is_variable);
    make_meta(&x, role)?;
    Ok(x)
}

/// Returns an empty storage of `dtype`. A new tensor takes its own dtype from it.
pub(super) fn empty(dtype: DType) -> candle_core::Result<CpuStorage> {
    Ok(match dtype {
        DType::U8 => CpuStorage::U8(Vec::new()),
        DType::U32 => CpuStorage::U32(Vec::new()),
        DType::I64 => CpuStorage::I64(Vec::new()),
        DType::F16 => CpuStorage::F16(Vec::new()),
        DType::BF16 => CpuStorage::BF16(Vec::new()),
        DType::F32 => CpuStorage::F32(Vec::new()),
        DType::F64 => CpuStorage::F64(Vec::new()),
        other => {
            return Err(Error::dtype("graph", other.as_str())
                .must_be(
                    "u8, u32, i64, f16, bf16, f32 or f64",
                    "no op of this crate takes another",
                )
                .into());
        }
    })
}

/// Replaces the empty storage of `x` by the F4 storage of a meta tensor.
pub(super) fn make_meta(x: &Tensor, role: Role) -> candle_core::Result<()> {
    struct MakeMeta(Role);

    impl InplaceOp1 for MakeMeta {
        fn name(&self) -> &'static str {
            "meta"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            *storage = CpuStorage::F4(self.0.to_bytes());
            Ok(())
        }
    }

    let make_meta = MakeMeta(role);
    match x.elem_count() {
        // An empty tensor can have strides of 0, which look like overlapping elements to candle's in-place ops.
        0 => x.detach().flatten_all()?.inplace_op1(&make_meta),
        _ => x.inplace_op1(&make_meta),
    }
}

struct MetaWeights;

impl SimpleBackend for MetaWeights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        meta_weight(name, shape, dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        if name.ends_with(PROBE) {
            return meta_tensor((), dtype, Role::Output, false);
        }
        candle_core::bail!(
            "graph::weights: {name} was asked for without a shape, which nothing else knows"
        )
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
