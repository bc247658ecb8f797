//! FlashAttention-2 in plain tensor ops, tile by tile: the algorithm of the kernels, in the order of the paper.
//!
//! Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023. Line numbers are
//! those of its Algorithm 1 in [`Attention::forward`] and of its Algorithm 2 in [`Attention::backward`]; its B_r and
//! B_c are [`Q_TILE`] and [`K_TILE`], its L is [`Softmax::lse`], its D is `delta`.
//!
//! Its listings leave out the scale, the soft cap, biases, the masks, dropout, queries that attend to no key, and query
//! heads that share a key head. The heads of such a group are additional rows of a query tile, since they attend to the
//! same keys. The sums over a tile's rows then include the sum over the group's heads that dk and dv need.

mod seen;

use super::{NAME, check};
use crate::Result;
use crate::attention::AttentionConfig;
use crate::attention::computed::Computed;
use crate::attention::host_seen::HostSeen;
use crate::attention::masks::MaskTensors;
use crate::attention::nothing::{lse_of_nothing, nothing};
use crate::grad::is_grad_enabled;
use crate::graph::{self, Attribute, Target};
use crate::kernels::DropoutMask;
use crate::kernels::attention::Sizes;
use crate::ops::lowering::{Signature, Workspace};
use crate::ops::record::{Spec, apply, traced, widen};
use crate::ops::{check_float, with_last_dim};
use crate::probe::{self, Kind, Operand};
use candle_core::{D, DType, Shape, Tensor};
use seen::Seen;
use std::ops::Range;

/// Queries in a tile; the last may have fewer.
const Q_TILE: usize = 64;
/// Keys in a tile; the last may have fewer.
const K_TILE: usize = 64;

/// Computes [`flash_with_lse`](super::flash_with_lse) with candle's own ops, on any device.
///
/// Half precision is computed in f32; out and the gradients are rounded once, and backward uses the unrounded out.
/// Differentiable in q, k and v, as one op of candle's graph. No gradient flows through lse.
///
/// # Errors
/// Those of [`flash`](super::flash()).
pub fn reference(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let sizes = check(q, k, v, config)?;
    check_float(NAME, q)?;
    let masks = MaskTensors::new(NAME, config, q, &sizes)?;
    let inputs = masks.inputs([q, k, v]);
    if let Some(out) = nothing(NAME, &sizes, &inputs)? {
        return Ok((out, lse_of_nothing(q)?));
    }
    if graph::is_tracing() {
        let op = Traced {
            sizes,
            config: config.clone(),
            reads: config.reads(&masks),
        };
        let out = traced(NAME, op, &inputs, true)?;
        let lse = graph::saved_value(&out, "lse")?;
        let lse = lse.ok_or_else(|| candle_core::Error::msg("attention::flash: no lse"))?;
        let lse = lse.narrow(0, 0, 1)?.reshape(&q.dims()[..q.rank() - 1])?;
        return Ok((out, lse));
    }
    let attention = Attention {
        sizes,
        seen: HostSeen::new(config, &masks, &sizes)?,
        bias: masks.bias.as_ref().map(Tensor::detach),
        dropout: match &config.dropout {
            Some(dropout) => Some(dropout.mask(sizes.keys)?),
            None => None,
        },
    };
    let (wide_out, softmax) = {
        const TILES: &str = "attention::flash tiles";
        let _range = probe::op(Kind::Op, TILES, probe::op_path(TILES));
        attention.forward(q, k, v)?
    };
    let out = wide_out.reshape(with_last_dim(q.dims(), sizes.value_dim))?;
    let out = out.to_dtype(q.dtype())?;
    let lse_of_rows = softmax.lse()?.reshape(&q.dims()[..q.rank() - 1])?;
    if !is_grad_enabled() {
        return Ok((out, lse_of_rows));
    }
    let op = Computed {
        name: NAME,
        out,
        backward: move |inputs: &[&Tensor], d_out: &Tensor| {
            attention.backward(inputs, &wide_out, &softmax, d_out)
        },
    };
    Ok((apply(&inputs, op)?, lse_of_rows))
}

/// The attributes and saved tensors that a trace records for a call. (It does not run the tiles on meta tensors.)
struct Traced {
    sizes: Sizes,
    config: AttentionConfig,
    reads: Vec<Tensor>,
}

impl Traced {
    /// Returns the shape of out, (..., H, Tq, Dv).
    fn out_dims(&self, q: &Operand<'_>) -> Vec<usize> {
        with_last_dim(q.dims, self.sizes.value_dim)
    }
}

impl Spec for Traced {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        (self.out_dims(&inputs[0]).into(), inputs[0].dtype)
    }

    fn extra_inputs(&self) -> Vec<Tensor> {
        self.reads.clone()
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        self.config.attributes(&self.sizes)
    }

    /// The unrounded out, and the maxima and sums of the softmax.
    fn saved(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let (q, sizes) = (&inputs[0], &self.sizes);
        let softmax = (2, sizes.batch, sizes.heads, sizes.queries);
        vec![
            ("out in tiles", self.out_dims(q).into(), q.wide_dtype()),
            ("lse", softmax.into(), q.wide_dtype()),
        ]
    }
}

/// Returns the memory of backward: the gradients of all tiles, before they are concatenated.
pub(super) fn backward_workspace(signature: &Signature<'_>) -> Workspace {
    let inputs = &signature.inputs;
    Workspace {
        what: "gradients in tiles",
        formula: "as q, k, v",
        elements: inputs.iter().map(Operand::elements).sum(),
        element_bytes: inputs[0].wide_dtype().size_in_bytes(),
    }
}

/// The maximum of each query's scores and the sum of their exponentials relative to it, (G, R, Tq, 1). Backward
/// recomputes the probabilities from them. The paper stores both as one number L, whose rounding error scales a row of
/// P.
struct Softmax {
    max: Tensor,
    sum: Tensor,
}

impl Softmax {
    /// Returns the log-sum-exps: line 13 of Algorithm 1.
    fn lse(&self) -> candle_core::Result<Tensor> {
        &self.max + self.sum.log()?
    }
}

/// The parameters of one call. With G = B Hkv and R = H / Hkv, q is viewed as (G, R, Tq, Dh), k as (G, Tk, Dh), v as
/// (G, Tk, Dv), and a tile of Br queries as (G, R Br, Dh).
struct Attention {
    sizes: Sizes,
    seen: HostSeen,
    /// (B, H, Tq, Tk), each dimension that or 1.
    bias: Option<Tensor>,
    /// The dropout mask of the probabilities (B H Tq, Tk), if there is dropout.
    dropout: Option<DropoutMask>,
}

impl Attention {
    /// Algorithm 1: out (G, R, Tq, Dv) in the dtype it was computed in, and what backward needs.
    fn forward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> candle_core::Result<(Tensor, Softmax)> {
        let (q, k, v) = (self.queries(q)?, self.keys(k)?, self.keys(v)?);
        // Lines 1 and 2: the outputs, tile by tile.
        let (mut out, mut max, mut sum) = (Vec::new(), Vec::new(), Vec::new());
        // Line 3: for every query tile ...
        for i in tiles(self.sizes.queries, Q_TILE) {
            let q_i = self.rows(&q, &i)?; // line 4
            let mut l = q_i.narrow(2, 0, 1)?.zeros_like()?; // line 5
            let (matrices, rows, _) = l.dims3()?;
            let mut o = Tensor::zeros(
                (matrices, rows, self.sizes.value_dim),
                l.dtype(),
                l.device(),
            )?;
            let mut m = constant(f32::NEG_INFINITY, &l)?;
            // Line 6: ... and every key tile that one of its queries sees.
            for j in tiles(self.sizes.keys, K_TILE) {
                let Some(seen) = self.seen(&i, &j, &q)? else {
                    continue;
                };
                let (k_j, v_j) = (columns(&k, &j)?, columns(&v, &j)?); // line 7
                let s = self.biased(&self.scores(&q_i, &k_j)?, &i, &j)?; // line 8
                let s = seen.select(&s, f32::NEG_INFINITY)?;
                let m_before = m; // line 9, to the sum
                m = m_before.maximum(&s.max_keepdim(D::Minus1)?)?;
                let p = s.broadcast_sub(&subtrahend(&m)?)?.exp()?;
                let rescale = (m_before - subtrahend(&m)?)?.exp()?;
                l = ((&rescale * l)? + p.sum_keepdim(D::Minus1)?)?;
                let p = self.dropped(&p, &i, &j)?;
                o = (o.broadcast_mul(&rescale)? + seen.product(&p, &v_j)?)?; // line 10
            }
            // A query that has seen no key has l = 0; it keeps its o = 0, and its lse is -inf + ln 0.
            let divisor = (&l + l.eq(0f32)?.to_dtype(l.dtype())?)?;
            let o = o.broadcast_div(&divisor)?; // line 12
            out.push(self.tile(&o)?); // line 14
            max.push(self.tile(&m)?); // line 15
            sum.push(self.tile(&l)?);
        }
        let (max, sum) = (Tensor::cat(&max, 2)?, Tensor::cat(&sum, 2)?);
        Ok((Tensor::cat(&out, 2)?, Softmax { max, sum })) // line 17
    }

    /// Algorithm 2: dq (G, R, Tq, Dh), dk (G, Tk, Dh), dv (G, Tk, Dv) and the gradient of a bias, from the dtypes and
    /// shapes that forward took and gave.
    fn backward(
        &self,
        inputs: &[&Tensor],
        out: &Tensor,
        softmax: &Softmax,
        d_out: &Tensor,
    ) -> candle_core::Result<Vec<Tensor>> {
        let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
        let (q, k, v) = (self.queries(q)?, self.keys(k)?, self.keys(v)?);
        let mut d_bias = BiasGradient::new(&self.bias)?;
        let d_out = self.queries(d_out)?;
        // Lines 1 to 3: the gradients, tile by tile.
        let q_tiles = tiles(self.sizes.queries, Q_TILE).map(|i| self.rows(&q, &i)?.zeros_like());
        let mut dq = q_tiles.collect::<candle_core::Result<Vec<_>>>()?;
        let (mut dk, mut dv) = (Vec::new(), Vec::new());
        let delta = (&d_out * out)?.sum_keepdim(D::Minus1)?; // line 4
        // Line 5: for every key tile ...
        for j in tiles(self.sizes.keys, K_TILE) {
            let (k_j, v_j) = (columns(&k, &j)?, columns(&v, &j)?); // line 6
            let (mut dk_j, mut dv_j) = (k_j.zeros_like()?, v_j.zeros_like()?); // line 7
            // Line 8: ... and every query tile of which one sees it.
            for (i, dq_i) in tiles(self.sizes.queries, Q_TILE).zip(&mut dq) {
                let Some(seen) = self.seen(&i, &j, &q)? else {
                    continue;
                };
                let (q_i, d_out_i) = (self.rows(&q, &i)?, self.rows(&d_out, &i)?); // line 9
                let (m_i, l_i) = (self.rows(&softmax.max, &i)?, self.rows(&softmax.sum, &i)?);
                let delta_i = self.rows(&delta, &i)?;
                let s = self.scores(&q_i, &k_j)?; // line 10
                let biased = self.biased(&s, &i, &j)?;
                let p = biased.broadcast_sub(&subtrahend(&m_i)?)?.exp()?; // line 11
                let p = p.broadcast_div(&l_i)?;
                let p = seen.select(&p, 0.0)?;
                let stayed = self.dropped(&p, &i, &j)?;
                dv_j = (dv_j + seen.product_of_transposed(&stayed, &d_out_i)?)?; // line 12
                let dp = self.dropped(&d_out_i.matmul(&v_j.t()?)?, &i, &j)?; // line 13
                let mut ds = (p * dp.broadcast_sub(&delta_i)?)?; // line 14
                d_bias.add(&self.of_heads(&seen.select(&ds, 0.0)?)?, &i, &j)?;
                if let Some(cap) = self.sizes.soft_cap {
                    ds = (ds * (1.0 - (s / cap)?.sqr()?)?)?;
                }
                let ds = seen.select(&(ds * self.sizes.scale)?, 0.0)?;
                *dq_i = (&*dq_i + seen.product(&ds, &k_j)?)?; // line 15
                dk_j = (dk_j + seen.product_of_transposed(&ds, &q_i)?)?; // line 16
            }
            dk.push(dk_j); // line 18
            dv.push(dv_j);
        }
        let dq = dq.iter().map(|dq_i| self.tile(dq_i));
        let dq = dq.collect::<candle_core::Result<Vec<_>>>()?;
        let mut gradients = vec![
            Tensor::cat(&dq, 2)?, // line 20
            Tensor::cat(&dk, 1)?,
            Tensor::cat(&dv, 1)?,
        ];
        gradients.extend(d_bias.sum);
        Ok(gradients)
    }

    /// Adds the bias to the scores (G, R Br, Bc) of a tile.
    fn biased(
        &self,
        scores: &Tensor,
        i: &Range<usize>,
        j: &Range<usize>,
    ) -> candle_core::Result<Tensor> {
        let Some(bias) = &self.bias else {
            return Ok(scores.clone());
        };
        let Sizes {
            batch,
            heads,
            queries,
            keys,
            ..
        } = self.sizes;
        let bias = bias.broadcast_as((batch, heads, queries, keys))?;
        let tile = bias
            .narrow(2, i.start, i.len())?
            .narrow(3, j.start, j.len())?;
        scores + tile.contiguous()?.reshape(scores.shape())?
    }

    /// Views scores (G, R Br, Bc) as (B, H, Br, Bc).
    fn of_heads(&self, scores: &Tensor) -> candle_core::Result<Tensor> {
        let (_, rows, keys) = scores.dims3()?;
        let Sizes { batch, heads, .. } = self.sizes;
        scores.reshape((batch, heads, rows / self.sizes.group(), keys))
    }

    /// `scale q_i k_j^T` (G, R Br, Bc), capped.
    fn scores(&self, q_i: &Tensor, k_j: &Tensor) -> candle_core::Result<Tensor> {
        let scores = (q_i.matmul(&k_j.t()?)? * self.sizes.scale)?;
        match self.sizes.soft_cap {
            None => Ok(scores),
            Some(cap) => (scores / cap)?.tanh()? * cap,
        }
    }

    /// x (G, R Br, Bc) times 1 / (1 - p) where the pair's probability stays, and 0 where it is dropped.
    fn dropped(
        &self,
        x: &Tensor,
        i: &Range<usize>,
        j: &Range<usize>,
    ) -> candle_core::Result<Tensor> {
        let Some(mask) = &self.dropout else {
            return Ok(x.clone());
        };
        let (mut stay, queries) = (Vec::with_capacity(x.elem_count()), self.sizes.queries);
        for matrix in 0..self.sizes.batch * self.sizes.heads {
            for query in i.clone() {
                let row = matrix * queries + query;
                mask.each(row, j.clone(), |_, stays| stay.push(u8::from(stays)));
            }
        }
        let stay = Tensor::from_vec(stay, x.shape(), x.device())?;
        stay.where_cond(&(x * mask.scale())?, &x.zeros_like()?)
    }

    /// Returns the visible pairs of a tile; `None` if there are none.
    fn seen(
        &self,
        i: &Range<usize>,
        j: &Range<usize>,
        like: &Tensor,
    ) -> candle_core::Result<Option<Seen>> {
        let Sizes { kv_heads, .. } = self.sizes;
        let group = self.sizes.group(); // R
        let matrices = match self.seen.is_shared() {
            true => 1,
            false => self.sizes.kv_matrices(), // G
        };
        let sees = |[matrix, member]: [usize; 2], i, j| {
            let head = matrix % kv_heads * group + member;
            self.seen.sees([matrix / kv_heads, head], i, j)
        };
        Seen::new([matrices, group], i, j, sees, like.device())
    }

    /// Views q, out or their gradients as (G, R, Tq, Dh or Dv).
    fn queries(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let sizes = self.sizes;
        let group = sizes.group();
        let shape = (sizes.kv_matrices(), group, sizes.queries, x.dim(D::Minus1)?);
        widen(&x.detach())?.reshape(shape)
    }

    /// Views k or v as (G, Tk, Dh or Dv).
    fn keys(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let sizes = self.sizes;
        let shape = (sizes.kv_matrices(), sizes.keys, x.dim(D::Minus1)?);
        widen(&x.detach())?.reshape(shape)
    }

    /// Returns tile i of x (G, R, Tq, n) as (G, R Br, n).
    fn rows(&self, x: &Tensor, i: &Range<usize>) -> candle_core::Result<Tensor> {
        x.narrow(2, i.start, i.len())?.flatten(1, 2)
    }

    /// Views a result of [`Attention::rows`] as (G, R, Br, n).
    fn tile(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, rows_of_group, width) = rows.dims3()?;
        let group = self.sizes.group();
        rows.reshape((batch, group, rows_of_group / group, width))
    }
}

/// The gradient of a bias, a sum over tiles; nothing without a bias.
struct BiasGradient {
    sum: Option<Tensor>,
}

impl BiasGradient {
    fn new(bias: &Option<Tensor>) -> candle_core::Result<Self> {
        let sum = bias.as_ref().map(Tensor::zeros_like).transpose()?;
        Ok(Self { sum })
    }

    /// Adds the gradient of a tile's scores (B, H, Br, Bc), summed over the dimensions in which the bias is repeated.
    fn add(&mut self, ds: &Tensor, i: &Range<usize>, j: &Range<usize>) -> candle_core::Result<()> {
        let Some(sum) = &self.sum else {
            return Ok(());
        };
        let mut ds = ds.clone();
        for (dim, size) in sum.dims().iter().enumerate() {
            if *size == 1 {
                ds = ds.sum_keepdim(dim)?;
            }
        }
        for (dim, tile) in [(2, i), (3, j)] {
            if sum.dims()[dim] > 1 {
                let after = sum.dims()[dim] - tile.end;
                ds = ds.pad_with_zeros(dim, tile.start, after)?;
            }
        }
        self.sum = Some((sum + ds)?);
        Ok(())
    }
}

/// Splits `0..length` into ranges of `size`; the last may be shorter.
fn tiles(length: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..length).step_by(size);
    starts.map(move |start| start..length.min(start + size))
}

/// Returns tile j of x (G, Tk, Dh).
fn columns(x: &Tensor, j: &Range<usize>) -> candle_core::Result<Tensor> {
    x.narrow(1, j.start, j.len())?.contiguous()
}

/// Returns a tensor filled with `value`, of the shape and dtype of `like`.
fn constant(value: f32, like: &Tensor) -> candle_core::Result<Tensor> {
    Tensor::full(value, like.shape(), like.device())?.to_dtype(like.dtype())
}

/// Returns `x` to be subtracted in an exponent, with 0 in place of -inf: for a row without a visible key,
/// exp(-inf - 0) is 0, where exp(-inf - (-inf)) would be NaN.
fn subtrahend(x: &Tensor) -> candle_core::Result<Tensor> {
    x.eq(f32::NEG_INFINITY)?.where_cond(&x.zeros_like()?, x)
}
