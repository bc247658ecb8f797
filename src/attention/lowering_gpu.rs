//! Launches of attention in a plan, on heads one after another.

use super::lowering::sizes;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::flash_attention::{self as flash, Heads, Outputs};
use crate::kernels::cuda::naive_attention::{self, HeadGroups};
use crate::ops::lowering::{Kernel, Operands};
use candle_core::Result;

/// Writes out, lse, in half precision rounding_error (what rounding took from out), and a workspace.
pub(super) fn flash_forward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let outputs = Outputs {
        out: of_queries(&sizes, l.y("out")?),
        rounding_error: l.some_y("rounding_error"),
        lse: l.y("lse")?,
    };
    let heads = [
        of_queries(&sizes, l.x("q")?),
        of_keys(&sizes, l.x("k")?),
        of_keys(&sizes, l.x("v")?),
    ];
    let tf32 = l.products.tf32();
    flash::forward(l.gpu, &sizes, tf32, heads, outputs, l.y("workspace")?)
}

/// Reads d_out, q, k, v, out, lse and, in half precision, what rounding took from out; writes dq, dk, dv and a
/// workspace.
pub(super) fn flash_backward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = sizes(k)?;
    let inputs = flash::Inputs {
        d_out: of_queries(&sizes, l.x("d_out")?),
        q: of_queries(&sizes, l.x("q")?),
        k: of_keys(&sizes, l.x("k")?),
        v: of_keys(&sizes, l.x("v")?),
        out: of_queries(&sizes, l.x("out")?),
        lse: l.x("lse")?,
        rounding_error: l.some_x("rounding_error"),
    };
    let gradients = flash::Gradients {
        dq: of_queries(&sizes, l.y("dq")?),
        dk: of_keys(&sizes, l.y("dk")?),
        dv: of_keys(&sizes, l.y("dv")?),
    };
    let tf32 = l.products.tf32();
    flash::backward(l.gpu, &sizes, tf32, inputs, gradients, l.y("workspace")?)
}

/// Writes out, the probabilities and, in half precision, the scores of some heads in f32.
pub(super) fn naive_forward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let heads = HeadGroups::of(&sizes(k)?);
    let (out, p) = (l.y("out")?, l.y("p")?);
    let scores = l.some_y("scores").unwrap_or(p); // f32's in the same place
    let qkv = [l.x("q")?, l.x("k")?, l.x("v")?];
    let multiply = &mut l.multiplier();
    naive_attention::forward(l.gpu, multiply, &heads, qkv, scores, p, out)
}

/// Reads d_out, q, k, v and the probabilities; writes dq, dk, dv and, of some heads, the probabilities' gradients in
/// f32 and, in half precision, the scores'.
pub(super) fn naive_backward(k: &Kernel, l: &Operands<'_>) -> Result<()> {
    let heads = HeadGroups::of(&sizes(k)?);
    let inputs = [l.x("d_out")?, l.x("q")?, l.x("k")?, l.x("v")?, l.x("p")?];
    let gradients = [l.y("dq")?, l.y("dk")?, l.y("dv")?];
    let dp = l.y("dp")?;
    let ds = l.some_y("dscores").unwrap_or(dp); // f32's in the same place
    let multiply = &mut l.multiplier();
    naive_attention::backward(l.gpu, multiply, &heads, inputs, [dp, ds], gradients)
}

fn of_queries<'a>(sizes: &Sizes, view: View<'a>) -> Heads<'a> {
    heads(
        view,
        [sizes.batch, sizes.heads, sizes.queries, sizes.head_dim],
    )
}

fn of_keys<'a>(sizes: &Sizes, view: View<'a>) -> Heads<'a> {
    heads(
        view,
        [sizes.batch, sizes.kv_heads, sizes.keys, sizes.head_dim],
    )
}

/// One after another: (B, H, T, Dh).
fn heads(view: View<'_>, dims: [usize; 4]) -> Heads<'_> {
    let [_, heads, rows, head_dim] = dims;
    Heads {
        view,
        strides: [heads * rows * head_dim, rows * head_dim, head_dim],
        dims,
    }
}
