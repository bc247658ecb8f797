//! Tensors one after another.

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
    strided::{Dim, joined},
};
use crate::{Error, Result, precision};
use candle_core::Tensor;

/// The tensors one after another along dimension `dim`; all others are equal. PyTorch's `cat`.
///
/// Of more than three tensors by candle's own copy, whose backward is candle's too: see
/// [`backward`](crate::backward()). Backward: each has its own part of the gradient. Nothing is kept for it. Autocast:
/// the widest of their dtypes under the CPU's policy; under CUDA's it follows them.
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
/// No tensor, a dimension that they do not have, shapes that differ elsewhere, mixed dtypes (but for a region's casts)
/// or devices.
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
    // An op of candle's graph has three inputs at most.
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

/// In a plan.
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

/// Each part with where its first row begins in the whole.
#[cfg(feature = "cuda")]
fn parts<'a>(
    parts: &Named<View<'a>>,
    outer: usize,
    whole: View<'a>,
) -> impl Iterator<Item = (View<'a>, View<'a>)> {
    let mut before = 0; // elements of a row that lie in the parts before
    parts.iter().map(move |part| {
        let place = whole.part_from(before);
        before += part.len / outer.max(1);
        (*part, place)
    })
}

/// So many rows of a part, of what is read and of what is written, by how many elements all rows of each have.
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
    joined([rows, row].into_iter())
}

/// The dimensions before the one that the tensors are joined along: the first in which one of them differs from the
/// result.
fn outer(signature: &Signature<'_>) -> usize {
    let shape = signature.output.dims;
    let differs = |dim: &usize| signature.inputs.iter().any(|x| x.dims[*dim] != shape[*dim]);
    let dim = (0..shape.len()).find(differs).unwrap_or(0);
    shape[..dim].iter().product()
}
