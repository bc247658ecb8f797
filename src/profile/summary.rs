//! The summary of ops, as nsys gives it of kernels.

use super::balance::{Balance, LineKind};
use super::cost;
use super::recording::{Recording, Span};
use super::selection::{Grouping, Selection};
use super::tree::Tree;
use crate::Result;
use crate::ops::cost::Cost;
use crate::probe::Kind;
use crate::report::Statistics;
use std::collections::HashMap;

/// One row: the ranges of one name or path.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The name or path.
    pub name: String,
    /// What kind of range; `None` for a line of time in which no op ran.
    pub kind: Option<Kind>,
    /// How many there were, over all steps.
    pub instances: usize,
    /// Their time, over all steps.
    pub total_ns: u64,
    /// Their times; `None` for a line of time in which no op ran.
    pub statistics: Option<Statistics>,
    /// Their FLOPs and bytes, over all steps; `None` where one of them has no formula.
    pub cost: Option<Cost>,
    /// What these ops hold that others time apart.
    pub inside: Option<&'static str>,
}

impl Row {
    /// The name, with what is inside.
    pub fn label(&self) -> String {
        match self.inside {
            Some(inside) => format!("{} ({inside} inside)", self.name),
            None => self.name.clone(),
        }
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

/// Time by op or by place, the longest first.
///
/// An op's time is its own, and so are its FLOPs: those of ops inside of it are theirs. So the ops' rows never count a
/// moment twice, and with the lines of [`Balance`], which follow them where whole phases or steps are asked for, they
/// add up to [`whole_ns`](Self::whole_ns). Modules and ranges are given with everything inside.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileReport {
    /// The rows, the longest total first; time without ops after them.
    pub rows: Vec<Row>,
    /// What shares are of: the wall time of the phase or the steps that were asked for; where only a part of the model
    /// was, or modules and ranges, the ops' time in it.
    pub whole_ns: u64,
    /// How many steps; `None` if none were recorded.
    pub steps: Option<usize>,
}

impl ProfileReport {
    /// Of what `selection` picks from `recording`.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a selection that nothing in the recording meets; it lists the phases
    /// that there are.
    pub fn new(recording: &Recording, selection: &Selection, grouping: Grouping) -> Result<Self> {
        let tree = Tree::new(recording);
        let own_costs = own_costs(recording, &tree);
        let mut groups = Groups::default();
        let mut selected_ops_ns = 0;
        for (i, span) in recording.spans.iter().enumerate() {
            if !tree.counts(i) || !selection.is_about(span) {
                continue;
            }
            if span.is_op() {
                selected_ops_ns += tree.own_ns[i];
            }
            if selection.takes(span.kind) {
                let ns = match span.is_op() {
                    true => tree.own_ns[i],
                    false => span.duration_ns(),
                };
                groups.add(span, grouping, (ns, own_costs[i]), tree.holds_ops[i]);
            }
        }
        let mut report = Self {
            rows: groups.rows()?,
            whole_ns: selected_ops_ns,
            steps: tree.num_steps(),
        };
        if report.rows.is_empty() {
            return Err(selection.nothing(recording));
        }
        report
            .rows
            .sort_by_key(|row| std::cmp::Reverse(row.total_ns));
        if selection.within.is_none() {
            report.add_time_without_ops(&Balance::new(recording), selection);
        }
        Ok(report)
    }

    fn add_time_without_ops(&mut self, balance: &Balance, selection: &Selection) {
        let in_phase = |phase: &str| selection.phase.as_deref().is_none_or(|p| p == phase);
        self.whole_ns = match &selection.phase {
            Some(_) => balance.sum_ns(|line| in_phase(line.phase)),
            None => balance.wall_ns,
        };
        if !selection.kinds.is_empty() {
            return;
        }
        let lines = balance.lines.iter();
        for line in lines.filter(|l| l.kind != LineKind::Ops && in_phase(l.phase)) {
            self.rows.push(Row {
                name: match line.phase {
                    "" => format!("{}, between phases", line.kind.name()),
                    phase => format!("{}, {phase}", line.kind.name()),
                },
                kind: None,
                instances: 0,
                total_ns: line.total_ns,
                statistics: None,
                cost: None,
                inside: None,
            });
        }
    }

    /// A row's part of the whole, in percent.
    pub fn percent(&self, row: &Row) -> f64 {
        100.0 * row.total_ns as f64 / self.whole_ns.max(1) as f64
    }

    /// How often a row's ranges ran in a step; `None` if no steps were recorded.
    pub fn instances_per_step(&self, row: &Row) -> Option<f64> {
        Some(row.instances as f64 / self.steps? as f64)
    }

    /// Milliseconds a step, or in all where there are no steps.
    pub fn ms_per_step(&self, total_ns: u64) -> f64 {
        total_ns as f64 / 1e6 / self.steps.unwrap_or(1) as f64
    }

    /// The sum of the rows that `wanted` picks, as one row called `name`.
    pub fn sum(&self, name: &str, wanted: impl Fn(&Row) -> bool) -> Row {
        let mut sum = Row {
            name: name.into(),
            kind: None,
            instances: 0,
            total_ns: 0,
            statistics: None,
            cost: Some(Cost::default()),
            inside: None,
        };
        for row in self.rows.iter().filter(|row| wanted(row)) {
            sum.instances += row.instances;
            sum.total_ns += row.total_ns;
            sum.cost = sum.cost.zip(row.cost).map(|(sum, cost)| sum + cost);
        }
        sum
    }
}

/// Each op's cost as its time is its own: without the FLOPs of ops inside of it, which are theirs. Bytes stay: what is
/// handed from one to another is read and written by both.
fn own_costs(recording: &Recording, tree: &Tree) -> Vec<Option<Cost>> {
    let costs: Vec<Option<Cost>> = recording.spans.iter().map(Span::cost).collect();
    let mut own = costs.clone();
    for (inner, owner) in costs.iter().zip(&tree.owner) {
        let owners = owner.and_then(|owner| own[owner].as_mut());
        if let (Some(owners), Some(inner)) = (owners, inner) {
            owners.product_flops = (owners.product_flops - inner.product_flops).max(0.0);
            owners.other_flops = (owners.other_flops - inner.other_flops).max(0.0);
        }
    }
    own
}

/// Rows as they fill.
#[derive(Default)]
struct Groups {
    numbers: HashMap<(String, Kind), usize>,
    groups: Vec<Group>,
}

struct Group {
    name: String,
    kind: Kind,
    samples_ns: Vec<u64>,
    cost: Option<Cost>,
    inside: Option<&'static str>,
}

impl Groups {
    /// Adds a span with its own time and cost.
    fn add(
        &mut self,
        span: &Span,
        grouping: Grouping,
        (ns, cost): (u64, Option<Cost>),
        holds_ops: bool,
    ) {
        let name = grouping.name_of(span);
        let number = *self
            .numbers
            .entry((name.clone(), span.kind))
            .or_insert_with(|| {
                self.groups.push(Group {
                    name,
                    kind: span.kind,
                    samples_ns: Vec::new(),
                    cost: Some(Cost::default()),
                    inside: None,
                });
                self.groups.len() - 1
            });
        let group = &mut self.groups[number];
        group.samples_ns.push(ns);
        group.cost = group.cost.zip(cost).map(|(sum, cost)| sum + cost);
        // Where the parts are ops of their own, they are not inside.
        if span.is_op() && !holds_ops {
            group.inside = cost::entry(&span.name()).and_then(|entry| entry.inside);
        }
    }

    fn rows(self) -> Result<Vec<Row>> {
        let rows = self.groups.into_iter().map(|group| {
            let samples = group.samples_ns.iter();
            let samples_ms: Vec<f64> = samples.map(|&ns| ns as f64 / 1e6).collect();
            Ok(Row {
                name: group.name,
                kind: Some(group.kind),
                instances: samples_ms.len(),
                total_ns: group.samples_ns.iter().sum(),
                statistics: Some(Statistics::new(&samples_ms)?),
                cost: group.cost,
                inside: group.inside,
            })
        });
        rows.collect()
    }
}
