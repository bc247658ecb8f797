//! Head and loss, some rows at a time: the logits of all rows are never there at once.

use super::super::buffer::{BufferId, Category};
use super::super::op::{Accumulate, Op};
use super::super::plan::{Operand, Phase};
use super::Builder;
use candle_core::DType;

/// Elements of logits at a time, about: 10 MiB of f32. Fewer rows would read and write the head's gradient more often (it
/// is added to once for each chunk), more would leave the cache.
const CHUNK_ELEMENTS: usize = 256 * 10_240;

/// On a card: products of so many rows are as fast as larger ones.
const CARD_CHUNK_ELEMENTS: usize = 4096 * 10_240;

/// Rows at a time at least, whatever the vocabulary.
const CHUNK_ROWS: usize = 64;

/// Of so many rows, those whose logits are there at a time on the CPU.
pub(in crate::compile) fn rows_on_cpu(rows: usize, classes: usize) -> usize {
    rows_within(CHUNK_ELEMENTS, rows, classes)
}

fn rows_within(elements: usize, rows: usize, classes: usize) -> usize {
    (elements / classes).clamp(CHUNK_ROWS.min(rows), rows)
}

impl Builder<'_> {
    /// From what the head reads, h (N, D): the loss, the head's gradient, and the gradient of h, (N, D).
    ///
    /// The loss is computed in f32 whatever the precision, from logits that come in its dtype.
    pub(super) fn loss(&mut self, h: BufferId) -> BufferId {
        let (rows, width) = (self.source.config.rows(), self.source.model.d_model);
        let classes = self.source.model.vocab_size;
        let counted = rows * self.source.config.accumulation;
        self.plan.phase = Phase::Loss;
        self.plan.path = "lm_head".into();
        let losses = self.buffer("losses", &[rows]);
        let dh = self.lower("dx", &[rows, width]);
        let head = self.product_weight(&["lm_head.weight".into()]);
        let (d_head, first) = self.gradient(&["lm_head.weight".into()]);
        let chunk = match self.is_on_card() {
            false => rows_on_cpu(rows, classes),
            // All of a size, and so that each begins where products like it.
            true => {
                let chunks = rows.div_ceil(rows_within(CARD_CHUNK_ELEMENTS, rows, classes));
                rows.div_ceil(chunks).next_multiple_of(2 * CHUNK_ROWS)
            }
        };
        for start in (0..rows).step_by(chunk) {
            let some = start..rows.min(start + chunk);
            let of = |buffer, width: usize| Operand {
                buffer,
                elements: some.start * width..some.end * width,
            };
            let rows = some.len();
            let logits = self.lower("logits", &[rows, classes]);
            let product =
                |[rows, cols, depth]: [usize; 3], a_transposed, b_transposed, accumulate| {
                    Op::Matmul {
                        rows,
                        cols,
                        depth,
                        a_transposed,
                        b_transposed,
                        accumulate,
                    }
                };
            let (all_logits, all_head) = (self.plan.whole(logits), self.plan.whole(head));
            self.plan.call_on(
                product([rows, classes, width], false, true, Accumulate::Never),
                vec![of(h, width), all_head.clone()],
                vec![all_logits.clone()],
            );
            self.plan.call_on(
                Op::CrossEntropy {
                    rows,
                    classes,
                    counted,
                },
                vec![of(self.targets, 1)],
                vec![all_logits.clone(), of(losses, 1)],
            );
            self.plan.call_on(
                product([rows, width, classes], false, false, Accumulate::Never),
                vec![all_logits.clone(), all_head],
                vec![of(dh, width)],
            );
            let accumulate = if start == 0 {
                first
            } else {
                Accumulate::Always
            };
            let d_head = self.plan.whole(d_head);
            self.plan.call_on(
                product([classes, width, rows], true, false, accumulate),
                vec![all_logits, of(h, width)],
                vec![d_head],
            );
        }
        let loss = self
            .plan
            .arena("loss", &[1], DType::F64, Category::Temporary);
        self.plan.kept.push(loss);
        let op = Op::MeanLoss {
            rows,
            counted,
            accumulate: Accumulate::AfterFirst,
        };
        self.plan.call(op, &[losses], &[loss]);
        self.gradient_done(&["lm_head.weight".into()]);
        dh
    }
}
