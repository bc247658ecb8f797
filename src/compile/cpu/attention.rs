//! Calls that are attention.

use super::super::sizes::{AttentionSizes, HeadAttentionSizes};
use super::operands::Operands;
use crate::kernels::attention::Sizes;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::flash::{self as flash, Tiles};
use crate::kernels::cpu::attention::{blocked, rotary};
use candle_core::DType;
use half::f16;

pub(super) fn naive<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    let inputs = rotary::Inputs {
        q: o.lower_x("q"),
        k: o.lower_x("k"),
        v: o.lower_x("v"),
        angles: o.angles(),
    };
    let outputs = rotary::Outputs {
        p: o.writes("p").then(|| o.y("p")),
        out: o.lower_y("out"),
    };
    rotary::forward(&sizes.rotary(), inputs, outputs, o.y("scratch"));
}

pub(super) fn naive_backward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    let inputs = rotary::Inputs {
        q: o.lower_x("q"),
        k: o.lower_x("k"),
        v: o.lower_x("v"),
        angles: o.angles(),
    };
    let gradients = rotary::Gradients {
        dq: o.lower_y("dq"),
        dk: o.lower_y("dk"),
        dv: o.lower_y("dv"),
    };
    let (p, d_out, scratch) = (o.x("p"), o.lower_x("d_out"), o.y("scratch"));
    rotary::backward(&sizes.rotary(), inputs, p, d_out, gradients, scratch);
}

pub(super) fn heads_forward<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    sizes: &HeadAttentionSizes,
) {
    match o.dtype("exponentials") {
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
    let outputs = blocked::Outputs {
        out: o.lower_y("out"),
        rounding_error: rounding_error(o),
        e: o.write::<E>("exponentials"),
        inv_row_sum: o.y("inv_row_sum"),
    };
    blocked::forward(sizes, heads_of(o), outputs, o.y("scratch"));
}

pub(super) fn heads_backward<S: Stored<Wide = f32>>(
    o: &Operands<'_, S>,
    sizes: &HeadAttentionSizes,
) {
    match o.dtype_read("exponentials") {
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
    let gradients = blocked::Gradients {
        dq: o.lower_y("dq"),
        dk: o.lower_y("dk"),
        dv: o.lower_y("dv"),
    };
    let saved = blocked::Saved {
        e: o.read::<E>("exponentials"),
        inv_row_sum: o.x("inv_row_sum"),
        out: o.lower_x("out"),
        rounding_error: match o.reads("rounding_error") {
            true => o.lower_x("rounding_error"),
            false => &[],
        },
        d_out: o.lower_x("d_out"),
    };
    let (partial_sums, scratch) = (o.y("partial_sums"), o.y("scratch"));
    blocked::backward(sizes, heads_of(o), saved, gradients, partial_sums, scratch);
}

fn heads_of<'a, S: Stored<Wide = f32>>(o: &Operands<'a, S>) -> blocked::Inputs<'a, S> {
    let [q, k, v] = ["q", "k", "v"].map(|name| o.lower_x(name));
    blocked::Inputs { q, k, v }
}

/// What rounding takes from out, where backward wants it.
fn rounding_error<'a, S: Stored<Wide = f32>>(o: &Operands<'a, S>) -> &'a mut [S] {
    match o.writes("rounding_error") {
        true => o.lower_y("rounding_error"),
        false => &mut [],
    }
}

pub(super) fn flash_forward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    tiled_forward(o, &sizes.flash(), in_model_dimension(sizes));
}

pub(super) fn flash_backward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, sizes: &AttentionSizes) {
    tiled_backward(o, &sizes.flash(), in_model_dimension(sizes));
}

/// Of q, k and v that lie by these strides.
fn tiled_forward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, kernel: &Sizes, strides: [usize; 4]) {
    let heads = |name| lying(o, name, strides);
    let outputs = flash::Outputs {
        out: o.lower_y("out"),
        rounding_error: rounding_error(o),
        lse: o.y("lse"),
    };
    let tiles = Tiles::for_head_dim(kernel.head_dim);
    flash::forward(kernel, &tiles, heads("q"), heads("k"), heads("v"), outputs);
}

/// Of d_out, q, k, v and out that lie by these strides.
fn tiled_backward<S: Stored<Wide = f32>>(o: &Operands<'_, S>, kernel: &Sizes, strides: [usize; 4]) {
    let heads = |name| lying(o, name, strides);
    let name = "rounding_error";
    let rounding_error = o.reads(name).then(|| lying(o, name, by_head(kernel)));
    let inputs = flash::Inputs {
        d_out: heads("d_out"),
        q: heads("q"),
        k: heads("k"),
        v: heads("v"),
        out: heads("out"),
        rounding_error,
        lse: o.x("lse"),
    };
    let gradients = flash::Gradients {
        dq: o.lower_y("dq"),
        dk: o.lower_y("dk"),
        dv: o.lower_y("dv"),
    };
    let tiles = Tiles::for_head_dim(kernel.head_dim);
    flash::backward(kernel, &tiles, inputs, gradients);
}

/// What is read by that name, by these strides.
fn lying<'a, S: Stored<Wide = f32>>(
    o: &Operands<'a, S>,
    name: &str,
    strides: [usize; 4],
) -> flash::Heads<'a, S> {
    flash::Heads {
        data: o.lower_x(name),
        strides,
    }
}

/// The strides of a (B, T, H*Dh), by batch, head, position and element.
fn in_model_dimension(sizes: &AttentionSizes) -> [usize; 4] {
    let row = sizes.heads * sizes.head_dim;
    [sizes.length * row, sizes.head_dim, row, 1]
}

/// Those of a (B, H, T, Dh).
fn by_head(kernel: &Sizes) -> [usize; 4] {
    let head = kernel.queries * kernel.head_dim;
    [kernel.heads * head, head, kernel.head_dim, 1]
}
