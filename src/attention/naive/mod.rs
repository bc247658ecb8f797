//! Attention with all scores and probabilities in memory: scores, softmax, weighted sum.
//!
//! [`naive()`] is one op; [`reference()`] composes it of three, and is its specification.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::{AttentionConfig, naive};
//!
//! let q = Tensor::randn(0f32, 1.0, (1, 2, 5, 8), &Device::Cpu)?; // (B, H, T, Dh)
//! let config = AttentionConfig::default();
//! let out = naive::naive(&q, &q, &q, &config)?;
//! let difference = (out - naive::reference(&q, &q, &q, &config)?)?.abs()?.max_all()?;
//! assert!(difference.to_scalar::<f32>()? < 1e-5);
//! # Ok::<(), tallow::Error>(())
//! ```

#[cfg(feature = "cuda")]
mod cuda;

use super::nothing::nothing;
use super::shapes::Shapes;
use super::{AttentionConfig, attributes};
use crate::Result;
use crate::graph::{self, Attribute, MemoryStep, Room, Target};
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};
use crate::kernels::cpu::{Stored, attention::naive as kernel};
use crate::kernels::workspace::naive_heads_at_once;
use crate::ops::cpu::{elements, for_stored, output_keeping, tensor, tensors, view};
use crate::ops::record::{Spec, apply3, contiguous, made, to_dtype, wide_input};
use crate::ops::{self, Path, choose, with_last_dim};
use crate::precision::without_autocast;
use crate::probe::{self, Operand};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor};
use std::sync::OnceLock;

pub(super) const NAME: &str = "attention::naive";

/// `out = softmax(scale q k^T) v`, with the probabilities in memory: q (..., H, Tq, Dh), k (..., Hkv, Tk, Dh),
/// v (..., Hkv, Tk, Dv), out (..., H, Tq, Dv). The dimensions before the heads are the same in all three, and as
/// many as there are; (T, Dh) alone is one head.
///
/// With Hkv heads of k and v, a divisor of H, head h of q meets head `h / (H / Hkv)` of theirs: grouped-query
/// attention, and multi-query attention where Hkv is 1. Nothing is copied for it.
///
/// Differentiable in q, k and v. Kept for backward, beside them: the probabilities p, B H Tq Tk elements. That is the
/// cost which tiled attention ([`flash`](super::flash())) removes. Backward: `dv = p^T dout`, `dp = dout v^T`,
/// `ds = scale p (dp - sum(dp p))`, `dq = ds k`, `dk = ds^T q`, dk and dv summed over the heads that share them. 4 B H
/// Tq Tk Dh FLOPs forward, twice that backward, whatever the mask. Without keys out is zeros, and so are gradients.
///
/// On the CPU scores are overwritten by their softmax, one head after another, so that a head's scores are still in
/// cache by then; p is f32 for half precision, or gradients would inherit its rounding. On a GPU products are
/// cuBLAS's, with sums in f32. Scores and the gradients of p are f32 in every dtype; p and the scores' gradients are in
/// the dtype of q, k and v, as they are multiplied with those. In f32 p takes the scores' place, and backward has the
/// gradients of as many heads at once as 1 GiB holds; in half precision both have scores of as many heads as 32 MiB
/// hold in f32, one at least. Beyond 1,024 tokens blocks of queries and keys that a mask hides are left out there,
/// unless heads share keys.
///
/// Autocast: lower under both policies, as PyTorch's `scaled_dot_product_attention`; the softmax inside is part of it.
///
/// Vaswani et al., "Attention Is All You Need", 2017, equation 1. Ainslie et al., "GQA: Training Generalized
/// Multi-Query Transformer Models from Multi-Head Checkpoints", 2023, section 2.2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, Mask};
///
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &Device::Cpu)?;
/// let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
/// let out = attention::naive(&q, &q, &q, &config)?;
/// assert_eq!(out.dims(), [2, 3, 5, 8]);
///
/// let k = q.narrow(1, 0, 1)?; // one head for all three of q
/// let out = attention::naive(&q, &k, &k, &config)?;
/// assert_eq!(out.dims(), [2, 3, 5, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not fit each other, heads that kv heads do not divide, a head dimension of 0, mixed dtypes or
/// devices.
pub fn naive(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    let shapes = Shapes::of(NAME, q, k, v)?;
    let scores = with_last_dim(q.dims(), shapes.keys);
    ops::check_size(NAME, &scores, q.dtype(), q.device())?;
    if let Some(out) = nothing(NAME, &shapes, [q, k, v])? {
        return Ok(out);
    }
    match choose(NAME, q)? {
        Path::Kernel => {
            let op = Naive {
                sizes: shapes.sizes(config),
                probabilities: OnceLock::new(),
            };
            let (q, k, v) = (contiguous(q)?, contiguous(k)?, contiguous(v)?);
            Ok(apply3(&q, &k, &v, op)?)
        }
        Path::Reference => reference(q, k, v, config),
    }
}

/// [`naive`] as three ops, the scores a tensor of their own: `matmul_transposed`, `softmax` with scale and mask,
/// `matmul`. Half precision is widened to f32 before the first and rounded once after the last, in backward too.
///
/// Heads of q that share one of k and v are one matrix for the products, their rows one below the other: each row meets
/// the same keys and values, and their gradients sum over all rows.
///
/// # Errors
/// As [`naive`].
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let [q, k, v] = &ops::cast_for(NAME, [q, k, v])?;
    without_autocast(|| in_three_ops(q, k, v, config)) // the softmax inside is attention's, not one of its own
}

fn in_three_ops(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    let shapes = Shapes::of(NAME, q, k, v)?;
    if let Some(out) = nothing(NAME, &shapes, [q, k, v])? {
        return Ok(out);
    }
    let matrices = shapes.batch * shapes.kv_heads;
    let matrices = |x: &Tensor, rows, cols| of_shape(x, &[matrices, rows, cols]);
    let [wide_q, k, v] = [q, k, v].map(|x| wide_input(NAME, x));
    let (wide_q, k, v) = (wide_q?, k?, v?);
    let rows = shapes.heads / shapes.kv_heads * shapes.queries;
    let q_rows = matrices(&wide_q, rows, shapes.head_dim)?; // (B Hkv, H / Hkv Tq, Dh)
    let k = matrices(&k, shapes.keys, shapes.head_dim)?; // (B Hkv, Tk, Dh)
    let v = matrices(&v, shapes.keys, shapes.value_dim)?; // (B Hkv, Tk, Dv)
    let range = probe::range("scores");
    let scores = ops::matmul_transposed(&q_rows, &k)?; // (B Hkv, H / Hkv Tq, Tk)
    drop(range);
    let heads = shapes.batch * shapes.heads;
    let scores = of_shape(&scores, &[heads, shapes.queries, shapes.keys])?; // (B H, Tq, Tk)
    let p = ops::softmax(&scores, config.scale_for(shapes.head_dim), config.mask)?; // (B H, Tq, Tk)
    let _range = probe::range("values");
    let out = ops::matmul(&matrices(&p, rows, shapes.keys)?, &v)?; // (B Hkv, H / Hkv Tq, Dv)
    let out = out.reshape(with_last_dim(q.dims(), shapes.value_dim))?; // (..., H, Tq, Dv)
    Ok(to_dtype(&out, q.dtype())?)
}

/// x in a shape. As it is, if it has that: a node of candle's graph has a gradient of its own, which is added to zeros.
fn of_shape(x: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
    match x.dims() == shape {
        true => Ok(x.clone()),
        false => x.reshape(shape),
    }
}

/// What backward takes for itself, where there is a kernel.
fn backward_room(sizes: &Sizes, dtype: DType, target: Target) -> Room {
    let (width, wide) = (dtype.size_in_bytes(), dtype.size_in_bytes().max(4));
    match target {
        Target::Cpu => Room {
            what: "scores' gradient, packed",
            formula: "T^2 + blocks, a thread",
            elements: scratch_elements(sizes, dtype)[1],
            element_bytes: wide,
        },
        // Those of probabilities and, in half precision, those of scores.
        Target::Cuda => Room {
            what: "scores' gradients of some heads",
            formula: "..T^2",
            elements: scores_on_gpu(sizes, dtype),
            element_bytes: match width == wide {
                true => wide,
                false => wide + width,
            },
        },
    }
}

/// Elements that forward and backward take for themselves on the CPU, in the dtype computed in: backward a matrix of
/// (Tq, Tk), both what half precision is widened to, head by head, and what products pack.
fn scratch_elements(sizes: &Sizes, dtype: DType) -> [f64; 2] {
    let Sizes {
        queries,
        keys,
        head_dim,
        value_dim,
        ..
    } = *sizes;
    let threads = rayon::current_num_threads();
    // As the kernel shares its matrices out.
    let (at_once, inside) = match sizes.matrices() < 2 * threads {
        true => (1.0, Threads::All),
        false => (threads as f64, Threads::One),
    };
    let element_bytes = dtype.size_in_bytes().max(size_of::<f32>());
    let [tq, tk, dh, dv] = [queries, keys, head_dim, value_dim].map(|size| size as f64);
    // q, k, v and out before it is rounded; q, k, v, dout, and dq, dk, dv before they are rounded.
    let widened = match dtype.size_in_bytes() < element_bytes {
        true => [
            tq * dh + tk * dh + tk * dv + tq * dv,
            2.0 * (tq * dh + tk * dh + tk * dv) + tq * dv,
        ],
        false => [0.0; 2],
    };
    let packed = |rows, depth, cols, a_transposed, b_transposed| {
        let sizes = ProductSizes {
            rows,
            depth,
            cols,
            a_transposed,
            b_transposed,
            element_bytes,
        };
        packing_bytes(sizes, inside) / element_bytes as f64
    };
    let scores = packed(queries, head_dim, keys, false, true); // q k^T
    let values = packed(queries, keys, value_dim, false, false); // p v
    let backward = [
        packed(queries, value_dim, keys, false, true), // dout v^T
        packed(queries, keys, head_dim, false, false), // ds k
        packed(keys, queries, value_dim, true, false), // p^T dout
        packed(keys, queries, head_dim, true, false),  // ds^T q
    ];
    [
        at_once * (widened[0] + scores.max(values)),
        at_once * (tq * tk + widened[1] + backward.into_iter().fold(0.0, f64::max)),
    ]
}

/// The scores that there are at once on a GPU beside the probabilities.
fn scores_on_gpu(sizes: &Sizes, dtype: DType) -> f64 {
    let of_head = sizes
        .group()
        .saturating_mul(sizes.queries)
        .saturating_mul(sizes.keys);
    naive_heads_at_once(sizes.kv_matrices(), of_head, dtype) as f64 * of_head as f64
}

struct Naive {
    sizes: Sizes,
    /// (..., H, Tq, Tk).
    probabilities: OnceLock<Tensor>,
}

impl Spec for Naive {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let q = &inputs[0];
        (with_last_dim(q.dims, self.sizes.value_dim).into(), q.dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        attributes(self.sizes.scale, self.sizes.mask)
    }

    fn kept(&self, inputs: &[Operand<'_>]) -> Vec<(&'static str, Shape, DType)> {
        let q = &inputs[0];
        let dtype = match graph::target() {
            Some(Target::Cuda) => q.dtype,
            _ => q.wide_dtype(),
        };
        vec![(
            "probabilities",
            with_last_dim(q.dims, self.sizes.keys).into(),
            dtype,
        )]
    }

    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let (dtype, wide) = (inputs[0].dtype, inputs[0].wide_dtype());
        let room = match target {
            Target::Cpu => Some(Room {
                what: "heads in f32, packed",
                formula: "TD/H + blocks, a thread",
                elements: scratch_elements(&self.sizes, dtype)[0],
                element_bytes: wide.size_in_bytes(),
            }),
            // f32's are the probabilities' place.
            Target::Cuda => (dtype != wide).then(|| Room {
                what: "scores of some heads",
                formula: "..T^2",
                elements: scores_on_gpu(&self.sizes, dtype),
                element_bytes: wide.size_in_bytes(),
            }),
        };
        let room = room.map(MemoryStep::Pass);
        made(self, inputs).into_iter().chain(room).collect()
    }

    fn backward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let room = backward_room(&self.sizes, inputs[0].dtype, target);
        let gradients = (0..3).map(MemoryStep::gradient);
        [MemoryStep::Take(room)]
            .into_iter()
            .chain(gradients)
            .collect()
    }
}

impl CustomOp3 for Naive {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let sizes = self.sizes;
        let out_shape = with_last_dim(q_layout.dims(), sizes.value_dim);
        let p_shape = with_last_dim(q_layout.dims(), sizes.keys);
        for_stored!(q.dtype(), T => {
            let (q, k) = (view::<T>(q, q_layout)?, view::<T>(k, k_layout)?);
            let v = view::<T>(v, v_layout)?;
            let (out, p) = output_keeping(out_shape, p_shape, |out, p| {
                kernel::forward(&sizes, q, k, v, p, out)
            })?;
            probe::kept("probabilities", &p);
            let _ = self.probabilities.set(p); // empty until now: an op runs forward once
            Ok(out)
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.forward_on_gpu([(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(p) = self.probabilities.get() else {
            candle_core::bail!("{NAME}: backward before forward");
        };
        let dout = dout.contiguous()?;
        #[cfg(feature = "cuda")]
        if dout.device().is_cuda() {
            let [dq, dk, dv] = self.backward_on_gpu([&dout, q, k, v, p])?;
            return Ok((Some(dq), Some(dk), Some(dv)));
        }
        let [q_shape, k_shape, v_shape] = [q, k, v].map(Tensor::shape);
        for_stored!(dout.dtype(), T => {
            let (dout, p) = (elements::<T>(&dout)?, elements::<<T as Stored>::Wide>(p)?);
            let (q, k, v) = (elements::<T>(q)?, elements::<T>(k)?, elements::<T>(v)?);
            let mut dk_dv = None;
            let dq = tensor(q_shape, |dq| {
                dk_dv = Some(tensors(k_shape, v_shape, |dk, dv| {
                    kernel::backward(&self.sizes, &dout, &q, &k, &v, &p, dq, dk, dv)
                }));
            })?;
            let (dk, dv) = dk_dv.transpose()?.unzip();
            Ok((Some(dq), dk, dv))
        })
    }
}
