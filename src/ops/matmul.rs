//! Batched matmuls.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let a = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?; // (..., M, K)
//! let b = Tensor::new(&[[0f32, 1.0], [1.0, 1.0]], &Device::Cpu)?; // (..., K, N)
//! assert_eq!(ops::matmul(&a, &b)?.to_vec2::<f32>()?, [[2.0, 3.0], [4.0, 7.0]]);
//! assert_eq!(
//!     ops::matmul_transposed(&a, &a)?.to_vec2::<f32>()?, // a a^T
//!     [[5.0, 11.0], [11.0, 25.0]]
//! );
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::{cast, cast_for};
use super::dispatch::{Path, check_same, choose};
use super::info::OpInfo;
use super::lowering::{Calls, Kernel, Lowering, Slot};
use super::matmul_kernel::{Factor, batched};
use super::operand::{check_size, sums_in_half, without_repeats, zeros_of};
use super::record::{CallSpec, Spec, by_kernels, composed, input};
use crate::graph::Attribute;
use crate::precision::without_autocast;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};

/// Computes `c = a b` for each matrix: a (..., M, K), b (..., K, N), c (..., M, N), with the same leading dimensions.
///
/// Backward: `da = dc b^T`, `db = a^T dc`. Saved for backward: a and b. 2 * batch * M * K * N FLOPs forward, twice that
/// backward. Autocast: lower under both policies.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let a = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?; // (M, K)
/// let b = Tensor::new(&[[5f32], [6.0]], &Device::Cpu)?; // (K, N)
/// assert_eq!(tallow::ops::matmul(&a, &b)?.to_vec2::<f32>()?, [[17.0], [39.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Ranks under 2; leading dimensions or depths that differ; mixed dtypes or devices.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    checked_matmul(&INFO, a, b, false)
}

/// Computes `c = a b^T` for each matrix: a (..., M, K), b (..., N, K), c (..., M, N), as for queries and keys.
///
/// Backward: `da = dc b`, `db = dc^T a`. Saved for backward: a and b. b is used transposed by its strides, without a
/// copy. Autocast: as [`matmul`](fn@matmul).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let q = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?; // (M, K)
/// let k = Tensor::new(&[[5f32, 6.0]], &Device::Cpu)?; // (N, K)
/// assert_eq!(tallow::ops::matmul_transposed(&q, &k)?.to_vec2::<f32>()?, [[17.0], [39.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`matmul`](fn@matmul).
pub fn matmul_transposed(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    checked_matmul(&TRANSPOSED_INFO, a, b, true)
}

/// Computes either matmul with candle's own `matmul`; if `transposed`, b is (..., N, K).
///
/// # Errors
/// Those of [`matmul`](fn@matmul).
pub fn reference(a: &Tensor, b: &Tensor, transposed: bool) -> Result<Tensor> {
    let shape = check("matmul", a, b, transposed)?;
    let (a, b) = (&input(a), &input(b));
    if a.dims().ends_with(&[0]) {
        return Ok(zeros_of("matmul", shape, a.dtype(), &[a, b])?);
    }
    if a.rank() > 4 {
        // candle multiplies at most rank 4: merge the leading dimensions.
        let leading = &a.dims()[..a.rank() - 2];
        let (a, b) = (a.flatten_to(a.rank() - 3)?, b.flatten_to(b.rank() - 3)?);
        let c = reference(&a, &b, transposed)?;
        return Ok(c.reshape([leading, &c.dims()[1..]].concat())?);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let b = if transposed { b.t()? } else { b };
    Ok(a.matmul(&b)?)
}

fn checked_matmul(
    info: &'static OpInfo,
    a: &Tensor,
    b: &Tensor,
    transposed: bool,
) -> Result<Tensor> {
    let op = info.op;
    check_size(op, a.dims(), a.dtype(), a.device())?;
    check_size(op, b.dims(), b.dtype(), b.device())?;
    if sums_in_half(a) || sums_in_half(b) {
        return of_broadcast(info, a, b, transposed);
    }
    let [a, b] = &cast_for(op, [a, b])?;
    let shape = check(op, a, b, transposed)?;
    let call = CallSpec::new(shape, a.dtype()).with("transposed", Attribute::Flag(transposed));
    match choose(info, a)? {
        Path::Kernel => by_kernels(&INFO, call, [a, b]),
        Path::Reference => composed(&INFO, &[a, b], call.output(&[a.into(), b.into()]), || {
            reference(a, b, transposed)
        }),
    }
}

/// Computes the matmul in f32 if a factor is a broadcast view in half precision: its gradient is a sum of matmuls,
/// added in f32 and rounded once.
fn of_broadcast(info: &'static OpInfo, a: &Tensor, b: &Tensor, transposed: bool) -> Result<Tensor> {
    let once = [without_repeats(a)?, without_repeats(b)?];
    let [x, y] = cast_for(info.op, [&once[0], &once[1]])?;
    check_same(info.op, &[("a", &x), ("b", &y)])?;
    let wide =
        |x: &Tensor, shape: &Shape| Ok::<_, Error>(cast(x, DType::F32)?.broadcast_as(shape)?);
    let (a, b) = (wide(&x, a.shape())?, wide(&y, b.shape())?);
    let c = without_autocast(|| checked_matmul(info, &a, &b, transposed))?;
    cast(&c, x.dtype())
}

/// Returns the shape of the result, (..., M, N).
fn check(op: &'static str, a: &Tensor, b: &Tensor, transposed: bool) -> Result<Vec<usize>> {
    check_same(op, &[("a", a), ("b", b)])?;
    if let (Some(a_sizes), Some(b_sizes)) = (MatrixDims::of(a.dims()), MatrixDims::of(b.dims())) {
        let (depth, cols) = match transposed {
            true => (b_sizes.cols, b_sizes.rows),
            false => (b_sizes.rows, b_sizes.cols),
        };
        if a_sizes.leading == b_sizes.leading && a_sizes.cols == depth {
            let shape = [a_sizes.leading, &[a_sizes.rows, cols]].concat();
            check_size(op, &shape, a.dtype(), a.device())?;
            return Ok(shape);
        }
    }
    Err(Error::Shape {
        op,
        expected: if transposed {
            "a (..., M, K) and b (..., N, K)".into()
        } else {
            "a (..., M, K) and b (..., K, N)".into()
        },
        got: format!("a {:?}, b {:?}", a.dims(), b.dims()),
        hint: "leading dimensions must agree; broadcast_as repeats a tensor".into(),
    })
}

#[derive(Clone, Copy)]
struct MatrixDims<'a> {
    leading: &'a [usize],
    rows: usize,
    cols: usize,
}

impl<'a> MatrixDims<'a> {
    fn of(dims: &'a [usize]) -> Option<Self> {
        match dims {
            [leading @ .., rows, cols] => Some(Self {
                leading,
                rows: *rows,
                cols: *cols,
            }),
            _ => None,
        }
    }
}

const INFO: OpInfo = OpInfo::new("matmul").planned(LOWERING).on_gpu().costing(
    "2 B M K N, backward 4",
    "a, b, c; backward a, b, dc, da, db",
    |o| o.matmuls(o.output.size(), 2.0, 0.0),
    Some(|o| o.matmuls_backward(o.output.size(), 4.0, 0.0)),
);

/// The transposed op, which runs and is timed as `matmul`.
const TRANSPOSED_INFO: OpInfo = OpInfo::new("matmul_transposed").on_gpu();

pub(super) const INFOS: &[OpInfo] = &[INFO, TRANSPOSED_INFO];

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let [a, b] = [signature.inputs[0].dims, signature.inputs[1].dims];
        let transposed = signature.attribute("transposed") == Some(Attribute::Flag(true));
        let kernel = planned(a, false, b, transposed);
        let factors = [("a", Slot::Input(0)), ("b", Slot::Input(1))];
        Calls::default().call(kernel, factors, [("c", Slot::Output)])
    },
    backward: |signature| {
        let [a, b] = [signature.inputs[0].dims, signature.inputs[1].dims];
        let transposed = signature.attribute("transposed") == Some(Attribute::Flag(true));
        let dc = signature.output.dims;
        let (of_a, of_b, of_dc) = (Slot::Input(0), Slot::Input(1), Slot::OutputGradient);
        let da = planned(dc, false, b, !transposed);
        let calls =
            Calls::default().call(da, [("a", of_dc), ("b", of_b)], [("c", Slot::Gradient(0))]);
        // b (K, N): a^T dc; b (N, K): dc^T a.
        match transposed {
            false => {
                let db = planned(a, true, dc, false);
                calls.call(db, [("a", of_a), ("b", of_dc)], [("c", Slot::Gradient(1))])
            }
            true => {
                let db = planned(dc, true, a, false);
                calls.call(db, [("a", of_dc), ("b", of_a)], [("c", Slot::Gradient(1))])
            }
        }
    },
};

/// Plans `c = a b` for each of the leading dimensions, given the factors' stored shapes and whether they are
/// transposed.
fn planned(a: &[usize], a_transposed: bool, b: &[usize], b_transposed: bool) -> Kernel {
    let factor = |dims: &[usize], transposed| match *dims {
        [.., rows, cols] => Factor {
            row_stride: cols,
            rows,
            cols,
            transposed,
        },
        _ => Factor::new(1, 1), // refused by `check`
    };
    let batch: usize = a[..a.len().saturating_sub(2)].iter().product();
    batched(batch, factor(a, a_transposed), factor(b, b_transposed))
}
