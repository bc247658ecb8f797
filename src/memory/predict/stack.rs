//! A model's pass as a graph to be replayed, whatever its depth: of blocks that are alike, the first, one for all
//! between, and the last are traced; so are segments of blocks.

use super::layer::traced;
use super::replay::{Buffer, Formula, Outcome, Repeat, What, elements, replay};
use super::workload::{optimizer_state, place, reaching};
use super::{MemoryKind, Mode, Workload};
use crate::Result;
use crate::attention::Algorithm;
use crate::graph::{self, Graph, TraceEvent};
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::{Architecture, Checkpointing};
use candle_core::DType;
use std::num::NonZeroUsize;
use std::ops::Range;

/// What is there before a pass of the model: more than its graph reads. A forward has targets beside it, and tables of
/// angles are as long as the model takes sequences.
pub(super) fn residents(config: &TransformerConfig, workload: &Workload) -> Vec<Buffer> {
    let width = workload.precision.parameter_dtype().size_in_bytes();
    let buffer = |kind, what, formula, elements, width, count| Buffer {
        kind,
        what: What::Named(what),
        formula: Formula::Letters(formula),
        elements,
        width,
        count,
    };
    let all = config.parameters_formula();
    let parameters = config.num_parameters() as f64;
    let mut residents = vec![buffer(
        MemoryKind::Weights,
        "weights",
        all,
        parameters,
        width,
        1.0,
    )];
    if workload.mode == Mode::TrainStep {
        let state = optimizer_state(width, workload.moments);
        residents.extend(
            state.map(|(what, width)| {
                buffer(MemoryKind::Optimizer, what, all, parameters, width, 1.0)
            }),
        );
    }
    let ids = elements(&[workload.batch_size, workload.sequence_length]);
    residents.push(buffer(
        MemoryKind::Inputs,
        "tokens, targets",
        "BT",
        ids,
        4,
        2.0,
    ));
    if config.architecture == Architecture::Llama {
        let angles = elements(&[config.context_length, config.head_dim()]);
        residents.push(buffer(
            MemoryKind::Inputs,
            "cos, sin",
            "context_length Dh",
            angles,
            width,
            1.0,
        ));
    }
    residents
}

/// What a model's sizes are called.
pub(super) fn letters(
    config: &TransformerConfig,
    workload: &Workload,
) -> [(&'static str, usize); 8] {
    let (batch, length) = (workload.batch_size, workload.sequence_length);
    [
        ("B", batch),
        ("T", length),
        ("D", config.d_model),
        ("F", config.d_ff),
        ("H", config.num_heads),
        ("V", config.vocab_size),
        ("Dh", config.head_dim()),
        ("BT", batch.saturating_mul(length)),
    ]
}

/// What the letters stand for.
pub(super) fn sizes(config: &TransformerConfig, workload: &Workload) -> String {
    let letters = letters(config, workload);
    let letters = letters
        .iter()
        .filter(|(letter, _)| !matches!(*letter, "BT" | "Dh"));
    let letters: Vec<String> = letters.map(|(l, size)| format!("{l} {size}")).collect();
    format!(
        "{}, L {}, Dh {}; {}",
        letters.join(", "),
        config.num_layers,
        config.head_dim(),
        place(workload.kernels)
    )
}

/// Whether every tensor of the pass has an address for each of its bytes. (Weights do: the configuration is checked for
/// that.)
pub(super) fn is_addressable(config: &TransformerConfig, workload: &Workload) -> bool {
    let rows = [workload.batch_size, workload.sequence_length];
    let widest = config.d_model.max(config.d_ff).max(config.vocab_size);
    let scores = match workload.attention {
        Algorithm::Naive => elements(&[config.num_heads, workload.sequence_length]),
        Algorithm::Flash => 0.0,
    };
    let most = elements(&rows) * scores.max(widest as f64);
    most * (size_of::<f32>() as f64) < isize::MAX as f64
}

/// The most that a pass has alive at once. In f64, which goes on where bytes in 64 bits end.
///
/// # Errors
/// Those of the trace.
pub(super) fn peak_bytes(config: &TransformerConfig, workload: &Workload) -> Result<f64> {
    let config = &reaching(config, workload.sequence_length);
    if !is_addressable(config, workload) {
        return Ok(f64::INFINITY);
    }
    let stack = Stack::new(config, workload)?;
    let outcome = stack.replay(workload.mode, residents(config, workload));
    Ok(outcome.peak_bytes)
}

/// A model's pass.
pub(super) struct Stack {
    pub graph: Graph,
    repeats: Vec<Repeat>,
}

/// How many blocks each of those that are traced stands for.
struct Depth {
    /// Segments that are recomputed, by how many are alike,
    segments: Vec<f64>,
    /// and the blocks of each.
    blocks: Vec<f64>,
    /// The blocks after them.
    rest: Vec<f64>,
}

/// So many that are alike: the first, those between, and the last.
fn representatives(number: usize) -> Vec<f64> {
    let between = number.saturating_sub(2) as f64;
    let last = usize::from(number > 1) as f64;
    let counts = [number.min(1) as f64, between, last];
    counts.into_iter().filter(|count| *count > 0.0).collect()
}

impl Depth {
    fn of(layers: usize, checkpointing: Checkpointing) -> Self {
        let again = checkpointing.recomputed_blocks(layers);
        let blocks = checkpointing
            .segment_blocks(layers)
            .map_or(1, NonZeroUsize::get);
        Self {
            segments: representatives(again / blocks),
            blocks: if again > 0 {
                representatives(blocks)
            } else {
                Vec::new()
            },
            rest: representatives(layers - again),
        }
    }

    /// How many blocks are traced.
    fn layers(&self) -> usize {
        self.segments.len() * self.blocks.len() + self.rest.len()
    }

    /// What treats the traced blocks as `checkpointing` treats all of them: the last segment is no longer than the
    /// others.
    fn checkpointing(&self, checkpointing: Checkpointing) -> Checkpointing {
        let length = match self.segments.len() {
            0 => self.rest.len(),
            _ => self.blocks.len(),
        };
        match (checkpointing, NonZeroUsize::new(length)) {
            (Checkpointing::None, _) | (_, None) => checkpointing,
            (_, Some(length)) => Checkpointing::Every(length),
        }
    }

    /// The stretches of a graph that stand for several.
    fn repeats(&self, graph: &Graph) -> Vec<Repeat> {
        let starts = starts(graph, self.layers());
        let mut repeats = Vec::new();
        let mut add = |stretch: Range<usize>, count: f64, until: usize| {
            if count > 1.0 {
                repeats.push(Repeat {
                    stretch,
                    count,
                    until,
                });
            }
        };
        let length = self.blocks.len();
        let segments_end = starts[self.segments.len() * length].outer;
        for (i, count) in self.segments.iter().enumerate() {
            let first = i * length;
            let end = starts[first + length].outer;
            add(starts[first].outer..end, *count, segments_end);
            let blocks_end = inner_end(graph, starts[first].outer..end);
            for (k, count) in self.blocks.iter().enumerate() {
                let stretch = starts[first + k].inner..starts[first + k + 1].outer.min(blocks_end);
                add(stretch, *count, blocks_end);
            }
        }
        let first = self.segments.len() * length;
        let end = starts[first + self.rest.len()].outer;
        for (i, count) in self.rest.iter().enumerate() {
            let stretch = starts[first + i].outer..starts[first + i + 1].outer;
            add(stretch, *count, end);
        }
        repeats
    }
}

/// Where a block begins.
#[derive(Clone, Copy)]
struct Start {
    /// With the segment that begins with it.
    outer: usize,
    /// With its own first op.
    inner: usize,
}

/// Where each of `layers` blocks begins, and where what follows them does.
fn starts(graph: &Graph, layers: usize) -> Vec<Start> {
    let mut starts: Vec<Start> = Vec::with_capacity(layers + 1);
    let mut entered = None;
    for (i, event) in graph.events.iter().enumerate() {
        match event {
            TraceEvent::Enter => entered = Some(i),
            TraceEvent::Leave => entered = None,
            TraceEvent::Node(node) if starts.len() < layers => {
                let name = format!("layers.{}/", starts.len());
                if node.path.starts_with(&name) {
                    starts.push(Start {
                        outer: entered.take().unwrap_or(i),
                        inner: i,
                    });
                }
            }
            TraceEvent::Node(node) if !node.path.starts_with("layers.") => {
                starts.push(Start { outer: i, inner: i });
                return starts;
            }
            _ => {}
        }
    }
    starts
}

/// Where the blocks of a segment have ended: where it is left, or where the next one begins.
fn inner_end(graph: &Graph, segment: Range<usize>) -> usize {
    let mut events = segment.clone();
    let left = events.find(|i| graph.events[*i] == TraceEvent::Leave);
    left.unwrap_or(segment.end)
}

impl Stack {
    /// Traces what `workload` does to a model of hollow weights, wherever it is asked for.
    pub fn new(config: &TransformerConfig, workload: &Workload) -> Result<Self> {
        let depth = Depth::of(config.num_layers, workload.checkpointing);
        let config = TransformerConfig {
            num_layers: depth.layers(),
            checkpointing: depth.checkpointing(workload.checkpointing),
            attention: workload.attention,
            ..config.clone()
        };
        let shape = (workload.batch_size, workload.sequence_length);
        let precision = workload.precision;
        let forward = || {
            let weights = graph::weights(precision.parameter_dtype());
            let model = TransformerLM::of_any_length(&config, weights)?;
            let tokens = graph::input("tokens", shape, DType::U32)?;
            precision.run(|| match workload.mode {
                Mode::Forward | Mode::ForwardKeepingGraph => model.forward(&tokens),
                Mode::ForwardBackward | Mode::TrainStep => {
                    model.loss(&tokens, &graph::input("targets", shape, DType::U32)?)
                }
            })
        };
        let graph = traced(workload.kernels, workload.mode != Mode::Forward, forward)?;
        Ok(Self {
            repeats: depth.repeats(&graph),
            graph,
        })
    }

    /// Replays it.
    pub fn replay(&self, mode: Mode, residents: impl IntoIterator<Item = Buffer>) -> Outcome {
        replay(&self.graph, mode, residents, &self.repeats)
    }
}
