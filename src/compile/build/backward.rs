//! Backward: the gradients of the final norm, the blocks from the last to the first, the embedding.
//!
//! The residual stream's gradient is one buffer, which every norm's backward adds to.

use super::super::buffer::BufferId;
use super::super::op::{Accumulate, Op};
use super::super::plan::Phase;
use super::Builder;
use super::forward::{Attended, BlockState, Normed, Segment, States, Stream};

impl Builder<'_> {
    /// Loss, and every gradient.
    pub(super) fn loss_and_backward(&mut self, states: States) {
        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        let dy = self.loss(states.ln_final.y);
        self.phase = Phase::Backward;
        self.path = "ln_final".into();
        let dx = self.buffer("dstream", &[rows, width]); // of the residual stream, from here to the embedding
        self.norm_backward("ln_final", states.ln_final, dy, dx, false);
        for segment in states.segments.into_iter().rev() {
            match segment {
                Segment::Kept(layer, state) => self.block_backward(layer, &state, dx),
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
                        self.block_backward(*layer, state, dx);
                    }
                }
            }
        }
        self.path = "token_embeddings".into();
        let (d_table, accumulate) = self.gradient("token_embeddings.weight");
        let op = Op::EmbeddingBackward {
            rows,
            width,
            accumulate,
        };
        self.call(op, &[dx, self.tokens], &[d_table]);
        self.gradient_done("token_embeddings.weight");
    }

    /// The last block of a segment that was run again: nobody reads its branch, so the product that made it goes, and the
    /// gate before it, which backward computes anyway.
    fn drop_last_branch(&mut self) {
        self.calls.truncate(self.calls.len() - 2);
    }

    fn block_backward(&mut self, layer: usize, state: &BlockState, dx: BufferId) {
        let rows = self.source.config.rows();
        let hidden = self.source.model.d_ff;
        let width = self.source.model.d_model;
        let prefix = format!("layers.{layer}");

        // dgated = dx W2; then, in its place, what W2's gradient is made from.
        self.path = format!("{prefix}/ffn/w2");
        let d_branch = self.lowered(dx);
        let gated = self.lower("gated", &[rows, hidden]);
        self.input_gradient("w2", &prefix, "ffn", d_branch, gated, Accumulate::Never);
        let BlockState { gate, up, .. } = *state;
        self.path = format!("{prefix}/ffn");
        let elements = rows * hidden;
        self.call(Op::SwiGluBackward { elements }, &[], &[gated, gate, up]);
        self.weight_gradient("w2", &prefix, "ffn", d_branch, gated);
        let dy = self.lower("dx", &[rows, width]);
        self.input_gradient("w1", &prefix, "ffn", gate, dy, Accumulate::Never);
        self.weight_gradient("w1", &prefix, "ffn", gate, state.ln2.y);
        self.input_gradient("w3", &prefix, "ffn", up, dy, Accumulate::Always);
        self.weight_gradient("w3", &prefix, "ffn", up, state.ln2.y);
        self.norm_backward(&format!("{prefix}/ln2"), state.ln2, dy, dx, true);

        self.path = format!("{prefix}/attn");
        let d_branch = self.lowered(dx);
        let d_merged = self.lower("dmerged", &[rows, width]);
        self.input_gradient(
            "output_proj",
            &prefix,
            "attn",
            d_branch,
            d_merged,
            Accumulate::Never,
        );
        self.weight_gradient("output_proj", &prefix, "attn", d_branch, state.merged);
        self.path = format!("{prefix}/attn");
        let gradients = self.attention_backward(state, d_merged);
        self.path = format!("{prefix}/attn");
        let dy = self.lower("dx", &[rows, width]);
        let names = ["q_proj", "k_proj", "v_proj"];
        for (i, (name, gradient)) in names.into_iter().zip(gradients).enumerate() {
            let accumulate = match i {
                0 => Accumulate::Never,
                _ => Accumulate::Always,
            };
            self.input_gradient(name, &prefix, "attn", gradient, dy, accumulate);
            self.weight_gradient(name, &prefix, "attn", gradient, state.ln1.y);
        }
        self.norm_backward(&format!("{prefix}/ln1"), state.ln1, dy, dx, true);
    }

    /// `dx = dy W` for the linear layer `part.name` of a block.
    fn input_gradient(
        &mut self,
        name: &str,
        prefix: &str,
        part: &str,
        dy: BufferId,
        dx: BufferId,
        accumulate: Accumulate,
    ) {
        self.path = format!("{prefix}/{part}/{name}");
        let weight = self.product_weight(&format!("{prefix}.{part}.{name}.weight"));
        self.matmul((dy, false), (weight, false), dx, accumulate);
    }

    /// `dW = dy^T x`, in f32 whatever the factors are in.
    fn weight_gradient(&mut self, name: &str, prefix: &str, part: &str, dy: BufferId, x: BufferId) {
        self.path = format!("{prefix}/{part}/{name}");
        let weight = format!("{prefix}.{part}.{name}.weight");
        let (dw, accumulate) = self.gradient(&weight);
        self.matmul((dy, true), (x, false), dw, accumulate);
        self.gradient_done(&weight);
    }

    fn norm_backward(
        &mut self,
        path: &str,
        normed: Normed,
        dy: BufferId,
        dx: BufferId,
        add_dx: bool,
    ) {
        use crate::kernels::cpu::residual_norm::partials_len;

        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        self.path = path.into();
        let name = format!("{}.weight", path.replace('/', "."));
        let weight = self.weight(&name);
        let (dw, accumulate) = self.gradient(&name);
        let partials = self.scratch(&[partials_len(rows, width)]);
        let op = Op::RmsNormBackward {
            rows,
            width,
            add_dx,
            accumulate,
        };
        let Normed { x, rstd, .. } = normed;
        self.call(op, &[dy, x, weight, rstd], &[dx, dw, partials]);
        self.gradient_done(&name);
    }

    /// The gradients of q, k and v, (N, D) each.
    fn attention_backward(&mut self, state: &BlockState, d_merged: BufferId) -> [BufferId; 3] {
        let sizes = self.attention_sizes();
        let [cos, sin] = self.angles;
        let [q, k, v] = state.qkv;
        let shape = [self.source.config.rows(), self.source.model.d_model];
        let gradients = ["dq", "dk", "dv"].map(|name| self.lower(name, &shape));
        match state.attended {
            Attended::Naive { p: None } => {} // a forward alone, which has no backward
            Attended::Naive { p: Some(p) } => {
                let threads = self.source.threads;
                let scratch = self.scratch(&[threads, sizes.rotary().backward_scratch_len()]);
                let [dq, dk, dv] = gradients;
                self.call(
                    Op::AttentionBackward(sizes),
                    &[d_merged, q, k, v, p, cos, sin],
                    &[dq, dk, dv, scratch],
                );
            }
            Attended::Flash { lse, rounded_off } => {
                let shape = [sizes.batch, sizes.heads, sizes.length, sizes.head_dim];
                let heads = ["dq_heads", "dk_heads", "dv_heads"];
                let heads = heads.map(|name| self.lower(name, &shape));
                let reads = [d_merged, q, k, v, state.merged, lse];
                let reads: Vec<BufferId> = reads.into_iter().chain(rounded_off).collect();
                self.call(Op::FlashAttentionBackward(sizes), &reads, &heads);
                let [dq, dk, dv] = gradients;
                for (from, to) in [(heads[0], dq), (heads[1], dk)] {
                    self.call(Op::MergeRotatedBack(sizes), &[from, cos, sin], &[to]);
                }
                self.call(Op::MergeHeads(sizes), &[heads[2]], &[dv]);
            }
        }
        gradients
    }
}
