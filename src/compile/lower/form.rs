//! Forms: some nodes of a graph that are planned together.

use super::Lower;
use super::program::Program;
use crate::Result;
use crate::graph::ValueId;
use crate::op_table;
use crate::ops::cost::Cost;
use std::collections::{BTreeMap, BTreeSet};
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

    /// Whether its forward has its backward's calls, too.
    fn differentiates_at_once(&self) -> bool {
        false
    }

    /// Writes the calls of its backward, and hands the gradients of its inputs on.
    fn backward(&self, lower: &mut Lower<'_>) -> Result<()>;

    /// Whether its backward recomputes its first output, where the gradient of that lay.
    fn remakes_output(&self) -> bool {
        false
    }

    /// Recomputes what it does not keep, before its output's gradient comes.
    fn prepare(&self, _: &mut Lower<'_>) -> Result<()> {
        Ok(())
    }

    /// Its first output once more, from what it has kept, if that is cheap.
    fn recomputed_output(&self, _: &mut Lower<'_>) -> Option<super::BufferRange> {
        None
    }
}

/// A form, and the nodes that are in it.
pub(super) struct Placed {
    /// The number of the node that it is at.
    pub at: usize,
    pub form: Rc<dyn Form>,
    /// The nodes' names.
    pub ops: Vec<&'static str>,
    /// What its forward and its backward cost, by the nodes' formulas; backward of those whose gradients are needed.
    pub costs: [Cost; 2],
}

impl Placed {
    fn new(program: &Program<'_>, at: usize, nodes: &BTreeSet<usize>, form: Rc<dyn Form>) -> Self {
        let nodes = || nodes.iter().map(|node| &program.nodes[*node]);
        let mut costs = [Cost::default(); 2];
        for node in nodes() {
            let [forward, backward] = op_table::costs_of_node(program.graph, node);
            let backward = backward.filter(|_| program.is_wanted(node.output));
            costs[0] += forward.unwrap_or_default();
            costs[usize::from(!form.differentiates_at_once())] += backward.unwrap_or_default();
        }
        Self {
            at,
            form,
            ops: nodes().map(|node| node.op).collect(),
            costs,
        }
    }
}

/// Forms by the node that they are at, and the nodes that are in one.
pub(super) struct Forms {
    at: BTreeMap<usize, (BTreeSet<usize>, Rc<dyn Form>)>,
    taken: Vec<bool>,
}

impl Forms {
    /// None yet, of so many nodes.
    pub fn none(nodes: usize) -> Self {
        Self {
            at: BTreeMap::new(),
            taken: vec![false; nodes],
        }
    }

    /// In order.
    pub fn placed(self, program: &Program<'_>) -> Vec<Placed> {
        let forms = self.at.into_iter();
        forms
            .map(|(at, (nodes, form))| Placed::new(program, at, &nodes, form))
            .collect()
    }

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
        let nodes: BTreeSet<usize> = nodes.into_iter().chain([at]).collect();
        for node in &nodes {
            self.taken[*node] = true;
        }
        self.at.insert(at, (nodes, Rc::new(form)));
    }
}
