//! Rows of a table by id, in f32.

use super::super::op::Op;
use super::form::{Form, Forms};
use super::program::Program;
use super::{Lower, place_of};
use crate::Result;
use crate::graph::{self, ValueId};
use crate::kernels::workspace;
use crate::ops::lowering::{Ids, Named};
use candle_core::DType;

struct Embedding {
    path: String,
    /// (V, D).
    table: ValueId,
    /// (N).
    ids: graph::Operand,
    /// (N, D).
    output: ValueId,
    vocab_size: usize,
    rows: usize,
    width: usize,
}

impl Form for Embedding {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        vec![self.output]
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let (rows, width) = (self.rows, self.width);
        let ids = Ids {
            read: 0,
            bound: self.vocab_size,
            ignore: None,
        };
        lower.ids.push((self.ids.value, ids));
        let reads = [
            ("ids", lower.read(&self.ids)),
            ("table", lower.value(self.table)),
        ];
        let x = lower.make(self.output, "x", &[rows, width]);
        lower
            .plan
            .call(Op::Embedding { rows, width }, reads, [("x", x)]);
        Ok(())
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let Some(dx) = lower.gradients.take(self.output) else {
            return Ok(());
        };
        let (d_table, accumulate) = lower.gradient_of_weights(&[self.table], DType::F32);
        let workspace = lower.is_on_gpu().then(|| {
            let parts = workspace::embedding_backward(self.rows, self.vocab_size);
            lower.scratch(&[parts.iter().sum()], DType::U32)
        });
        let op = Op::EmbeddingBackward {
            rows: self.rows,
            width: self.width,
            accumulate,
        };
        let reads = [("dx", dx), ("ids", lower.read(&self.ids))];
        let writes = Named::from([("dtable", d_table)]).with_some("workspace", workspace);
        lower.plan.call(op, reads, writes);
        lower.gradient_done(&[self.table]);
        Ok(())
    }
}

/// The embeddings of f32 tables.
pub(super) fn find(program: &Program<'_>, forms: &mut Forms) {
    let graph = program.graph;
    for (i, node) in program.nodes.iter().enumerate() {
        if node.op != "embedding" || node.composed || node.reads.len() != 1 {
            continue;
        }
        let (table, ids) = (&node.inputs[0], &node.reads[0]);
        let value = graph.value(table.value);
        let are_ids =
            graph.value(ids.value).dtype == DType::U32 && !graph.shape_of(ids).contains(&0);
        let [vocab_size, width] = value.shape[..] else {
            continue;
        };
        if value.dtype != DType::F32 || width == 0 || !are_ids || !program.is_leaf(table) {
            continue;
        }
        let form = Embedding {
            path: place_of(node),
            table: table.value,
            ids: ids.clone(),
            output: node.output,
            vocab_size,
            rows: graph.shape_of(ids).iter().product(),
            width,
        };
        forms.add(i, [], form);
    }
}
