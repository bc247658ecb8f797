//! Strided views: copies of their elements, and gradients.

use super::cpu::{for_any, for_stored};
use super::lowering::{Kernel, on_gpu};
use crate::graph::View;
use crate::kernels::cpu::parallel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::strided as cuda_kernel;
use crate::kernels::strided::{Dim, RANK, merged_dims, writes_are_disjoint};
use candle_core::{DType, Result, WithDType};
use std::cmp::Reverse;

/// Returns whether a view's elements are contiguous.
pub(crate) fn is_contiguous(view: &View) -> bool {
    let mut expected = 1;
    view.shape
        .iter()
        .zip(&view.stride)
        .rev()
        .all(|(size, stride)| {
            let fits = *size == 1 || *stride == expected;
            expected *= size;
            fits
        })
}

/// Returns the order of dimensions that makes `view` contiguous, if it covers all of a tensor of this `shape`.
pub(crate) fn contiguous_order(view: &View, shape: &[usize]) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..view.shape.len()).collect();
    order.sort_by_key(|dim| Reverse((view.stride[*dim], view.shape[*dim])));
    let all: usize = shape.iter().product();
    let is_all = view.shape.iter().product::<usize>() == all && view.offset == 0;
    let mut following = all;
    let in_order = order.iter().all(|&dim| {
        following /= view.shape[dim].max(1);
        view.shape[dim] == 1 || view.stride[dim] == following
    });
    (is_all && in_order).then_some(order)
}

/// Returns the view that broadcasts a tensor of these dimensions to `shape`.
pub(crate) fn broadcast(dims: &[usize], shape: &[usize]) -> View {
    let mut stride = vec![0; shape.len()];
    let mut step = 1;
    for (size, stride) in dims
        .iter()
        .zip(stride[shape.len() - dims.len()..].iter_mut())
        .rev()
    {
        *stride = if *size == 1 { 0 } else { step };
        step *= size;
    }
    View {
        shape: shape.to_vec(),
        stride,
        offset: 0,
    }
}

/// Returns the offset after a view's last element.
pub(crate) fn end(view: &View) -> usize {
    let dims = view.shape.iter().zip(&view.stride);
    let last: usize = dims
        .map(|(size, stride)| size.saturating_sub(1) * stride)
        .sum();
    match view.shape.contains(&0) {
        true => 0,
        false => view.offset + last + 1,
    }
}

/// Returns the offsets of a view's elements, in order.
pub(crate) fn offsets(view: &View) -> impl Iterator<Item = usize> {
    let (width, stride, count) = rows(view);
    let starts = (0..count).map(|number| match view.shape.is_empty() {
        true => view.offset,
        false => row(view, number),
    });
    starts.flat_map(move |start| (0..width).map(move |col| start + col * stride))
}

/// Returns the offset of the first element of a row, which is along the view's last dimension.
fn row(view: &View, mut number: usize) -> usize {
    let leading = view.shape.len() - 1;
    let dims = view.shape[..leading].iter().zip(&view.stride[..leading]);
    dims.rev().fold(view.offset, |place, (size, stride)| {
        let index = number % size;
        number /= size;
        place + index * stride
    })
}

/// Returns the size and stride of the last dimension, and the number of rows.
fn rows(view: &View) -> (usize, usize, usize) {
    match (view.shape.split_last(), view.stride.last()) {
        (Some((width, leading)), Some(stride)) => (*width, *stride, leading.iter().product()),
        _ => (1, 1, 1),
    }
}

/// Copies a view. Reads x; writes y, the elements of x at the offsets of `view`, in order.
pub(crate) fn gather(view: View) -> Kernel {
    let kernel = Kernel::new(
        "contiguous",
        |k, s| for_any!(s.dtype()?, T => gathered::<T>(k.view()?, s.x("x")?, s.y("y")?)),
    );
    let is_on_gpu = gather_dims(&view).len() <= RANK;
    let kernel = kernel.viewing(view);
    match is_on_gpu {
        false => kernel,
        true => on_gpu!(kernel, |k, l| {
            let view = k.view()?;
            let x = l.x("x")?.slice_from(view.offset);
            cuda_kernel::copy(l.gpu, x, l.y("y")?, &gather_dims(view))
        }),
    }
}

/// Returns the dimensions of a copy from a view to contiguous elements.
fn gather_dims(view: &View) -> Vec<Dim> {
    let mut following = view.shape.iter().product::<usize>();
    let dims = view.shape.iter().zip(&view.stride);
    merged_dims(dims.map(|(&size, &from)| {
        following /= size.max(1);
        Dim {
            size,
            from,
            to: following,
        }
    }))
}

/// Returns the dimensions of a copy from contiguous elements to a view.
fn scatter_dims(view: &View) -> Vec<Dim> {
    let dims = gather_dims(view).into_iter();
    let dims = dims.map(|Dim { size, from, to }| Dim {
        size,
        from: to,
        to: from,
    });
    dims.collect()
}

fn gathered<T: WithDType>(view: &View, x: &[T], y: &mut [T]) -> Result<()> {
    let (width, stride, _) = rows(view);
    if view.shape.is_empty() {
        y[0] = x[view.offset];
        return Ok(());
    }
    parallel::for_rows(y, width, |first, rows| {
        for (i, to) in rows.chunks_exact_mut(width).enumerate() {
            let start = row(view, first + i);
            match stride {
                1 => to.copy_from_slice(&x[start..start + width]),
                _ => {
                    let from = (0..width).map(|col| x[start + col * stride]);
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from);
                }
            }
        }
    });
    Ok(())
}

/// Computes the gradient of a view. Reads dy; writes dx, zeros with dy added at the offsets of `view`, in the dtype of
/// sums. It runs on a GPU only if elements share an offset solely because a dimension repeats them: a sum is then
/// computed by one thread or one block.
pub(crate) fn scatter(view: View) -> Kernel {
    let kernel = Kernel::new("scatter_add", |k, s| match s.dtype()? {
        DType::F64 => scattered::<f64, f64>(k.view()?, s.x("dy")?, s.y("dx")?),
        dtype => for_stored!(dtype, T => scattered::<T, f32>(k.view()?, s.x("dy")?, s.y("dx")?)),
    });
    let dims = scatter_dims(&view);
    let kernel = kernel.viewing(view);
    match dims.len() <= RANK && writes_are_disjoint(&dims) {
        false => kernel,
        true => on_gpu!(kernel, |k, l| {
            let (view, dy, dx) = (k.view()?, l.x("dy")?, l.y("dx")?);
            cuda_kernel::sums(l.gpu, dy, dx, view.offset, &scatter_dims(view))
        }),
    }
}

/// Adds in a fixed order. If all rows map to one row, each thread adds its columns; otherwise one thread adds
/// everything.
fn scattered<T: WithDType, S: WithDType + std::ops::AddAssign>(
    view: &View,
    dy: &[T],
    dx: &mut [S],
) -> Result<()> {
    dx.fill(S::from_f64(0.0));
    if view.shape.is_empty() {
        dx[view.offset] = S::from_f64(dy[0].to_f64());
        return Ok(());
    }
    let (width, stride, count) = rows(view);
    let leading = view.shape.len() - 1;
    let is_one_row = view.stride[..leading].iter().all(|stride| *stride == 0);
    if is_one_row && stride == 1 && dx.len() == width && width > 0 {
        parallel::for_rows(dx, 1, |first, part| {
            for from in dy.chunks_exact(width) {
                let from = &from[first..first + part.len()];
                part.iter_mut()
                    .zip(from)
                    .for_each(|(dx, dy)| *dx += S::from_f64(dy.to_f64()));
            }
        });
        return Ok(());
    }
    for (number, from) in (0..count).zip(dy.chunks_exact(width.max(1))) {
        let start = row(view, number);
        for (col, dy) in from.iter().enumerate() {
            dx[start + col * stride] += S::from_f64(dy.to_f64());
        }
    }
    Ok(())
}
