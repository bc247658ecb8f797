//! Kernel arguments, laid out as the CUDA sources declare them.

use super::backward::{Gradients, Inputs};
use super::kernel_config::pointer_to;
use super::masks::MaskArguments;
use crate::kernels::Dropout;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use candle_core::DType;
use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, sys};

/// A strided tensor of heads (B, H, T, D): D contiguous, address and other strides multiples of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads<'a> {
    pub view: View<'a>,
    /// The strides of batch, head and row, in elements.
    pub strides: [usize; 3],
    /// B, H, T, and Dh or Dv.
    pub dims: [usize; 4],
}

impl<'a> Heads<'a> {
    /// Returns heads of these dimensions, with the strides of the view or contiguous.
    pub(crate) fn new(view: View<'a>, dims: [usize; 4]) -> Self {
        let [_, heads, rows, width] = dims;
        let strides = match view.strides {
            Some(&[batch, head, row, _]) => [batch, head, row],
            None => [heads * rows * width, rows * width, width],
        };
        Self {
            view,
            strides,
            dims,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Strides {
    batch: i64,
    head: i64,
    row: i64,
}

impl From<&Heads<'_>> for Strides {
    fn from(heads: &Heads<'_>) -> Self {
        let [batch, head, row] = heads.strides.map(|stride| stride as i64);
        Self { batch, head, row }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CallSizes {
    batch: i32,
    heads: i32,
    kv_heads: i32,
    queries: i32,
    keys: i32,
    head_dim: i32,
    value_dim: i32,
    offset: i32,
    heads_at_once: i32,
    scale: f32,
    window: i32,
    cap: f32,
}

impl CallSizes {
    /// `heads_at_once`, the number of heads that concurrent blocks belong to, only affects speed.
    pub(super) fn new(sizes: &Sizes, heads_at_once: usize) -> Self {
        Self {
            batch: sizes.batch as i32,
            heads: sizes.heads as i32,
            kv_heads: sizes.kv_heads as i32,
            queries: sizes.queries as i32,
            keys: sizes.keys as i32,
            head_dim: sizes.head_dim as i32,
            value_dim: sizes.value_dim as i32,
            offset: sizes.mask.offset(sizes.queries, sizes.keys) as i32,
            heads_at_once: heads_at_once.max(1) as i32,
            scale: sizes.scale as f32,
            window: sizes.mask.window_or_0(),
            cap: sizes.soft_cap.unwrap_or(1.0) as f32,
        }
    }
}

/// The dropout of the probabilities.
#[derive(Clone, Copy)]
pub(crate) struct ProbabilityDropout<'a> {
    pub dropout: Dropout,
    /// (4) u32: seed, seed >> 32, step, micro-batch.
    pub key: View<'a>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DropoutArguments {
    /// (4) u32, or null.
    key: u64,
    site: u32,
    threshold: u32,
    scale: f32,
    unused: u32,
}

impl DropoutArguments {
    pub(super) fn new(dropped: Option<ProbabilityDropout<'_>>) -> Self {
        let dropout = dropped.map(|dropped| dropped.dropout);
        Self {
            key: dropped.map_or(0, |dropped| dropped.key.pointer),
            site: dropout.map_or(0, |dropout| dropout.site),
            threshold: dropout.map_or(0, |dropout| dropout.threshold().into()),
            scale: dropout.map_or(1.0, |dropout| dropout.scale() as f32),
            unused: 0,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ForwardArguments {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub out: u64,
    pub rounding_error: u64,
    pub lse: u64,
    pub q_strides: Strides,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub out_strides: Strides,
    pub sizes: CallSizes,
    /// (B, Tq) u32, or null.
    pub first_keys: u64,
    pub dropout: DropoutArguments,
    pub masks: MaskArguments,
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct ForwardHopperArguments {
    pub maps: [Map; 3],
    pub out: u64,
    pub rounding_error: u64,
    pub lse: u64,
    /// Two i32, zero before and after a launch: the number of tiles that were taken, and of blocks that are done.
    pub tickets: u64,
    pub out_strides: Strides,
    pub sizes: CallSizes,
    /// (B, Tq) u32, or null.
    pub first_keys: u64,
    pub dropout: DropoutArguments,
    pub masks: MaskArguments,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BackwardArguments {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub out: u64,
    pub rounding_error: u64,
    pub d_out: u64,
    pub lse: u64,
    pub dq: u64,
    pub dk: u64,
    pub dv: u64,
    pub statistics: u64,
    pub dq_sums: u64,
    pub turns: u64,
    pub q_strides: Strides,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub out_strides: Strides,
    pub d_out_strides: Strides,
    pub dq_strides: Strides,
    pub dk_strides: Strides,
    pub dv_strides: Strides,
    pub sizes: CallSizes,
    /// (B, Tq) u32, or null.
    pub first_keys: u64,
    pub dropout: DropoutArguments,
    pub masks: MaskArguments,
}

impl BackwardArguments {
    /// `scratch` has the addresses of statistics, sums of dq and turns. Without gradients, only kernels that do not
    /// write them may run.
    pub(super) fn new(
        sizes: &Sizes,
        inputs: &Inputs<'_>,
        gradients: Option<&Gradients<'_>>,
        [statistics, dq_sums, turns]: [u64; 3],
        masks: MaskArguments,
        heads_at_once: usize,
    ) -> Self {
        let gradients = [
            gradients.map(|x| x.dq),
            gradients.map(|x| x.dk),
            gradients.map(|x| x.dv),
        ];
        let [dq, dk, dv] = gradients.map(|x| x.map_or(0, |x| x.view.pointer));
        let [dq_strides, dk_strides, dv_strides] =
            gradients.map(|x| x.map_or(Strides::default(), |x| Strides::from(&x)));
        Self {
            q: inputs.q.view.pointer,
            k: inputs.k.view.pointer,
            v: inputs.v.view.pointer,
            out: inputs.out.view.pointer,
            rounding_error: inputs.rounding_error.map_or(0, |rest| rest.pointer),
            d_out: inputs.d_out.view.pointer,
            lse: inputs.lse.pointer,
            dq,
            dk,
            dv,
            statistics,
            dq_sums,
            turns,
            q_strides: Strides::from(&inputs.q),
            k_strides: Strides::from(&inputs.k),
            v_strides: Strides::from(&inputs.v),
            out_strides: Strides::from(&inputs.out),
            d_out_strides: Strides::from(&inputs.d_out),
            dq_strides,
            dk_strides,
            dv_strides,
            sizes: CallSizes::new(sizes, heads_at_once),
            first_keys: pointer_to(inputs.first_keys),
            dropout: DropoutArguments::new(inputs.dropout),
            masks,
        }
    }
}

/// q, k, v and d_out for the tensor copy engine.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct BackwardMaps(pub [Map; 4]);

/// A tensor map of heads: boxes of 64 columns and a number of rows, with the 128-byte swizzle.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Map([u64; 16]);

impl Map {
    pub(super) fn new(heads: &Heads<'_>, rows: usize) -> Result<Self> {
        let mut map = Self([0; 16]);
        let [batch, head_count, length, head_dim] = heads.dims.map(|size| size as u64);
        let [batch_bytes, head_bytes, row_bytes] = heads.strides.map(|stride| 2 * stride as u64);
        let dims = [head_dim, length, head_count, batch];
        let strides_bytes = [row_bytes, head_bytes, batch_bytes];
        let (box_dims, element_strides) = ([64, rows as u32, 1, 1], [1u32; 4]);
        let dtype = match heads.view.dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        // SAFETY: the arrays have the four elements (strides: three) of rank 4; the map has 128 bytes at a multiple of
        // 64.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                dtype,
                4,
                heads.view.pointer as *mut std::ffi::c_void,
                dims.as_ptr(),
                strides_bytes.as_ptr(),
                box_dims.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .w()?;
        Ok(map)
    }
}

// SAFETY: plain data with the layout that the sources declare.
unsafe impl DeviceRepr for ForwardArguments {}
unsafe impl DeviceRepr for ForwardHopperArguments {}
unsafe impl DeviceRepr for BackwardArguments {}
unsafe impl DeviceRepr for BackwardMaps {}

// The sizes of the kernels' parameters.
const _: () = assert!(size_of::<ForwardHopperArguments>() == 704);
const _: () = assert!(size_of::<ForwardArguments>() == 6 * 8 + 4 * 24 + 48 + 8 + 24 + 144);
const _: () = assert!(size_of::<BackwardArguments>() == 13 * 8 + 8 * 24 + 48 + 8 + 24 + 144);
