//! One call: its operands as slices, handed to its kernel.
//!
//! The plan says that what a call writes is no other operand of it, and that nobody else uses the memory of a buffer that
//! is alive; a call runs alone. That is what [`View`]'s slices want.

use super::super::op::{AttentionSizes, Op};
use super::super::plan::{Call, Plan};
use super::Controls;
use super::memory::View;
use crate::kernels::Mask;
use crate::kernels::cpu::flash_attention::{self as flash, Tiles};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::kernels::cpu::rotary_heads::{self, Angles};
use crate::kernels::cpu::{
    adamw, cross_entropy, embedding, heads, reduce, residual_norm, rms_norm, rotary_attention,
    swiglu,
};
use crate::{Error, Result};
use candle_core::WithDType;

/// A call's operands, by their place in the op's order.
struct Operands<'a> {
    call: &'a Call,
    view: &'a View<'a>,
}

impl<'a> Operands<'a> {
    fn read<T: WithDType>(&self, place: usize) -> &'a [T] {
        // SAFETY: see above.
        unsafe { self.view.read(&self.call.reads[place]) }
    }

    /// Once for each place.
    fn write<T: WithDType>(&self, place: usize) -> &'a mut [T] {
        // SAFETY: see above; each function below asks once for each place.
        unsafe { self.view.write(&self.call.writes[place]) }
    }

    /// In f32, the only type computed in so far.
    fn x(&self, place: usize) -> &'a [f32] {
        self.read(place)
    }

    fn y(&self, place: usize) -> &'a mut [f32] {
        self.write(place)
    }

    fn angles(&self, cos: usize, sin: usize) -> Angles<'a, f32> {
        Angles {
            cos: self.x(cos),
            sin: self.x(sin),
        }
    }

    fn adds(&self, accumulate: super::super::op::Accumulate) -> bool {
        accumulate.adds(self.view.micro_batch())
    }
}

/// Runs a call.
///
/// # Errors
/// Gradients that are not finite, found by clipping.
pub(super) fn run(
    plan: &Plan,
    call: &Call,
    view: &View<'_>,
    controls: &Controls<'_>,
) -> Result<()> {
    let o = Operands { call, view };
    match call.op {
        Op::Embedding { width, .. } => embedding::forward(o.x(1), width, o.read(0), o.y(0)),
        Op::RmsNorm { eps, .. } => rms_norm::forward(o.x(0), o.x(1), eps, o.y(0), o.y(1)),
        Op::AddRmsNorm { eps, .. } => {
            let outputs = residual_norm::Outputs {
                sum: o.y(0),
                y: o.y(1),
                rstd: o.y(2),
            };
            residual_norm::add_forward(o.x(0), o.x(1), o.x(2), eps, outputs);
        }
        Op::Matmul { .. } => product(&o),
        Op::Rotate(sizes) => {
            rotary_heads::rotate_in_place(sizes.heads(), o.angles(0, 1), o.y(0));
        }
        Op::Attention(sizes) => {
            let outputs = rotary_attention::Outputs {
                p: (call.writes.len() > 2).then(|| o.y(2)),
                out: o.y(0),
            };
            let inputs = rotary_attention::Inputs {
                q: o.x(0),
                k: o.x(1),
                v: o.x(2),
                angles: o.angles(3, 4),
            };
            rotary_attention::forward(&sizes.rotary(), inputs, outputs, o.y(1));
        }
        Op::AttentionBackward(sizes) => {
            let inputs = rotary_attention::Inputs {
                q: o.x(1),
                k: o.x(2),
                v: o.x(3),
                angles: o.angles(5, 6),
            };
            let gradients = rotary_attention::Gradients {
                dq: o.y(0),
                dk: o.y(1),
                dv: o.y(2),
            };
            let (p, d_out) = (o.x(4), o.x(0));
            rotary_attention::backward(&sizes.rotary(), inputs, p, d_out, gradients, o.y(3));
        }
        Op::FlashAttention(sizes) => flash_forward(&o, &sizes),
        Op::FlashAttentionBackward(sizes) => flash_backward(&o, &sizes),
        Op::MergeHeads(sizes) => heads::merge(sizes.heads(), o.x(0), o.y(0)),
        Op::MergeRotatedBack(sizes) => {
            rotary_heads::merge_turned_back(sizes.heads(), o.angles(1, 2), o.x(0), o.y(0));
        }
        Op::SwiGlu { .. } => swiglu::forward(o.x(0), o.x(1), o.y(0)),
        Op::SwiGluBackward { .. } => swiglu::backward_in_place(o.y(0), o.y(1), o.y(2)),
        Op::CrossEntropy {
            classes, counted, ..
        } => {
            let targets: &[u32] = o.read(0);
            let weight = (1.0 / counted as f64) as f32;
            let target = |row: usize| targets[row] as usize;
            cross_entropy::forward_backward_in_place(o.y(0), classes, target, weight, o.y(1));
        }
        Op::MeanLoss {
            counted,
            accumulate,
            ..
        } => {
            let losses = o.x(0).iter().map(|loss| f64::from(*loss));
            let share = losses.sum::<f64>() / counted as f64;
            let loss = &mut o.write::<f64>(0)[0];
            *loss = share + if o.adds(accumulate) { *loss } else { 0.0 };
        }
        Op::RmsNormBackward {
            add_dx, accumulate, ..
        } => {
            let inputs = residual_norm::Inputs {
                dy: o.x(0),
                x: o.x(1),
                weight: o.x(2),
                rstd: o.x(3),
            };
            let gradients = residual_norm::Gradients {
                dx: o.y(0),
                add_dx,
                dw: o.y(1),
                add_dw: o.adds(accumulate),
            };
            residual_norm::backward(inputs, gradients, o.y(2));
        }
        Op::EmbeddingBackward {
            width, accumulate, ..
        } => match o.adds(accumulate) {
            false => embedding::backward(o.x(0), width, o.read(1), o.y(0)),
            true => embedding::backward_accumulating(o.x(0), width, o.read(1), o.y(0)),
        },
        Op::SumOfSquares { .. } => o.write::<f64>(0)[0] = reduce::sum_of_squares(o.x(0)),
        Op::ClipFactor { .. } => return clip_factor(plan, &o, controls),
        Op::AdamW { parameter, .. } => {
            let update = &controls.updates[parameter];
            let factor = match call.reads.len() {
                1 => 1.0,
                _ => o.read::<f64>(1)[1],
            };
            let (p, g, m, v) = (o.y(0), o.x(0), o.y(1), o.y(2));
            match factor < 1.0 {
                true => adamw::step_scaled(p, g, factor, m, v, update),
                false => adamw::step(p, g, m, v, update),
            }
        }
    }
    Ok(())
}

fn product(o: &Operands<'_>) {
    let Op::Matmul {
        rows,
        cols,
        depth,
        a_transposed,
        b_transposed,
        accumulate,
    } = o.call.op
    else {
        return;
    };
    let a = match a_transposed {
        false => MatRef::new(o.x(0), rows, depth),
        true => MatRef::new(o.x(0), depth, rows).t(),
    };
    let b = match b_transposed {
        false => MatRef::new(o.x(1), depth, cols),
        true => MatRef::new(o.x(1), cols, depth).t(),
    };
    matmul(a, b, o.y(0), o.adds(accumulate), Threads::All);
}

fn flash_sizes(sizes: &AttentionSizes) -> (flash::Sizes, Tiles) {
    let kernel = flash::Sizes {
        batch: sizes.batch,
        heads: sizes.heads,
        kv_heads: sizes.heads,
        queries: sizes.length,
        keys: sizes.length,
        head_dim: sizes.head_dim,
        mask: Mask::Causal,
        scale: sizes.scale,
    };
    (kernel, Tiles::for_head_dim(sizes.head_dim))
}

/// The heads of a (B, T, H*Dh), as they lie.
fn in_model_dimension<'a>(sizes: &AttentionSizes, data: &'a [f32]) -> flash::Heads<'a, f32> {
    let row = sizes.heads * sizes.head_dim;
    flash::Heads {
        data,
        strides: [sizes.length * row, sizes.head_dim, row, 1],
    }
}

fn flash_forward(o: &Operands<'_>, sizes: &AttentionSizes) {
    let (kernel, tiles) = flash_sizes(sizes);
    let [q, k, v] = [0, 1, 2].map(|place| in_model_dimension(sizes, o.x(place)));
    let outputs = flash::Outputs {
        out: o.y(0),
        rounded_off: &mut [],
        lse: o.y(1),
    };
    flash::forward(&kernel, &tiles, q, k, v, outputs);
}

fn flash_backward(o: &Operands<'_>, sizes: &AttentionSizes) {
    let (kernel, tiles) = flash_sizes(sizes);
    let [d_out, q, k, v, out] = [0, 1, 2, 3, 4].map(|place| in_model_dimension(sizes, o.x(place)));
    let inputs = flash::Inputs {
        q,
        k,
        v,
        out,
        rounded_off: None,
        lse: o.x(5),
        d_out,
    };
    let gradients = flash::Gradients {
        dq: o.y(0),
        dk: o.y(1),
        dv: o.y(2),
    };
    flash::backward(&kernel, &tiles, inputs, gradients);
}

/// The norm, and what the gradients are multiplied by: as `clip_grad_norm_checked`.
fn clip_factor(plan: &Plan, o: &Operands<'_>, controls: &Controls<'_>) -> Result<()> {
    let squares: &[f64] = o.read(0);
    let norm = squares.iter().sum::<f64>().sqrt();
    let result: &mut [f64] = o.write(0);
    result.copy_from_slice(&[norm, controls.clip_norm / (norm + 1e-6)]);
    if norm.is_finite() {
        return Ok(());
    }
    let culprit = squares.iter().position(|square| !square.is_finite());
    let name = culprit.and_then(|number| {
        plan.at_home(super::super::buffer::Home::Parameter(number))
            .map(|id| plan.buffer(id).name.clone())
    });
    Err(Error::Data {
        what: match name {
            Some(name) => format!("the gradient of parameter {name}"),
            None => "all gradients together".into(),
        },
        expected: "finite numbers".into(),
        got: format!("a norm of {norm}"),
        hint: "lower the learning rate, or skip this batch; nothing was updated".into(),
    })
}
