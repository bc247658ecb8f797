//! Launches of attention in the model's dimension.

use super::InModel;
use crate::attention::lowering::dropped;
use crate::kernels::cuda::View;
use crate::kernels::cuda::flash_attention::{self as flash, Heads, Outputs};
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::naive_attention::{
    HeadGroups, compare, transposed_weighted_sum, weighted_sum,
};
use crate::kernels::cuda::{rope, softmax};
use crate::ops::lowering::{Kernel, Named, Operands};
use candle_core::Result;
use std::ops::Range;

/// Heads in the model's dimension: (B, T, heads*Dh), or a part of rows that are longer.
#[derive(Clone, Copy)]
struct Rows<'a> {
    view: View<'a>,
    heads: usize,
    /// From a position to the next, in elements.
    row: usize,
}

impl<'a> Rows<'a> {
    fn heads(self, sizes: &InModel) -> Heads<'a> {
        Heads {
            view: self.view,
            strides: [sizes.length * self.row, sizes.head_dim, self.row],
            dims: [sizes.batch, self.heads, sizes.length, sizes.head_dim],
        }
    }

    /// The heads of sequence `batch`, (T, Dh) each.
    fn of(self, sizes: &InModel, batch: usize) -> Matrix<'a> {
        let skipped = batch * sizes.length * self.row;
        Matrix {
            row_stride: self.row,
            matrix_stride: sizes.head_dim,
            ..Matrix::new(self.view.part_from(skipped), sizes.length, sizes.head_dim)
        }
    }
}

/// q, k and v: three buffers, or one.
fn qkv<'a>(sizes: &InModel, views: &Named<View<'a>>) -> [Rows<'a>; 3] {
    match sizes.packed {
        false => apart(sizes, ["q", "k", "v"].map(|name| *views.operand(name))),
        true => split(sizes, *views.operand("qkv")),
    }
}

/// Their gradients, as [`qkv`].
fn gradients<'a>(sizes: &InModel, views: &Named<View<'a>>) -> [Rows<'a>; 3] {
    match sizes.packed {
        false => apart(sizes, ["dq", "dk", "dv"].map(|name| *views.operand(name))),
        true => split(sizes, *views.operand("dqkv")),
    }
}

fn apart<'a>(sizes: &InModel, [q, k, v]: [View<'a>; 3]) -> [Rows<'a>; 3] {
    let heads = [(q, sizes.heads), (k, sizes.kv_heads), (v, sizes.kv_heads)];
    heads.map(|(view, heads)| dense(sizes, view, heads))
}

/// The parts of rows.
fn split<'a>(sizes: &InModel, packed: View<'a>) -> [Rows<'a>; 3] {
    let [q, k, v] = sizes.columns();
    let parts = [
        (0, sizes.heads),
        (q, sizes.kv_heads),
        (q + k, sizes.kv_heads),
    ];
    parts.map(|(first, heads)| Rows {
        view: packed.part_from(first),
        heads,
        row: q + k + v,
    })
}

/// What is as wide as q.
fn as_q<'a>(sizes: &InModel, view: View<'a>) -> Rows<'a> {
    dense(sizes, view, sizes.heads)
}

/// Rows of these heads alone.
fn dense<'a>(sizes: &InModel, view: View<'a>, heads: usize) -> Rows<'a> {
    Rows {
        view,
        heads,
        row: heads * sizes.head_dim,
    }
}

/// Turns q or k, or both where they are packed, in place.
pub(super) fn rotate(kernel: &Kernel, l: &Operands<'_>, back: bool) -> Result<()> {
    let sizes = InModel::of(kernel)?;
    let [q, k, v] = sizes.columns();
    let (heads, row) = match sizes.packed {
        false => (sizes.heads, q),
        true => (sizes.heads + sizes.kv_heads, q + k + v), // q's, then k's
    };
    let turn = rope::Turn {
        by_halves: sizes.by_halves,
        back,
    };
    let turned = rope::Turned {
        batch: sizes.batch,
        length: sizes.length,
        heads,
        head_dim: sizes.head_dim,
        row,
    };
    rope::in_place(l.gpu, l.y("x")?, [l.x("cos")?, l.x("sin")?], &turned, turn)
}

pub(super) fn tiled(kernel: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = &InModel::of(kernel)?;
    let outputs = Outputs {
        out: as_q(sizes, l.y("out")?).heads(sizes),
        rounding_error: l.some_y("rounding_error"),
        lse: l.y("lse")?,
    };
    let [q, k, v] = qkv(sizes, &l.reads).map(|x| x.heads(sizes));
    let inputs = flash::ForwardInputs {
        q,
        k,
        v,
        first_keys: l.some_x("first_keys"),
        dropout: dropped(sizes.dropout, l)?,
    };
    let (tf32, sizes, workspace) = (l.tf32(kernel), sizes.flash(), l.y("workspace")?);
    flash::forward(l.gpu, &sizes, tf32, inputs, outputs, workspace)
}

pub(super) fn tiled_backward(kernel: &Kernel, l: &Operands<'_>) -> Result<()> {
    let sizes = &InModel::of(kernel)?;
    let [q, k, v] = qkv(sizes, &l.reads).map(|x| x.heads(sizes));
    let [dq, dk, dv] = gradients(sizes, &l.writes).map(|x| x.heads(sizes));
    let inputs = flash::Inputs {
        q,
        k,
        v,
        out: as_q(sizes, l.x("out")?).heads(sizes),
        rounding_error: l.some_x("rounding_error"),
        d_out: as_q(sizes, l.x("d_out")?).heads(sizes),
        lse: l.x("lse")?,
        first_keys: l.some_x("first_keys"),
        dropout: dropped(sizes.dropout, l)?,
    };
    let gradients = flash::Gradients { dq, dk, dv };
    let tf32 = l.tf32(kernel);
    let workspace = l.y("workspace")?;
    flash::backward(l.gpu, &sizes.flash(), tf32, inputs, gradients, workspace)
}

/// Some heads of a model whose scores are there at once: those of whole sequences, or of a part of one.
struct Turn {
    sequences: Range<usize>,
    heads: Range<usize>,
}

/// All heads, in turns for which there is room for scores (.., T, T).
fn turns(sizes: &InModel, room: View<'_>) -> Vec<Turn> {
    let at_once = (room.len / sizes.length.pow(2).max(1)).max(1);
    let parts = |of: usize, at_once: usize| {
        let firsts = (0..of).step_by(at_once);
        firsts.map(move |first| first..of.min(first + at_once))
    };
    let sequences = parts(sizes.batch, (at_once / sizes.heads.max(1)).max(1));
    let turns = sequences.flat_map(|sequences| {
        let heads = parts(sizes.heads, at_once);
        heads.map(move |heads| Turn {
            sequences: sequences.clone(),
            heads,
        })
    });
    turns.collect()
}

impl Turn {
    /// What naive attention's kernels are told of the heads of one sequence; with the first keys (B, T) of all of its
    /// sequences, which softmax takes together.
    fn of_sequence<'a>(&self, sizes: &InModel, first_keys: Option<View<'a>>) -> HeadGroups<'a> {
        let (first, count) = (self.sequences.start, self.sequences.len());
        HeadGroups {
            kv_heads: self.heads.len(),
            group: 1,
            queries: sizes.length,
            keys: sizes.length,
            mask: sizes.mask,
            scale: sizes.scale,
            first_keys: first_keys.map(|all| all.part(first * sizes.length, count * sizes.length)),
            heads: self.heads.len(),
            first_head: 0,
        }
    }

    /// Its scores, of all heads' or where they are by themselves.
    fn of_all<'a>(&self, sizes: &InModel, view: View<'a>) -> View<'a> {
        let of_head = sizes.length * sizes.length;
        let first = self.sequences.start * sizes.heads + self.heads.start;
        view.part(first * of_head, self.count() * of_head)
    }

    fn alone<'a>(&self, sizes: &InModel, view: View<'a>) -> View<'a> {
        view.part(0, self.count() * sizes.length * sizes.length)
    }

    fn count(&self) -> usize {
        self.sequences.len() * self.heads.len()
    }

    /// Its heads of sequence `batch`, (T, Dh) each.
    fn heads<'a>(&self, sizes: &InModel, x: Rows<'a>, batch: usize) -> Matrix<'a> {
        let view = x.view.part_from(self.heads.start * sizes.head_dim);
        Rows { view, ..x }.of(sizes, batch)
    }

    /// The scores (T, T) of its heads of sequence `batch`, among those of all its heads.
    fn scores<'a>(&self, sizes: &InModel, view: View<'a>, batch: usize) -> Matrix<'a> {
        let length = sizes.length;
        let before = (batch - self.sequences.start) * self.heads.len() * length * length;
        Matrix::several(view.part_from(before), length, length)
    }
}

pub(super) fn naive(sizes: &InModel, l: &Operands<'_>) -> Result<()> {
    let [q, k, v] = qkv(sizes, &l.reads);
    let (out, p) = (as_q(sizes, l.y("out")?), l.y("p")?);
    let mut multiply = l.multiplier();
    // f32's scores are in the probabilities' place.
    let room = l.some_y("scores");
    for turn in turns(sizes, room.unwrap_or(p)) {
        let naive = turn.of_sequence(sizes, l.some_x("first_keys"));
        let p = turn.of_all(sizes, p);
        let scores = room.map_or(p, |room| turn.alone(sizes, room));
        for batch in turn.sequences.clone() {
            let factors = [q, k].map(|x| turn.heads(sizes, x, batch));
            compare(
                &mut multiply,
                &naive,
                factors,
                turn.scores(sizes, scores, batch),
            )?;
        }
        softmax::forward(l.gpu, naive.scores(), scores, p)?;
        for batch in turn.sequences.clone() {
            let factors = [turn.scores(sizes, p, batch), turn.heads(sizes, v, batch)];
            weighted_sum(
                &mut multiply,
                &naive,
                factors,
                turn.heads(sizes, out, batch),
            )?;
        }
    }
    Ok(())
}

pub(super) fn naive_backward(sizes: &InModel, l: &Operands<'_>) -> Result<()> {
    let d_out = as_q(sizes, l.x("d_out")?);
    let [q, k, v] = qkv(sizes, &l.reads);
    let [dq, dk, dv] = gradients(sizes, &l.writes);
    let (p, dp) = (l.x("p")?, l.y("dp")?);
    let ds = l.some_y("dscores").unwrap_or(dp); // f32's in the same place
    let multiply = &mut l.multiplier();
    for turn in turns(sizes, dp) {
        let naive = turn.of_sequence(sizes, l.some_x("first_keys"));
        let [dp, ds] = [dp, ds].map(|view| turn.alone(sizes, view));
        let p = turn.of_all(sizes, p);
        for batch in turn.sequences.clone() {
            let heads = |x| turn.heads(sizes, x, batch);
            let of_batch = |view| turn.scores(sizes, view, batch);
            compare(multiply, &naive, [d_out, v].map(heads), of_batch(dp))?;
            transposed_weighted_sum(multiply, &naive, [of_batch(p), heads(d_out)], heads(dv))?;
        }
        softmax::backward_from_p(l.gpu, naive.scores(), [dp, p], ds)?;
        for batch in turn.sequences.clone() {
            let heads = |x| turn.heads(sizes, x, batch);
            let ds = turn.scores(sizes, ds, batch);
            weighted_sum(multiply, &naive, [ds, heads(k)], heads(dq))?;
            transposed_weighted_sum(multiply, &naive, [ds, heads(q)], heads(dk))?;
        }
    }
    Ok(())
}
