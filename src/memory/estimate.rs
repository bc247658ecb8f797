//! The memory of a pass or a step, from its sizes alone.

use super::letters::Letters;
use super::lifetimes::{Buffer, Lifetimes, What, elements};
use super::workload::{self, Mode, Workload, check_pass, optimizer_state, place, reaching};
use super::{MemoryBreakdown, MemoryKind};
use crate::graph::{Graph, Source, ValueId};
use crate::model::TransformerConfig;
use crate::optim::Moments;
use crate::report::Format;
use crate::{Error, Result};
use serde::Serialize;
use std::fmt;

/// Bytes of an eager pass or step, by what they hold: when each buffer of the run is alive in forward and backward,
/// from its size alone.
///
/// The pass is traced ([`Workload::trace`]), as [`estimate_graph`] takes the trace of any function, and every value of
/// the graph has a lifetime by a few rules: a value lives until its last read, its drop, or the backward of the last op
/// that holds it. Parameters of 2^47 bytes, as many as a process has addresses, or a tensor of 2^63 make the peak
/// `u64::MAX`.
///
/// What forward of [`TransformerLM`](crate::model::TransformerLM) leaves for backward, in elements: N = B T; S is what
/// attention keeps beside its inputs and output, the probabilities, B H T^2 in f32, if it is naive; if it is flash, the
/// log-sum-exp of their rows, B H T in f32, and what rounding took from it, as much again, or in half precision what
/// rounding took from its output, N D in half.
///
/// - f32: `L (16 N D + 3 N F + S + 2 N) + 2 N D + N`, every op's input and output once each.
/// - Half precision throughout: the same in half, but for S and the norms' N; and `L 2 T D / H` for the rotary tables,
///   in f32.
/// - Autocast: the residual stream, the norms' outputs and the sums' second operands are f32,
///   `L (6 N D + 2 N) + 2 N D + N`; all between in half, `L (14 N D + 3 N F) + N D`: the norms' outputs a second time,
///   and both branches' outputs. S as above, and tables for all layers, `T D / H`. And the linear weights' casts, 2
///   bytes a weight: they stay until the graph goes or, without one, the region ends; if dropped, until their op is
///   done, and each layer has tables of its own, as above.
///
/// Of [GPT-2](crate::nn::Architecture::Gpt2) in f32 it is `L (14 N D + 2 N F + S + 4 N) + 3 N D + 2 N`. Of
/// [Gemma 2](crate::nn::Architecture::Gemma2) it is counted from the trace alone.
///
/// On a GPU ([`Kernels`](super::Kernels)) S of naive attention is in the dtype of q, and products pack nothing.
///
/// That is with the whole graph. With [checkpointing](crate::nn::Checkpointing), a segment that is recomputed leaves
/// its input, `N D`; its graph, as above with a copy of its input, is there in forward until the segment is done and in
/// backward until it is through, one at a time, and with it its weights' casts.
///
/// Nothing is dropped: a step with dropout is [traced](estimate_graph).
///
/// A training step in f16 scales its loss ([`GradScaler`](crate::optim::GradScaler)). Gradients of f16 parameters are
/// divided by the scale into f32, once the graph is gone: 4 bytes a parameter then, and the head's gradient in f16
/// beside them.
///
/// It displays as a table with the formula beside each line. Kernels' scratch is counted for all threads of the pool
/// that asks: the blocks that matrix products pack, attention's tiles.
/// Threads that find no work hold none, so with more threads than a small step keeps busy this is a bound. Left out:
/// the records of tensors and ops, a few hundred bytes each; what kernels keep from call to call; and, before the first
/// step, the drawing of the weights, the largest of which exists once more. [`measure()`](crate::memory::measure())
/// runs it and counts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// P: the weights.
    pub parameter_bytes: u64,
    /// P, with a backward: one gradient a weight, in its dtype, when backward is done.
    pub gradient_bytes: u64,
    /// 2 P in f32, with the optimizer: AdamW's exp_avg and exp_avg_sq; 3 P where it keeps an f32 copy of weights in
    /// half.
    pub optimizer_bytes: u64,
    /// What the blocks' graph holds when forward is done, as above; without a graph, what of it is alive at the worst
    /// moment.
    pub activation_bytes: u64,
    /// Copies of weights in half precision, at the same moment.
    pub weight_cast_bytes: u64,
    /// N V: the logits, 2 N V with a [cap](TransformerConfig::logit_soft_cap); with a loss also the loss and what it
    /// keeps beside them, 2 N + 1 in f32. At the same moment.
    pub logit_bytes: u64,
    /// What comes and goes at the worst moment, beyond the above and the gradients that exist by then.
    pub transient_bytes: u64,
    /// What is alive when forward is done: what backward begins with.
    pub after_forward_bytes: u64,
    /// The most that is alive at once.
    pub peak_bytes: u64,
    /// What is alive at the worst moment, term by term; its sum is the peak.
    pub breakdown: MemoryBreakdown,
}

/// The breakdown of one pass or step, before anything is allocated. A model of a shorter context than the workload's
/// sequences is taken for one that reaches as far.
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{Mode, Workload, estimate};
/// use tallow::model::TransformerConfig;
/// use tallow::precision::Precision;
///
/// let workload = Workload { batch_size: 4, sequence_length: 256, mode: Mode::TrainStep, ..Default::default() };
/// let plan = estimate(&TransformerConfig::small(), &workload)?;
/// assert_eq!(plan.parameter_bytes, 4 * 128_625_408);
/// assert!(plan.peak_bytes > 4 * plan.parameter_bytes);
///
/// // Flash attention keeps 12 layers of two numbers for each of (4, 12, 256) in place of (4, 12, 256, 256).
/// let flash = Workload { attention: Algorithm::Flash, ..workload.clone() };
/// let saved_bytes = plan.activation_bytes - estimate(&TransformerConfig::small(), &flash)?.activation_bytes;
/// assert_eq!(saved_bytes, 4 * 12 * 4 * 12 * 256 * (256 - 2));
///
/// // Autocast copies every linear weight: all but the embeddings and the norms.
/// let bf16 = estimate(&TransformerConfig::small(), &Workload { precision: Precision::BF16, ..workload })?;
/// assert_eq!(bf16.weight_cast_bytes, 2 * (128_625_408 - 10_000 * 768 - 25 * 768));
/// println!("{bf16}");
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A configuration that is no model's, or not one of the workload's attention; more than 4,096 blocks; no sequences, or
/// empty ones.
pub fn estimate(config: &TransformerConfig, workload: &Workload) -> Result<Estimate> {
    check_pass(config, workload)?;
    let (graph, lifetimes) = workload::lifetimes(config, workload)?;
    let letters = match lifetimes.peak_bytes.is_finite() {
        true => workload::letters(config, workload, &graph),
        false => Letters::default(),
    };
    let parameters = reaching(config, workload.sequence_length).num_parameters() as f64;
    let parameter_bytes = parameters * workload.precision.parameter_dtype().size_in_bytes() as f64;
    let sizes = workload::sizes(config, workload);
    let breakdown = letters.breakdown(&graph, sizes, &lifetimes);
    Ok(Estimate::of(
        &lifetimes,
        parameter_bytes,
        workload.mode,
        breakdown,
    ))
}

/// The breakdown of one pass or step of any traced function, as far as `mode` says: its forward, backward from its
/// first output, and AdamW for the weights that get a gradient.
///
/// It is of what was traced: whether forward keeps a graph, autocast regions, segments that are checkpointed, what is
/// dropped when; on the kernels of the trace's [`Target`](crate::graph::Target). Weights, inputs
/// and constants that the function reads are there from the beginning, each once. Ops that are composed of candle's own
/// count for what they take and return; what several of candle's keep between them is left out, so where a kernel is
/// missing this is too low.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::graph::{self, Target};
/// use tallow::memory::{Mode, estimate_graph};
/// use tallow::{nn::Linear, ops};
///
/// let weights = graph::weights(DType::F32);
/// let up = Linear::new(256, 1024, weights.pp("up"))?;
/// let down = Linear::new(1024, 256, weights.pp("down"))?;
/// let x = graph::input("x", (64, 256), DType::F32)?;
/// let targets = graph::input("targets", 64, DType::U32)?;
/// let model = |x: &Tensor| down.forward(&ops::relu(&up.forward(x)?)?);
///
/// let graph = graph::trace(Target::Cpu, || ops::cross_entropy(&model(&x)?, &targets))?;
/// let step = estimate_graph(&graph, Mode::TrainStep)?;
/// assert_eq!(step.parameter_bytes, 4 * 2 * 256 * 1024);
/// assert_eq!(step.optimizer_bytes, 2 * step.parameter_bytes);
/// assert_eq!(step.activation_bytes, 4 * 64 * (2 * 1024 + 256)); // both of ReLU's sides, and the logits
/// println!("{step}");
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A mode with a backward of a graph whose first output no gradient leaves.
pub fn estimate_graph(graph: &Graph, mode: Mode) -> Result<Estimate> {
    let output = graph.outputs.first();
    let is_tracked = output.is_some_and(|output| output.tracked);
    if mode.has_backward() && !is_tracked {
        return Err(Error::order(
            "memory::estimate_graph",
            "no gradient leaves the function's first output",
            "trace it outside of no_grad with a weight that it reads, or ask for Mode::Forward",
        ));
    }
    let weights = graph.weights().map(|(id, _)| graph.value(id));
    let parameter_bytes =
        weights.map(|weight| elements(&weight.shape) * weight.dtype.size_in_bytes() as f64);
    let parameter_bytes = parameter_bytes.sum();
    let lifetimes = Lifetimes::of(graph, mode, residents(graph, mode));
    let place = place(graph.target);
    let sizes = format!(
        "{} ops, {} weights; {place}",
        graph.nodes().count(),
        graph.weights().count()
    );
    let breakdown = Letters::default().breakdown(graph, sizes, &lifetimes);
    Ok(Estimate::of(&lifetimes, parameter_bytes, mode, breakdown))
}

/// What is there before the function is called: what it reads from outside and, for a step, the optimizer's state.
fn residents(graph: &Graph, mode: Mode) -> Vec<Buffer> {
    let mut residents = Vec::new();
    for (i, value) in graph.values.iter().enumerate() {
        let mut add = |kind, what, width| {
            let (id, elements) = (ValueId(i), elements(&value.shape));
            residents.push(Buffer::new(kind, what, id, elements, width));
        };
        let width = value.dtype.size_in_bytes();
        match value.source {
            Source::Weight(_) => {
                add(MemoryKind::Weights, What::Weight(ValueId(i)), width);
                if mode == Mode::TrainStep {
                    for (what, width) in optimizer_state(width, Moments::Wide) {
                        add(MemoryKind::Optimizer, What::Named(what), width);
                    }
                }
            }
            Source::Input(_) => add(MemoryKind::Inputs, What::Named("inputs"), width),
            Source::Constant => add(MemoryKind::Inputs, What::Named("constants"), width),
            Source::Node => {}
        }
    }
    residents
}

impl Estimate {
    fn of(
        lifetimes: &Lifetimes,
        parameter_bytes: f64,
        mode: Mode,
        breakdown: MemoryBreakdown,
    ) -> Self {
        // Without a graph nothing is left when forward is done.
        let forwards = match mode {
            Mode::Forward => &lifetimes.at_peak,
            _ => &lifetimes.after_forward,
        };
        let of_forward = |kind| {
            let buffers = forwards.iter().filter(|buffer| buffer.kind == kind);
            buffers.map(Buffer::bytes).sum::<f64>() as u64
        };
        let gradient_bytes = match mode.has_backward() {
            true => parameter_bytes,
            false => 0.0,
        };
        Self {
            parameter_bytes: parameter_bytes as u64, // all of these saturate
            gradient_bytes: gradient_bytes as u64,
            optimizer_bytes: breakdown.bytes_of(MemoryKind::Optimizer),
            activation_bytes: of_forward(MemoryKind::Activations),
            weight_cast_bytes: of_forward(MemoryKind::WeightCasts),
            logit_bytes: of_forward(MemoryKind::Logits),
            transient_bytes: breakdown.bytes_of(MemoryKind::Scratch),
            after_forward_bytes: breakdown.before_backward_bytes,
            peak_bytes: lifetimes.peak_bytes as u64,
            breakdown,
        }
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::new();
        let written = self.breakdown.report().write_to(Format::Text, &mut text);
        written.map_err(|_| fmt::Error)?;
        f.write_str(String::from_utf8_lossy(&text).trim_end())
    }
}
