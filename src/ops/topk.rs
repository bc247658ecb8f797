//! The largest elements of rows, and their indices.

use super::cast::cast_for;
use super::dispatch::{Path, choose};
use super::elementwise::affine;
use super::index::gather_checked;
use super::info::OpInfo;
use super::lowering::{Calls, Lowering, Slot, kernel, on_gpu};
use super::operand::{check_size, check_supported};
use super::record::{CallSpec, by_kernels, composed_as};
use super::reduce::some_dims;
use crate::grad::no_grad;
use crate::graph::Attribute;
use crate::kernels::cpu::index as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::index as cuda_kernel;
use crate::{Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Tensor};

/// Returns the k largest elements of each row and their indices along it, the largest first: x (..., N), values
/// (..., k) in x's dtype, indices (..., k) in u32. PyTorch's `topk`.
///
/// Of equal elements the first comes first, and NaN is larger than any number. The indices are under N, so that they
/// may select among N experts in a planned step too. Backward: dx is dy at the indices, 0 elsewhere. Saved for
/// backward: the indices. Autocast: follows x. [`gather()`](super::gather()) reads other tensors at the indices,
/// [`index_select`](super::index_select) and [`index_add`](super::index_add) rows; the
/// [guide](crate::guide::own_model#mixtures-of-experts) has two mixtures of experts.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops;
///
/// let x = Var::new(&[[1f32, 5.0, 3.0, 5.0]], &Device::Cpu)?;
/// let (values, indices) = ops::topk(&x, 3)?;
/// assert_eq!(values.to_vec2::<f32>()?, [[5.0, 5.0, 3.0]]);
/// assert_eq!(indices.to_vec2::<u32>()?, [[1, 3, 2]]);
/// let gradients = tallow::backward(ops::sum(&values)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?, [[0.0, 1.0, 1.0, 1.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a scalar; k of 0 or above N.
pub fn topk(x: &Tensor, k: usize) -> Result<(Tensor, Tensor)> {
    check_supported(INFO.op, x)?;
    let [x] = &cast_for(INFO.op, [x])?;
    let indices = no_grad(|| indices_of(INFO.op, x, k))?;
    let values = gather_checked(x, x.rank() - 1, &indices, indices.dims(), None)?;
    Ok((values, indices))
}

/// Returns the index of the largest element along dimension `dim`, which the output lacks: x (B, T, D) over 1 gives
/// (B, D) in u32.
///
/// Of equal elements it is the first, and of NaNs the first too, as in PyTorch. It has no gradient;
/// [`max_over`](super::max_over) returns the elements. The last dimension is read in place, others from a copy.
///
/// ```
/// use candle_core::{D, Device, Tensor};
/// let logits = Tensor::new(&[[0.1f32, 0.7, 0.7], [0.9, 0.0, 0.1]], &Device::Cpu)?; // (N, V)
/// assert_eq!(tallow::ops::argmax(&logits, D::Minus1)?.to_vec1::<u32>()?, [1, 0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float; a dimension that x does not have or that has no elements.
pub fn argmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    extreme("argmax", x, dim, false)
}

/// Returns the index of the smallest element along dimension `dim`; otherwise like [`argmax`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 5.0], [0.0, 7.0]], &Device::Cpu)?;
/// assert_eq!(tallow::ops::argmin(&x, 0)?.to_vec1::<u32>()?, [1, 0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`argmax`].
pub fn argmin(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    extreme("argmin", x, dim, true)
}

fn extreme(op: &'static str, x: &Tensor, dim: impl Dim, is_smallest: bool) -> Result<Tensor> {
    check_supported(op, x)?;
    let dim = some_dims(op, x, dim)?[0];
    let others: Vec<usize> = (0..x.rank()).filter(|other| *other != dim).collect();
    let shape: Vec<usize> = others.iter().map(|other| x.dims()[*other]).collect();
    no_grad(|| {
        let [x] = cast_for(op, [x])?;
        let x = if is_smallest {
            affine(&x, -1.0, 0.0)?
        } else {
            x
        };
        let last = x.permute([&others[..], &[dim]].concat())?;
        Ok(indices_of(op, &last, 1)?.reshape(shape)?)
    })
}

/// Returns the indices of the k largest elements of each row, under `no_grad`.
fn indices_of(op: &'static str, x: &Tensor, k: usize) -> Result<Tensor> {
    let Some((&n, leading)) = x.dims().split_last() else {
        return Err(Error::shape(op, "a scalar").must_be("rows (..., N)", "add a dimension"));
    };
    if k == 0 || k > n || u32::try_from(n).is_err() {
        return Err(Error::shape(op, format!("{k} of {:?}", x.dims())).must_be(
            "at least 1 and at most the elements of a row, which u32 counts",
            "k elements are selected in each row",
        ));
    }
    let shape = [leading, &[k]].concat();
    check_size(op, &shape, DType::U32, x.device())?;
    let call = CallSpec::new(shape.as_slice(), DType::U32);
    let call = call.with(IDS_BELOW, Attribute::Count(n));
    match choose(&INFO, x)? {
        Path::Kernel => by_kernels(&INFO, call, [x]),
        Path::Reference => composed_as(&INFO, &[x], call, || {
            let rows = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
            let mut indices = vec![0; rows.len() / n * k];
            kernel::topk(&rows, n, k, &mut indices);
            Ok(Tensor::from_vec(indices, shape.as_slice(), x.device())?)
        }),
    }
}

/// The attribute of ops that make ids: all are under this bound.
pub(crate) const IDS_BELOW: &str = "ids_below";

pub(super) const INFO: OpInfo = OpInfo::new("topk")
    .on_gpu()
    .planned_composed(LOWERING)
    .composed("1 an element and k", |o| o.reduction(o.output.last()));

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("topk", |T, k, s| {
            kernel::topk::<T>(s.x("x")?, k.count("n")?, k.count("k")?, s.y("indices")?);
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let sizes = [k.count("n")?, k.count("k")?];
            cuda_kernel::topk(l.gpu, l.x("x")?, sizes, l.y("indices")?)
        });
        let [n, k] = [&signature.inputs[0], &signature.output].map(|x| x.dims.last().copied());
        let kernel = kernel.sized([("n", n.unwrap_or(1)), ("k", k.unwrap_or(1))]);
        Calls::default().call(kernel, [("x", Slot::Input(0))], [("indices", Slot::Output)])
    },
    backward: |_| Calls::default(),
};
