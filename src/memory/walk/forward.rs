//! Forward, layer by layer as `model` and `nn` write it: with a graph everything stays; without one, a buffer goes when
//! the last variable that has it does.

use super::products::Linear;
use super::{Size, Value, Walk};
use crate::attention::Algorithm;
use crate::kernels::cpu::parallel::BLOCK_ROWS;
use crate::kernels::workspace;
use crate::memory::attention::{
    flash_backward_on_card, flash_scratch, naive_backward_width, naive_scores_on_card,
    naive_scratch,
};
use crate::memory::{Holds, Mode};
use crate::nn::Checkpointing;

/// The weights, as tables name them.
const PROJECTIONS: &str = "q_proj, k_proj, v_proj, output_proj";
const FEED_FORWARD: &str = "w1, w2, w3";

/// So many that are alike: the first, those between, which are walked as one, and the last.
pub(super) fn alike(number: usize) -> impl Iterator<Item = f64> {
    let between = number.saturating_sub(2) as f64;
    let last = usize::from(number > 1) as f64;
    let counts = [number.min(1) as f64, between, last];
    counts.into_iter().filter(|count| *count > 0.0)
}

impl Walk {
    pub(super) fn forward(&mut self, layers: usize) {
        let x = self.embedding();
        let x = match self.workload.checkpointing {
            Checkpointing::None => self.blocks(x, layers),
            strategy if !self.keeps_graph() => self.blocks_in_segments(x, strategy, layers),
            strategy => self.segments(x, strategy, layers),
        };
        let normed = self.rms_norm("ln_final", x);
        self.drop(x);
        match self.workload.mode {
            Mode::Forward | Mode::ForwardKeepingGraph => self.head(normed),
            Mode::ForwardBackward | Mode::TrainStep => self.loss(normed),
        }
        self.drop(normed);
        self.end_region();
    }

    /// Blocks in one graph.
    pub(super) fn blocks(&mut self, mut x: Value, layers: usize) -> Value {
        for count in alike(layers) {
            self.count = count;
            x = self.block(x);
        }
        self.count = 1.0;
        x
    }

    /// Blocks without a graph, by segments: each one's input is there until its last block is done.
    fn blocks_in_segments(&mut self, x: Value, strategy: Checkpointing, layers: usize) -> Value {
        let has_several = strategy.recomputed_blocks(layers) > 0
            && strategy.segment_blocks(layers).is_some_and(|n| n.get() > 1);
        if !has_several {
            return self.blocks(x, layers); // a block has its own input anyway
        }
        let (size, width) = (x.size, x.width);
        let x = self.block(x);
        let input = self.take(Holds::Activations, "inputs of segments", size, width);
        let x = self.blocks(x, layers - 1);
        self.ledger.give_back(input);
        x
    }

    pub(super) fn block(&mut self, x: Value) -> Value {
        let normed = self.rms_norm("ln1", x);
        let attended = self.attention(normed);
        let middle = self.add(x, attended);
        self.drop(normed);
        self.drop(attended);
        let normed = self.rms_norm("ln2", middle);
        let fed = self.feed_forward(normed);
        let out = self.add(middle, fed);
        for gone in [normed, fed, middle, x] {
            self.drop(gone);
        }
        out
    }

    fn attention(&mut self, x: Value) -> Value {
        let lowered = self.lowered(x);
        let q = self.heads(lowered, true);
        let k = self.heads(lowered, true);
        let v = self.heads(lowered, false);
        let out = self.attend(q, k, v);
        let merged = self.op("heads merged", out.size, &[out]);
        let projected = self.linear("output_proj's output", merged, PROJECTIONS);
        for gone in [merged, q, k, v, out] {
            self.drop(gone);
        }
        self.drop_copy(lowered, x);
        projected
    }

    /// x projected, cut into heads, and rotated if it has positions.
    fn heads(&mut self, x: Value, rotated: bool) -> Value {
        let projected = self.linear("q, k, v projected", x, PROJECTIONS);
        let heads = self.op("q, k, v in heads", projected.size, &[projected]);
        self.drop(projected);
        if !rotated {
            return heads;
        }
        // Half precision turns by tables in f32, which the op keeps; a region rounds them to half before that.
        if x.width < 4 {
            let angles = self.sizes.angles;
            self.keep(Holds::Activations, "cos, sin in f32", angles, 4);
            if self.parameter_width() != x.width {
                self.scratch_now("cos, sin rounded", angles, x.width);
            }
        }
        let out = self.op("q, k rotated", x.size, &[heads]);
        self.drop(heads);
        out
    }

    fn attend(&mut self, q: Value, k: Value, v: Value) -> Value {
        let (in_half, attention) = (q.width < 4, self.sizes.attention);
        match attention.algorithm {
            Algorithm::Naive if self.on_card() => {
                let (scores, width) = (self.sizes.scores, q.width);
                self.keep(Holds::Activations, "probabilities", scores, width);
                let some = Size::new("..T^2", naive_scores_on_card(&attention));
                if in_half {
                    self.scratch_now("scores of some heads", some, 4);
                }
                let backward = naive_backward_width(attention.dtype);
                self.scratch_later("scores' gradients of some heads", some, backward);
            }
            Algorithm::Naive => {
                let [forward, backward] = naive_scratch(&attention);
                self.keep(Holds::Activations, "probabilities", self.sizes.scores, 4);
                let heads = Size::new("TD/H + blocks, a thread", forward);
                self.scratch_now("heads in f32, packed", heads, 4);
                let scores = Size::new("T^2 + blocks, a thread", backward);
                self.scratch_later("scores' gradient, packed", scores, 4);
            }
            Algorithm::Flash => {
                let (lse, [forward, backward]) = (self.sizes.head_rows, flash_scratch(&attention));
                let width = 4 * workspace::flash_lse_parts(attention.dtype);
                self.keep(Holds::Activations, "log-sum-exp of scores", lse, width);
                if in_half {
                    let what = "what rounding took from out";
                    self.keep(Holds::Activations, what, q.size, q.width);
                }
                if self.on_card() {
                    let sums = Size::new("BH(T + ..)(Dh + ..)", flash_backward_on_card(&attention));
                    self.scratch_later("delta, dq's sums", sums, 4);
                } else {
                    self.scratch_now("tiles", Size::new("tiles, a thread", forward), 4);
                    let size = Size::new("BHT + tiles, a thread", backward);
                    self.scratch_later("delta, dq's sums, tiles", size, 4);
                }
            }
        }
        self.op("attention's output", q.size, &[q, k, v])
    }

    fn feed_forward(&mut self, x: Value) -> Value {
        let lowered = self.lowered(x);
        let (hidden, width) = (self.sizes.hidden, lowered.width);
        let w1 = self.weight(FEED_FORWARD, self.sizes.feed_forward);
        let w3 = self.weight(FEED_FORWARD, self.sizes.feed_forward);
        let product = Linear {
            from: self.sizes.counts.d_model,
            to: self.sizes.counts.d_ff,
            width,
        };
        for weight in [w1, w3] {
            self.keep(Holds::Activations, "gate, up", hidden, width);
            self.packs_now(product);
            self.drop_weight(weight);
        }
        let gradients = Size::new("2BTF", 2.0 * hidden.elements);
        self.scratch_later("gradients of gate and up", gradients, width);
        let [dx, dw] = self.packs_in_backward(product);
        self.packs_later(vec![dx, dw, dw]);
        let gated = self.op("silu(gate) up", hidden, &[lowered, w1, w3]);
        self.drop_copy(lowered, x);
        let out = self.linear("w2's output", gated, FEED_FORWARD);
        self.drop(gated);
        out
    }

    fn embedding(&mut self) -> Value {
        let table = self.parameter("token_embeddings", self.sizes.vocabulary);
        self.keep(Holds::Inputs, "ids that ops keep", self.sizes.rows, 4);
        if self.on_card() {
            let counts = self.sizes.counts;
            let words: usize = workspace::embedding_backward(counts.rows, counts.vocab_size)
                .iter()
                .sum();
            self.scratch_later("positions by id", Size::new("32V + ..", words as f64), 4);
        }
        self.op("embedding", self.sizes.stream, &[table])
    }

    fn rms_norm(&mut self, what: &'static str, x: Value) -> Value {
        let weight = self.parameter("norms", self.sizes.norm_weight);
        self.keep(Holds::Activations, "rstd of norms", self.sizes.rows, 4);
        let partial = if self.on_card() {
            let counts = self.sizes.counts;
            let partials = workspace::rms_norm_partials(counts.rows, counts.d_model);
            Size::new("min(BT, 1024) D", partials as f64)
        } else {
            let blocks = (self.sizes.rows.elements / BLOCK_ROWS as f64).ceil();
            Size::new("BTD / 32", blocks * weight.size.elements)
        };
        self.scratch_later("partial sums of a norm", partial, 4);
        self.op(what, x.size, &[x, weight])
    }

    /// A residual sum: the second summand is cast to the first one's dtype.
    fn add(&mut self, x: Value, y: Value) -> Value {
        let copy = self.cast("summands in f32", y, x.width);
        let sum = self.sum("residual sums", &[x, copy]);
        self.drop_copy(copy, y);
        sum
    }

    /// A linear map to the width of the residual stream, from it or from the feed-forward network's.
    pub(super) fn linear(&mut self, what: &'static str, x: Value, weights: &'static str) -> Value {
        let lowered = self.lowered(x);
        let (size, from) = match weights == FEED_FORWARD {
            true => (self.sizes.feed_forward, self.sizes.counts.d_ff),
            false => (self.sizes.projection, self.sizes.counts.d_model),
        };
        let weight = self.weight(weights, size);
        let product = Linear {
            from,
            to: self.sizes.counts.d_model,
            width: lowered.width,
        };
        self.packs(product);
        let y = self.op(what, self.sizes.stream, &[lowered, weight]);
        self.drop_weight(weight);
        self.drop_copy(lowered, x);
        y
    }

    fn head_product(&self, x: Value) -> Linear {
        Linear {
            from: self.sizes.counts.d_model,
            to: self.sizes.counts.vocab_size,
            width: x.width,
        }
    }

    /// The logits, for whoever called.
    fn head(&mut self, x: Value) {
        let lowered = self.lowered(x);
        let weight = self.weight("lm_head", self.sizes.vocabulary);
        self.take(Holds::Logits, "logits", self.sizes.logits, lowered.width);
        self.packs_now(self.head_product(lowered));
        self.drop_weight(weight);
        self.drop_copy(lowered, x);
    }

    /// Head and loss, which are one op.
    fn loss(&mut self, x: Value) {
        let lowered = self.lowered(x);
        let weight = self.weight("lm_head", self.sizes.vocabulary);
        let (rows, logits) = (self.sizes.rows, self.sizes.logits);
        self.keep(Holds::Inputs, "ids that ops keep", rows, 4);
        self.keep(Holds::Logits, "logits", logits, lowered.width);
        self.packs_now(self.head_product(lowered));
        if self.on_card() {
            self.lets_go(); // of the logits, which become their gradient
            self.scratch_now(
                "losses, tops and totals",
                Size::new("3BT", 3.0 * rows.elements),
                4,
            );
            self.scratch_later("losses, ids", Size::new("2BT", 2.0 * rows.elements), 4);
        } else {
            let statistics = Size::new("2BT", 2.0 * rows.elements);
            self.keep(Holds::Logits, "tops and totals of logits", statistics, 4);
            self.scratch_now("losses", rows, 4);
            self.scratch_later("gradient of the logits", logits, lowered.width);
        }
        let packing = self.packs_in_backward(self.head_product(lowered));
        self.packs_later(packing.into());
        self.loss_op(&[lowered, weight]);
        self.drop_weight(weight);
        self.drop_copy(lowered, x);
    }
}
