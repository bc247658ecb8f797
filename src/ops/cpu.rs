//! Between candle's CPU storage and the kernels' slices.

use super::operand::{check_room, operand};
use crate::kernels::cpu::{Real, attention::flash::Heads, parallel};
use crate::{graph, hardware};
use candle_core::{
    CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use half::{bf16, f16};
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

/// Runs `$body` with the type `$T` that the dtype names; only the kernels' dtypes get here.
macro_rules! for_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => candle_core::bail!("no CPU kernel for {other:?}"),
        }
    };
}
pub(crate) use for_real;

/// As [`for_real`], with half precision too, for kernels that widen as they read.
macro_rules! for_stored {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => $crate::ops::cpu::for_real!(other, $T => $body),
        }
    };
}
pub(crate) use for_stored;

fn contiguous_range(layout: &Layout) -> Result<Range<usize>> {
    if layout.dims().contains(&0) {
        return Ok(0..0); // it may begin beyond its storage
    }
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("a kernel was handed a strided tensor: {layout:?}"),
    }
}

/// The elements of a contiguous operand, inside a custom op's forward.
pub(crate) fn view<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    Ok(&storage.as_slice::<T>()?[contiguous_range(layout)?])
}

/// As [`view`], in the type computed in: for small operands, which half precision is widened to as a whole.
pub(crate) fn wide_view<'a, R: Real>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<Cow<'a, [R]>> {
    fn widened<T: WithDType, R: Real>(elements: &[T]) -> Vec<R> {
        elements.iter().map(|x| R::real(x.to_f64())).collect()
    }
    Ok(match storage {
        CpuStorage::F16(_) => Cow::Owned(widened(view::<f16>(storage, layout)?)),
        CpuStorage::BF16(_) => Cow::Owned(widened(view::<bf16>(storage, layout)?)),
        _ => Cow::Borrowed(view::<R>(storage, layout)?),
    })
}

/// A tensor of heads (B, H, T, Dh) as it lies, inside a custom op's forward or behind [`cpu_storage`].
pub(crate) fn heads<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<Heads<'a, T>> {
    match *layout.stride() {
        [batch, head, row, col] => {
            let all = storage.as_slice::<T>()?;
            let start = match layout.dims().contains(&0) {
                true => all.len(), // it may begin beyond its storage
                false => layout.start_offset(),
            };
            Ok(Heads {
                data: &all[start..],
                strides: [batch, head, row, col],
            })
        }
        _ => bail!("a tensor of heads has four dimensions, not {layout:?}"),
    }
}

/// What a CPU tensor's storage lock guards.
pub(crate) fn cpu_storage(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(cpu) => Ok(cpu),
        other => bail!(
            "a CPU kernel was handed a tensor on {:?}",
            other.device().location()
        ),
    }
}

/// The elements of a contiguous CPU tensor, borrowed for as long as this lives.
pub(crate) fn elements<T: WithDType>(tensor: &Tensor) -> Result<impl Deref<Target = [T]> + '_> {
    struct Elements<G, T> {
        storage: G,
        range: Range<usize>,
        element: PhantomData<T>,
    }

    impl<G: Deref<Target = Storage>, T: WithDType> Deref for Elements<G, T> {
        type Target = [T];

        fn deref(&self) -> &[T] {
            match &*self.storage {
                Storage::Cpu(cpu) => cpu
                    .as_slice::<T>()
                    .map_or(&[], |all| &all[self.range.clone()]),
                _ => &[], // refused below
            }
        }
    }

    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous_range(layout)?;
    cpu_storage(&storage)?.as_slice::<T>()?; // or the error why not
    Ok(Elements {
        storage,
        range,
        element: PhantomData,
    })
}

/// A buffer that `fill` writes completely, or the error that there is no room for it.
fn buffer<T: WithDType>(len: usize, fill: impl FnOnce(&mut [T])) -> Result<Vec<T>> {
    const WHAT: &str = "one tensor";
    let wanted_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    check_room(WHAT, wanted_bytes)?;
    parallel::filled(len, fill).map_err(|_| {
        let refused = crate::Error::OutOfMemory {
            what: WHAT.into(),
            wanted_bytes,
            available_bytes: hardware::total_bytes().unwrap_or(u64::MAX),
        };
        refused.into()
    })
}

/// How many elements a result has.
fn elements_of(shape: &Shape) -> Result<usize> {
    let count = shape
        .dims()
        .iter()
        .try_fold(1usize, |n, dim| n.checked_mul(*dim));
    count.ok_or_else(|| {
        candle_core::Error::msg(format!("{shape:?} has more elements than can be counted"))
    })
}

/// What a custom op's forward returns: elements that `fill` writes, as storage.
pub(crate) fn output<T: WithDType>(
    shape: impl Into<Shape>,
    fill: impl FnOnce(&mut [T]),
) -> Result<(CpuStorage, Shape)> {
    let shape = shape.into();
    let data = buffer(elements_of(&shape)?, fill)?;
    Ok((T::to_cpu_storage_owned(data), shape))
}

/// A CPU tensor of elements that `fill` writes.
pub(crate) fn tensor<T: WithDType>(
    shape: impl Into<Shape>,
    fill: impl FnOnce(&mut [T]),
) -> Result<Tensor> {
    let shape = shape.into();
    let data = buffer(elements_of(&shape)?, fill)?;
    Tensor::from_vec(data, shape, &Device::Cpu)
}

/// Two CPU tensors that `fill` writes together.
pub(crate) fn tensors<T: WithDType>(
    first: impl Into<Shape>,
    second: impl Into<Shape>,
    fill: impl FnOnce(&mut [T], &mut [T]),
) -> Result<(Tensor, Tensor)> {
    let mut b = None;
    let a = tensor(first, |a| b = Some(tensor(second, |b| fill(a, b))))?;
    match b {
        Some(b) => Ok((a, b?)),
        None => bail!("nothing was computed"),
    }
}

/// As [`output`], with a tensor beside it that the op keeps for backward.
pub(crate) fn output_keeping<T: WithDType, K: WithDType>(
    shape: impl Into<Shape>,
    kept: impl Into<Shape>,
    fill: impl FnOnce(&mut [T], &mut [K]),
) -> Result<((CpuStorage, Shape), Tensor)> {
    let mut y = None;
    let kept = tensor(kept, |kept| y = Some(output(shape, |y| fill(y, kept))))?;
    match y {
        Some(y) => Ok((y?, kept)),
        None => bail!("nothing was computed"),
    }
}

/// Token ids in u32 or i64 on the host, flattened, each checked against the vocabulary before any kernel sees it.
///
/// `ignore` is let through.
pub(crate) fn ids(
    op: &'static str,
    ids: &Tensor,
    vocab_size: usize,
    ignore: Option<u32>,
) -> crate::Result<Vec<u32>> {
    let is_traced = graph::is_tracing();
    let outside = |position: usize, id: i64| crate::Error::TokenId {
        op,
        id,
        position,
        vocab_size,
    };
    let is_in = |id: u32| (id as usize) < vocab_size || Some(id) == ignore;
    match ids.dtype() {
        DType::U32 if is_traced => Ok(Vec::new()), // a trace knows the tensor, not what is in it
        DType::U32 => {
            let ids = operand(op, ids)?.flatten_all()?.to_vec1::<u32>()?;
            match ids.iter().position(|id| !is_in(*id)) {
                Some(position) => Err(outside(position, ids[position].into())),
                None => Ok(ids),
            }
        }
        DType::I64 if !is_traced => {
            let ids = operand(op, ids)?.flatten_all()?.to_vec1::<i64>()?;
            let ids = ids.into_iter().enumerate();
            let ids = ids.map(|(position, id)| match u32::try_from(id) {
                Ok(id) if is_in(id) => Ok(id),
                _ => Err(outside(position, id)),
            });
            ids.collect()
        }
        dtype => Err(crate::Error::DType {
            op,
            expected: match is_traced {
                true => "ids in u32, where they are traced".into(),
                false => "ids in u32 or i64".into(),
            },
            got: dtype.as_str().into(),
            hint: "convert with to_dtype(DType::U32)".into(),
        }),
    }
}
