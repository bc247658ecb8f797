//! Elements and rows by index.

use super::cast::{cast, cast_for, operand};
use super::cost::cost;
use super::cpu::{ids as checked_ids, narrow_id};
use super::dispatch::{Path, check_same, choose, choose_of_any, has_kernel_for};
use super::embedding;
use super::info::OpInfo;
use super::lowering::{
    Accumulate, Calls, Check, Kernel, Lowering, Signature, Slot, converted, kernel, on_gpu,
};
use super::operand::{check_size, check_supported, is_half, is_supported_float};
use super::record::{CallSpec, by_kernels, composed_as, contiguous, input, wide_input};
use super::reduce::some_dims;
use crate::grad::no_grad;
use crate::graph::Attribute;
use crate::kernels::cpu::index::{self as kernel, Sizes};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::index as cuda_kernel;
use crate::ops::arithmetic::lowering::accumulated;
use crate::{Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Device, Tensor};

/// Returns the elements of x at these indices along dimension `dim`: `y[i][j][k] = x[i][index[i][j][k]][k]` for dim 1.
/// PyTorch's `gather`.
///
/// index is u32 or i64 and has x's rank; y has its shape. Its other dimensions are at most x's. The indices are checked
/// on the host; in a planned step they are an input, or made by [`topk`](super::topk()) or [`argmax`](super::argmax).
/// Backward adds the elements of dy at an index in their order, in half precision in f32, rounded once. Saved for
/// backward: the indices. Autocast: follows x.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::Cpu)?;
/// let index = Tensor::new(&[[2u32, 2], [0, 1]], &Device::Cpu)?;
/// let y = ops::gather(&x, 1, &index)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[3.0, 3.0], [4.0, 5.0]]);
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?, [[0.0, 0.0, 2.0], [1.0, 1.0, 0.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a dimension that x does not have; an index of another rank, larger in another
/// dimension, of another dtype, or outside of the dimension.
pub fn gather(x: &Tensor, dim: impl Dim, index: &Tensor) -> Result<Tensor> {
    let op = GATHER_INFO.op;
    check_supported(op, x)?;
    let [x] = cast_for(op, [x])?;
    let dim = some_dims(op, &x, dim)?[0];
    let fits = |other: usize| other == dim || index.dims()[other] <= x.dims()[other];
    if index.rank() != x.rank() || !(0..x.rank()).all(fits) {
        return Err(index_shape(op, &x, dim, index));
    }
    let ids = checked_ids(op, index, x.dims()[dim], None)?;
    let others = (0..x.rank()).filter(|other| *other != dim);
    let x = others
        .into_iter()
        .try_fold(x.clone(), |x, other| match index.dims()[other] {
            size if size == x.dims()[other] => Ok(x),
            size => x.narrow(other, 0, size),
        })?;
    gather_checked(&x, dim, &ids, index.dims(), None)
}

/// Runs [`gather`] with ids that were checked, for an index of shape `dims`. An id that is `ignore` gives 0.
pub(super) fn gather_checked(
    x: &Tensor,
    dim: usize,
    ids: &Tensor,
    dims: &[usize],
    ignore: Option<i64>,
) -> Result<Tensor> {
    let op = GATHER_INFO.op;
    let dtype = x.dtype();
    check_size(op, dims, dtype, x.device())?;
    let ignored = ignore.map(|id| ("ignore", Attribute::Integer(id)));
    let call = CallSpec::new(dims, dtype)
        .with_all(sizes_of(x, dim))
        .with_all(ignored)
        .reading(ids);
    match choose(&GATHER_INFO, x)? {
        Path::Kernel => by_kernels(&GATHER_INFO, call, [x]),
        Path::Reference => composed_as(&GATHER_INFO, &[x], call, || {
            let ids = ids.to_device(x.device())?.reshape(dims)?;
            let (ids, counts) = match ignore {
                None => (ids, None),
                Some(id) => {
                    let counts = ids.ne(narrow_id(id))?;
                    (counts.where_cond(&ids, &ids.zeros_like()?)?, Some(counts))
                }
            };
            let x = wide_input(op, x)?.contiguous()?;
            let y = x.gather(&ids.contiguous()?, dim)?;
            let y = match counts {
                Some(counts) => counts.where_cond(&y, &y.zeros_like()?)?,
                None => y,
            };
            cast(&y, dtype)
        }),
    }
}

/// Adds the elements of src to x at these indices along dimension `dim`: `y = x`, then
/// `y[i][index[i][j][k]][k] += src[i][j][k]` for dim 1. PyTorch's `scatter_add`.
///
/// index is u32 or i64, of src's shape, which is x's but for `dim`. Elements of one index are added in their order, so
/// the bits do not depend on the number of threads, on a GPU neither; in half precision they are added in f32, rounded
/// once. There each element of y reads the indices of its row: for few of them, such as those of experts.
/// [`index_add`] adds rows. Backward: `dx = dy`, `dsrc[i][j][k] = dy[i][index[i][j][k]][k]`. Saved for backward: the
/// indices. Autocast: the widest of x and src under CUDA's policy; under the CPU's it follows them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::ops;
///
/// let gates = Tensor::new(&[[0.7f32, 0.3], [0.6, 0.4]], &Device::Cpu)?; // (N, k)
/// let experts = Tensor::new(&[[2u32, 0], [1, 2]], &Device::Cpu)?; // (N, k)
/// let zeros = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?; // (N, E)
/// let weights = ops::scatter_add(&zeros, 1, &experts, &gates)?;
/// assert_eq!(weights.to_vec2::<f32>()?, [[0.3, 0.0, 0.7], [0.0, 0.6, 0.4]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Dtypes that are not floats, or differ outside of an autocast region; different devices; a dimension that x does not
/// have; other shapes of index and src; an index of another dtype, or outside of the dimension.
pub fn scatter_add(x: &Tensor, dim: impl Dim, index: &Tensor, src: &Tensor) -> Result<Tensor> {
    let op = SCATTER_INFO.op;
    check_supported(op, x)?;
    let [x, src] = cast_for(op, [x, src])?;
    check_same(op, &[("x", &x), ("src", &src)])?;
    let dim = some_dims(op, &x, dim)?[0];
    let fits = |other: usize| other == dim || index.dims()[other] == x.dims()[other];
    if index.dims() != src.dims() || index.rank() != x.rank() || !(0..x.rank()).all(fits) {
        return Err(index_shape(op, &x, dim, index));
    }
    let ids = &checked_ids(op, index, x.dims()[dim], None)?;
    in_wide(&x, &src, |x, src| {
        let call = CallSpec::like_first()
            .with_all(sizes_of(x, dim))
            .reading(ids);
        match choose(&SCATTER_INFO, x)? {
            Path::Kernel => by_kernels(&SCATTER_INFO, call, [x, src]),
            Path::Reference => composed_as(&SCATTER_INFO, &[x, src], call, || {
                // candle's own scatter_add has another gradient of x.
                let ids = positions(x, dim, &ids.to_vec1()?);
                let ids = Tensor::from_vec(ids, src.elem_count(), x.device())?;
                let (flat, src) = (input(x).flatten_all()?, input(src).flatten_all()?);
                Ok(flat.index_add(&ids, &src, 0)?.reshape(x.shape())?)
            }),
        }
    })
}

/// Returns the slices of x at these indices along dimension `dim`: rows of a matrix for dim 0. PyTorch's
/// `index_select`.
///
/// ids (M) are u32 or i64; y is x with size M in dimension `dim`. It is [`embedding()`](super::embedding()) of the rows
/// of x, whose dtypes, backward and autocast it has; other dimensions than the first are moved there by copies. Saved
/// for backward: the ids.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?;
/// let ids = Tensor::new(&[2u32, 2, 0], &Device::Cpu)?;
/// assert_eq!(
///     tallow::ops::index_select(&x, 0, &ids)?.to_vec2::<f32>()?,
///     [[5.0, 6.0], [5.0, 6.0], [1.0, 2.0]]
/// );
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a dimension that x does not have; ids of another rank or dtype, or outside of the
/// dimension.
pub fn index_select(x: &Tensor, dim: impl Dim, ids: &Tensor) -> Result<Tensor> {
    let op = "index_select";
    check_supported(op, x)?;
    let dim = some_dims(op, x, dim)?[0];
    check_vector(op, ids)?;
    let (rows, others) = rows_of(op, x, dim)?;
    let y = embedding::look_up(op, ids, &rows, None)?;
    from_rows(&y, dim, &others)
}

/// Adds the slices of src to x at these indices along dimension `dim`: for dim 0, `y = x`, then `y[ids[i]] += src[i]`.
/// PyTorch's `index_add`.
///
/// ids (M) are u32 or i64; src is x's shape with size M in dimension `dim`. Rows of one id are added in their order, so
/// the bits do not depend on the number of threads, on a GPU neither; in half precision they are added in f32, rounded
/// once. Other dimensions than the first are moved there by copies. Backward: `dx = dy`, `dsrc[i] = dy[ids[i]]`. Saved
/// for backward: the ids. Autocast: follows x and src.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use tallow::ops;
///
/// let x = Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?;
/// let src = Var::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?;
/// let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu)?;
/// let y = ops::index_add(&x, 0, &ids, &src)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Dtypes that are not floats, or differ outside of an autocast region; different devices; a dimension that x does not
/// have; another shape of src; ids of another rank or dtype, or outside of the dimension.
pub fn index_add(x: &Tensor, dim: impl Dim, ids: &Tensor, src: &Tensor) -> Result<Tensor> {
    let op = ADD_INFO.op;
    check_supported(op, x)?;
    let [x, src] = cast_for(op, [x, src])?;
    check_same(op, &[("x", &x), ("src", &src)])?;
    let dim = some_dims(op, &x, dim)?[0];
    check_vector(op, ids)?;
    let mut expected = x.dims().to_vec();
    expected[dim] = ids.elem_count();
    if src.dims() != expected {
        return Err(Error::shape(op, format!("src {:?}", src.dims())).must_be(
            format!("src {expected:?}, x's shape with a slice for each id"),
            "each slice of src is added to one of x",
        ));
    }
    let ids = &checked_ids(op, ids, x.dims()[dim], None)?;
    in_wide(&x, &src, |x, src| {
        let ((x, others), (src, _)) = (rows_of(op, x, dim)?, rows_of(op, src, dim)?);
        let call = CallSpec::like_first().reading(ids);
        let y = match choose(&ADD_INFO, &x)? {
            Path::Kernel => by_kernels(&ADD_INFO, call, [&x, &src])?,
            Path::Reference => composed_as(&ADD_INFO, &[&x, &src], call, || {
                let ids = ids.to_device(x.device())?;
                let (x, src) = (input(&x).contiguous()?, input(&src).contiguous()?);
                Result::Ok(x.index_add(&ids, &src, 0)?)
            })?,
        };
        from_rows(&y, dim, &others)
    })
}

/// Returns rows with a 1 at each id and 0 elsewhere: ids (...) u32 or i64, y (..., classes) in `dtype`.
///
/// There is no gradient, and nothing is saved for backward. PyTorch's `one_hot` returns integers; a float is what masks
/// and sums of experts' loads need.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let ids = Tensor::new(&[2u32, 0], &Device::Cpu)?;
/// let y = tallow::ops::one_hot(&ids, 3, DType::F32)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// An id outside of the classes, ids of another dtype, or a dtype that is not a float.
pub fn one_hot(ids: &Tensor, classes: usize, dtype: DType) -> Result<Tensor> {
    let op = ONE_HOT_INFO.op;
    if !is_supported_float(dtype) {
        return Err(Error::dtype(op, dtype.as_str()).must_be(
            "f16, bf16, f32 or f64",
            "candle's to_dtype makes integers of it",
        ));
    }
    let shape = [ids.dims(), &[classes]].concat();
    check_size(op, &shape, dtype, ids.device())?;
    let checked = checked_ids(op, ids, classes, None)?;
    no_grad(|| {
        let call = CallSpec::new(shape.as_slice(), dtype).reading(&checked);
        let like = &checked.to_device(ids.device())?; // u32, of the device where it is computed
        let has_kernel = has_kernel_for(&ONE_HOT_INFO, like, dtype);
        match choose_of_any(op, like, has_kernel)? {
            Path::Kernel => by_kernels(&ONE_HOT_INFO, call, [like]),
            Path::Reference => composed_as(&ONE_HOT_INFO, &[like], call, || {
                let classes = Tensor::arange(0, classes as u32, &Device::Cpu)?;
                let y = checked.unsqueeze(1)?.broadcast_eq(&classes)?;
                Ok(y.to_dtype(dtype)?
                    .reshape(shape.as_slice())?
                    .to_device(ids.device())?)
            }),
        }
    })
}

fn index_shape(op: &'static str, x: &Tensor, dim: usize, index: &Tensor) -> Error {
    Error::shape(op, format!("index {:?}, x {:?}", index.dims(), x.dims())).must_be(
        format!(
            "an index of x's rank that fits it in every dimension but {dim}, and src of its shape"
        ),
        "repeat it with unsqueeze and broadcast_as",
    )
}

fn check_vector(op: &'static str, ids: &Tensor) -> Result<()> {
    match ids.rank() {
        1 => Ok(()),
        _ => Err(Error::shape(op, format!("ids {:?}", ids.dims()))
            .must_be("ids of one dimension", "flatten them with flatten_all")),
    }
}

/// Runs `f` on both in at least f32, and rounds its result once to x's dtype.
fn in_wide(
    x: &Tensor,
    src: &Tensor,
    f: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    match is_half(x.dtype()) {
        true => cast(
            &f(&cast(x, DType::F32)?, &cast(src, DType::F32)?)?,
            x.dtype(),
        ),
        false => f(x, src),
    }
}

/// Returns x as rows (n, inner) along dimension `dim`, and its other dimensions.
fn rows_of(op: &'static str, x: &Tensor, dim: usize) -> Result<(Tensor, Vec<usize>)> {
    let mut others = x.dims().to_vec();
    let n = others.remove(dim);
    let inner = others.iter().product::<usize>();
    let order: Vec<usize> = [dim]
        .into_iter()
        .chain((0..x.rank()).filter(|d| *d != dim))
        .collect();
    let x = contiguous(&operand(op, x)?.permute(order)?)?;
    Ok((x.reshape((n, inner))?, others))
}

/// Moves the rows (m, inner) back to dimension `dim` of a tensor whose other dimensions are `others`.
fn from_rows(y: &Tensor, dim: usize, others: &[usize]) -> Result<Tensor> {
    let y = y.reshape([&[y.dims()[0]], others].concat())?;
    let mut order: Vec<usize> = (1..=others.len()).collect();
    order.insert(dim, 0);
    Ok(contiguous(&y.permute(order)?)?)
}

/// Returns the offsets in x of the elements at `ids` along dimension `dim`.
fn positions(x: &Tensor, dim: usize, ids: &[u32]) -> Vec<u32> {
    let n = x.dims()[dim];
    let inner = x.dims()[dim + 1..].iter().product::<usize>();
    let outer = x.dims()[..dim].iter().product::<usize>();
    let of_outer = (ids.len() / outer.max(1)).max(1);
    let each = ids.iter().enumerate();
    let each = each.map(|(at, id)| (at / of_outer * n + *id as usize) * inner + at % inner);
    each.map(|position| position as u32).collect()
}

/// Returns n and inner of x (outer, n, inner) along dimension `dim`, as attributes.
fn sizes_of(x: &Tensor, dim: usize) -> [(&'static str, Attribute); 2] {
    let inner = x.dims()[dim + 1..].iter().product();
    [
        ("n", Attribute::Count(x.dims()[dim])),
        ("inner", Attribute::Count(inner)),
    ]
}

const GATHER_INFO: OpInfo = OpInfo::new("gather")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(GATHER)
    .costing(
        "0, backward 1 an element",
        "elements, y; backward dy, dx",
        |o| cost(0.0, 0.0, o.output.bytes(), o.output.bytes()),
        Some(|o| o.moved_back(1.0)),
    );

const SCATTER_INFO: OpInfo = summing("scatter_add", SCATTER);

const ADD_INFO: OpInfo = summing("index_add", ADD);

const fn summing(op: &'static str, lowering: Lowering) -> OpInfo {
    OpInfo::new(op)
        .on_gpu_up_to(usize::MAX)
        .planned_composed(lowering)
        .costing(
            "1 an element of src, backward 0",
            "x, src, y; backward dy, dsrc",
            |o| {
                cost(
                    0.0,
                    o.input(1)?.elements(),
                    o.input_bytes(),
                    o.output.bytes(),
                )
            },
            Some(|o| cost(0.0, 0.0, o.input(1)?.bytes(), o.input(1)?.bytes())),
        )
}

const ONE_HOT_INFO: OpInfo = OpInfo::new("one_hot")
    .on_gpu_up_to(usize::MAX)
    .planned_composed(ONE_HOT)
    .composed("0", |o| o.elementwise(0.0));

pub(super) const INFOS: &[OpInfo] = &[GATHER_INFO, SCATTER_INFO, ADD_INFO, ONE_HOT_INFO];

const GATHER: Lowering = Lowering {
    forward: |signature| {
        let ids = Check::Ids {
            bound: size(signature, "n"),
            ignore: match signature.attribute("ignore") {
                Some(Attribute::Integer(id)) => Some(id),
                _ => None,
            },
        };
        let reads = [("x", Slot::Input(0)), IDS];
        let calls = Calls::default().checked(0, ids);
        calls.call(gathered(signature), reads, [("y", Slot::Output)])
    },
    backward: |signature| {
        let (mut calls, x) = (Calls::default(), &signature.inputs[0]);
        let reads = [("values", Slot::OutputGradient), IDS];
        let kernel = scattered(signature);
        match x.dtype == x.wide_dtype() {
            true => calls.call(kernel, reads, [("y", Slot::Gradient(0))]),
            false => {
                let sums = calls.scratch(x.dims, x.wide_dtype());
                let calls = calls.call(kernel, reads, [("y", sums)]);
                calls.call(converted(), [("x", sums)], [("y", Slot::Gradient(0))])
            }
        }
    },
};

const SCATTER: Lowering = Lowering {
    forward: |signature| {
        let (bound, ignore) = (size(signature, "n"), None);
        let reads = [("values", Slot::Input(1)), IDS, ("base", Slot::Input(0))];
        let calls = Calls::default().checked(0, Check::Ids { bound, ignore });
        calls.call(scattered(signature), reads, [("y", Slot::Output)])
    },
    backward: |signature| {
        let reads = [("x", Slot::OutputGradient), IDS];
        let calls = Calls::default().alias(0);
        calls.call(gathered(signature), reads, [("y", Slot::Gradient(1))])
    },
};

const ADD: Lowering = Lowering {
    forward: |signature| {
        let (bound, ignore) = (signature.inputs[0].dims[0], None);
        let (x, y) = ([("x", Slot::Input(0))], [("y", Slot::Output)]);
        let calls = Calls::default().checked(0, Check::Ids { bound, ignore });
        let calls = calls.call(accumulated(Accumulate::Never), x, y);
        embedding::sum_rows(
            signature,
            calls,
            [Slot::Input(1), Slot::Output],
            Accumulate::Always,
        )
    },
    backward: |signature| {
        let calls = Calls::default().alias(0);
        embedding::rows(signature, calls, [Slot::OutputGradient, Slot::Gradient(1)])
    },
};

const ONE_HOT: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("one_hot", of "y", |T, k, s| {
            kernel::one_hot::<T>(s.x("ids")?, k.count("classes")?, s.y("y")?);
        });
        let kernel = on_gpu!(kernel, |k, l| {
            cuda_kernel::one_hot(l.gpu, l.x("ids")?, k.count("classes")?, l.y("y")?)
        });
        let bound = signature.output.dims.last().copied().unwrap_or(0);
        let ids = Check::Ids {
            bound,
            ignore: None,
        };
        let calls = Calls::default().checked(0, ids);
        let kernel = kernel.sized([("classes", bound)]);
        calls.call(kernel, [IDS], [("y", Slot::Output)])
    },
    backward: |_| Calls::default(),
};

const IDS: (&str, Slot) = ("ids", Slot::ExtraInput(0));

fn size(signature: &Signature<'_>, name: &str) -> usize {
    match signature.attribute(name) {
        Some(Attribute::Count(count)) => count,
        _ => 1,
    }
}

/// Adds k to the kernel's sizes, from the number of ids.
fn sized(signature: &Signature<'_>, kernel: Kernel) -> Kernel {
    let elements = |x: &crate::probe::Operand<'_>| x.dims.iter().product::<usize>();
    let [n, inner] = ["n", "inner"].map(|name| size(signature, name));
    let outer = elements(&signature.inputs[0]) / (n * inner).max(1);
    let k = elements(&signature.extra_inputs[0]) / (outer * inner).max(1);
    kernel.with_all(signature.attributes).sized([("k", k)])
}

fn sizes(k: &Kernel) -> candle_core::Result<Sizes> {
    Ok(Sizes {
        n: k.count("n")?,
        k: k.count("k")?,
        inner: k.count("inner")?,
    })
}

/// Reads x and ids; writes y, the elements of x at the ids.
fn gathered(signature: &Signature<'_>) -> Kernel {
    let kernel = kernel!("gather", |T, k, s| {
        let ignore = k.some_integer("ignore").map(narrow_id);
        kernel::gather::<T>(s.x("x")?, s.x("ids")?, sizes(k)?, ignore, s.y("y")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let ignore = k.some_integer("ignore").map(narrow_id);
        cuda_kernel::gather(
            l.gpu,
            [l.x("x")?, l.x("ids")?],
            sizes(k)?,
            ignore,
            l.y("y")?,
        )
    });
    sized(signature, kernel)
}

/// Reads values, ids and optionally a base; writes y, the sums of values by id.
fn scattered(signature: &Signature<'_>) -> Kernel {
    let kernel = kernel!("scatter_add", |T, k, s| {
        let (values, ids) = (s.x::<T>("values")?, s.x("ids")?);
        let ignore = k.some_integer("ignore").map(narrow_id);
        kernel::scatter_add(s.some_x("base")?, values, ids, sizes(k)?, ignore, s.y("y")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (base, reads) = (l.some_x("base"), [l.x("values")?, l.x("ids")?]);
        let ignore = k.some_integer("ignore").map(narrow_id);
        cuda_kernel::scatter_add(l.gpu, base, reads, sizes(k)?, ignore, l.y("y")?)
    });
    sized(signature, kernel)
}
