//! Concatenation of tensors.

use super::cast::cast_castable;
use super::cast::operand;
use super::check_same;
use super::dispatch::{Path, choose};
use super::info::OpInfo;
#[cfg(feature = "cuda")]
use super::lowering::Named;
use super::lowering::{Calls, Lowering, Signature, Slot, kernel, on_gpu};
use super::operand::{check_size, is_supported_float};
use super::record::{CallSpec, by_kernels, composed_as, input};
#[cfg(feature = "cuda")]
use crate::kernels::{
    cuda::{View, strided as cuda_kernel},
    strided::{Dim, merged_dims},
};
use crate::{Error, Result, precision};
use candle_core::Tensor;

/// Concatenates tensors along dimension `dim`; all other dimensions must be equal. PyTorch's `cat`.
///
/// More than three tensors are copied by candle, whose backward then runs too: see [`backward`](crate::backward()).
/// Backward: each tensor's gradient is its part of dy. Saved for backward: nothing. Autocast: the widest of their
/// dtypes under the CPU's policy; under CUDA's it follows its inputs.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let a = Tensor::new(&[[1f32], [2.0]], &Device::Cpu)?;
/// let b = Tensor::new(&[[3f32, 4.0], [5.0, 6.0]], &Device::Cpu)?;
/// let y = tallow::ops::concat(&[&a, &b], 1)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// No tensor; a dimension that they do not have; shapes that differ in other dimensions; mixed devices; mixed dtypes,
/// unless a region casts them.
pub fn concat(tensors: &[&Tensor], dim: usize) -> Result<Tensor> {
    let all: Vec<_> = tensors.iter().map(|x| (*x).into()).collect();
    let target = precision::decide("concat", &all);
    let mut inputs = Vec::with_capacity(tensors.len());
    for x in tensors {
        let x = operand("concat", x)?;
        inputs.push(match target {
            Some(dtype) => cast_castable(&x, dtype)?,
            None => x,
        });
    }
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let named: Vec<_> = inputs.iter().map(|x| ("a tensor", *x)).collect();
    check_same("concat", &named)?;
    let shape = shape_of(&inputs, dim)?;
    check_size("concat", &shape, inputs[0].dtype(), inputs[0].device())?;
    let dtype = inputs[0].dtype();
    let call = || CallSpec::new(shape.as_slice(), dtype);
    // A custom op of candle has at most three inputs.
    let has_kernel = inputs.len() <= 3 && is_supported_float(dtype);
    if has_kernel && choose(&INFO, inputs[0])? == Path::Kernel {
        match inputs[..] {
            [a] => return by_kernels(&INFO, call(), [a]),
            [a, b] => return by_kernels(&INFO, call(), [a, b]),
            [a, b, c] => return by_kernels(&INFO, call(), [a, b, c]),
            _ => {}
        }
    }
    composed_as(&INFO, &inputs, call(), || {
        let inputs: Vec<Tensor> = inputs.iter().map(|x| input(x)).collect();
        Ok(Tensor::cat(&inputs, dim)?.contiguous()?)
    })
}

/// Joins tensors of one shape along a new dimension `dim`: (T, D) three times along 0 is (3, T, D). PyTorch's `stack`.
///
/// It is [`concat()`] of the tensors with a dimension of size 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (a, b) = (Tensor::new(&[1f32, 2.0], &Device::Cpu)?, Tensor::new(&[3f32, 4.0], &Device::Cpu)?);
/// assert_eq!(tallow::ops::stack(&[&a, &b], 0)?.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, 4.0]]);
/// assert_eq!(tallow::ops::stack(&[&a, &b], 1)?.to_vec2::<f32>()?, [[1.0, 3.0], [2.0, 4.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// No tensor; shapes that differ; a dimension above the rank; mixed devices; mixed dtypes, unless a region casts them.
pub fn stack(tensors: &[&Tensor], dim: usize) -> Result<Tensor> {
    let shapes = || tensors.iter().map(|x| x.dims()).collect::<Vec<_>>();
    let rank = tensors.first().map_or(0, |x| x.rank());
    if tensors.is_empty() || dim > rank || shapes().iter().any(|shape| *shape != shapes()[0]) {
        return Err(
            Error::shape("stack", format!("{:?} along {dim}", shapes())).must_be(
                "at least one tensor, all of one shape, and a dimension up to their rank",
                "concat joins tensors along a dimension that they have",
            ),
        );
    }
    let tensors = tensors
        .iter()
        .map(|x| Ok(operand("stack", x)?.unsqueeze(dim)?));
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    concat(&tensors.iter().collect::<Vec<_>>(), dim)
}

fn shape_of(inputs: &[&Tensor], dim: usize) -> Result<Vec<usize>> {
    let shapes = || inputs.iter().map(|x| x.dims());
    let refuse = |expected: String| {
        Error::shape("concat", format!("{:?}", shapes().collect::<Vec<_>>()))
            .must_be(expected, "all dimensions but that one are equal")
    };
    let Some(first) = shapes().next() else {
        return Err(refuse("at least one tensor".into()));
    };
    if dim >= first.len() {
        return Err(refuse(format!(
            "tensors with a dimension {dim}, counted from 0"
        )));
    }
    let fits = |dims: &[usize]| {
        let mut others = dims.iter().zip(first).enumerate();
        dims.len() == first.len() && others.all(|(i, (a, b))| i == dim || a == b)
    };
    if !shapes().all(fits) {
        return Err(refuse(format!("{first:?} but for dimension {dim}")));
    }
    let mut shape = first.to_vec();
    let lengths = shapes().map(|dims| dims[dim]);
    shape[dim] = lengths.fold(0, usize::saturating_add);
    Ok(shape)
}

pub(super) const INFO: OpInfo = OpInfo::new("concat")
    .on_gpu_up_to(usize::MAX)
    .moving()
    .planned_composed(LOWERING);

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("concat", |T, k, s| {
            let parts = s.all_x::<T>()?;
            let (outer, mut rest) = (k.count("outer")?, s.y::<T>("y")?);
            for i in 0..outer {
                for part in &parts {
                    let width = part.len() / outer;
                    let (to, after) = rest.split_at_mut(width);
                    to.copy_from_slice(&part[i * width..(i + 1) * width]);
                    rest = after;
                }
            }
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let (outer, y) = (k.count("outer")?, l.y("y")?);
            let mut places = parts(&l.reads, outer, y);
            places.try_for_each(|(part, place)| {
                let dims = rows_of(outer, [part.len, part.len, y.len]);
                cuda_kernel::copy(l.gpu, part, place, &dims)
            })
        });
        let kernel = kernel.sized([("outer", outer(signature))]);
        let parts = 0..signature.inputs.len();
        let reads: Vec<_> = parts.map(|i| ("x", Slot::Input(i))).collect();
        Calls::default().call(kernel, reads, [("y", Slot::Output)])
    },
    backward: |signature| {
        let kernel = kernel!("concat_backward", |T, k, s| {
            let mut parts = s.all_y::<T>()?;
            let (outer, mut rest) = (k.count("outer")?, s.x::<T>("dy")?);
            for i in 0..outer {
                for part in &mut parts {
                    let width = part.len() / outer;
                    let (from, after) = rest.split_at(width);
                    part[i * width..(i + 1) * width].copy_from_slice(from);
                    rest = after;
                }
            }
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let (outer, dy) = (k.count("outer")?, l.x("dy")?);
            let mut places = parts(&l.writes, outer, dy);
            places.try_for_each(|(part, place)| {
                let dims = rows_of(outer, [part.len, dy.len, part.len]);
                cuda_kernel::copy(l.gpu, place, part, &dims)
            })
        });
        let kernel = kernel.sized([("outer", outer(signature))]);
        let parts = 0..signature.inputs.len();
        let writes: Vec<_> = parts.map(|i| ("dx", Slot::Gradient(i))).collect();
        Calls::default().call(kernel, [("dy", Slot::OutputGradient)], writes)
    },
};

/// Returns each part with the view of the whole that starts at its first row.
#[cfg(feature = "cuda")]
fn parts<'a>(
    parts: &Named<View<'a>>,
    outer: usize,
    whole: View<'a>,
) -> impl Iterator<Item = (View<'a>, View<'a>)> {
    let mut before = 0; // elements per row in the parts before
    parts.iter().map(move |part| {
        let place = whole.slice_from(before);
        before += part.len / outer.max(1);
        (*part, place)
    })
}

/// Returns the dimensions of a copy of `outer` rows. `elements` are the total elements of the part, the source and the
/// destination.
#[cfg(feature = "cuda")]
fn rows_of(outer: usize, elements: [usize; 3]) -> Vec<Dim> {
    let [size, from, to] = elements.map(|elements| elements / outer.max(1));
    let rows = Dim {
        size: outer,
        from,
        to,
    };
    let row = Dim {
        size,
        from: 1,
        to: 1,
    };
    merged_dims([rows, row].into_iter())
}

/// Returns the product of the dimensions before the concatenated one, which is the first in which an input differs from
/// the output.
fn outer(signature: &Signature<'_>) -> usize {
    let shape = signature.output.dims;
    let differs = |dim: &usize| signature.inputs.iter().any(|x| x.dims[*dim] != shape[*dim]);
    let dim = (0..shape.len()).find(differs).unwrap_or(0);
    shape[..dim].iter().product()
}
