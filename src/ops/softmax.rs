//! Softmax along the last dimension, with the scale and the mask of attention.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::{attention::Mask, ops};
//!
//! let scores = Tensor::randn(0f32, 1.0, (2, 4, 4), &Device::Cpu)?; // (..., Tq, Tk)
//! let p = ops::softmax(&scores, 0.5, Mask::Causal)?;
//! assert!((p.sum_all()?.to_scalar::<f32>()? - 8.0).abs() < 1e-5); // each row sums to 1
//! assert_eq!(p.to_vec3::<f32>()?[0][0], [1.0, 0.0, 0.0, 0.0]); // the first query sees the first key
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::cast_for;
use super::cost::{as_softmax, cost};
use super::cpu::{for_real, for_stored};
use super::info::OpInfo;
#[cfg(feature = "cuda")]
use super::lowering::Operands;
use super::lowering::{Calls, Check, Kernel, Lowering, Named, Signature, Slices, Slot, on_gpu};
use super::operand::{check_float, check_size};
use super::record::{CallSpec, composed, run, wide_input};
use crate::graph::Attribute;
use crate::kernels::Mask;
use crate::kernels::attention::{KeyRanges, PerScore};
use crate::kernels::cpu::rows::softmax::{self as kernel, HeadRows};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{flash_attention::PerScore as PerScoreOnGpu, softmax as cuda_kernel};
use crate::{Error, Result};
use candle_core::{D, DType, Device, Tensor};

/// Computes `p = softmax(scale * x)` along the last dimension, over the keys that `mask` leaves visible: x and p (...,
/// Tq, Tk).
///
/// A plain softmax is `softmax(&x, 1.0, Mask::Full)`, for any rank (a scalar is one key). Masked places are 0, and so
/// is a row without a visible key. Backward: `dx = scale p (dp - sum(dp p))`. Saved for backward: p; in half precision
/// x instead, from which p is recomputed without rounding. There is never a mask tensor or a tensor of scaled scores.
/// Autocast: f32 under CUDA's policy; follows x under the CPU's.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::{attention::Mask, ops};
/// let x = Tensor::new(&[[1f32, 9.0], [1.0, 1.0]], &Device::Cpu)?;
/// let p = ops::softmax(&x, 1.0, Mask::Causal)?;
/// assert_eq!(p.to_vec2::<f32>()?, [[1.0, 0.0], [0.5, 0.5]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A mask on a tensor of fewer than two dimensions.
pub fn softmax(x: &Tensor, scale: f64, mask: Mask) -> Result<Tensor> {
    let [x] = &cast_for("softmax", [x])?;
    check(x, mask)?;
    run(&INFO, call(scale, mask), [x], || reference(x, scale, mask))
}

fn call(scale: f64, mask: Mask) -> CallSpec {
    CallSpec::like_first()
        .with("scale", Attribute::Number(scale))
        .with("mask", Attribute::Mask(mask))
}

/// The visible keys of heads (B, H, Tq, Tk).
pub(crate) struct Seen<'a> {
    pub mask: Mask,
    /// (B, Tq) u32.
    pub first_keys: Option<&'a Tensor>,
    /// u8, with dimensions of the heads or 1; 0 hides.
    pub visible: Option<&'a Tensor>,
    /// Whether rows whose visible scores are all -inf are 0, as those without a visible key. A key mask needs this.
    pub masked: bool,
}

/// Computes [`softmax()`] over heads, x and p (B, H, Tq, Tk). `on_host` returns the visible keys for the reference
/// ([`softmax_over`]).
///
/// # Errors
/// Those of [`softmax()`].
pub(crate) fn softmax_of_heads(
    x: &Tensor,
    scale: f64,
    seen: Seen<'_>,
    on_host: impl FnOnce() -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let info = match seen.masked {
        true => &MASKED,
        false => &INFO,
    };
    let [x] = &cast_for(info.op, [x])?;
    check(x, seen.mask)?;
    let reads = seen.first_keys.into_iter().chain(seen.visible);
    let call = reads.fold(call(scale, seen.mask), |call, x| call.reading(x));
    run(info, call, [x], || softmax_over(x, scale, on_host))
}

/// Computes [`softmax()`] in plain candle ops.
///
/// # Errors
/// Those of [`softmax()`].
pub fn reference(x: &Tensor, scale: f64, mask: Mask) -> Result<Tensor> {
    let (queries, keys) = check(x, mask)?;
    if x.rank() == 0 {
        return Ok(reference(&x.reshape(1)?, scale, mask)?.reshape(())?);
    }
    let wide = wide_input("softmax", x)?;
    if x.dims().contains(&0) {
        return Ok(wide.contiguous()?.to_dtype(x.dtype())?); // candle refuses to reduce an empty tensor
    }
    if mask == Mask::Full {
        let scores = scaled(&wide, scale)?;
        let top = scores.max_keepdim(D::Minus1)?.detach();
        let e = scores.broadcast_sub(&top)?.exp()?;
        let p = e.broadcast_div(&e.sum_keepdim(D::Minus1)?)?;
        return Ok(p.to_dtype(x.dtype())?);
    }
    softmax_over(x, scale, || {
        let seen = KeyRanges::by_mask(mask, queries, keys);
        let seen = (0..queries).flat_map(|i| {
            let seen = seen.of_query(i);
            (0..keys).map(move |j| u8::from(seen.contains(&j)))
        });
        Tensor::from_vec(seen.collect(), (queries, keys), x.device())
    })
}

/// Returns a constant of x's dtype on its device. It is converted on the host, because Metal has no f64.
fn scalar(value: f64, x: &Tensor) -> candle_core::Result<Tensor> {
    let value = Tensor::new(value, &Device::Cpu)?.to_dtype(x.dtype())?;
    value.to_device(x.device())
}

/// Computes `scale x` as a product of tensors: with `x * 0.0`, candle drops the gradient.
fn scaled(x: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    composed(&SCALE, &[x], (x.shape(), x.dtype()), || {
        x.broadcast_mul(&scalar(scale, x)?)
    })
}

/// Computes the [`reference`] over the keys where the tensor from `visible`, in u8, is 1; it broadcasts to the shape of
/// x.
fn softmax_over(
    x: &Tensor,
    scale: f64,
    seen: impl FnOnce() -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let scores = scaled(&wide_input("softmax", x)?, scale)?;
    let [.., queries, keys] = *x.dims() else {
        return Err(candle_core::Error::msg("softmax: no queries and keys").into());
    };
    let seen = composed(&MASK, &[], ((queries, keys), DType::U8), seen)?;
    let visible = seen.to_dtype(scores.dtype())?;
    // Low enough that its exponential vanishes next to any score, and finite: a row without a visible key is 0 / 1, not
    // NaN.
    let low = if scores.dtype() == DType::F64 {
        -1e300
    } else {
        -1e38
    };
    // Selected, not multiplied by 0: NaN or infinity in a hidden score has no effect.
    let scores = composed(
        &MASK,
        &[&seen, &scores],
        (scores.shape(), scores.dtype()),
        || {
            let low = scalar(low, &scores)?.broadcast_as(scores.shape())?;
            seen.broadcast_as(scores.shape())?.where_cond(&scores, &low)
        },
    )?;
    let top = scores.max_keepdim(D::Minus1)?.detach();
    let e = scores.broadcast_sub(&top)?.exp()?.broadcast_mul(&visible)?;
    let total = e.sum_keepdim(D::Minus1)?;
    let total = (&total + total.eq(0.0)?.to_dtype(total.dtype())?)?;
    Ok(e.broadcast_div(&total)?.to_dtype(x.dtype())?)
}

/// Returns (Tq, Tk); Tq is 1 for one dimension, and both are 1 for a scalar.
fn check(x: &Tensor, mask: Mask) -> Result<(usize, usize)> {
    check_float("softmax", x)?;
    check_size("softmax", x.dims(), x.dtype(), x.device())?;
    match *x.dims() {
        [.., queries, keys] => Ok((queries, keys)),
        [keys] if mask == Mask::Full => Ok((1, keys)),
        [] if mask == Mask::Full => Ok((1, 1)),
        _ => Err(Error::Shape {
            op: "softmax",
            expected: "x (..., Tq, Tk)".into(),
            got: format!("{:?} with the mask {mask}", x.dims()),
            hint: "a mask needs queries and keys; Mask::Full takes any rank".into(),
        }),
    }
}

const INFO: OpInfo = info("softmax", LOWERING).on_gpu();

const fn info(op: &'static str, lowering: Lowering) -> OpInfo {
    let info = OpInfo::new(op).planned(lowering).costing(
        "6 an element, backward 5",
        "x, p; backward p, dp, dx",
        |o| o.elementwise(6.0).map(as_softmax),
        Some(|o| {
            let flops = 5.0 * o.output.elements();
            cost(0.0, flops, 2.0 * o.output.bytes(), o.input_bytes()).map(as_softmax)
        }),
    );
    info.including("scale and mask")
}

/// Softmax of heads with a key mask or a bias: x in f32 or f64.
const MASKED: OpInfo = info("masked_softmax", MASKED_LOWERING).on_gpu();

/// Ops of which the reference is composed.
const SCALE: OpInfo = OpInfo::new("scale").composed("1 an element", |o| o.elementwise(1.0));

const MASK: OpInfo = OpInfo::new("mask").composed("0", |o| o.elementwise(0.0));

pub(super) const INFOS: &[OpInfo] = &[INFO, MASKED, SCALE, MASK];

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = planned("softmax", signature, |k, s| {
            let (sequences, scale) = (Sequences::of(k, s)?, k.number("scale")?);
            for_stored!(s.dtype()?, T => {
                sequences.each([s.x::<T>("x")?], s.y("p")?, |[x], seen, p| {
                    kernel::forward(x, seen, scale, p);
                });
                Ok(())
            })
        });
        let kernel = on_gpu!(kernel, |k, l| {
            cuda_kernel::forward(l.gpu, scores(k, l)?, l.x("x")?, l.y("p")?)
        });
        let reads = Named::from([("x", Slot::Input(0))]);
        let reads = reads.with_some("first_keys", first_keys(signature));
        let calls = match first_keys(signature) {
            Some(_) => Calls::default().checked(0, Check::FirstKeys),
            None => Calls::default(),
        };
        calls.call(kernel, reads, [("p", Slot::Output)])
    },
    backward: |signature| {
        // Half precision recomputes p from x, without rounding it.
        let source = match signature.output.dtype {
            DType::F16 | DType::BF16 => ("x", Slot::Input(0)),
            _ => ("p", Slot::Output),
        };
        let kernel = planned("softmax_backward", signature, |k, s| {
            let (sequences, scale) = (Sequences::of(k, s)?, k.number("scale")?);
            match s.dtype()? {
                dtype @ (DType::F16 | DType::BF16) => for_stored!(dtype, T => {
                    let inputs = [s.x::<T>("dp")?, s.x("x")?];
                    sequences.each(inputs, s.y("dx")?, |[dp, x], seen, dx| {
                        kernel::backward_from_scores(dp, x, seen, scale, dx);
                    });
                    Ok(())
                }),
                dtype => for_real!(dtype, T => {
                    let inputs = [s.x::<T>("dp")?, s.x("p")?];
                    sequences.each(inputs, s.y("dx")?, |[dp, p], seen, dx| {
                        kernel::backward(dp, p, seen, scale, dx);
                    });
                    Ok(())
                }),
            }
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let source = match l.reads.get("p") {
                Some(p) => *p,
                None => l.x("x")?,
            };
            cuda_kernel::backward(l.gpu, scores(k, l)?, [l.x("dp")?, source], l.y("dx")?)
        });
        let reads = Named::from([("dp", Slot::OutputGradient), source]);
        let reads = reads.with_some("first_keys", first_keys(signature));
        Calls::default().call(kernel, reads, [("dx", Slot::Gradient(0))])
    },
};

const MASKED_LOWERING: Lowering = Lowering {
    forward: |signature| {
        let kernel = planned_of_heads("masked_softmax", signature, |k, s| {
            let (rows, scale) = (head_rows(k, s)?, k.number("scale")?);
            for_real!(s.dtype()?, T => {
                kernel::forward_of_heads(s.x::<T>("x")?, &rows, scale, s.y("p")?);
                Ok(())
            })
        });
        let kernel = on_gpu!(kernel, |k, l| {
            cuda_kernel::forward(l.gpu, masked_scores(k, l)?, l.x("x")?, l.y("p")?)
        });
        let reads = Named::from([("x", Slot::Input(0))]).and(masks(signature));
        let first_keys = signature.extra_inputs.iter();
        let calls = match first_keys.clone().position(|x| x.dtype == DType::U32) {
            Some(read) => Calls::default().checked(read, Check::FirstKeys),
            None => Calls::default(),
        };
        calls.call(kernel, reads, [("p", Slot::Output)])
    },
    backward: |signature| {
        let kernel = planned_of_heads("masked_softmax_backward", signature, |k, s| {
            let (rows, scale) = (head_rows(k, s)?, k.number("scale")?);
            for_real!(s.dtype()?, T => {
                let (dp, p) = (s.x::<T>("dp")?, s.x("p")?);
                kernel::backward_of_heads(dp, p, &rows, scale, s.y("dx")?);
                Ok(())
            })
        });
        let kernel = on_gpu!(kernel, |k, l| {
            let inputs = [l.x("dp")?, l.x("p")?];
            cuda_kernel::backward(l.gpu, masked_scores(k, l)?, inputs, l.y("dx")?)
        });
        let reads = Named::from([("dp", Slot::OutputGradient), ("p", Slot::Output)]);
        Calls::default().call(
            kernel,
            reads.and(masks(signature)),
            [("dx", Slot::Gradient(0))],
        )
    },
};

/// Returns the first keys, in u32, and the key mask, in u8, if there are any.
fn masks(signature: &Signature<'_>) -> Vec<(&'static str, Slot)> {
    let names = signature.extra_inputs.iter().map(|x| match x.dtype {
        DType::U8 => "visible",
        _ => "first_keys",
    });
    names.zip((0..).map(Slot::ExtraInput)).collect()
}

/// The sizes of heads and of a key mask.
const HEADS: [&str; 4] = ["batch", "heads", "queries", "keys"];
const VISIBLE: [&str; 4] = ["visible_b", "visible_h", "visible_q", "visible_k"];

/// Returns a kernel with the sizes of heads (B, H, Tq, Tk).
fn planned_of_heads(
    name: &'static str,
    signature: &Signature<'_>,
    run: fn(&Kernel, &Slices<'_>) -> candle_core::Result<()>,
) -> Kernel {
    let kernel = Kernel::new(name, run).with_all(signature.attributes);
    let mut visible = signature.extra_inputs.iter();
    let visible = visible.find(|x| x.dtype == DType::U8);
    let all = [(HEADS, Some(&signature.output)), (VISIBLE, visible)];
    all.into_iter().fold(kernel, |kernel, (names, x)| match x {
        Some(x) if x.dims.len() == 4 => kernel.sized([0, 1, 2, 3].map(|i| (names[i], x.dims[i]))),
        _ => kernel,
    })
}

/// Returns the sizes of these names.
fn counts(k: &Kernel, [b, h, q, l]: [&str; 4]) -> candle_core::Result<[usize; 4]> {
    Ok([k.count(b)?, k.count(h)?, k.count(q)?, k.count(l)?])
}

fn head_rows<'a>(k: &Kernel, s: &Slices<'a>) -> candle_core::Result<HeadRows<'a>> {
    let [_, heads, queries, keys] = counts(k, HEADS)?;
    let visible = s.some_x("visible")?;
    let visible =
        visible.map(|all| candle_core::Result::Ok(PerScore::new(all, counts(k, VISIBLE)?)));
    Ok(HeadRows {
        mask: k.mask()?,
        heads,
        queries,
        keys,
        first_keys: s.some_x("first_keys")?.unwrap_or_default(),
        visible: visible.transpose()?,
    })
}

fn first_keys(signature: &Signature<'_>) -> Option<Slot> {
    (!signature.extra_inputs.is_empty()).then_some(Slot::ExtraInput(0))
}

/// The rows of a call, with first keys for each sequence if there are any.
struct Sequences<'a> {
    mask: Mask,
    queries: usize,
    keys: usize,
    /// The first keys, (B, Tq); empty if there are none.
    first_keys: &'a [u32],
}

impl<'a> Sequences<'a> {
    fn of(k: &Kernel, s: &Slices<'a>) -> candle_core::Result<Self> {
        Ok(Self {
            mask: k.mask()?,
            queries: k.count("queries")?,
            keys: k.count("keys")?,
            first_keys: s.some_x("first_keys")?.unwrap_or_default(),
        })
    }

    /// Calls `f` with the elements of each sequence and the keys that its queries see.
    fn each<T, const N: usize>(
        &self,
        inputs: [&[T]; N],
        y: &mut [T],
        f: impl Fn([&[T]; N], KeyRanges<'_>, &mut [T]),
    ) {
        let seen = KeyRanges::by_mask(self.mask, self.queries, self.keys);
        if self.first_keys.is_empty() {
            return f(inputs, seen, y);
        }
        let sequences = self.first_keys.chunks(self.queries);
        let elements = y.len() / sequences.len();
        for (i, (first_keys, y)) in sequences.zip(y.chunks_mut(elements)).enumerate() {
            let inputs = inputs.map(|x| &x[i * elements..][..elements]);
            f(inputs, seen.from_first_keys(first_keys), y);
        }
    }
}

/// Returns a kernel with the sizes of the rows.
fn planned(
    name: &'static str,
    signature: &Signature<'_>,
    run: fn(&Kernel, &Slices<'_>) -> candle_core::Result<()>,
) -> Kernel {
    let (queries, keys) = match *signature.output.dims {
        [.., queries, keys] => (queries, keys),
        [keys] => (1, keys),
        [] => (1, 1),
    };
    let kernel = Kernel::new(name, run).with_all(signature.attributes);
    let kernel = kernel.sized([("queries", queries), ("keys", keys)]);
    match signature.extra_inputs.first() {
        None => kernel,
        Some(first_keys) => {
            let matrices = signature.output.rows() / queries.max(1);
            kernel.sized([("heads", matrices / first_keys.rows().max(1))])
        }
    }
}

#[cfg(feature = "cuda")]
fn scores<'a>(k: &Kernel, l: &Operands<'a>) -> candle_core::Result<cuda_kernel::Scores<'a>> {
    Ok(cuda_kernel::Scores {
        scale: k.number("scale")?,
        mask: k.mask()?,
        queries: k.count("queries")?,
        keys: k.count("keys")?,
        first_keys: l.some_x("first_keys"),
        heads: k.some_count("heads").unwrap_or(1),
        first_head: 0,
        masked: false,
        shown: None,
    })
}

#[cfg(feature = "cuda")]
fn masked_scores<'a>(k: &Kernel, l: &Operands<'a>) -> candle_core::Result<cuda_kernel::Scores<'a>> {
    let shown = l.some_x("visible").map(|view| {
        let dims = counts(k, VISIBLE)?;
        candle_core::Result::Ok(PerScoreOnGpu { view, dims })
    });
    Ok(cuda_kernel::Scores {
        masked: true,
        shown: shown.transpose()?,
        ..scores(k, l)?
    })
}
