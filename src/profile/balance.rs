//! The balance of a step's wall time: its parts, which add up to it exactly.

use super::recording::Recording;
use super::tree::Tree;
use crate::probe::Kind;
use std::fmt;

/// The wall time of the steps and its parts, which add up to it exactly.
///
/// Ops are timed themselves. candle's own work is not: it is the rest of a phase, the time between this crate's ops. In
/// backward this is the sorting of the graph before the first op; between ops it is the sums of
/// gradients, the backwards of candle's own ops, and this crate's checks. In forward it is candle's own ops (reshapes,
/// copies) and checks. An op that runs its reference is an op in forward, but its backward is candle's. Gaps in other
/// phases and between phases are unexplained. A planned step has no candle graph: the time between its calls is one
/// line.
///
/// With a [GPU's kernels](Recording::kernels) each kernel counts for the line whose work launched it, with its time on
/// the GPU, and the rest of a phase is GPU idle time. `wall_ns` is then the sum of the lines: if kernels overlap, it is
/// larger than the elapsed time of the steps. Kernels of candle's backward count as gradient sums.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Balance {
    /// The total time that the lines divide: that of the steps. If no steps were recorded it is the duration of the
    /// recording times the number of threads, because lines add up the work of all threads. With a GPU's kernels it is
    /// the sum of the lines.
    pub wall_ns: u64,
    /// Number of steps; `None` if none were recorded.
    pub steps: Option<usize>,
    /// The parts, phase by phase in the order in which the phases first ran.
    pub lines: Vec<Line>,
}

/// A part of the wall time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The phase; empty for time in no phase.
    pub phase: &'static str,
    /// The kind of work.
    pub kind: LineKind,
    /// Its time, summed over all steps.
    pub total_ns: u64,
}

/// The kind of work that a part of the wall time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LineKind {
    /// Ops of this crate.
    Ops,
    /// Time before backward's first op.
    GraphSort,
    /// On the CPU, time between backward's ops. On a GPU, kernels that candle launched in backward.
    GradientSums,
    /// Time after backward's last op.
    GraphFree,
    /// On the CPU, time between ops of this crate in forward. On a GPU, kernels that candle's own ops launched, in any
    /// phase but backward.
    CandleForward,
    /// Time between the calls of a plan.
    Plan,
    /// Time without a kernel: the GPU waited for the host.
    Idle,
    /// Any other time.
    Unexplained,
}

impl LineKind {
    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ops => "ops",
            Self::GraphSort => "sorting the graph",
            Self::GradientSums => "gradient sums and bookkeeping",
            Self::GraphFree => "freeing the graph",
            Self::CandleForward => "candle: its own ops and bookkeeping",
            Self::Plan => "between the plan's calls",
            Self::Idle => "GPU idle",
            Self::Unexplained => "unexplained",
        }
    }
}

impl Balance {
    /// Computes the balance of all steps of `recording`.
    pub fn new(recording: &Recording) -> Self {
        let tree = Tree::new(recording);
        let mut balance = Self {
            steps: tree.num_steps(),
            ..Default::default()
        };
        let spans = &recording.spans;
        let on_gpu = !recording.kernels.is_empty();
        let mut within_roots_ns = 0; // used without steps
        for (i, span) in spans.iter().enumerate() {
            if !tree.counts(i) || !tree.is_owner(i) {
                continue;
            }
            if tree.nodes[i].owner.is_none() {
                within_roots_ns += span.duration_ns();
            }
            let kind = match (span.kind, span.phase) {
                _ if span.is_op() => LineKind::Ops,
                (kind, _) if tree.is_planned(i) && (on_gpu || kind == Kind::Phase) => {
                    LineKind::Plan
                }
                (Kind::Phase, "backward") if !on_gpu => {
                    balance.add_backward(recording, &tree, i);
                    continue;
                }
                (_, "backward") if on_gpu => LineKind::GradientSums,
                (Kind::Phase, "forward") => LineKind::CandleForward,
                _ if on_gpu => LineKind::CandleForward,
                _ => LineKind::Unexplained,
            };
            let phase = match span.kind {
                Kind::Step => "",
                _ => span.phase,
            };
            let (node, waits) = (&tree.nodes[i], on_gpu && !span.is_op());
            if node.own_ns > 0 || !waits {
                balance.add(phase, kind, node.own_ns);
            }
            if waits {
                balance.add(phase, LineKind::Idle, node.idle_ns);
            }
        }
        let rest = match on_gpu {
            true => LineKind::Idle,
            false => LineKind::Unexplained,
        };
        if balance.steps.is_some() {
            balance.wall_ns = within_roots_ns; // the steps themselves are the roots
        } else {
            balance.wall_ns = recording
                .duration_ns
                .saturating_mul(recording.threads.len() as u64);
            let rest_ns = balance.wall_ns.saturating_sub(within_roots_ns);
            balance.add("", rest, rest_ns);
        }
        if on_gpu {
            balance.wall_ns = balance.sum_ns(|_| true);
        }
        balance.in_order()
    }

    /// Divides a backward's own time at its first and last op.
    fn add_backward(&mut self, recording: &Recording, tree: &Tree<'_>, backward: usize) {
        let span = &recording.spans[backward];
        let later = recording.spans.iter().enumerate().skip(backward + 1);
        let mut ops = later
            .take_while(|(_, other)| other.thread != span.thread || other.start_ns < span.end_ns)
            .filter(|(i, _)| tree.nodes[*i].owner == Some(backward) && tree.is_owner(*i))
            .map(|(_, op)| (op.start_ns, op.end_ns));
        let Some((first_start_ns, mut last_end_ns)) = ops.next() else {
            return self.add(
                span.phase,
                LineKind::GradientSums,
                tree.nodes[backward].own_ns,
            );
        };
        if let Some((_, end_ns)) = ops.last() {
            last_end_ns = end_ns;
        }
        let before_ns = first_start_ns.saturating_sub(span.start_ns);
        let after_ns = span.end_ns.saturating_sub(last_end_ns);
        let between_ns = tree.nodes[backward]
            .own_ns
            .saturating_sub(before_ns + after_ns);
        self.add(span.phase, LineKind::GraphSort, before_ns);
        self.add(span.phase, LineKind::GradientSums, between_ns);
        self.add(span.phase, LineKind::GraphFree, after_ns);
    }

    fn add(&mut self, phase: &'static str, kind: LineKind, ns: u64) {
        let mut lines = self.lines.iter_mut();
        match lines.find(|line| line.phase == phase && line.kind == kind) {
            Some(line) => line.total_ns += ns,
            None => self.lines.push(Line {
                phase,
                kind,
                total_ns: ns,
            }),
        }
    }

    /// Sorts lines by phase as the phases first ran, then by kind; lines in no phase come last.
    fn in_order(mut self) -> Self {
        let mut phases: Vec<&str> = Vec::new();
        for line in &self.lines {
            if !phases.contains(&line.phase) {
                phases.push(line.phase);
            }
        }
        let place = |phase: &str| phases.iter().position(|known| *known == phase);
        self.lines
            .sort_by_key(|line| (line.phase.is_empty(), place(line.phase), line.kind));
        self
    }

    /// Returns the time of the lines for which `wanted` returns true.
    pub fn sum_ns(&self, wanted: impl Fn(&Line) -> bool) -> u64 {
        let lines = self.lines.iter().filter(|line| wanted(line));
        lines.map(|line| line.total_ns).sum()
    }

    /// Returns the fraction of the wall time that is explained, in 0..=1; `None` if the wall time is 0.
    pub fn explained(&self) -> Option<f64> {
        let explained_ns = self.sum_ns(|line| line.kind != LineKind::Unexplained);
        (self.wall_ns > 0).then(|| explained_ns as f64 / self.wall_ns as f64)
    }

    /// Returns milliseconds a step, or in all without steps.
    pub fn ms_per_step(&self, total_ns: u64) -> f64 {
        total_ns as f64 / 1e6 / self.steps.unwrap_or(1) as f64
    }
}

/// Writes a line for each part, with its milliseconds a step and its share.
impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = "candle: its own ops and bookkeeping, ".len() + 10;
        let mut write = |name: &str, ns: u64| {
            let share = 100.0 * ns as f64 / self.wall_ns.max(1) as f64;
            writeln!(
                f,
                "{name:<width$} {:>10.3} ms {share:>6.2}%",
                self.ms_per_step(ns)
            )
        };
        for line in &self.lines {
            match line.phase {
                "" => write(line.kind.name(), line.total_ns)?,
                phase => write(&format!("{phase}, {}", line.kind.name()), line.total_ns)?,
            }
        }
        write("wall time", self.wall_ns)
    }
}
