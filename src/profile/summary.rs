//! The summary of ops, as nsys gives it of kernels.

use super::balance::{Balance, LineKind};
use super::cost;
use super::kernels;
use super::recording::{Recording, Span};
use super::row::Row;
use super::selection::{Grouping, Selection};
use super::tree::Tree;
use crate::ops::cost::Cost;
use crate::probe::{Kind, Parts};
use crate::report::Statistics;
use crate::{Error, Result};
use std::collections::HashMap;

/// Time by op or by place, the longest first.
///
/// On a GPU whose kernels were recorded, times are the kernels', and rows may be by kernel. Elsewhere they are the
/// host's.
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
        if grouping == Grouping::Kernel {
            return Self::of_kernels(recording, &tree, selection);
        }
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
                    false => tree.whole_ns[i],
                };
                let name = grouping.name_of(span);
                let group = groups.of(name, span.kind);
                group.samples_ns.push(ns);
                group.parts += tree.parts[i];
                group.cost = group.cost.zip(own_costs[i]).map(|(sum, cost)| sum + cost);
                // Where the parts are ops of their own, they are not inside.
                if span.is_op() && !tree.holds_ops[i] {
                    group.inside = cost::entry(&span.name()).and_then(|entry| entry.inside);
                }
            }
        }
        let rows = groups.rows()?;
        Self::of_rows(rows, selected_ops_ns, recording, &tree, selection)
    }

    fn of_kernels(recording: &Recording, tree: &Tree, selection: &Selection) -> Result<Self> {
        if recording.kernels.is_empty() {
            return Err(Error::Data {
                what: "profile report".into(),
                expected: "kernels".into(),
                got: "a recording without any".into(),
                hint: "record a GPU of NVIDIA's with Profiler::start_on; on the CPU group ops by name or place".into(),
            });
        }
        let (rows, sum_ns) = kernels::rows(recording, tree, selection)?;
        Self::of_rows(rows, sum_ns, recording, tree, selection)
    }

    fn of_rows(
        rows: Vec<Row>,
        sum_ns: u64,
        recording: &Recording,
        tree: &Tree,
        selection: &Selection,
    ) -> Result<Self> {
        let mut report = Self {
            rows,
            whole_ns: sum_ns,
            steps: tree.num_steps(),
        };
        if report.rows.is_empty() {
            return Err(selection.nothing(recording));
        }
        report.rows.sort_by(|a, b| {
            let longest_first = b.total_ns.cmp(&a.total_ns);
            longest_first.then_with(|| a.name.cmp(&b.name))
        });
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
        // Kernels that no op launched are rows like any other.
        let by_kernel = self.rows.iter().any(|row| row.launches.is_some());
        let is_row = |kind| kind == LineKind::Ops || by_kernel && kind != LineKind::Idle;
        let lines = balance.lines.iter();
        for line in lines.filter(|l| !is_row(l.kind) && in_phase(l.phase)) {
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
                parts: Parts::default(),
                inside: None,
                launches: None,
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
            parts: Parts::default(),
            inside: None,
            launches: None,
        };
        for row in self.rows.iter().filter(|row| wanted(row)) {
            sum.instances += row.instances;
            sum.total_ns += row.total_ns;
            sum.parts += row.parts;
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
    parts: Parts,
    inside: Option<&'static str>,
}

impl Groups {
    /// The group of ranges of this name and kind.
    fn of(&mut self, name: String, kind: Kind) -> &mut Group {
        let number = *self.numbers.entry((name.clone(), kind)).or_insert_with(|| {
            self.groups.push(Group {
                name,
                kind,
                samples_ns: Vec::new(),
                cost: Some(Cost::default()),
                parts: Parts::default(),
                inside: None,
            });
            self.groups.len() - 1
        });
        &mut self.groups[number]
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
                parts: group.parts,
                inside: group.inside,
                launches: None,
            })
        });
        rows.collect()
    }
}
