//! Attention as it is written down: scores, softmax, weighted sum.

use super::{AttentionConfig, Mask};
use crate::kernels::cpu::naive_attention as kernel;
use crate::ops::cpu::{elements, for_real, output_keeping, tensor, tensors, view};
use crate::ops::{self, Path, choose_where, record::apply3};
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor};
use std::sync::OnceLock;

const NAME: &str = "attention::naive";

/// `out = softmax(scale q k^T) v`, with the probabilities in memory: q (B, H, Tq, Dh), k and v (B, H, Tk, Dh),
/// out (B, H, Tq, Dh). Any number of leading dimensions will do, if they agree.
///
/// Differentiable in q, k and v. Kept for backward, beside them: the probabilities p, B H Tq Tk elements. That is the
/// cost which tiled attention removes. Backward: `dv = p^T dout`, `dp = dout v^T`, `ds = scale p (dp - sum(dp p))`,
/// `dq = ds k`, `dk = ds^T q`. 4 B H Tq Tk Dh FLOPs forward, twice that backward, whatever the mask.
///
/// The kernel takes one head after another, so that a head's scores are still in cache when their softmax is taken;
/// they are overwritten by it.
///
/// Vaswani et al., "Attention Is All You Need", 2017, equation 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, Mask};
///
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &Device::Cpu)?;
/// let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
/// let out = attention::naive(&q, &q, &q, &config)?;
/// assert_eq!(out.dims(), [2, 3, 5, 8]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not fit each other, no keys, mixed dtypes or devices.
pub fn naive(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    check(q, k, v)?;
    let has_kernel = q.device().is_cpu() && matches!(q.dtype(), DType::F32 | DType::F64);
    match choose_where(NAME, q, has_kernel)? {
        Path::Kernel => {
            let op = Naive {
                scale: config.scale_for(q.dims()[q.rank() - 1]),
                mask: config.mask,
                probabilities: OnceLock::new(),
            };
            let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
            Ok(apply3(&q, &k, &v, op)?)
        }
        Path::Reference => reference(q, k, v, config),
    }
}

/// [`naive`] as three ops, the scores a tensor of their own: `matmul_transposed`, `softmax` with scale and mask,
/// `matmul`.
///
/// # Errors
/// As [`naive`].
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, config: &AttentionConfig) -> Result<Tensor> {
    check(q, k, v)?;
    let scale = config.scale_for(q.dims()[q.rank() - 1]);
    let scores = ops::matmul_transposed(q, k)?; // (B, H, Tq, Tk)
    let probabilities = ops::softmax(&scores, scale, config.mask)?; // (B, H, Tq, Tk)
    ops::matmul(&probabilities, v) // (B, H, Tq, Dh)
}

fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    let fits = match (q.dims(), k.dims(), v.dims()) {
        ([q @ .., _, q_dim], [k @ .., k_len, k_dim], [v @ .., v_len, _]) => {
            q == k && k == v && q_dim == k_dim && k_len == v_len && *q_dim > 0 && *k_len > 0
        }
        _ => false,
    };
    if !fits {
        return Err(Error::Shape {
            op: NAME,
            expected: "q (B, H, Tq, Dh), k and v (B, H, Tk, Dh), at least one key".into(),
            got: format!("q {:?}, k {:?}, v {:?}", q.dims(), k.dims(), v.dims()),
            hint: "ops::split_heads makes heads of (B, T, D)".into(),
        });
    }
    ops::check_same(NAME, &[("q", q), ("k", k), ("v", v)])
}

struct Naive {
    scale: f64,
    mask: Mask,
    /// (..., Tq, Tk).
    probabilities: OnceLock<Tensor>,
}

/// The kernel's sizes for q (..., Tq, Dh) and v (..., Tk, Dv).
fn sizes(q: &[usize], v: &[usize]) -> candle_core::Result<kernel::Sizes> {
    match (q, v) {
        ([leading @ .., queries, head_dim], [.., keys, value_dim]) => Ok(kernel::Sizes {
            batch: leading.iter().product(),
            queries: *queries,
            keys: *keys,
            head_dim: *head_dim,
            value_dim: *value_dim,
        }),
        _ => candle_core::bail!("attention of q {q:?} and v {v:?}"),
    }
}

/// `q`'s shape with another last dimension.
fn with_last(q: &[usize], last: usize) -> Shape {
    let mut shape = q.to_vec();
    shape.pop();
    shape.push(last);
    shape.into()
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
        let sizes = sizes(q_layout.dims(), v_layout.dims())?;
        let out_shape = with_last(q_layout.dims(), sizes.value_dim);
        let p_shape = with_last(q_layout.dims(), sizes.keys);
        for_real!(q.dtype(), T => {
            let (q, k) = (view::<T>(q, q_layout)?, view::<T>(k, k_layout)?);
            let v = view::<T>(v, v_layout)?;
            let (out, p) = output_keeping(out_shape, p_shape, |out, p| {
                kernel::forward(sizes, q, k, v, self.scale, self.mask, p, out)
            })?;
            let _ = self.probabilities.set(p); // empty until now: an op runs forward once
            Ok(out)
        })
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
        let sizes = sizes(q.dims(), v.dims())?;
        let [q_shape, k_shape, v_shape] = [q, k, v].map(Tensor::shape);
        let dout = dout.contiguous()?;
        for_real!(dout.dtype(), T => {
            let (dout, p) = (elements::<T>(&dout)?, elements::<T>(p)?);
            let (q, k, v) = (elements::<T>(q)?, elements::<T>(k)?, elements::<T>(v)?);
            let mut dk_dv = None;
            let dq = tensor(q_shape, |dq| {
                dk_dv = Some(tensors(k_shape, v_shape, |dk, dv| {
                    let (scale, mask) = (self.scale, self.mask);
                    kernel::backward(sizes, &dout, &q, &k, &v, &p, scale, mask, dq, dk, dv)
                }));
            })?;
            let (dk, dv) = dk_dv.transpose()?.unzip();
            Ok((Some(dq), dk, dv))
        })
    }
}
