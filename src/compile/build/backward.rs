//! Backward: the gradients of the final norm, the blocks from the last to the first, the embedding.
//!
//! The residual stream's gradient is one buffer, which every norm's backward adds to. What a norm gives forward does not stay:
//! its backward, which reads the same, makes it again where its gradient lay, and then the weights' products read it.

use super::super::buffer::BufferId;
use super::super::op::{Accumulate, Op};
use super::super::plan::Phase;
use super::super::sizes::AttentionSizes;
use super::Builder;
use super::forward::{
    Attended, BlockState, DOWN, GATE_UP, OUT, QKV, Segment, States, turned, weights_of,
};
use super::norm::Stream;
use crate::kernels::workspace;

impl Builder<'_> {
    /// Loss, and every gradient.
    pub(super) fn loss_and_backward(&mut self, states: States) {
        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        let dy = self.loss(states.ln_final.y);
        self.update_matrices(); // the head's, whose gradient would lie beside a block's
        self.plan.phase = Phase::Backward;
        self.plan.path = "ln_final".into();
        let dx = self.buffer("dstream", &[rows, width]); // of the residual stream, from here to the embedding
        let any_block = !states.segments.is_empty();
        let mut branch = self.norm_backward("ln_final", states.ln_final, dy, dx, false, any_block);
        for segment in states.segments.into_iter().rev() {
            match segment {
                Segment::Kept(layer, state) => {
                    branch = self.block_backward(layer, &state, dx, branch);
                }
                Segment::Again(layers, x) => {
                    let mut stream = Stream::Whole(x);
                    let mut states = Vec::new();
                    for layer in layers {
                        let (state, next) = self.block(layer, stream);
                        states.push((layer, state));
                        stream = next;
                    }
                    self.drop_last_branch();
                    for (layer, state) in states.iter().rev() {
                        branch = self.block_backward(*layer, state, dx, branch);
                    }
                }
            }
        }
        self.plan.path = "token_embeddings".into();
        let (d_table, accumulate) = self.gradient(&["token_embeddings.weight".into()]);
        let op = Op::EmbeddingBackward {
            rows,
            width,
            accumulate,
        };
        let vocab_size = self.source.model.vocab_size;
        let workspace = self.is_on_card().then(|| {
            let parts = workspace::embedding_backward(rows, vocab_size);
            self.workspace(parts.iter().sum())
        });
        let writes: Vec<BufferId> = [d_table].into_iter().chain(workspace).collect();
        self.plan.call(op, &[dx, self.tokens], &writes);
        self.gradient_done(&["token_embeddings.weight".into()]);
    }

    /// The last block of a segment that was run again: nobody reads its branch, so the product that made it goes, and the
    /// gate before it, which backward computes anyway.
    fn drop_last_branch(&mut self) {
        self.plan.calls.truncate(self.plan.calls.len() - 2);
    }

    /// Adds a block's gradient to `dx`. `branch` is what dx has been so far, as products read it; what is returned is what it
    /// then is, for the next block.
    fn block_backward(
        &mut self,
        layer: usize,
        state: &BlockState,
        dx: BufferId,
        branch: BufferId,
    ) -> BufferId {
        let rows = self.source.config.rows();
        let hidden = self.source.model.d_ff;
        let width = self.source.model.d_model;
        let prefix = format!("layers.{layer}");
        let ffn = |names: &'static [&'static str]| (layer, "ffn", names);
        let attn = |names: &'static [&'static str]| (layer, "attn", names);

        let gate_up = match &state.gate_up {
            Some(kept) => kept.clone(),
            None => self.gate_up_again(layer, state.ln2.kept()),
        };
        // dgated = dx W2; then, in its place, what W2's gradient is made from.
        let gated = self.lower("gated", &[rows, hidden]);
        self.input_gradient(ffn(DOWN), branch, gated, Accumulate::Never);
        self.plan.path = format!("{prefix}/ffn");
        let op = match self.packs() {
            true => Op::PackedSwiGluBackward {
                rows,
                width: hidden,
            },
            false => Op::SwiGluBackward {
                elements: rows * hidden,
            },
        };
        let in_place: Vec<BufferId> = [gated].into_iter().chain(gate_up.clone()).collect();
        self.plan.call(op, &[], &in_place);
        self.weight_gradient(ffn(DOWN), branch, gated);
        let dy = self.input_gradients(ffn(GATE_UP), &gate_up);
        let branch = self.norm_backward(&format!("{prefix}/ln2"), state.ln2, dy, dx, true, true);
        let y = dy;
        self.weight_gradients(ffn(GATE_UP), &gate_up, y);

        self.plan.path = format!("{prefix}/attn");
        let d_merged = self.lower("dmerged", &[rows, width]);
        self.input_gradient(attn(OUT), branch, d_merged, Accumulate::Never);
        self.weight_gradient(attn(OUT), branch, state.merged);
        self.plan.path = format!("{prefix}/attn");
        let gradients = self.attention_backward(state, d_merged);
        let dy = self.input_gradients(attn(QKV), &gradients);
        let is_last = layer == 0;
        let branch =
            self.norm_backward(&format!("{prefix}/ln1"), state.ln1, dy, dx, true, !is_last);
        let y = dy;
        self.weight_gradients(attn(QKV), &gradients, y);
        self.update_matrices();
        branch
    }

    /// The gradient of what several linear layers read, from all of theirs.
    fn input_gradients(
        &mut self,
        (layer, part, names): Layers<'_>,
        gradients: &[BufferId],
    ) -> BufferId {
        self.plan.path = format!("layers.{layer}/{part}");
        let shape = [self.source.config.rows(), self.source.model.d_model];
        let dx = self.lower("dx", &shape);
        for (i, (group, dy)) in self.groups(names).zip(gradients).enumerate() {
            let accumulate = match i {
                0 => Accumulate::Never,
                _ => Accumulate::Always,
            };
            self.input_gradient((layer, part, group), *dy, dx, accumulate);
        }
        dx
    }

    /// The gradients of the weights of linear layers that read the same x.
    fn weight_gradients(
        &mut self,
        (layer, part, names): Layers<'_>,
        gradients: &[BufferId],
        x: BufferId,
    ) {
        for (group, dy) in self.groups(names).zip(gradients) {
            self.weight_gradient((layer, part, group), *dy, x);
        }
    }

    /// `dx = dy W` for linear layers that are one product.
    fn input_gradient(
        &mut self,
        (layer, part, group): Layers<'_>,
        dy: BufferId,
        dx: BufferId,
        accumulate: Accumulate,
    ) {
        self.plan.path = format!("layers.{layer}/{part}/{}", group.join("+"));
        let weight = self.product_weight(&weights_of(layer, part, group));
        self.matmul((dy, false), (weight, false), dx, accumulate);
    }

    /// `dW = dy^T x` for the same.
    fn weight_gradient(&mut self, (layer, part, group): Layers<'_>, dy: BufferId, x: BufferId) {
        self.plan.path = format!("layers.{layer}/{part}/{}", group.join("+"));
        let weights = weights_of(layer, part, group);
        let (dw, accumulate) = self.product_gradient(&weights);
        self.matmul((dy, true), (x, false), dw, accumulate);
        self.gradient_done(&weights);
    }

    /// The gradients of q, k and v, as those lie.
    fn attention_backward(&mut self, state: &BlockState, d_merged: BufferId) -> Vec<BufferId> {
        let sizes = self.attention_sizes();
        let [cos, sin] = self.angles;
        let qkv = &state.qkv;
        let [rows, width] = [self.source.config.rows(), self.source.model.d_model];
        let columns = 3 * width / qkv.len();
        let gradients = ["dq", "dk", "dv"].iter().take(qkv.len());
        let gradients: Vec<BufferId> = gradients
            .map(|name| self.lower(name, &[rows, columns]))
            .collect();
        let [b, h, t] = [sizes.batch, sizes.heads, sizes.length];
        match state.attended {
            Attended::Naive { p: None } => {} // a forward alone, which has no backward
            Attended::Naive { p: Some(p) } if self.is_on_card() => {
                let some = self.scores_at_once(&sizes);
                let d_probabilities = self.scratch(&some);
                let d_scores = self.is_half().then(|| self.lower("dscores", &some));
                let reads = reads(&[d_merged], qkv, &[p]);
                let writes = gradients.iter().copied();
                let writes = writes.chain([d_probabilities]).chain(d_scores);
                let writes: Vec<BufferId> = writes.collect();
                self.plan
                    .call(Op::NaiveAttentionBackward(sizes), &reads, &writes);
                self.turn_back(sizes, &gradients);
            }
            Attended::Naive { p: Some(p) } => {
                let scratch = [self.threads(), sizes.rotary().backward_scratch_len()];
                let scratch = self.scratch(&scratch);
                let reads = reads(&[d_merged], qkv, &[p, cos, sin]);
                let writes = [&gradients[..], &[scratch]].concat();
                self.plan
                    .call(Op::AttentionBackward(sizes), &reads, &writes);
            }
            Attended::Flash { lse, rounded_off } => {
                let mut reads = reads(&[d_merged], qkv, &[state.merged, lse]);
                reads.extend(rounded_off);
                if self.is_on_card() {
                    let workspace = self.workspace(workspace::flash_backward(&sizes.flash()));
                    let writes = [&gradients[..], &[workspace]].concat();
                    self.plan
                        .call(Op::FlashAttentionBackward(sizes), &reads, &writes);
                    self.turn_back(sizes, &gradients);
                    return gradients;
                }
                let shape = [b, h, t, sizes.head_dim];
                let heads = ["dq_heads", "dk_heads", "dv_heads"];
                let heads = heads.map(|name| self.lower(name, &shape));
                self.plan
                    .call(Op::FlashAttentionBackward(sizes), &reads, &heads);
                for (from, to) in heads.iter().zip(&gradients).take(2) {
                    self.plan
                        .call(Op::MergeRotatedBack(sizes), &[*from, cos, sin], &[*to]);
                }
                self.plan
                    .call(Op::MergeHeads(sizes), &[heads[2]], &[gradients[2]]);
            }
        }
        gradients
    }

    fn turn_back(&mut self, sizes: AttentionSizes, gradients: &[BufferId]) {
        let [cos, sin] = self.angles;
        for gradient in turned(gradients) {
            self.plan
                .call(Op::RotateBack(sizes), &[cos, sin], &[*gradient]);
        }
    }
}

/// Linear layers of a block: its number, which part of it, and their names.
type Layers<'n> = (usize, &'static str, &'n [&'n str]);

fn reads(before: &[BufferId], qkv: &[BufferId], after: &[BufferId]) -> Vec<BufferId> {
    [before, qkv, after].concat()
}
