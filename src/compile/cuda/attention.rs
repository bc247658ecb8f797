//! Calls that are attention.

use super::super::op::AttentionSizes;
use super::super::plan::Call;
use super::call::Launcher;
use crate::Result;
use crate::kernels::Mask;
use crate::kernels::cuda::View;
use crate::kernels::cuda::flash_attention::{self as flash, Heads};
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::softmax::{self, Scores};

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
    let (out, lse, workspace) = (dense(sizes, writes[0]).heads(sizes), writes[1], writes[2]);
    let rounded_off = writes.get(3).copied();
    let (card, kernel) = (launcher.card, sizes.flash());
    Ok(flash::forward(
        card,
        &kernel,
        qkv,
        out,
        rounded_off,
        lse,
        workspace,
    )?)
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
    let (card, kernel, workspace) = (launcher.card, sizes.flash(), writes[count(sizes)]);
    Ok(flash::backward(
        card, &kernel, inputs, gradients, workspace,
    )?)
}

/// The scores of sequence `batch`, (T, T) for each head.
fn scores<'a>(sizes: &AttentionSizes, view: View<'a>, batch: usize) -> Matrix<'a> {
    let of_head = sizes.length * sizes.length;
    Matrix {
        matrix_stride: of_head,
        ..Matrix::new(
            view.part_from(batch * sizes.heads * of_head),
            sizes.length,
            sizes.length,
        )
    }
}

fn masked(sizes: &AttentionSizes) -> Scores {
    Scores {
        scale: sizes.scale,
        mask: Mask::Causal,
        queries: sizes.length,
        keys: sizes.length,
    }
}

pub(super) fn naive(
    launcher: &mut Launcher<'_>,
    call: &Call,
    sizes: &AttentionSizes,
) -> Result<()> {
    let (reads, writes) = views(launcher, call);
    let [q, k, v] = split(sizes, &reads);
    let (out, p, card) = (dense(sizes, writes[0]), writes[1], launcher.card);
    for batch in 0..sizes.batch {
        let factors = [q.of(sizes, batch), k.of(sizes, batch).t()];
        let scores = scores(sizes, p, batch);
        launcher
            .products
            .multiply(card, factors, scores, sizes.heads, false)?;
    }
    softmax::forward(card, masked(sizes), p, p)?;
    for batch in 0..sizes.batch {
        let factors = [scores(sizes, p, batch), v.of(sizes, batch)];
        let out = out.of(sizes, batch);
        launcher
            .products
            .multiply(card, factors, out, sizes.heads, false)?;
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
    let card = launcher.card;
    let mut multiply = |factors, c| {
        launcher
            .products
            .multiply(card, factors, c, sizes.heads, false)
    };
    for batch in 0..sizes.batch {
        let (d_out, p) = (d_out.of(sizes, batch), scores(sizes, p, batch));
        let d_scores = scores(sizes, d_scores, batch);
        multiply([d_out, v.of(sizes, batch).t()], d_scores)?;
        multiply([p.t(), d_out], dv.of(sizes, batch))?;
    }
    softmax::backward_in_place(card, masked(sizes), d_scores, p)?;
    for batch in 0..sizes.batch {
        let d_scores = scores(sizes, d_scores, batch);
        multiply([d_scores, k.of(sizes, batch)], dq.of(sizes, batch))?;
        multiply([d_scores.t(), q.of(sizes, batch)], dk.of(sizes, batch))?;
    }
    Ok(())
}
