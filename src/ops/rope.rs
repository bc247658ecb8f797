//! Rotary position embedding.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::new(&[[1f32, 0.0], [1.0, 0.0]], &Device::Cpu)?; // (..., T, Dh)
//! let angles = Tensor::new(&[[0f32], [0.5]], &Device::Cpu)?; // (T, Dh/2)
//! let y = ops::rope(&x, &angles.cos()?, &angles.sin()?)?.to_vec2::<f32>()?;
//! assert_eq!(y[0], [1.0, 0.0]); // position 0 is not rotated
//! assert!((y[1][0] - 0.5f32.cos()).abs() < 1e-6 && (y[1][1] - 0.5f32.sin()).abs() < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::{cast_table, cast_with_tables};
use super::cost::cost;
use super::cpu::for_stored;
use super::dispatch::{Path, check_same_or_f32, choose};
use super::info::OpInfo;
use super::lowering::{Calls, Kernel, Lowering, Signature, Slot, on_gpu};
use super::operand::is_half;
use super::record::{Spec, by_kernels, composed, contiguous, wide_input, widen};
use crate::graph::Attribute;
use crate::kernels::cpu::rope as kernel;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::rope as cuda_kernel;
use crate::{Error, Result};
use candle_core::{D, DType, Tensor};

/// The pairs of elements of a head that rotate together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum RotaryPairs {
    /// (0,1), (2,3).., as in the paper.
    #[default]
    Adjacent,
    /// Element i and element i + Dh/2, as the weights of Llama, Qwen and Mistral on Hugging Face expect.
    Halves,
}

/// Rotates each adjacent pair of the last dimension by its position's angle: x and y (..., T, Dh), `cos` and `sin` (T,
/// Dh/2).
///
/// `y[2i] = x[2i] cos - x[2i+1] sin`, `y[2i+1] = x[2i] sin + x[2i+1] cos`. The pairs are (0,1), (2,3).., as in the
/// paper; [`rope_with`] supports others. It is computed in at least f32 and rounded once. If x is in half precision,
/// the tables may be in f32. Backward rotates back. Saved for backward: `cos` and `sin`, which get no gradient.
///
/// Autocast: follows x, and the tables are rounded to its dtype. (PyTorch's promotion would turn a half-precision x
/// into f32, which attention then turns back.)
///
/// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equations 15 and 34.
///
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0]], &Device::Cpu)?; // (T, Dh)
/// let cos = Tensor::new(&[[0f32, 1.0]], &Device::Cpu)?; // (T, Dh/2)
/// let sin = Tensor::new(&[[1f32, 0.0]], &Device::Cpu)?;
/// let y = tallow::ops::rope(&x, &cos, &sin)?; // a quarter turn of 1 and 2
/// assert_eq!(y.to_vec2::<f32>()?, [[-2.0, 1.0, 3.0, 4.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// An odd Dh; tables of another size than (T, Dh/2); mixed devices; mixed dtypes, except for f32 tables with x in half
/// precision.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope_with(x, cos, sin, RotaryPairs::Adjacent)
}

/// Rotates these pairs, otherwise like [`rope()`]. By halves: `y[i] = x[i] cos - x[i + Dh/2] sin`,
/// `y[i + Dh/2] = x[i] sin + x[i + Dh/2] cos`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, RotaryPairs};
///
/// let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0]], &Device::Cpu)?; // (T, Dh)
/// let cos = Tensor::new(&[[0f32, 1.0]], &Device::Cpu)?;
/// let sin = Tensor::new(&[[1f32, 0.0]], &Device::Cpu)?;
/// let y = ops::rope_with(&x, &cos, &sin, RotaryPairs::Halves)?; // a quarter turn of 1 and 3
/// assert_eq!(y.to_vec2::<f32>()?, [[-3.0, 2.0, 1.0, 4.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`rope()`].
pub fn rope_with(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: RotaryPairs) -> Result<Tensor> {
    let (x, [cos, sin]) = &cast_with_tables("rope", x, [cos, sin])?;
    check(x, cos, sin)?;
    match choose(&INFO, x)? {
        Path::Kernel => {
            let call = Rope {
                cos: contiguous(&wide_table(cos)?)?,
                sin: contiguous(&wide_table(sin)?)?,
                pairs,
            };
            by_kernels(&INFO, call, [x])
        }
        Path::Reference => {
            let output = (x.shape(), x.dtype());
            composed(&INFO, &[x], output, || reference_with(x, cos, sin, pairs))
        }
    }
}

/// Computes [`rope()`] in plain candle ops.
///
/// # Errors
/// Those of [`rope()`].
pub fn reference(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    reference_with(x, cos, sin, RotaryPairs::Adjacent)
}

/// Computes [`rope_with()`] in plain candle ops.
///
/// # Errors
/// Those of [`rope()`].
pub fn reference_with(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    pairs: RotaryPairs,
) -> Result<Tensor> {
    check(x, cos, sin)?;
    let wide = wide_input("rope", x)?;
    if x.dims().contains(&0) {
        return Ok(wide.to_dtype(x.dtype())?); // candle divides by zero on a GPU
    }
    let (cos, sin) = (widen(&cos.detach())?, widen(&sin.detach())?);
    let mut shape = x.dims().to_vec();
    let width = shape.pop().unwrap_or(0);
    // (..., T, Dh/2, 2), or (..., T, 2, Dh/2).
    let both = match pairs {
        RotaryPairs::Adjacent => D::Minus1,
        RotaryPairs::Halves => D::Minus2,
    };
    shape.extend(match pairs {
        RotaryPairs::Adjacent => [width / 2, 2],
        RotaryPairs::Halves => [2, width / 2],
    });
    let wide = wide.reshape(shape)?;
    let first = wide.narrow(both, 0, 1)?.squeeze(both)?; // (..., T, Dh/2)
    let second = wide.narrow(both, 1, 1)?.squeeze(both)?;
    let rotated_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let rotated_second = (first.broadcast_mul(&sin)? + second.broadcast_mul(&cos)?)?;
    let rotated = [rotated_first, rotated_second];
    let y = match pairs {
        RotaryPairs::Adjacent => Tensor::stack(&rotated, D::Minus1)?,
        RotaryPairs::Halves => Tensor::cat(&rotated, D::Minus1)?,
    };
    Ok(y.reshape(x.shape())?.to_dtype(x.dtype())?)
}

/// Returns a table in at least f32, as kernels read it.
fn wide_table(table: &Tensor) -> Result<Tensor> {
    match is_half(table.dtype()) {
        true => cast_table(table, DType::F32),
        false => Ok(table.detach()),
    }
}

fn check(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    check_same_or_f32("rope", &[("x", x), ("cos", cos), ("sin", sin)])?;
    if let [.., length, width] = x.dims() {
        let table = [*length, width / 2];
        if width % 2 == 0 && cos.dims() == table && sin.dims() == table {
            return Ok(());
        }
    }
    Err(Error::Shape {
        op: "rope",
        expected: "x (..., T, Dh) with Dh even, cos and sin (T, Dh/2)".into(),
        got: format!(
            "x {:?}, cos {:?}, sin {:?}",
            x.dims(),
            cos.dims(),
            sin.dims()
        ),
        hint: "narrow the tables to the sequence's positions".into(),
    })
}

pub(crate) const INFO: OpInfo = OpInfo::new("rope").on_gpu().planned(LOWERING).costing(
    "3 an element, backward 3",
    "x, y; backward dy, dx",
    |o| o.elementwise(3.0),
    Some(|o| {
        let bytes = o.output.bytes();
        cost(0.0, 3.0 * o.output.elements(), bytes, bytes)
    }),
);

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let reads = with_angles(Slot::Input(0));
        Calls::default().call(rotation(signature, false), reads, [("y", Slot::Output)])
    },
    backward: |signature| {
        let reads = with_angles(Slot::OutputGradient);
        Calls::default().call(rotation(signature, true), reads, [("y", Slot::Gradient(0))])
    },
};

fn with_angles(x: Slot) -> [(&'static str, Slot); 3] {
    [
        ("x", x),
        ("cos", Slot::ExtraInput(0)),
        ("sin", Slot::ExtraInput(1)),
    ]
}

/// Reads x, cos and sin; writes y, x rotated, or rotated back if `inverse`.
fn rotation(signature: &Signature<'_>, back: bool) -> Kernel {
    let name = if back { "rope_backward" } else { "rope" };
    let width = signature.output.dims.last().copied().unwrap_or(1);
    let kernel = Kernel::new(name, |k, s| {
        for_stored!(s.dtype()?, T => {
            let (width, back) = (k.count("width")?, k.flag("back"));
            let (x, cos, sin) = (s.x::<T>("x")?, s.x("cos")?, s.x("sin")?);
            match k.flag(HALVES) {
                false => kernel::rotate(x, cos, sin, width, back, s.y("y")?),
                true => kernel::rotate_halves(x, cos, sin, width, back, s.y("y")?),
            }
            Ok(())
        })
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (tables, width) = ([l.x("cos")?, l.x("sin")?], k.count("width")?);
        let sizes = (2 * tables[0].len / width.max(1), width);
        let turn = cuda_kernel::Rotation {
            by_halves: k.flag(HALVES),
            inverse: k.flag("back"),
        };
        cuda_kernel::rotate(l.gpu, l.x("x")?, tables, sizes, turn, l.y("y")?)
    });
    kernel
        .sized([("width", width)])
        .with("back", Attribute::Flag(back))
        .with_all(signature.attributes)
}

/// Returns the kernel that rotates the first heads of each row in place, or rotates gradients back. Reads `cos`, `sin`
/// (T, Dh/2); writes `x` (B, T, `row`). Only on GPUs.
pub(crate) fn in_place(
    [batch, length, heads, head_dim, row]: [usize; 5],
    by_halves: bool,
    back: bool,
) -> Kernel {
    let name = if back { "rotate_back" } else { "rotate" };
    let kernel = on_gpu!(Kernel::of_gpus(name), |k, l| {
        let turned = cuda_kernel::PackedHeads {
            batch: k.count("batch")?,
            length: k.count("length")?,
            heads: k.count("heads")?,
            head_dim: k.count("head_dim")?,
            row: k.count("row")?,
        };
        let turn = cuda_kernel::Rotation {
            by_halves: k.flag(HALVES),
            inverse: k.flag("back"),
        };
        cuda_kernel::in_place(l.gpu, l.y("x")?, [l.x("cos")?, l.x("sin")?], &turned, turn)
    });
    let kernel = kernel.sized([
        ("batch", batch),
        ("length", length),
        ("heads", heads),
        ("head_dim", head_dim),
        ("row", row),
    ]);
    let flags = [(HALVES, by_halves), ("back", back)];
    let flags = flags.map(|(name, set)| (name, Attribute::Flag(set)));
    kernel.with_all(&flags).in_place()
}

/// The attribute of a rotation [by halves](RotaryPairs::Halves).
pub(crate) const HALVES: &str = "by_halves";

/// A call of the op. It is small, because the graph of a model keeps many of these.
struct Rope {
    /// cos of the angles, (T, Dh/2), in the compute dtype.
    cos: Tensor,
    sin: Tensor,
    pairs: RotaryPairs,
}

impl Spec for Rope {
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        match self.pairs {
            RotaryPairs::Adjacent => Vec::new(),
            RotaryPairs::Halves => vec![(HALVES, Attribute::Flag(true))],
        }
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        vec![self.cos.clone(), self.sin.clone()]
    }
}
