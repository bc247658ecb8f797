//! The memory of a pass or step, estimated from its sizes alone.

use super::letters::Letters;
use super::lifetimes::{Buffer, BufferName, Lifetimes, elements};
use super::workload::{self, Mode, Workload, check_pass, place, with_context_of};
use super::{MemoryBreakdown, MemoryKind};
use crate::graph::{Graph, Source, ValueId};
use crate::model::TransformerConfig;
use crate::optim::Rule;
use crate::report::Format;
use crate::{Error, Result};
use serde::Serialize;
use std::fmt;

/// Estimated memory of an eager pass or step, in bytes, by use.
///
/// The pass is traced ([`Workload::trace`]), and each value of the graph gets a lifetime: a value lives until the
/// latest of these: its last read, its drop, the backward of the last op that saved it. [`estimate_graph`] does the
/// same for the trace of any function. The peak is `u64::MAX` if the parameters have 2^47 bytes, the address space of a
/// process, or if a tensor has 2^63.
///
/// The following formulas count what forward of [`TransformerLM`](crate::model::TransformerLM) saves for backward, in
/// elements. N = B T. S is what attention saves in addition to its inputs and output:
///
/// | attention | S |
/// |---|---|
/// | naive | the probabilities, B H T^2 in f32 |
/// | flash, f32 | the log-sum-exp and its rounding error, B H T in f32 each |
/// | flash, half precision | the log-sum-exp, B H T in f32, and the rounding error of the output, N D in half precision |
///
/// - f32: `L (16 N D + 3 N F + S + 2 N) + 2 N D + N`, the input and output of every op once each.
/// - Half precision throughout: the same number of elements in half precision, except that S and the N of the norms
///   stay f32. The rotary tables add `L 2 T D / H` in f32.
/// - Autocast: the residual stream, the outputs of the norms and the second operands of sums are f32:
///   `L (6 N D + 2 N) + 2 N D + N`. All else is in half precision, `L (14 N D + 3 N F) + N D`. Two kinds of tensors
///   therefore exist twice: the norms' outputs (cast for the matmuls), and the outputs of attention and feed-forward
///   (widened for the sums). S is as above, and all layers share tables, `T D / H`. In
///   addition there are casts of the linear weights, 2 bytes a weight. They live until the graph is freed or, without a
///   graph, until the region ends. With casts dropped, they live until their op is done, and each layer has its own
///   tables, as above.
///
/// For [GPT-2](crate::nn::Architecture::Gpt2) in f32 the formula is `L (14 N D + 2 N F + S + 4 N) + 3 N D + 2 N`. For
/// [Gemma 2](crate::nn::Architecture::Gemma2) there is no formula, only the trace.
///
/// On a GPU ([`Target`](super::Target)) S of naive attention has the dtype of q, and matmuls need no packing buffers.
///
/// These formulas are of the whole graph. With [checkpointing](crate::nn::Checkpointing), a segment that is recomputed
/// saves only its input, `N D`. Its graph, as above with a copy of its input, is alive in forward until the segment is
/// done, and in backward from recomputation to the end of the segment's backward, one segment at a time. The casts of
/// its weights live as long as its graph.
///
/// Dropout is not counted: [trace](estimate_graph) a step that has it.
///
/// A training step in f16 scales its loss ([`GradScaler`](crate::optim::GradScaler)). After the graph is freed,
/// gradients of f16 parameters are divided by the scale into f32: 4 bytes a parameter, and in addition the head's
/// gradient in f16.
///
/// `Display` writes a table with a formula in each row. Kernels' scratch (packing buffers of matmuls, attention's
/// tiles) is counted for all threads of the current pool. Threads without work allocate none, so this is an upper bound
/// where a small step has too little work for all threads. Not counted are the records of tensors and ops, a few
/// hundred bytes each; memory that kernels keep from call to call; and, before the first step, a second copy of the
/// largest weight while weights are drawn. [`measure()`](crate::memory::measure()) runs the step and counts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// P: the weights.
    pub parameter_bytes: u64,
    /// P with a backward, else 0: when backward is done there is one gradient a weight, in its dtype.
    pub gradient_bytes: u64,
    /// With the optimizer, its [state](crate::optim::Rule::state). That of AdamW is 2 P in f32, and 3 P if it keeps an
    /// f32 copy of half-precision weights.
    pub optimizer_bytes: u64,
    /// Memory of the transformer blocks' graph when forward is done, as above; without a graph, the part that is alive
    /// at the peak.
    pub activation_bytes: u64,
    /// Half-precision copies of weights, at the same point in time.
    pub weight_cast_bytes: u64,
    /// N V at the same point in time: the logits, or 2 N V with a [cap](TransformerConfig::logit_soft_cap). With a loss
    /// also the loss and what it saves, 2 N + 1 in f32.
    pub logit_bytes: u64,
    /// Scratch memory and gradients between ops that are alive at the peak.
    pub transient_bytes: u64,
    /// Memory alive when forward is done and backward begins.
    pub after_forward_bytes: u64,
    /// The peak.
    pub peak_bytes: u64,
    /// Memory alive at the peak, term by term; the sum is the peak.
    pub breakdown: MemoryBreakdown,
}

/// Estimates the memory of one pass or step, before anything is allocated. If the workload's sequences are longer than
/// the model's context, the estimate is of a model with a longer context.
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{Mode, Workload, estimate};
/// use tallow::model::TransformerConfig;
/// use tallow::precision::Precision;
///
/// let workload = Workload {
///     batch_size: 4,
///     sequence_length: 256,
///     mode: Mode::TrainStep,
///     ..Default::default()
/// };
/// let plan = estimate(&TransformerConfig::preset("small")?, &workload)?;
/// assert_eq!(plan.parameter_bytes, 4 * 128_625_408);
/// assert!(plan.peak_bytes > 4 * plan.parameter_bytes);
///
/// // Flash attention keeps 12 layers of two numbers for each of (4, 12, 256) in place of
/// // (4, 12, 256, 256).
/// let flash = Workload { attention: Algorithm::Flash, ..workload.clone() };
/// let saved_bytes = plan.activation_bytes
///     - estimate(&TransformerConfig::preset("small")?, &flash)?.activation_bytes;
/// assert_eq!(saved_bytes, 4 * 12 * 4 * 12 * 256 * (256 - 2));
///
/// // Autocast copies every linear weight: all but the embeddings and the norms.
/// let bf16 = estimate(
///     &TransformerConfig::preset("small")?,
///     &Workload { precision: Precision::BF16, ..workload },
/// )?;
/// assert_eq!(bf16.weight_cast_bytes, 2 * (128_625_408 - 10_000 * 768 - 25 * 768));
/// println!("{bf16}");
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// An invalid model configuration; heads too wide for the workload's attention; more than 4,096 transformer blocks; a
/// batch size or sequence length of 0.
pub fn estimate(config: &TransformerConfig, workload: &Workload) -> Result<Estimate> {
    check_pass(config, workload)?;
    let (graph, lifetimes) = workload::lifetimes(config, workload)?;
    let letters = match lifetimes.peak_bytes.is_finite() {
        true => workload::letters(config, workload, &graph),
        false => Letters::default(),
    };
    let parameters = with_context_of(config, workload.sequence_length).num_parameters() as f64;
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

/// Estimates the memory of one pass or step of any traced function, as far as `mode` goes: forward, backward from the
/// first output, and AdamW for the weights that get a gradient.
///
/// The estimate follows the trace: whether forward keeps a graph, autocast regions, checkpointed segments, when values
/// are dropped, and the kernels of the trace's [`Target`](crate::graph::Target). Weights, inputs and constants that the
/// function reads are alive from the beginning, and count once each. Ops composed of candle's own ops count only their
/// inputs and outputs, not candle's intermediate tensors, so the estimate is too low where a kernel is missing.
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
/// // Both of ReLU's sides, and the logits.
/// assert_eq!(step.activation_bytes, 4 * 64 * (2 * 1024 + 256));
/// println!("{step}");
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Order`] for a mode with backward if the first output is not tracked.
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
    let lifetimes = Lifetimes::of(graph, mode, residents(graph, mode), None);
    let place = place(graph.target);
    let sizes = format!(
        "{} ops, {} weights; {place}",
        graph.nodes().count(),
        graph.weights().count()
    );
    let breakdown = Letters::default().breakdown(graph, sizes, &lifetimes);
    Ok(Estimate::of(&lifetimes, parameter_bytes, mode, breakdown))
}

/// Returns the buffers that exist before the function is called: what it reads from outside and, for a step, the
/// optimizer's state.
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
                add(MemoryKind::Weights, BufferName::Weight(ValueId(i)), width);
                if mode == Mode::TrainStep {
                    for (what, dtype) in Rule::default().state(value.dtype) {
                        add(
                            MemoryKind::Optimizer,
                            BufferName::Named(what),
                            dtype.size_in_bytes(),
                        );
                    }
                }
            }
            Source::Input(_) => add(MemoryKind::Inputs, BufferName::Named("inputs"), width),
            Source::Constant => add(MemoryKind::Inputs, BufferName::Named("constants"), width),
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
        // Without a graph nothing is alive when forward is done.
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
