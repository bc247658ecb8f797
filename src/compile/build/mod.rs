//! From a model's configuration to a plan's calls.
//!
//! What lives here: the mathematics of a step, call by call, in the order of execution: [`forward`], [`loss`],
//! [`backward`], [`update`], with the [norms](norm) of both ways; and what is in half precision under autocast ([`lower`]). What
//! does not: where buffers lie ([`super::arena`]) and what computes a call ([`super::cpu`]).

mod backward;
mod forward;
mod loss;
mod lower;
mod norm;
#[cfg(test)]
mod tests;
mod update;

pub(super) use loss::rows_on_cpu;

use super::buffer::{BufferId, Category, Home};
use super::config::PlanConfig;
use super::op::{Accumulate, Op};
use super::plan::{Operand, Plan, Runs};
use super::sizes::AttentionSizes;
use super::writer::Writer;
use crate::attention::Algorithm;
use crate::kernels::workspace;
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use candle_core::DType;

/// What a plan is built from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub model: &'a TransformerConfig,
    pub config: &'a PlanConfig,
    /// Cosines and sines of all positions, (T, Dh/2) each.
    pub angles: [&'a [f32]; 2],
    /// What will run it.
    pub target: Target,
}

impl Source<'_> {
    /// Whether it is half precision on a card.
    pub fn is_half_on_card(&self) -> bool {
        self.target == Target::Card && self.config.precision.dtype() != DType::F32
    }
}

/// What runs a plan: kernels differ in what they take at once, and in the room they work in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The CPU, with scratch for so many threads.
    Cpu { threads: usize },
    /// A card.
    Card,
}

/// What backward runs again, with the same bits, instead of finding it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Again {
    /// Which whole blocks.
    pub checkpointing: Checkpointing,
    /// In how many of the others, the first ones, the sum that the second norm reads: what it is the sum of stays, of which the
    /// stream does anyway. In [half precision on a card](Source::is_half_on_card), where the branch takes half as much as the
    /// sum.
    pub sums: usize,
    /// In how many of the others, the first ones, gate and up: half of what a block leaves, and half of its products.
    pub gates: usize,
}

impl From<Checkpointing> for Again {
    fn from(checkpointing: Checkpointing) -> Self {
        Self {
            checkpointing,
            sums: 0,
            gates: 0,
        }
    }
}

/// The plan of a training step.
pub(super) fn train_step(source: Source<'_>, again: Again) -> Plan {
    let mut builder = Builder::new(source, true);
    if source.config.accumulation > 1 || builder.is_on_card() {
        builder.copy_weights();
    }
    let first = builder.plan.calls.len();
    let states = builder.forward(again);
    builder.loss_and_backward(states);
    let repeated = first..builder.plan.calls.len();
    builder.update();
    builder.finish(repeated, source.config.accumulation)
}

/// The plan of a forward alone, to logits.
pub(super) fn forward(source: Source<'_>) -> Plan {
    let mut builder = Builder::new(source, false);
    if builder.is_on_card() {
        builder.copy_weights();
    }
    let first = builder.plan.calls.len();
    builder.forward_to_logits();
    let repeated = first..builder.plan.calls.len();
    builder.finish(repeated, 1)
}

/// Calls and buffers so far.
struct Builder<'a> {
    source: Source<'a>,
    /// Whether there will be a backward.
    trains: bool,
    plan: Writer,
    /// Of each parameter; in a forward alone, none.
    gradients: Vec<Option<Operand>>,
    /// Of each parameter in half precision, where one was made.
    copies: Vec<Option<Operand>>,
    /// Parameters whose gradients are complete, to be updated in backward.
    waiting: Vec<usize>,
    tokens: BufferId,
    targets: BufferId,
    /// Cosines and sines.
    angles: [BufferId; 2],
}

impl<'a> Builder<'a> {
    fn new(source: Source<'a>, trains: bool) -> Self {
        let nobody = BufferId(usize::MAX); // until the lines below
        let mut builder = Self {
            source,
            trains,
            plan: Writer::default(),
            gradients: Vec::new(),
            copies: Vec::new(),
            waiting: Vec::new(),
            tokens: nobody,
            targets: nobody,
            angles: [nobody; 2],
        };
        let rows = source.config.rows();
        let tokens =
            builder
                .plan
                .buffers
                .add("tokens", &[rows], DType::U32, Category::Input, Home::Tokens);
        let targets = builder.plan.buffers.add(
            "targets",
            &[rows],
            DType::U32,
            Category::Input,
            Home::Targets,
        );
        let half = source.model.head_dim() / 2;
        let shape = [source.config.sequence_length, half];
        let names = ["rope.cos", "rope.sin"];
        let angles = [0, 1].map(|i| {
            builder.plan.buffers.add(
                names[i],
                &shape,
                DType::F32,
                Category::Input,
                Home::Table(i),
            )
        });
        for (i, (name, shape)) in source.model.parameter_shapes().iter().enumerate() {
            let category = Category::Parameter;
            builder
                .plan
                .buffers
                .add(name, shape.dims(), DType::F32, category, Home::Parameter(i));
        }
        builder.gradients = vec![None; source.model.parameter_shapes().len()];
        builder.copies = vec![None; builder.gradients.len()];
        Self {
            tokens,
            targets,
            angles,
            ..builder
        }
    }

    fn finish(self, repeated: std::ops::Range<usize>, micro_batches: usize) -> Plan {
        let tables = self.source.angles.map(<[f32]>::to_vec).to_vec();
        let (lasting, workspace_bytes) = match self.source.target {
            Target::Cpu { .. } => (0..0, 0),
            Target::Card => (0..repeated.start, self.workspace_bytes()),
        };
        Plan::new(
            self.plan.calls,
            self.plan.buffers.into_vec(),
            tables,
            Runs {
                lasting,
                repeated,
                micro_batches,
            },
            &self.plan.kept,
        )
        .with_workspace(workspace_bytes)
    }

    /// What a card's executor takes beside the arena.
    fn workspace_bytes(&self) -> usize {
        let updated = self.plan.calls.iter().filter_map(|call| match call.op {
            Op::AdamW { elements, .. } => Some(elements),
            _ => None,
        });
        let tables_bytes = workspace::update_tables_bytes(updated);
        let buffers = self.plan.buffers.iter().map(|(_, buffer)| buffer);
        let outputs = buffers.filter(|buffer| buffer.home == Home::Output);
        let output_bytes = outputs.map(|b| b.bytes() as usize).sum::<usize>();
        workspace::PRODUCTS_BYTES + tables_bytes + output_bytes
    }

    /// A new f32 buffer of the arena, named after the place that it is made at. What is in half precision under autocast is
    /// a [`lower`](Self::lower) one.
    fn buffer(&mut self, name: &str, shape: &[usize]) -> BufferId {
        self.plan
            .arena(name, shape, DType::F32, Category::Temporary)
    }

    /// What the threads of one call work in.
    fn scratch(&mut self, shape: &[usize]) -> BufferId {
        self.plan
            .arena("scratch", shape, DType::F32, Category::Scratch)
    }

    /// Naive attention's scores on a card, of as many heads as it has there at once.
    fn scores_at_once(&self, sizes: &AttentionSizes) -> [usize; 3] {
        let (heads, t) = (sizes.batch * sizes.heads, sizes.length);
        [
            workspace::naive_heads_at_once(heads, t * t, self.lower_dtype()),
            t,
            t,
        ]
    }

    /// What a card's kernel works in: so many words.
    fn workspace(&mut self, words: usize) -> BufferId {
        self.plan
            .arena("workspace", &[words], DType::U32, Category::Scratch)
    }

    fn is_on_card(&self) -> bool {
        self.source.target == Target::Card
    }

    /// Whether linear maps of the same input are one: in half precision, where their weights' copies can lie one under the
    /// other.
    fn packs(&self) -> bool {
        self.source.is_half_on_card()
    }

    /// The linear maps of one input, by how many are one product.
    fn groups<'n>(&self, names: &'n [&'n str]) -> std::slice::Chunks<'n, &'n str> {
        names.chunks(if self.packs() { names.len() } else { 1 })
    }

    fn threads(&self) -> usize {
        match self.source.target {
            Target::Cpu { threads } => threads,
            Target::Card => 0, // where no call asks
        }
    }

    /// `c = a b`, with the factors' shapes as they lie.
    fn matmul(
        &mut self,
        (a, a_transposed): (BufferId, bool),
        (b, b_transposed): (BufferId, bool),
        c: BufferId,
        accumulate: Accumulate,
    ) {
        let of = |id: BufferId| -> [usize; 2] {
            let shape = &self.plan.buffers[id].shape;
            [shape[0], shape[1]]
        };
        let [rows, depth] = flipped(of(a), a_transposed);
        let [inner, cols] = flipped(of(b), b_transposed);
        assert_eq!((inner, [rows, cols]), (depth, of(c)), "{}", self.plan.path);
        let op = Op::Matmul {
            rows,
            cols,
            depth,
            a_transposed,
            b_transposed,
            accumulate,
        };
        self.plan.call(op, &[a, b], &[c]);
    }

    /// Number and buffer of the parameter with this name.
    fn parameter(&self, name: &str) -> (usize, BufferId) {
        let found = self
            .plan
            .buffers
            .iter()
            .find_map(|(id, buffer)| match buffer.home {
                Home::Parameter(number) if buffer.name == name => Some((number, id)),
                _ => None,
            });
        match found {
            Some(found) => found,
            None => panic!("the configuration lists no parameter {name}"), // a bug of this folder
        }
    }

    fn weight(&self, name: &str) -> BufferId {
        self.parameter(name).1
    }

    /// B, T, H, Dh.
    fn attention_sizes(&self) -> AttentionSizes {
        let Source { model, config, .. } = self.source;
        AttentionSizes {
            batch: config.batch_size,
            length: config.sequence_length,
            heads: model.num_heads,
            head_dim: model.head_dim(),
            scale: 1.0 / (model.head_dim() as f64).sqrt(),
            packed: self.packs(),
        }
    }

    fn is_naive(&self) -> bool {
        self.source.model.attention == Algorithm::Naive
    }
}

/// The rows and columns of a matrix, or of its transpose.
fn flipped([rows, cols]: [usize; 2], transposed: bool) -> [usize; 2] {
    match transposed {
        false => [rows, cols],
        true => [cols, rows],
    }
}
