//! Strided copies and sums; see `strided.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config, set_to_zero, suffix};
use crate::kernels::strided::{Dim, RANK};
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

const SOURCE: Source = Source {
    name: "strided",
    parts: &[PRELUDE, include_str!("strided.cu")],
};

/// The kernels' struct of this name.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Dims {
    from: [i64; RANK],
    to: [i64; RANK],
    size: [u32; RANK],
    rank: i32,
}

// SAFETY: only numbers, like the kernels' struct.
unsafe impl DeviceRepr for Dims {}

impl Dims {
    fn new(dims: &[Dim]) -> Result<Self> {
        if dims.len() > RANK || count(dims) > i32::MAX as usize {
            bail!("expected at most {RANK} dimensions and under 2^31 elements, got {dims:?}");
        }
        let mut all = Self {
            rank: dims.len() as i32,
            ..Self::default()
        };
        for (d, dim) in dims.iter().enumerate() {
            (all.size[d], all.from[d], all.to[d]) =
                (dim.size as u32, dim.from as i64, dim.to as i64);
        }
        Ok(all)
    }
}

fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|dim| dim.size).product()
}

/// Copies elements of any dtype, the same for x and y, from x's offsets to y's. Other elements of y are not written.
///
/// # Errors
/// More than [`RANK`] dimensions; 2^31 words or more; driver errors.
pub(crate) fn copy(gpu: &CudaDevice, x: View, y: View, dims: &[Dim]) -> Result<()> {
    if count(dims) == 0 {
        return Ok(());
    }
    let size = x.dtype.size_in_bytes();
    let is_whole = |bytes: &usize| is_in_words(*bytes, size, [x, y], dims);
    let bytes = [16, 8, 4, 2]
        .into_iter()
        .find(|bytes| *bytes > size && is_whole(bytes));
    let bytes = bytes.unwrap_or(size);
    let word = match bytes {
        1 => "1",
        2 => "2",
        4 => "4",
        8 => "8",
        _ => "16",
    };
    let mut dims = dims.to_vec();
    if bytes > size
        && let Some((last, others)) = dims.split_last_mut()
    {
        last.size = last.size * size / bytes;
        for dim in others {
            (dim.from, dim.to) = (dim.from * size / bytes, dim.to * size / bytes);
        }
    }
    let (n, dims) = (count(&dims), Dims::new(&dims)?);
    let kernel = SOURCE.kernel(gpu, "copy", word)?;
    let config = launch_config((n.div_ceil(256), 1), (256, 1));
    let n = n as u32;
    let mut launch = kernel.builder();
    launch.arg(&x.pointer).arg(&y.pointer).arg(&n).arg(&dims);
    // SAFETY: the arguments are those of the kernel; the caller's buffers contain these offsets.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Returns whether elements of `size` bytes can be copied as words of `bytes` bytes.
fn is_in_words(bytes: usize, size: usize, buffers: [View; 2], dims: &[Dim]) -> bool {
    let Some((last, others)) = dims.split_last() else {
        return false;
    };
    let mut lengths = vec![last.size * size];
    lengths.extend(
        others
            .iter()
            .flat_map(|dim| [dim.from * size, dim.to * size]),
    );
    let is_multiple = |length: &usize| length.is_multiple_of(bytes);
    (last.from, last.to) == (1, 1)
        && lengths.iter().all(is_multiple)
        && buffers
            .iter()
            .all(|buffer| is_multiple(&(buffer.pointer as usize)))
}

/// Computes dx, f32: each index of `dims` adds its element of dy, in f32, f16 or bf16, at its destination; the rest of
/// dx is 0. Dimensions that repeat one destination have `to` 0. Along the others, destinations differ. `dx` begins
/// `offset` elements before the first destination.
///
/// # Errors
/// Other dtypes; sizes as for [`copy`]; driver errors.
pub(crate) fn sums(
    gpu: &CudaDevice,
    dy: View,
    dx: View,
    offset: usize,
    dims: &[Dim],
) -> Result<()> {
    let is_float = matches!(dy.dtype, DType::F32 | DType::F16 | DType::BF16);
    if !is_float || dx.dtype != DType::F32 {
        bail!(
            "scatter_add: no CUDA kernel for {:?} to {:?}",
            dy.dtype,
            dx.dtype
        );
    }
    let (repeats, places): (Vec<Dim>, Vec<Dim>) = dims.iter().partition(|dim| dim.to == 0);
    let (n, times) = (count(&places), count(&repeats));
    if n * times == 0 {
        return set_to_zero(gpu, dx);
    }
    if n < dx.len {
        set_to_zero(gpu, dx)?;
    }
    let is_rows = dims.last().is_some_and(|dim| dim.to == 0);
    let sharing = times.next_power_of_two();
    let (stem, config) = match is_rows {
        true => {
            let x = sharing.clamp(32, 1024);
            let y = (128 / x).max(1);
            ("sums_of_rows", launch_config((n.div_ceil(y), 1), (x, y)))
        }
        false => {
            let y = sharing.min(32);
            let x = (256 / y).max(32);
            ("sums_of_columns", launch_config((n.div_ceil(x), 1), (x, y)))
        }
    };
    let kernel = SOURCE.kernel(gpu, stem, suffix(dy.dtype))?;
    let (places, repeats) = (Dims::new(&places)?, Dims::new(&repeats)?);
    let (n, times, dx) = (n as u32, times as u32, dx.slice_from(offset));
    let mut launch = kernel.builder();
    launch.arg(&dy.pointer).arg(&dx.pointer);
    launch.arg(&n).arg(&places).arg(&times).arg(&repeats);
    // SAFETY: the arguments are those of the kernel; the caller's buffers contain these offsets.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}
