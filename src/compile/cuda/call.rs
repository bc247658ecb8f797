//! One call: its operands handed to its kernel.

use super::super::op::Op;
use super::super::plan::{Call, Operand, Plan};
use super::super::sizes::AttentionSizes;
use super::attention;
use super::launcher::Launcher;
use crate::kernels::cuda::matmul::Matrix;
use crate::kernels::cuda::{
    adamw, arithmetic, cast, copy, cross_entropy, embedding, rms_norm, rope, swiglu,
};
use crate::kernels::cuda::{flash_attention, source};
use crate::kernels::limits;
use crate::ops::lowering::Operands;
use crate::{Error, Result};
use candle_core::cuda_backend::CudaDevice;
use std::cell::RefCell;
use std::ops::Range;

impl Launcher<'_> {
    /// Launches a call, unless it is launched already.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn launch(&mut self, index: usize, call: &Call) -> Result<()> {
        if index < self.launched {
            return Ok(());
        }
        self.launched = index + 1;
        let gpu = self.gpu;
        if let Op::Kernel(kernel) = &call.op {
            let [reads, writes] = self.operands(call);
            kernel.launch(&Operands {
                gpu,
                products: RefCell::new(&mut *self.products),
                reads,
                writes,
            })?;
            return Ok(());
        }
        match call.op {
            Op::Cast { .. } => {
                let ([x], [y]) = (self.reads(call, ["x"]), self.writes(call, ["y"]));
                cast::cast(gpu, x, y)?;
            }
            Op::Embedding { width, .. } => {
                let [ids, table] = self.reads(call, ["ids", "table"]);
                let [x] = self.writes(call, ["x"]);
                embedding::forward(gpu, table, ids, width, x)?;
            }
            Op::RmsNorm { eps, .. } => {
                let [x, weight] = self.reads(call, ["x", "weight"]);
                let [y, rstd] = self.writes(call, ["y", "rstd"]);
                match call.reads.get("branch").map(|branch| self.view(branch)) {
                    None => rms_norm::forward(gpu, x, weight, eps, y, rstd)?,
                    Some(branch) => {
                        rms_norm::add_forward(gpu, [x, branch, weight], eps, None, [y, rstd])?;
                    }
                }
            }
            Op::AddRmsNorm { eps, .. } => {
                let reads = self.reads(call, ["x", "branch", "weight"]);
                let [sum, y, rstd] = self.writes(call, ["sum", "y", "rstd"]);
                rms_norm::add_forward(gpu, reads, eps, Some(sum), [y, rstd])?;
            }
            Op::Matmul {
                rows,
                cols,
                depth,
                a_transposed,
                b_transposed,
                accumulate,
            } => {
                let ([a, b], [c]) = (self.reads(call, ["a", "b"]), self.writes(call, ["c"]));
                let a = match a_transposed {
                    false => Matrix::new(a, rows, depth),
                    true => Matrix::new(a, depth, rows).t(),
                };
                let b = match b_transposed {
                    false => Matrix::new(b, depth, cols),
                    true => Matrix::new(b, cols, depth).t(),
                };
                let adds = accumulate.adds(self.micro_batch);
                let c = Matrix::new(c, rows, cols);
                self.products.multiply(gpu, [a, b], c, 1, adds)?;
            }
            Op::Rotate(sizes) => self.turn(call, &sizes, false)?,
            Op::RotateBack(sizes) => self.turn(call, &sizes, true)?,
            Op::NaiveAttention(sizes) => attention::naive(self, call, &sizes)?,
            Op::NaiveAttentionBackward(sizes) => attention::naive_backward(self, call, &sizes)?,
            Op::FlashAttention(sizes) => attention::flash(self, call, &sizes)?,
            Op::FlashAttentionBackward(sizes) => attention::flash_backward(self, call, &sizes)?,
            Op::SwiGlu { .. } => {
                let [gate, up] = self.reads(call, ["gate", "up"]);
                let [y] = self.writes(call, ["y"]);
                swiglu::forward(gpu, gate, up, y)?;
            }
            Op::PackedSwiGlu { width, .. } => {
                let [gate_up] = self.reads(call, ["gate_up"]);
                let [y] = self.writes(call, ["y"]);
                swiglu::packed_forward(gpu, gate_up, y, width)?;
            }
            Op::SwiGluBackward { .. } => {
                let [dy, gate, up] = self.writes(call, ["dy", "gate", "up"]);
                swiglu::backward_in_place(gpu, gate, up, dy)?;
            }
            Op::PackedSwiGluBackward { width, .. } => {
                let [dy, gate_up] = self.writes(call, ["dy", "gate_up"]);
                swiglu::packed_backward_in_place(gpu, gate_up, dy, width)?;
            }
            Op::CrossEntropy {
                classes, counted, ..
            } => {
                let [targets] = self.reads(call, ["targets"]);
                let [logits, losses] = self.writes(call, ["logits", "losses"]);
                let scale = self.inputs.loss_scale();
                cross_entropy::in_place(gpu, logits, classes, targets, scale, counted, losses)?;
            }
            Op::LossGradient { .. } => copy(
                gpu,
                self.inputs.loss_scale(),
                self.view(&call.writes["dloss"]),
            )?,
            Op::Accumulate { accumulate, .. } => {
                let ([x], [y]) = (self.reads(call, ["x"]), self.writes(call, ["y"]));
                match accumulate.adds(self.micro_batch) {
                    false => copy(gpu, x, y)?,
                    true => arithmetic::add(gpu, y, x, y)?,
                }
            }
            Op::MeanLoss {
                counted,
                accumulate,
                ..
            } => {
                let [losses] = self.reads(call, ["losses"]);
                let [loss] = self.writes(call, ["loss"]);
                let adds = accumulate.adds(self.micro_batch);
                cross_entropy::mean(gpu, losses, counted, loss, adds)?;
            }
            Op::RmsNormBackward {
                add_dx, accumulate, ..
            } => {
                let [x, weight, rstd] = self.reads(call, ["x", "weight", "rstd"]);
                let written = ["dy", "dx", "dweight", "partials"];
                let [dy, dx, dw, partials] = self.writes(call, written);
                let inputs = rms_norm::Inputs {
                    dy,
                    x,
                    branch: call.reads.get("branch").map(|branch| self.view(branch)),
                    weight,
                    rstd,
                };
                let gradients = rms_norm::Gradients {
                    dx,
                    add_dx,
                    copy: call.writes.get("copy").map(|copy| self.view(copy)),
                    y: Some(dy), // where dy lies
                    dw,
                    add_dw: accumulate.adds(self.micro_batch),
                };
                rms_norm::backward(gpu, inputs, gradients, partials)?;
            }
            Op::EmbeddingBackward {
                width, accumulate, ..
            } => {
                let [dx, ids] = self.reads(call, ["dx", "ids"]);
                let [dtable, workspace] = self.writes(call, ["dtable", "workspace"]);
                let adds = accumulate.adds(self.micro_batch);
                embedding::backward(gpu, dx, ids, width, dtable, adds, workspace)?;
            }
            Op::Unscale { .. } | Op::SumOfSquares { .. } | Op::AdamW { .. } => {
                self.launch_fused_updates(index)?;
            }
            Op::CheckOverflow { .. } => {
                let [flags] = self.reads(call, ["found"]);
                let [first, clip] = self.writes(call, ["first", "factor"]);
                adamw::check_overflow(gpu, flags, first, clip)?;
            }
            Op::ClipFactor { .. } => {
                let [squares] = self.reads(call, ["squares"]);
                let [clip] = self.writes(call, ["factor"]);
                adamw::clip_factor(gpu, squares, self.inputs.clip_norm(), clip)?;
            }
            Op::Attention(_)
            | Op::AttentionBackward(_)
            | Op::HeadAttention(_)
            | Op::HeadAttentionBackward(_)
            | Op::MergeHeads(_)
            | Op::Kernel(_)
            | Op::MergeRotatedBack(_) => panic!("{:?} was planned for the CPU", call.op),
        }
        Ok(())
    }

    /// Turns q or k, or both where they are packed, in place.
    fn turn(&self, call: &Call, sizes: &AttentionSizes, back: bool) -> Result<()> {
        let ([cos, sin], [x]) = (self.reads(call, ["cos", "sin"]), self.writes(call, ["x"]));
        let width = sizes.heads * sizes.head_dim;
        let heads = match sizes.packed {
            false => rope::Turned {
                batch: sizes.batch,
                length: sizes.length,
                heads: sizes.heads,
                head_dim: sizes.head_dim,
                row: width,
            },
            true => rope::Turned {
                batch: sizes.batch,
                length: sizes.length,
                heads: 2 * sizes.heads, // q's, then k's
                head_dim: sizes.head_dim,
                row: 3 * width,
            },
        };
        Ok(rope::in_place(self.gpu, x, [cos, sin], &heads, back)?)
    }

    /// Call `index` and those after it that do the same to another parameter, in one launch.
    fn launch_fused_updates(&mut self, index: usize) -> Result<()> {
        let Some(updates) = self.updates else {
            panic!("an update was launched before the optimizer's state was lent");
        };
        let calls = &self.plan.calls()[index..self.end];
        let kind = std::mem::discriminant(&calls[0].op);
        let same = |call: &&Call| std::mem::discriminant(&call.op) == kind;
        let count = calls.iter().take_while(same).count();
        let calls = &calls[..count];
        self.launched = index + count;
        let (gpu, tables) = (self.gpu, &updates.tables);
        let joined = |name: &str| {
            let operands: Vec<&Operand> = calls.iter().map(|call| &call.writes[name]).collect();
            self.view(&whole_of(&operands))
        };
        match calls[0].op {
            Op::Unscale { .. } => {
                let flags = joined("found");
                match self.checks {
                    true => tables.unscale(gpu, 0..count, self.inputs.inverse_scale(), flags)?,
                    false => crate::kernels::cuda::set_to_zero(gpu, flags)?,
                }
            }
            Op::SumOfSquares { .. } => {
                tables.sums_of_squares(gpu, 0..count, joined("chunks"), joined("square"))?;
            }
            _ => {
                let first = updates.entry(index);
                let clip = calls[0].reads.get("factor").map(|clip| self.view(clip));
                let entries: Range<usize> = first..first + count;
                tables.adamw(gpu, entries, self.inputs.updates(), clip)?;
            }
        }
        Ok(())
    }
}

/// Operands that lie one after another in a buffer, as one.
fn whole_of(operands: &[&Operand]) -> Operand {
    let (first, last) = (operands[0], operands[operands.len() - 1]);
    for pair in operands.windows(2) {
        let follows =
            pair[0].buffer == pair[1].buffer && pair[0].elements.end == pair[1].elements.start;
        assert!(follows, "{pair:?}");
    }
    Operand {
        buffer: first.buffer,
        elements: first.elements.start..last.elements.end,
    }
}

/// Whether the GPU has kernels for all calls of a plan, with products of f32 in TF32 or exact.
///
/// # Errors
/// [`Error::Config`] with what it would take.
pub(super) fn check(plan: &Plan, gpu: &CudaDevice, tf32: bool) -> Result<()> {
    let refuse = |what: &str, got: String, hint: &str| {
        Err(Error::Placement {
            op: "compile",
            expected: format!("{what}, for a step that is planned on a GPU"),
            got,
            hint: hint.into(),
        })
    };
    if !source::runs_on(gpu) {
        let got = "an older GPU".into();
        return refuse(
            "compute capability 8.0 or later",
            got,
            "run the model eagerly there",
        );
    }
    for call in plan.calls() {
        let dtype = plan.compute_dtype(call);
        let flash = match &call.op {
            Op::FlashAttention(sizes) => Some(sizes.flash()),
            Op::Kernel(kernel) => crate::attention::planned_flash_sizes(kernel),
            _ => None,
        };
        if let Some(sizes) = flash
            && !flash_attention::takes(gpu, dtype, tf32, &sizes)
        {
            let got = format!(
                "heads of {} in {}, scale {}, {} rows",
                sizes.head_dim,
                dtype.as_str(),
                sizes.scale,
                sizes.batch * sizes.heads * sizes.queries
            );
            let wanted = "flash attention of heads of a multiple of 8 (f32: of 4) up to 256, \
                 whose tiles fit the GPU's shared memory, with a scale above 0, of fewer than 2^31 rows";
            return refuse(wanted, got, "plan naive attention");
        }
        match call.op {
            Op::RmsNorm { width, .. } | Op::AddRmsNorm { width, .. }
                if width > limits::RMS_NORM_WIDTH =>
            {
                let wanted = format!("a d_model of at most {}", limits::RMS_NORM_WIDTH);
                return refuse(&wanted, width.to_string(), "run the model eagerly there");
            }
            _ => {}
        }
    }
    Ok(())
}
