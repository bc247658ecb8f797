//! Calls that are attention.

use super::super::sizes::{AttentionSizes, HeadAttentionSizes};
use super::operands::Operands;
use crate::kernels::cpu::flash_attention::{self as flash, Tiles};
use crate::kernels::cpu::{Stored, blocked_attention, rotary_attention};
use candle_core::DType;
use half::f16;

pub(super) fn naive<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    let inputs = rotary_attention::Inputs {
        q: o.lower_x(0),
        k: o.lower_x(1),
        v: o.lower_x(2),
        angles: o.angles(3, 4),
    };
    let outputs = rotary_attention::Outputs {
        p: (o.call.writes.len() > 2).then(|| o.y(2)),
        out: o.lower_y(0),
    };
    rotary_attention::forward(&sizes.rotary(), inputs, outputs, o.y(1));
}

pub(super) fn naive_backward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    let inputs = rotary_attention::Inputs {
        q: o.lower_x(1),
        k: o.lower_x(2),
        v: o.lower_x(3),
        angles: o.angles(5, 6),
    };
    let gradients = rotary_attention::Gradients {
        dq: o.lower_y(0),
        dk: o.lower_y(1),
        dv: o.lower_y(2),
    };
    let (p, d_out) = (o.x(4), o.lower_x(0));
    rotary_attention::backward(&sizes.rotary(), inputs, p, d_out, gradients, o.y(3));
}

pub(super) fn heads_forward<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    sizes: &HeadAttentionSizes,
) {
    match o.dtype(1) {
        DType::F16 => heads_forward_in::<S, f16>(o, sizes),
        _ => heads_forward_in::<S, f32>(o, sizes),
    }
}

/// With exponentials in `E`.
fn heads_forward_in<S, E>(o: &Operands<'_, S>, sizes: &HeadAttentionSizes)
where
    S: Stored<Wide = f32>,
    E: Stored<Wide = f32>,
{
    let outputs = blocked_attention::Outputs {
        out: o.lower_y(0),
        rounding_error: match o.call.writes.len() {
            4 => &mut [],
            _ => o.lower_y(4),
        },
        e: o.write::<E>(1),
        inv_row_sum: o.y(2),
    };
    blocked_attention::forward(sizes, heads_from(o, 0), outputs, o.y(3));
}

pub(super) fn heads_backward<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    sizes: &HeadAttentionSizes,
) {
    match o.dtype_read(4) {
        DType::F16 => heads_backward_in::<S, f16>(o, sizes),
        _ => heads_backward_in::<S, f32>(o, sizes),
    }
}

/// With exponentials in `E`.
fn heads_backward_in<S, E>(o: &Operands<'_, S>, sizes: &HeadAttentionSizes)
where
    S: Stored<Wide = f32>,
    E: Stored<Wide = f32>,
{
    let gradients = blocked_attention::Gradients {
        dq: o.lower_y(0),
        dk: o.lower_y(1),
        dv: o.lower_y(2),
    };
    let saved = blocked_attention::Saved {
        e: o.read::<E>(4),
        inv_row_sum: o.x(5),
        out: o.lower_x(6),
        rounding_error: match o.call.reads.len() {
            7 => &[],
            _ => o.lower_x(7),
        },
        d_out: o.lower_x(0),
    };
    let (inputs, partial, scratch) = (heads_from(o, 1), o.y(3), o.y(4));
    blocked_attention::backward(sizes, inputs, saved, gradients, partial, scratch);
}

/// q, k and v, which are read from place `first` on.
fn heads_from<'a, S: Stored<Wide = f32>>(
    o: &Operands<'a, S>,
    first: usize,
) -> blocked_attention::Inputs<'a, S> {
    let [q, k, v] = [0, 1, 2].map(|i| o.lower_x(first + i));
    blocked_attention::Inputs { q, k, v }
}

pub(super) fn flash_forward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    tiled_forward(o, &sizes.flash(), in_model_dimension(sizes));
}

pub(super) fn flash_backward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    tiled_backward(o, &sizes.flash(), in_model_dimension(sizes));
}

/// Of q, k and v that lie by these strides.
fn tiled_forward<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    kernel: &flash::Sizes,
    strides: [usize; 4],
) {
    let heads = |place| lying(o, place, strides);
    let outputs = flash::Outputs {
        out: o.lower_y(0),
        rounding_error: match o.call.writes.len() {
            2 => &mut [],
            _ => o.lower_y(2),
        },
        lse: o.y(1),
    };
    let tiles = Tiles::for_head_dim(kernel.head_dim);
    flash::forward(kernel, &tiles, heads(0), heads(1), heads(2), outputs);
}

/// Of d_out, q, k, v and out that lie by these strides.
fn tiled_backward<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    kernel: &flash::Sizes,
    strides: [usize; 4],
) {
    let heads = |place| lying(o, place, strides);
    let rounding_error = (o.call.reads.len() > 6).then(|| lying(o, 6, by_head(kernel)));
    let inputs = flash::Inputs {
        d_out: heads(0),
        q: heads(1),
        k: heads(2),
        v: heads(3),
        out: heads(4),
        rounding_error,
        lse: o.x(5),
    };
    let gradients = flash::Gradients {
        dq: o.lower_y(0),
        dk: o.lower_y(1),
        dv: o.lower_y(2),
    };
    let tiles = Tiles::for_head_dim(kernel.head_dim);
    flash::backward(kernel, &tiles, inputs, gradients);
}

/// What is read from that place, by these strides.
fn lying<'a, S: Stored<Wide = f32>>(
    o: &Operands<'a, S>,
    place: usize,
    strides: [usize; 4],
) -> flash::Heads<'a, S> {
    flash::Heads {
        data: o.lower_x(place),
        strides,
    }
}

/// The strides of a (B, T, H*Dh), by batch, head, position and element.
fn in_model_dimension(sizes: &AttentionSizes) -> [usize; 4] {
    let row = sizes.heads * sizes.head_dim;
    [sizes.length * row, sizes.head_dim, row, 1]
}

/// Those of a (B, H, T, Dh).
fn by_head(kernel: &flash::Sizes) -> [usize; 4] {
    let head = kernel.queries * kernel.head_dim;
    [kernel.heads * head, head, kernel.head_dim, 1]
}
