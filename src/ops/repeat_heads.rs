//! Repetition of the heads of k and v for the heads of q that share them.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let k = Tensor::ones((2, 3, 5, 4), DType::F32, &Device::Cpu)?; // (B, Hkv, T, Dh)
//! assert_eq!(ops::repeat_heads(&k, 2)?.dims(), [2, 6, 5, 4]);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::cast_for;
use super::info::OpInfo;
use super::lowering::{Calls, Lowering, Slot, kernel, on_gpu};
use super::operand::check_size;
use super::record::{CallSpec, run, wide_input};
use crate::graph::Attribute;
use crate::kernels::cpu::repeat as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::repeat as cuda_kernel;
use crate::{Error, Result};
use candle_core::Tensor;

/// Repeats each head `times` times in succession: (..., H, T, Dh) to (..., H * times, T, Dh), PyTorch's
/// `repeat_interleave` along the heads.
///
/// [`attention`](crate::attention) accepts fewer heads of k and v than of q, without this copy. Backward: each head's
/// gradient is the sum over its repeats, in at least f32, rounded once. Saved for backward: nothing. Autocast: follows
/// x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let k = Tensor::new(&[[[1f32]], [[2.0]]], &Device::Cpu)?; // (H, T, Dh) = (2, 1, 1)
/// let repeated = tallow::ops::repeat_heads(&k, 2)?;
/// assert_eq!(repeated.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0, 2.0, 2.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A tensor of fewer than three dimensions; `times` 0.
pub fn repeat_heads(x: &Tensor, times: usize) -> Result<Tensor> {
    let shape = check(x, times)?;
    let [x] = &cast_for("repeat_heads", [x])?;
    let call = CallSpec::new(shape, x.dtype()).with("times", Attribute::Count(times));
    run(&INFO, call, [x], || reference(x, times))
}

/// Computes [`repeat_heads()`] in plain candle ops.
///
/// # Errors
/// Those of [`repeat_heads()`].
pub fn reference(x: &Tensor, times: usize) -> Result<Tensor> {
    let shape = check(x, times)?;
    let wide = wide_input("repeat_heads", x)?; // candle sums the gradient in this dtype
    let (outer, inner) = x.dims().split_at(x.rank() - 2);
    let y = wide
        .reshape([outer, &[1], inner].concat())?
        .broadcast_as([outer, &[times], inner].concat())?
        .reshape(shape)?;
    Ok(y.to_dtype(x.dtype())?)
}

fn check(x: &Tensor, times: usize) -> Result<Vec<usize>> {
    let refuse = |expected: &str, got: String| {
        Err(Error::shape("repeat_heads", got).must_be(
            expected,
            "as split_heads returns it; each head is repeated once or more",
        ))
    };
    check_size("repeat_heads", x.dims(), x.dtype(), x.device())?;
    if x.rank() < 3 {
        return refuse("x (..., H, T, Dh)", format!("{:?}", x.dims()));
    }
    let mut shape = x.dims().to_vec();
    let heads = &mut shape[x.rank() - 3];
    match heads.checked_mul(times) {
        Some(repeated) if times > 0 => *heads = repeated,
        _ => {
            return refuse(
                "times of at least 1, such that heads * times does not overflow",
                times.to_string(),
            );
        }
    }
    check_size("repeat_heads", &shape, x.dtype(), x.device())?;
    Ok(shape)
}

pub(super) const INFO: OpInfo = OpInfo::new("repeat_heads")
    .on_gpu()
    .costing(
        "0, backward 1 an element of y",
        "x, y; backward dy, dx",
        |o| o.elementwise(0.0),
        Some(|o| o.moved_back(1.0)),
    )
    .planned(LOWERING);

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = kernel!("repeat_heads", |T, k, s| {
            kernel::repeat(
                s.x::<T>("x")?,
                k.count("width")?,
                k.count("times")?,
                s.y("y")?,
            );
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let (width, times) = (k.count("width")?, k.count("times")?);
            cuda_kernel::repeat(l.gpu, l.x("x")?, width, times, l.y("y")?)
        });
        let kernel = kernel.with_all(signature.attributes);
        let kernel = kernel.sized([("width", width_of(signature.inputs[0].dims))]);
        Calls::default().call(kernel, [("x", Slot::Input(0))], [("y", Slot::Output)])
    },
    backward: |signature| {
        let kernel = kernel!("repeat_heads_backward", |T, k, s| {
            kernel::fold(
                s.x::<T>("dy")?,
                k.count("width")?,
                k.count("times")?,
                s.y("dx")?,
            );
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let (width, times) = (k.count("width")?, k.count("times")?);
            cuda_kernel::fold(l.gpu, l.x("dy")?, width, times, l.y("dx")?)
        });
        let kernel = kernel.with_all(signature.attributes);
        let kernel = kernel.sized([("width", width_of(signature.inputs[0].dims))]);
        Calls::default().call(
            kernel,
            [("dy", Slot::OutputGradient)],
            [("dx", Slot::Gradient(0))],
        )
    },
};

/// Returns the number of elements in a head, T Dh.
fn width_of(dims: &[usize]) -> usize {
    dims[dims.len() - 2..].iter().product()
}
