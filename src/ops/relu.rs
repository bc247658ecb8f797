//! ReLU, the rectified linear unit, max(x, 0).
//!
//! ```
//! use candle_core::{Device, Var};
//! use tallow::ops;
//!
//! let x = Var::new(&[-1f32, 0.0, 2.0], &Device::Cpu)?;
//! let y = ops::relu(&x)?;
//! assert_eq!(y.to_vec1::<f32>()?, [0.0, 0.0, 2.0]);
//! let gradients = tallow::backward(ops::sum(&y)?)?;
//! assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [0.0, 0.0, 1.0]);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::cast_for;
use super::info::{OpInfo, per_element};
use super::lowering::{Lowering, Slot, kernel, map_backward, map_forward};
use super::operand::check_size;
use super::record::{CallSpec, float_input, run};
use crate::Result;
use crate::kernels::cpu::relu as kernel;
use candle_core::Tensor;

/// Computes `y = max(x, 0)`, elementwise.
///
/// Backward: `dx = 0` where y is 0, else dy. Saved for backward: y, which the next op usually saves too. Autocast:
/// follows x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[-1f32, 0.0, 2.0], &Device::Cpu)?;
/// assert_eq!(tallow::ops::relu(&x)?.to_vec1::<f32>()?, [0.0, 0.0, 2.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A dtype that is not a float.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    let [x] = &cast_for("relu", [x])?;
    run(&INFO, CallSpec::like_first(), [x], || reference(x))
}

/// Computes [`relu()`] in plain candle ops. candle's own relu is not used: its gradient at 0 is 1, and it turns NaN
/// into 0.
///
/// # Errors
/// Those of [`relu()`].
pub fn reference(x: &Tensor) -> Result<Tensor> {
    check_size("relu", x.dims(), x.dtype(), x.device())?;
    let x = float_input("relu", x)?;
    Ok(x.le(0.0)?.where_cond(&x.zeros_like()?, &x)?)
}

pub(super) const INFO: OpInfo = per_element!(
    OpInfo::new("relu")
        .on_gpu_up_to(usize::MAX)
        .planned_composed(LOWERING),
    1,
    1,
    "x, y; backward y, dy, dx"
);

const LOWERING: Lowering = Lowering {
    forward: |_| {
        let kernel = kernel!("relu", |T, _, s| kernel::forward(s.x::<T>("x")?, s.y("y")?));
        map_forward(kernel)
    },
    backward: |_| {
        let kernel = kernel!("relu_backward", |T, _, s| {
            kernel::backward(s.x::<T>("dy")?, s.x("y")?, s.y("dx")?)
        });
        map_backward(kernel, ("y", Slot::Output))
    },
};
