//! The kernel as a candle op.

use super::NAME;
use crate::attention::shapes::Shapes;
use crate::attention::{AttentionConfig, attributes};
use crate::graph::{Attribute, MemoryStep, Room, Target};
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::flash::{self as kernel, Gradients, Inputs, Outputs, Sizes};
use crate::kernels::workspace::{self, flash_lse_parts};
use crate::ops::cpu::{cpu_storage, elements, for_stored, heads, output, tensor, tensors};
use crate::ops::record::{Made, Op, Spec, Storages, exactly, like_first, made};
use crate::probe::{self, Operand};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Shape, Tensor};
use std::sync::{Arc, OnceLock};

/// One call; holds what forward leaves for backward beside its inputs and its output.
pub(super) struct Flash {
    sizes: Sizes,
    /// Whether products of f32 are TF32: on a GPU, in backward as in forward, whatever the switch says by then. lse is
    /// that of the scores as they were computed.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    pub tf32: bool,
    /// (parts, B, H, Tq), of [`flash_lse_parts`].
    lse: Arc<OnceLock<Tensor>>,
    /// What rounding took from the output, in half precision: (B, H, Tq, Dh).
    rounding_error: OnceLock<Tensor>,
}

impl Flash {
    pub(super) fn new(shapes: Shapes, config: &AttentionConfig, tf32: bool) -> Self {
        Self {
            sizes: shapes.sizes(config),
            tf32,
            lse: Arc::default(),
            rounding_error: OnceLock::new(),
        }
    }

    /// Where forward will leave the log-sum-exps and, behind them, what rounding took from them.
    pub(super) fn lse(&self) -> Arc<OnceLock<Tensor>> {
        Arc::clone(&self.lse)
    }

    /// Forward's output, what rounding took from it (empty where nothing), and lse.
    fn forward<T: Stored>(
        &self,
        q: kernel::Heads<'_, T>,
        k: kernel::Heads<'_, T>,
        v: kernel::Heads<'_, T>,
    ) -> Result<(CpuStorage, Shape)> {
        let sizes = &self.sizes;
        let rows = (sizes.batch, sizes.heads, sizes.queries);
        let out_shape = Shape::from((rows.0, rows.1, rows.2, sizes.head_dim));
        let of_lse = (flash_lse_parts(T::DTYPE), rows.0, rows.1, rows.2);
        let rest_elements = match T::as_wide(&[]) {
            Some(_) => 0,
            None => out_shape.elem_count(),
        };
        let mut out = None;
        let mut rest = None;
        let lse = tensor::<T::Wide>(of_lse, |lse| {
            rest = Some(tensor::<T>(rest_elements, |rounding_error| {
                out = Some(output::<T>(out_shape.clone(), |out| {
                    let outputs = Outputs {
                        out,
                        rounding_error,
                        lse,
                    };
                    let tiles = kernel::Tiles::for_head_dim(sizes.head_dim);
                    kernel::forward(sizes, &tiles, q, k, v, outputs);
                }));
            }));
        })?;
        let (Some(out), Some(rest)) = (out, rest) else {
            candle_core::bail!("{NAME}: nothing was computed");
        };
        let rest = match rest_elements {
            0 => None,
            _ => Some(rest?.reshape(out_shape)?),
        };
        self.keep(lse, rest);
        out
    }

    /// Keeps what backward reads. An op runs forward once, so both places are empty until then.
    pub(super) fn keep(&self, lse: Tensor, rest: Option<Tensor>) {
        probe::kept("lse", &lse);
        let _ = self.lse.set(lse);
        if let Some(rest) = rest {
            probe::kept("rounded off", &rest);
            let _ = self.rounding_error.set(rest);
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn sizes(&self) -> &Sizes {
        &self.sizes
    }
}

/// What forward takes for itself.
fn forward_room(sizes: &Sizes, dtype: DType, target: Target) -> Option<Room> {
    let tiles = kernel::Tiles::for_head_dim(sizes.head_dim);
    (target == Target::Cpu).then(|| Room {
        what: "tiles",
        formula: "tiles, a thread",
        elements: kernel::forward_scratch_elements(sizes, &tiles),
        element_bytes: dtype.size_in_bytes().max(size_of::<f32>()),
    })
}

/// What backward takes for itself.
fn backward_room(sizes: &Sizes, dtype: DType, target: Target) -> Room {
    let width = dtype.size_in_bytes();
    match target {
        Target::Cpu => Room {
            what: "delta, dq's sums, tiles",
            formula: "BHT + tiles, a thread",
            elements: {
                let tiles = kernel::Tiles::for_head_dim(sizes.head_dim);
                kernel::backward_scratch_elements(sizes, &tiles, width)
            },
            element_bytes: width.max(size_of::<f32>()),
        },
        Target::Cuda => Room {
            what: "delta, dq's sums",
            formula: "BH(T + ..)(Dh + ..)",
            elements: workspace::flash_backward(sizes) as f64,
            element_bytes: size_of::<f32>(),
        },
    }
}

impl Spec for Flash {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        like_first(inputs)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        attributes(self.sizes.scale, self.sizes.mask)
    }

    fn kept(&self, inputs: &[Operand<'_>], _: Target) -> Vec<(&'static str, Shape, DType)> {
        let (q, sizes) = (&inputs[0], &self.sizes);
        let parts = flash_lse_parts(q.dtype);
        let lse = (parts, sizes.batch, sizes.heads, sizes.queries).into();
        let mut kept = vec![("lse", lse, q.wide_dtype())];
        if q.wide_dtype() != q.dtype {
            kept.push(("rounded off", q.dims.into(), q.dtype));
        }
        kept
    }

    fn forward_steps(&self, inputs: &[Operand<'_>], target: Target) -> Vec<MemoryStep> {
        let tiles = forward_room(&self.sizes, inputs[0].dtype, target).map(MemoryStep::Pass);
        made(self, inputs, target)
            .into_iter()
            .chain(tiles)
            .collect()
    }

    fn backward_steps(
        &self,
        inputs: &[Operand<'_>],
        _: &[bool],
        target: Target,
    ) -> Vec<MemoryStep> {
        let room = backward_room(&self.sizes, inputs[0].dtype, target);
        let gradients = (0..3).map(MemoryStep::Gradient);
        [MemoryStep::Take(room)]
            .into_iter()
            .chain(gradients)
            .collect()
    }
}

impl Op for Flash {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, inputs: Storages<'_, CpuStorage>) -> Made<CpuStorage> {
        let [(q, q_layout), (k, k_layout), (v, v_layout)] = exactly(inputs)?;
        for_stored!(q.dtype(), T => {
            let (q, k) = (heads::<T>(q, q_layout)?, heads::<T>(k, k_layout)?);
            self.forward(q, k, heads::<T>(v, v_layout)?)
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Storages<'_, CudaStorage>) -> Made<CudaStorage> {
        self.forward_on_gpu(exactly(inputs)?)
    }

    fn bwd(&self, inputs: &[&Tensor], out: &Tensor, d_out: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(lse) = self.lse.get() else {
            candle_core::bail!("{NAME}: backward before forward");
        };
        let [q, k, v] = exactly(inputs)?;
        let rest = self.rounding_error.get();
        #[cfg(feature = "cuda")]
        if q.device().is_cuda() {
            let gradients = self.backward_on_gpu([q, k, v, out, d_out], lse, rest)?;
            return Ok(gradients.map(Some).into());
        }
        let tensors_read = [Some(q), Some(k), Some(v), Some(out), Some(d_out), rest];
        let guards = tensors_read.map(|x| x.map(Tensor::storage_and_layout));
        for_stored!(d_out.dtype(), T => {
            let view = |i: usize| match &guards[i] {
                Some((storage, layout)) => heads::<T>(cpu_storage(storage)?, layout).map(Some),
                None => Ok(None),
            };
            let (Some(q_view), Some(k_view), Some(v_view)) = (view(0)?, view(1)?, view(2)?) else {
                candle_core::bail!("{NAME}: no inputs");
            };
            let (Some(out), Some(d_out), rounding_error) = (view(3)?, view(4)?, view(5)?) else {
                candle_core::bail!("{NAME}: no output");
            };
            let lse = elements::<<T as Stored>::Wide>(lse)?;
            let inputs = Inputs {
                q: q_view,
                k: k_view,
                v: v_view,
                out,
                rounding_error,
                lse: &lse,
                d_out,
            };
            let tiles = kernel::Tiles::for_head_dim(self.sizes.head_dim);
            let mut dk_dv = None;
            let dq = tensor::<T>(q.shape(), |dq| {
                dk_dv = Some(tensors::<T>(k.shape(), v.shape(), |dk, dv| {
                    let gradients = Gradients { dq, dk, dv };
                    kernel::backward(&self.sizes, &tiles, inputs, gradients);
                }));
            })?;
            let (dk, dv) = dk_dv.transpose()?.unzip();
            Ok(vec![Some(dq), dk, dv])
        })
    }
}
