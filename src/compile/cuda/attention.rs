//! Calls that are attention.

use super::super::plan::Call;
use super::super::sizes::{AttentionSizes, HeadAttentionSizes};
use super::launcher::Launcher;
use crate::Result;
use crate::kernels::Mask;
use crate::kernels::cpu::flash_attention::Sizes as FlashSizes;
use crate::kernels::cuda::View;
use crate::kernels::cuda::flash_attention::{self as flash, Heads, Outputs};
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::naive_attention::{self, Sizes, compare, gather, scatter};
use crate::kernels::cuda::softmax;

/// Heads in the model's dimension: (B, T, H*Dh), or a part of rows that are longer.
#[derive(Clone, Copy)]
struct InModel<'a> {
    view: View<'a>,
    /// From a position to the next, in elements.
    row: usize,
}

impl<'a> InModel<'a> {
    fn heads(self, sizes: &AttentionSizes) -> Heads<'a> {
        Heads {
            view: self.view,
            strides: [sizes.length * self.row, sizes.head_dim, self.row],
            dims: [sizes.batch, sizes.heads, sizes.length, sizes.head_dim],
        }
    }

    /// The heads of sequence `batch`, (T, Dh) each.
    fn of(self, sizes: &AttentionSizes, batch: usize) -> Matrix<'a> {
        let skipped = batch * sizes.length * self.row;
        Matrix {
            row_stride: self.row,
            matrix_stride: sizes.head_dim,
            ..Matrix::new(self.view.part_from(skipped), sizes.length, sizes.head_dim)
        }
    }
}

/// q, k and v, or their gradients: three buffers, or one.
fn split<'a>(sizes: &AttentionSizes, views: &[View<'a>]) -> [InModel<'a>; 3] {
    let width = sizes.heads * sizes.head_dim;
    [0, 1, 2].map(|place| match sizes.packed {
        false => InModel {
            view: views[place],
            row: width,
        },
        true => InModel {
            view: views[0].part_from(place * width),
            row: 3 * width,
        },
    })
}

fn dense<'a>(sizes: &AttentionSizes, view: View<'a>) -> InModel<'a> {
    let row = sizes.heads * sizes.head_dim;
    InModel { view, row }
}

fn views<'a>(launcher: &Launcher<'a>, call: &Call) -> (Vec<View<'a>>, Vec<View<'a>>) {
    let view = |operand| launcher.view(operand);
    let reads = call.reads.iter().map(view).collect();
    (reads, call.writes.iter().map(view).collect())
}

/// How many operands q, k and v are.
fn count(sizes: &AttentionSizes) -> usize {
    if sizes.packed { 1 } else { 3 }
}

pub(super) fn flash(launcher: &Launcher<'_>, call: &Call, sizes: &AttentionSizes) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let qkv = split(sizes, &reads).map(|x| x.heads(sizes));
    let out = dense(sizes, writes[0]).heads(sizes);
    tiled(launcher, &sizes.flash(), qkv, out, &writes[1..])
}

pub(super) fn flash_heads(
    launcher: &Launcher<'_>,
    call: &Call,
    sizes: &HeadAttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let qkv = [0, 1, 2].map(|place| one_after_another(sizes, reads[place]));
    let out = one_after_another(sizes, writes[0]);
    tiled(launcher, &sizes.flash(), qkv, out, &writes[1..])
}

/// Flash attention's forward; beside out are lse, the workspace and, in half precision, what rounding took.
fn tiled(
    launcher: &Launcher<'_>,
    kernel: &FlashSizes,
    qkv: [Heads<'_>; 3],
    out: Heads<'_>,
    beside: &[View<'_>],
) -> Result<()> {
    let outputs = Outputs {
        out,
        rounded_off: beside.get(2).copied(),
        lse: beside[0],
    };
    let (card, tf32) = (launcher.card, launcher.products.tf32());
    Ok(flash::forward(card, kernel, tf32, qkv, outputs, beside[1])?)
}

pub(super) fn flash_backward(
    launcher: &Launcher<'_>,
    call: &Call,
    sizes: &AttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let after = 1 + count(sizes);
    let [q, k, v] = split(sizes, &reads[1..]).map(|x| x.heads(sizes));
    let [dq, dk, dv] = split(sizes, &writes).map(|x| x.heads(sizes));
    let inputs = flash::Inputs {
        q,
        k,
        v,
        out: dense(sizes, reads[after]).heads(sizes),
        rounded_off: reads.get(after + 2).copied(),
        d_out: dense(sizes, reads[0]).heads(sizes),
        lse: reads[after + 1],
    };
    let gradients = flash::Gradients { dq, dk, dv };
    let workspace = writes[count(sizes)];
    tiled_backward(launcher, &sizes.flash(), inputs, gradients, workspace)
}

pub(super) fn flash_heads_backward(
    launcher: &Launcher<'_>,
    call: &Call,
    sizes: &HeadAttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let [d_out, q, k, v, out] = [0, 1, 2, 3, 4].map(|place| one_after_another(sizes, reads[place]));
    let [dq, dk, dv] = [0, 1, 2].map(|place| one_after_another(sizes, writes[place]));
    let inputs = flash::Inputs {
        q,
        k,
        v,
        out,
        rounded_off: reads.get(6).copied(),
        d_out,
        lse: reads[5],
    };
    let gradients = flash::Gradients { dq, dk, dv };
    tiled_backward(launcher, &sizes.flash(), inputs, gradients, writes[3])
}

fn tiled_backward(
    launcher: &Launcher<'_>,
    kernel: &FlashSizes,
    inputs: flash::Inputs<'_>,
    gradients: flash::Gradients<'_>,
    workspace: View<'_>,
) -> Result<()> {
    let (card, tf32) = (launcher.card, launcher.products.tf32());
    Ok(flash::backward(
        card, kernel, tf32, inputs, gradients, workspace,
    )?)
}

/// Heads one after another.
fn one_after_another<'a>(sizes: &HeadAttentionSizes, view: View<'a>) -> Heads<'a> {
    let (rows, head_dim) = (sizes.length, sizes.head_dim);
    Heads {
        view,
        strides: [rows * head_dim, rows * head_dim, head_dim],
        dims: [sizes.matrices, 1, rows, head_dim],
    }
}

/// The scores of sequence `batch`, (T, T) for each head.
fn scores<'a>(sizes: &AttentionSizes, view: View<'a>, batch: usize) -> Matrix<'a> {
    let length = sizes.length;
    let first = batch * sizes.heads * length * length;
    Matrix::several(view.part_from(first), length, length)
}

/// The heads of one sequence of a model.
fn of_sequence(sizes: &AttentionSizes) -> Sizes {
    Sizes {
        kv_heads: sizes.heads,
        group: 1,
        queries: sizes.length,
        keys: sizes.length,
        mask: Mask::Causal,
        scale: sizes.scale,
    }
}

pub(super) fn naive(
    launcher: &mut Launcher<'_>,
    call: &Call,
    sizes: &AttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let [q, k, v] = split(sizes, &reads);
    let (out, p, naive) = (dense(sizes, writes[0]), writes[1], of_sequence(sizes));
    let card = launcher.card;
    let mut multiply = launcher.multiplier();
    for batch in 0..sizes.batch {
        let [q, k] = [q, k].map(|x| x.of(sizes, batch));
        compare(&mut multiply, &naive, [q, k], scores(sizes, p, batch))?;
    }
    softmax::forward(card, naive.scores(), p, p)?;
    for batch in 0..sizes.batch {
        let (p, v) = (scores(sizes, p, batch), v.of(sizes, batch));
        gather(&mut multiply, &naive, [p, v], out.of(sizes, batch))?;
    }
    Ok(())
}

pub(super) fn naive_backward(
    launcher: &mut Launcher<'_>,
    call: &Call,
    sizes: &AttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let d_out = dense(sizes, reads[0]);
    let [q, k, v] = split(sizes, &reads[1..]);
    let [dq, dk, dv] = split(sizes, &writes);
    let (p, d_scores) = (reads[1 + count(sizes)], writes[count(sizes)]);
    let naive = of_sequence(sizes);
    let card = launcher.card;
    let mut multiply = launcher.multiplier();
    let multiply = &mut multiply;
    for batch in 0..sizes.batch {
        let (d_out, p) = (d_out.of(sizes, batch), scores(sizes, p, batch));
        let d_scores = scores(sizes, d_scores, batch);
        compare(multiply, &naive, [d_out, v.of(sizes, batch)], d_scores)?;
        scatter(multiply, &naive, [p, d_out], dv.of(sizes, batch))?;
    }
    softmax::backward_in_place(card, naive.scores(), d_scores, p)?;
    for batch in 0..sizes.batch {
        let d_scores = scores(sizes, d_scores, batch);
        let [q, k] = [q, k].map(|x| x.of(sizes, batch));
        gather(multiply, &naive, [d_scores, k], dq.of(sizes, batch))?;
        scatter(multiply, &naive, [d_scores, q], dk.of(sizes, batch))?;
    }
    Ok(())
}

/// Heads one after another.
fn of_heads(sizes: &HeadAttentionSizes) -> Sizes {
    Sizes {
        kv_heads: sizes.matrices,
        group: 1,
        queries: sizes.length,
        keys: sizes.length,
        mask: sizes.mask,
        scale: sizes.scale,
    }
}

pub(super) fn heads(
    launcher: &mut Launcher<'_>,
    call: &Call,
    sizes: &HeadAttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let card = launcher.card;
    let mut multiply = launcher.multiplier();
    let (qkv, p, out) = ([reads[0], reads[1], reads[2]], writes[1], writes[0]);
    naive_attention::forward(card, &mut multiply, &of_heads(sizes), qkv, p, out)?;
    Ok(())
}

pub(super) fn heads_backward(
    launcher: &mut Launcher<'_>,
    call: &Call,
    sizes: &HeadAttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let card = launcher.card;
    let mut multiply = launcher.multiplier();
    let inputs = [0, 1, 2, 3, 4].map(|place| reads[place]); // d_out, q, k, v, p
    let gradients = [0, 1, 2].map(|place| writes[place]);
    let sizes = of_heads(sizes);
    naive_attention::backward(card, &mut multiply, &sizes, inputs, writes[3], gradients)?;
    Ok(())
}
