//! A row of a summary.

use super::kernel;
use crate::ops::cost::Cost;
use crate::probe::{Kind, Parts};
use crate::report::Statistics;

/// One row: the ranges of one name or path, or the kernels of one name.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The name or path.
    pub name: String,
    /// What kind of range; `None` for kernels, and for a line of time in which no op ran.
    pub kind: Option<Kind>,
    /// How many there were, over all steps.
    pub instances: usize,
    /// Their time, over all steps.
    pub total_ns: u64,
    /// Their times; `None` for a line of time in which no op ran.
    pub statistics: Option<Statistics>,
    /// Their FLOPs and bytes, over all steps; `None` where one of them has no formula.
    pub cost: Option<Cost>,
    /// What of the time products took, and what softmax; nothing where the ops' kernels did not tell.
    pub parts: Parts,
    /// What these ops hold that others time apart.
    pub inside: Option<&'static str>,
    /// Of kernels: how they were launched.
    pub launches: Option<Launches>,
}

impl Row {
    /// The name, with what is inside.
    pub fn label(&self) -> String {
        match self.inside {
            Some(inside) => format!("{} ({inside} inside)", self.name),
            None => self.name.clone(),
        }
    }

    /// A kernel's name in few words: no namespaces, no template arguments but the one in which CUTLASS says what it
    /// multiplies. Any other name as it is.
    pub fn short_name(&self) -> &str {
        match self.launches {
            Some(_) => kernel::short(&self.name),
            None => &self.name,
        }
    }

    /// Whether it is a line of time in which no op or kernel ran.
    pub fn is_gap(&self) -> bool {
        self.instances == 0
    }

    /// Its time without products and softmax.
    pub fn rest_ns(&self) -> u64 {
        self.total_ns.saturating_sub(self.parts.sum_ns())
    }

    /// FLOP/s, where FLOPs are known and there are any.
    pub fn flops_per_s(&self) -> Option<f64> {
        self.rate(self.cost?.flops())
    }

    /// Bytes/s by the formula's bytes.
    pub fn bytes_per_s(&self) -> Option<f64> {
        self.rate(self.cost?.bytes())
    }

    fn rate(&self, amount: f64) -> Option<f64> {
        (amount > 0.0 && self.total_ns > 0).then(|| amount / (self.total_ns as f64 / 1e9))
    }

    /// Whether it multiplies matrices, with whatever else is inside.
    pub fn is_product(&self) -> bool {
        self.cost.is_some_and(|cost| cost.product_flops > 0.0)
    }
}

/// How the kernels of a row were launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Launches {
    /// The most frequent grid; `None` for memory.
    pub grid: Option<[u32; 3]>,
    /// The most frequent block.
    pub block: Option<[u32; 3]>,
    /// How many different grids and blocks there are.
    pub shapes: usize,
    /// The ops that launched them, and how often, the most frequent first; `candle` outside of this crate's ops.
    pub ops: Vec<(String, usize)>,
    /// Likewise their places, all blocks of the model together ([`Grouping::Layer`](super::Grouping::Layer)).
    pub places: Vec<(String, usize)>,
}

impl Launches {
    /// Some of the counted names as one text: `linear, swiglu_linear and 2 more`.
    pub(super) fn text(counts: &[(String, usize)], most: usize) -> String {
        let names: Vec<&str> = counts.iter().map(|(name, _)| name.as_str()).collect();
        match names.len().checked_sub(most + 1) {
            None => names.join(", "),
            Some(beyond) => format!("{} and {} more", names[..most].join(", "), beyond + 1),
        }
    }
}
