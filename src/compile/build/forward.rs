//! Forward: embedding, blocks, final norm.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::{Accumulate, Op};
use super::Builder;
use crate::nn::Checkpointing;

/// The residual stream as a norm finds it. N is B T.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    /// (N, D).
    Whole(BufferId),
    /// The stream and a branch that is still to be added to it, (N, D) each.
    Sum(BufferId, BufferId),
}

/// A norm, as its backward reads it.
#[derive(Clone, Copy)]
pub(super) struct Normed {
    /// What it read: (N, D).
    pub x: BufferId,
    /// What it gave: (N, D).
    pub y: BufferId,
    /// (N).
    pub rstd: BufferId,
}

/// What attention leaves for backward.
#[derive(Clone, Copy)]
pub(super) enum Attended {
    /// The probabilities; none in a forward alone.
    Naive { p: Option<BufferId> },
    /// The log-sum-exp of the scores, (B, H, T), and what rounding took from the output, in half precision, (B, H, T, Dh).
    /// q and k are turned.
    Flash {
        lse: BufferId,
        rounded_off: Option<BufferId>,
    },
}

/// What a block leaves for backward.
#[derive(Clone, Copy)]
pub(super) struct BlockState {
    pub ln1: Normed,
    /// q, k and v, (N, D) each.
    pub qkv: [BufferId; 3],
    pub attended: Attended,
    /// What the output projection reads: (N, D).
    pub merged: BufferId,
    pub ln2: Normed,
    /// (N, F).
    pub gate: BufferId,
    /// (N, F).
    pub up: BufferId,
}

/// Some blocks, as backward finds them.
pub(super) enum Segment {
    /// Everything is there.
    Kept(usize, BlockState),
    /// Blocks to be run again, from the stream that the first of them reads, (N, D).
    Again(std::ops::Range<usize>, BufferId),
}

/// What forward leaves for backward.
pub(super) struct States {
    /// In the order of forward.
    pub segments: Vec<Segment>,
    pub ln_final: Normed,
}

impl Builder<'_> {
    /// Embedding to final norm.
    pub(super) fn forward(&mut self, checkpointing: Checkpointing) -> States {
        let layers = self.source.model.num_layers;
        let again = checkpointing.recomputed_blocks(layers);
        let length = checkpointing
            .segment_blocks(layers)
            .map_or(1, |blocks| blocks.get());
        let mut stream = self.embedding();
        let mut segments = Vec::new();
        for layer in 0..layers {
            let (state, next) = self.block(layer, stream);
            match layer < again {
                false => segments.push(Segment::Kept(layer, state)),
                true if layer % length == 0 => {
                    segments.push(Segment::Again(layer..layer + length, state.ln1.x));
                }
                true => {} // in the segment that began before
            }
            stream = next;
        }
        self.path = "ln_final".into();
        let ln_final = self.norm(stream, "ln_final.weight");
        States { segments, ln_final }
    }

    /// As [`forward`](Self::forward), then the logits of all positions, which the run gives out: (N, V).
    pub(super) fn forward_to_logits(&mut self) {
        let states = self.forward(Checkpointing::None);
        let shape = [self.source.config.rows(), self.source.model.vocab_size];
        self.path = "lm_head".into();
        let dtype = self.lower_dtype();
        let logits = self.add("logits", &shape, dtype, Category::Output, Home::Output);
        let head = self.product_weight("lm_head.weight");
        self.matmul(
            (states.ln_final.y, false),
            (head, true),
            logits,
            Accumulate::Never,
        );
    }

    fn embedding(&mut self) -> Stream {
        let [rows, width] = [self.source.config.rows(), self.source.model.d_model];
        self.path = "token_embeddings".into();
        let table = self.weight("token_embeddings.weight");
        let x = self.buffer("x", &[rows, width]);
        self.call(Op::Embedding { rows, width }, &[self.tokens, table], &[x]);
        Stream::Whole(x)
    }

    /// One block, up to the branch that the next norm adds.
    pub(super) fn block(&mut self, layer: usize, stream: Stream) -> (BlockState, Stream) {
        let rows = self.source.config.rows();
        let (width, hidden) = (self.source.model.d_model, self.source.model.d_ff);
        let prefix = format!("layers.{layer}");
        let weight = |part: &str| format!("{prefix}.{part}.weight");
        self.path = format!("{prefix}/ln1");
        let ln1 = self.norm(stream, &weight("ln1"));

        let qkv = ["q", "k", "v"].map(|name| {
            self.path = format!("{prefix}/attn/{name}_proj");
            let projected = self.lower(name, &[rows, width]);
            let weight = self.product_weight(&weight(&format!("attn.{name}_proj")));
            self.matmul((ln1.y, false), (weight, true), projected, Accumulate::Never);
            projected
        });
        self.path = format!("{prefix}/attn");
        let (attended, merged) = self.attention(qkv);
        let branch = self.linear(&format!("{prefix}/attn/output_proj"), merged, width);

        self.path = format!("{prefix}/ln2");
        let ln2 = self.norm(Stream::Sum(ln1.x, branch), &weight("ln2"));
        let gate = self.linear(&format!("{prefix}/ffn/w1"), ln2.y, hidden);
        let up = self.linear(&format!("{prefix}/ffn/w3"), ln2.y, hidden);
        self.path = format!("{prefix}/ffn");
        let gated = self.lower("gated", &[rows, hidden]);
        let elements = rows * hidden;
        self.call(Op::SwiGlu { elements }, &[gate, up], &[gated]);
        let branch = self.linear(&format!("{prefix}/ffn/w2"), gated, width);
        let state = BlockState {
            ln1,
            qkv,
            attended,
            merged,
            ln2,
            gate,
            up,
        };
        (state, Stream::Sum(ln2.x, branch))
    }

    /// `y = x W^T` with the weight of the layer at `path`: (N, out).
    fn linear(&mut self, path: &str, x: BufferId, out: usize) -> BufferId {
        self.path = path.into();
        let weight = self.product_weight(&format!("{}.weight", path.replace('/', ".")));
        let y = self.lower("y", &[self.source.config.rows(), out]);
        self.matmul((x, false), (weight, true), y, Accumulate::Never);
        y
    }

    fn norm(&mut self, stream: Stream, weight: &str) -> Normed {
        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        let eps = self.source.model.rms_norm_eps;
        let weight = self.weight(weight);
        let y = self.lower("y", &[rows, width]);
        let rstd = self.buffer("rstd", &[rows]);
        match stream {
            Stream::Whole(x) => {
                let op = Op::RmsNorm { rows, width, eps };
                self.call(op, &[x, weight], &[y, rstd]);
                Normed { x, y, rstd }
            }
            Stream::Sum(x, branch) => {
                let op = Op::AddRmsNorm { rows, width, eps };
                let sum = self.buffer("x", &[rows, width]);
                self.call(op, &[x, branch, weight], &[sum, y, rstd]);
                Normed { x: sum, y, rstd }
            }
        }
    }

    /// Attention of projections (N, D): what backward needs, and the output (N, D).
    fn attention(&mut self, [q, k, v]: [BufferId; 3]) -> (Attended, BufferId) {
        let sizes = self.attention_sizes();
        let [cos, sin] = self.angles;
        let shape = [self.source.config.rows(), self.source.model.d_model];
        if self.is_naive() {
            let kernel = sizes.rotary();
            let out = self.lower("out", &shape);
            let threads = self.source.threads;
            let scratch = self.scratch(&[threads, kernel.forward_scratch_len()]);
            let p = self
                .trains
                .then(|| self.buffer("probabilities", &[kernel.probabilities_len()]));
            let writes: Vec<BufferId> = [out, scratch].into_iter().chain(p).collect();
            self.call(Op::Attention(sizes), &[q, k, v, cos, sin], &writes);
            return (Attended::Naive { p }, out);
        }
        let [b, h, t] = [sizes.batch, sizes.heads, sizes.length];
        for x in [q, k] {
            self.call(Op::Rotate(sizes), &[cos, sin], &[x]);
        }
        let by_head = [b, h, t, sizes.head_dim];
        let heads = self.lower("heads", &by_head);
        let lse = self.buffer("lse", &[b, h, t]);
        // Out's own rounding would be in every gradient.
        let rounded_off =
            (self.trains && self.is_half()).then(|| self.lower("rounded_off", &by_head));
        let writes: Vec<BufferId> = [heads, lse].into_iter().chain(rounded_off).collect();
        self.call(Op::FlashAttention(sizes), &[q, k, v], &writes);
        let out = self.lower("out", &shape);
        self.call(Op::MergeHeads(sizes), &[heads], &[out]);
        (Attended::Flash { lse, rounded_off }, out)
    }
}
