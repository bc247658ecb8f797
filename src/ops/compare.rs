//! Comparisons, whose results are masks in u8.

use super::arithmetic::{broadcast_shape, result_dtype};
use super::cast::cast;
use super::cpu::for_any;
use super::dispatch::{Path, check_one_device, choose_of_any, has_kernel};
use super::info::OpInfo;
use super::lowering::{Calls, Kernel, Lowering, Slot, on_gpu};
use super::operand::{check_size, inside_storage, is_supported_float, is_supported_integer};
use super::record::{CallSpec, by_kernels, composed_as, input};
use crate::grad::no_grad;
use crate::kernels::cpu::select as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::select as cuda_kernel;
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// Compares `a == b`, elementwise, with broadcasting: u8, 1 where it holds and 0 elsewhere.
///
/// The following also holds for [`ne`], [`lt`], [`le`], [`gt`] and [`ge`]. Operands are floats, whose dtypes are
/// promoted as by [`add`](super::add), or two integers of one dtype (u8, u32, i64). A comparison with NaN does not
/// hold, except `ne`. The result is a mask for [`where_cond`](super::where_cond) and
/// [`masked_fill`](super::masked_fill), and [`cast`](super::cast()) makes it a float. There is no gradient, and nothing
/// is saved for backward. Autocast: follows its inputs.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let tokens = Tensor::new(&[[3u32, 0], [0, 7]], &Device::Cpu)?; // (B, T)
/// let padding = Tensor::new(0u32, &Device::Cpu)?;
/// assert_eq!(tallow::ops::eq(&tokens, &padding)?.to_vec2::<u8>()?, [[0, 1], [1, 0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not broadcast to each other, different devices, integers of other dtypes.
pub fn eq(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    compare(&EQ, a, b, |a, b| a.eq(b))
}

/// Compares `a != b`; otherwise like [`eq`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[f32::NAN, 1.0, 2.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::ne(&x, &x)?.to_vec1::<u8>()?, [1, 0, 0]); // only NaN differs from itself
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`eq`].
pub fn ne(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    compare(&NE, a, b, |a, b| a.ne(b))
}

/// Compares `a < b`; otherwise like [`eq`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
/// let bound = Tensor::new(2f32, &Device::Cpu)?;
/// assert_eq!(tallow::ops::lt(&x, &bound)?.to_vec1::<u8>()?, [1, 0, 0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`eq`].
pub fn lt(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    compare(&LT, a, b, |a, b| a.lt(b))
}

/// Compares `a <= b`; otherwise like [`eq`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
/// let bound = Tensor::new(2f32, &Device::Cpu)?;
/// assert_eq!(tallow::ops::le(&x, &bound)?.to_vec1::<u8>()?, [1, 1, 0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`eq`].
pub fn le(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    compare(&LE, a, b, |a, b| a.le(b))
}

/// Compares `a > b`; otherwise like [`eq`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
/// let bound = Tensor::new(2f32, &Device::Cpu)?;
/// assert_eq!(tallow::ops::gt(&x, &bound)?.to_vec1::<u8>()?, [0, 0, 1]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`eq`].
pub fn gt(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    compare(&GT, a, b, |a, b| a.gt(b))
}

/// Compares `a >= b`; otherwise like [`eq`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// let rows = Tensor::arange(0u32, 3, &Device::Cpu)?;
/// let columns = Tensor::arange(0u32, 3, &Device::Cpu)?;
/// let causal = tallow::ops::ge(&rows.unsqueeze(1)?, &columns)?; // (3, 3)
/// assert_eq!(causal.to_vec2::<u8>()?, [[1, 0, 0], [1, 1, 0], [1, 1, 1]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`eq`].
pub fn ge(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    compare(&GE, a, b, |a, b| a.ge(b))
}

fn compare(
    info: &'static OpInfo,
    a: &Tensor,
    b: &Tensor,
    plain: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let op = info.op;
    let shape = broadcast_shape(op, a.shape(), b.shape())?;
    let dtypes = [a.dtype(), b.dtype()];
    let dtype = match dtypes {
        [a, b] if a == b && is_supported_integer(a) => a,
        _ if dtypes.into_iter().any(is_supported_float) => result_dtype(op, a, b)?,
        [a, b] => {
            return Err(
                Error::dtype(op, format!("{} and {}", a.as_str(), b.as_str())).must_be(
                    "floats, or two integers of one dtype, u8, u32 or i64",
                    "convert one with to_dtype",
                ),
            );
        }
    };
    check_one_device(op, ("a", a), ("b", b))?;
    check_size(op, shape.dims(), dtype, a.device())?;
    no_grad(|| {
        let prepared = |x: &Tensor| -> Result<Tensor> {
            let x = inside_storage(op, x)?;
            let x = if x.dtype() == dtype {
                x
            } else {
                cast(&x, dtype)?
            };
            Ok(x.broadcast_as(&shape)?)
        };
        let (a, b) = (&prepared(a)?, &prepared(b)?);
        let call = CallSpec::new(&shape, DType::U8);
        match choose_of_any(op, a, has_kernel(info, a))? {
            Path::Kernel => by_kernels(info, call, [a, b]),
            Path::Reference => {
                composed_as(info, &[a, b], call, || Ok(plain(&input(a), &input(b))?))
            }
        }
    })
}

const fn info(op: &'static str, lowering: Lowering) -> OpInfo {
    OpInfo::new(op)
        .on_gpu_up_to(usize::MAX)
        .planned_composed(lowering)
        .composed("1 an element", |o| o.elementwise(1.0))
}

/// The description of a comparison.
macro_rules! comparison {
    ($op:literal, $holds:expr) => {
        info(
            $op,
            Lowering {
                forward: |_| {
                    forward(Kernel::new($op, |_, s| {
                        for_any!(s.dtype()?, T => {
                            let holds: fn(T, T) -> bool = $holds;
                            kernel::compare(s.x::<T>("a")?, s.x("b")?, s.y("y")?, holds);
                            Ok(())
                        })
                    }))
                },
                backward: |_| Calls::default(),
            },
        )
    };
}

const EQ: OpInfo = comparison!("eq", |a, b| a == b);
const NE: OpInfo = comparison!("ne", |a, b| a != b);
const LT: OpInfo = comparison!("lt", |a, b| a < b);
const LE: OpInfo = comparison!("le", |a, b| a <= b);
const GT: OpInfo = comparison!("gt", |a, b| a > b);
const GE: OpInfo = comparison!("ge", |a, b| a >= b);

pub(super) const INFOS: &[OpInfo] = &[EQ, NE, LT, LE, GT, GE];

fn forward(kernel: Kernel) -> Calls {
    let kernel = on_gpu!(kernel, |k, l| {
        cuda_kernel::compare(l.gpu, k.name(), [l.x("a")?, l.x("b")?], l.y("y")?)
    });
    let reads = [("a", Slot::Input(0)), ("b", Slot::Input(1))];
    Calls::default().call(kernel, reads, [("y", Slot::Output)])
}
