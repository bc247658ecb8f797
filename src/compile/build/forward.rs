//! Forward: embedding, blocks, final norm.

use super::super::buffer::{BufferId, Category, Home};
use super::super::op::{Accumulate, Op};
use super::norm::{Normed, Stream};
use super::{Again, Builder};
use crate::kernels::workspace;
use crate::nn::Checkpointing;

/// What attention leaves for backward.
#[derive(Clone, Copy)]
pub(super) enum Attended {
    /// The probabilities; none in a forward alone on the CPU.
    Naive { p: Option<BufferId> },
    /// The log-sum-exp of the scores, (parts, B, H, T), and what rounding took from the output, in half precision,
    /// (B, H, T, Dh).
    /// q and k are turned.
    Flash {
        lse: BufferId,
        rounded_off: Option<BufferId>,
    },
}

/// What a block leaves for backward.
#[derive(Clone)]
pub(super) struct BlockState {
    pub ln1: Normed,
    /// q, k and v, (N, D) each, or all three as one, (N, 3 D).
    pub qkv: Vec<BufferId>,
    pub attended: Attended,
    /// What the output projection reads: (N, D).
    pub merged: BufferId,
    pub ln2: Normed,
    /// Gate and up, (N, F) each, or both as one, (N, 2 F); none where backward computes them again.
    pub gate_up: Option<Vec<BufferId>>,
}

/// The linear layers of a block, those of one input together.
pub(super) const QKV: &[&str] = &["q_proj", "k_proj", "v_proj"];
pub(super) const OUT: &[&str] = &["output_proj"];
pub(super) const GATE_UP: &[&str] = &["w1", "w3"];
pub(super) const DOWN: &[&str] = &["w2"];

/// The names of a block's weights.
pub(super) fn weights_of(layer: usize, part: &str, names: &[&str]) -> Vec<String> {
    let name = |name| format!("layers.{layer}.{part}.{name}.weight");
    names.iter().map(name).collect()
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
    pub(super) fn forward(&mut self, again: Again) -> States {
        let layers = self.source.model.num_layers;
        let Again {
            checkpointing,
            sums,
            gates,
        } = again;
        let again = checkpointing.recomputed_blocks(layers);
        let length = checkpointing
            .segment_blocks(layers)
            .map_or(1, |blocks| blocks.get());
        let mut stream = self.embedding();
        let mut segments = Vec::new();
        for layer in 0..layers {
            let (mut state, next) = self.block(layer, stream);
            state.ln2.keeps_stream = layer < sums;
            if layer < gates {
                state.gate_up = None;
            }
            match layer < again {
                false => segments.push(Segment::Kept(layer, state)),
                true if layer % length == 0 => {
                    segments.push(Segment::Again(layer..layer + length, state.ln1.x));
                }
                true => {} // in the segment that began before
            }
            stream = next;
        }
        self.plan.path = "ln_final".into();
        let ln_final = self.norm(stream, "ln_final.weight");
        States { segments, ln_final }
    }

    /// As [`forward`](Self::forward), then the logits of all positions, which the run gives out: (N, V).
    pub(super) fn forward_to_logits(&mut self) {
        let states = self.forward(Checkpointing::None.into());
        let shape = [self.source.config.rows(), self.source.model.vocab_size];
        self.plan.path = "lm_head".into();
        let dtype = self.lower_dtype();
        let logits = self
            .plan
            .buffers
            .add("logits", &shape, dtype, Category::Output, Home::Output);
        let head = self.product_weight(&["lm_head.weight".into()]);
        self.matmul(
            (states.ln_final.y, false),
            (head, true),
            logits,
            Accumulate::Never,
        );
    }

    fn embedding(&mut self) -> Stream {
        let [rows, width] = [self.source.config.rows(), self.source.model.d_model];
        self.plan.path = "token_embeddings".into();
        let table = self.weight("token_embeddings.weight");
        let x = self.buffer("x", &[rows, width]);
        self.plan
            .call(Op::Embedding { rows, width }, &[self.tokens, table], &[x]);
        Stream::Whole(x)
    }

    /// One block, up to the branch that the next norm adds.
    pub(super) fn block(&mut self, layer: usize, stream: Stream) -> (BlockState, Stream) {
        let rows = self.source.config.rows();
        let (width, hidden) = (self.source.model.d_model, self.source.model.d_ff);
        let prefix = format!("layers.{layer}");
        let weight = |part: &str| format!("{prefix}.{part}.weight");
        self.plan.path = format!("{prefix}/ln1");
        let ln1 = self.norm(stream, &weight("ln1"));

        let qkv = self.linear(layer, "attn", QKV, ln1.y, width);
        self.plan.path = format!("{prefix}/attn");
        let (attended, merged) = self.attention(&qkv);
        let branch = self.linear(layer, "attn", OUT, merged, width)[0];

        self.plan.path = format!("{prefix}/ln2");
        let ln2 = self.norm(Stream::Sum(ln1.x, branch), &weight("ln2"));
        let gate_up = self.gate_up(layer, ln2.y);
        self.plan.path = format!("{prefix}/ffn");
        let gated = self.lower("gated", &[rows, hidden]);
        let op = match self.packs() {
            true => Op::PackedSwiGlu {
                rows,
                width: hidden,
            },
            false => Op::SwiGlu {
                elements: rows * hidden,
            },
        };
        self.plan.call(op, &gate_up, &[gated]);
        let branch = self.linear(layer, "ffn", DOWN, gated, width)[0];
        let state = BlockState {
            ln1,
            qkv,
            attended,
            merged,
            ln2,
            gate_up: Some(gate_up),
        };
        (state, Stream::Sum(ln2.x, branch))
    }

    /// Gate and up from what a block's second norm gave.
    fn gate_up(&mut self, layer: usize, y: BufferId) -> Vec<BufferId> {
        self.linear(layer, "ffn", GATE_UP, y, self.source.model.d_ff)
    }

    /// The same from what that norm has kept.
    pub(super) fn gate_up_again(&mut self, layer: usize, kept: Stream) -> Vec<BufferId> {
        self.plan.path = format!("layers.{layer}/ln2");
        let y = self.norm_again(kept, &format!("layers.{layer}.ln2.weight"));
        self.gate_up(layer, y)
    }

    /// `y = x W^T` for linear layers of one input: (N, out) each, or beside each other in one.
    fn linear(
        &mut self,
        layer: usize,
        part: &str,
        names: &[&str],
        x: BufferId,
        out: usize,
    ) -> Vec<BufferId> {
        let rows = self.source.config.rows();
        let groups = self.groups(names);
        let outputs = groups.map(|group| {
            self.plan.path = format!("layers.{layer}/{part}/{}", group.join("+"));
            let weight = self.product_weight(&weights_of(layer, part, group));
            let y = self.lower("y", &[rows, group.len() * out]);
            self.matmul((x, false), (weight, true), y, Accumulate::Never);
            y
        });
        outputs.collect()
    }

    /// Attention of projections: what backward needs, and the output (N, D).
    fn attention(&mut self, qkv: &[BufferId]) -> (Attended, BufferId) {
        let sizes = self.attention_sizes();
        let [cos, sin] = self.angles;
        let shape = [self.source.config.rows(), self.source.model.d_model];
        let [b, h, t] = [sizes.batch, sizes.heads, sizes.length];
        if self.is_naive() && !self.is_on_card() {
            let kernel = sizes.rotary();
            let out = self.lower("out", &shape);
            let scratch = self.scratch(&[self.threads(), kernel.forward_scratch_len()]);
            let p = self
                .trains
                .then(|| self.buffer("probabilities", &[kernel.probabilities_len()]));
            let writes: Vec<BufferId> = [out, scratch].into_iter().chain(p).collect();
            let reads: Vec<BufferId> = qkv.iter().copied().chain([cos, sin]).collect();
            self.plan.call(Op::Attention(sizes), &reads, &writes);
            return (Attended::Naive { p }, out);
        }
        for x in turned(qkv) {
            self.plan.call(Op::Rotate(sizes), &[cos, sin], &[*x]);
        }
        if self.is_naive() {
            let out = self.lower("out", &shape);
            let p = self.lower("probabilities", &[b, h, t, t]);
            let scores = (self.is_half()).then(|| self.scratch(&self.scores_at_once(&sizes)));
            let writes: Vec<BufferId> = [out, p].into_iter().chain(scores).collect();
            self.plan.call(Op::NaiveAttention(sizes), qkv, &writes);
            return (Attended::Naive { p: Some(p) }, out);
        }
        let by_head = [b, h, t, sizes.head_dim];
        let heads = match self.is_on_card() {
            true => self.lower("out", &shape),
            false => self.lower("heads", &by_head),
        };
        let parts = workspace::flash_lse_parts(self.source.config.precision.dtype());
        let lse = self.buffer("lse", &[parts, b, h, t]);
        let workspace = self
            .is_on_card()
            .then(|| self.workspace(workspace::flash_forward()));
        // Out's own rounding would be in every gradient.
        let rounded_off =
            (self.trains && self.is_half()).then(|| self.lower("rounded_off", &by_head));
        let writes: Vec<BufferId> = [heads, lse]
            .into_iter()
            .chain(workspace)
            .chain(rounded_off)
            .collect();
        self.plan.call(Op::FlashAttention(sizes), qkv, &writes);
        let attended = Attended::Flash { lse, rounded_off };
        if self.is_on_card() {
            return (attended, heads);
        }
        let out = self.lower("out", &shape);
        self.plan.call(Op::MergeHeads(sizes), &[heads], &[out]);
        (attended, out)
    }
}

/// What positions turn of q, k and v, or of all three as one.
pub(super) fn turned(qkv: &[BufferId]) -> &[BufferId] {
    &qkv[..qkv.len().min(2)]
}
