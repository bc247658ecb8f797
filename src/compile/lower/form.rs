//! Forms: some nodes of a graph that are planned together.

use super::program::Program;
use super::recompute::Choice;
use super::{Job, Lower, attention, embedding, gated, head, heads, linear, node, norm};
use crate::Result;
use crate::graph::ValueId;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Some nodes that are planned together, forward and backward.
pub(super) trait Form {
    /// Where in the model.
    fn path(&self) -> &str;

    /// The values whose gradients its backward takes. It has one if one of them has.
    fn outputs(&self) -> Vec<ValueId>;

    /// The values whose makers are [prepared](Self::prepare) before its backward.
    fn inputs(&self) -> Vec<ValueId> {
        Vec::new()
    }

    /// Has the copies made that its products read.
    fn copy_weights(&self, _: &mut Lower<'_>) {}

    /// Writes the calls of its forward.
    fn forward(&self, lower: &mut Lower<'_>) -> Result<()>;

    /// Writes the calls of its backward, and hands the gradients of its inputs on.
    fn backward(&self, lower: &mut Lower<'_>) -> Result<()>;

    /// Whether its backward makes its first output again, where the gradient of that lay.
    fn remakes_output(&self) -> bool {
        false
    }

    /// Makes again what it does not keep, before its output's gradient comes.
    fn prepare(&self, _: &mut Lower<'_>) -> Result<()> {
        Ok(())
    }

    /// Its first output once more, from what it has kept, if that is cheap.
    fn recomputed_output(&self, _: &mut Lower<'_>) -> Option<super::Operand> {
        None
    }
}

/// Forms by the node that they are at, and the nodes that are in one.
#[derive(Default)]
pub(super) struct Forms {
    at: BTreeMap<usize, Rc<dyn Form>>,
    taken: Vec<bool>,
}

impl Forms {
    /// Whether a node is in no form yet.
    pub fn is_free(&self, node: usize) -> bool {
        !self.taken[node]
    }

    /// A form of these nodes, planned where the node `at` is.
    pub fn add(
        &mut self,
        at: usize,
        nodes: impl IntoIterator<Item = usize>,
        form: impl Form + 'static,
    ) {
        for node in nodes {
            self.taken[node] = true;
        }
        self.taken[at] = true;
        self.at.insert(at, Rc::new(form));
    }
}

/// The forms of a graph, in order, and the node that each is at.
pub(super) fn all(
    program: &Rc<Program<'_>>,
    job: &Job<'_>,
    choice: &Choice,
) -> Vec<(usize, Rc<dyn Form>)> {
    let mut forms = Forms {
        taken: vec![false; program.nodes.len()],
        ..Forms::default()
    };
    head::find(program, &mut forms);
    let packed = attention::find(program, job, &mut forms);
    heads::find(program, job, &mut forms);
    gated::find(program, job, choice, &mut forms);
    linear::find(program, &packed, &mut forms);
    norm::find(program, job, choice, &mut forms);
    embedding::find(program, &mut forms);
    node::find(program, &mut forms);
    forms.at.into_iter().collect()
}
