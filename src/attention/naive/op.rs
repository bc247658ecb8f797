//! The kernel as a candle op.

use super::NAME;
use crate::attention::attributes;
use crate::graph::{self, Attribute, MemoryStep, Room, Target};
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::gemm::{ProductSizes, Threads, packing_bytes};
use crate::kernels::cpu::{Real, Stored, attention::naive as kernel};
use crate::kernels::workspace::naive_heads_at_once;
use crate::ops::cpu::{elements, for_stored, output_keeping, tensor, tensors, view};
use crate::ops::record::{Spec, made};
use crate::ops::with_last_dim;
use crate::probe::{self, Operand};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Tensor};
use std::sync::{Arc, OnceLock};

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

/// One call; holds what forward leaves for backward beside its inputs.
pub(super) struct Naive {
    pub(super) sizes: Sizes,
    /// (..., H, Tq, Tk).
    pub(super) probabilities: OnceLock<Tensor>,
    /// (..., H, Tq), on the CPU, if it is wanted.
    lse: Option<Arc<OnceLock<Tensor>>>,
}

impl Naive {
    pub(super) fn new(sizes: Sizes, lse: Option<Arc<OnceLock<Tensor>>>) -> Self {
        Self {
            sizes,
            probabilities: OnceLock::new(),
            lse,
        }
    }
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
            let queries = &q_layout.dims()[..q_layout.dims().len() - 1];
            let lse_len = self.lse.as_ref().map_or(0, |_| queries.iter().product());
            let mut lse = vec![<T as Stored>::Wide::ZERO; lse_len];
            let (out, p) = output_keeping(out_shape, p_shape, |out, p| {
                kernel::forward_with_lse(&sizes, q, k, v, p, &mut lse, out)
            })?;
            if let Some(kept) = &self.lse {
                let lse = Tensor::from_vec(lse, queries, &Device::Cpu)?;
                probe::kept("lse", &lse);
                let _ = kept.set(lse); // empty until now: an op runs forward once
            }
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
