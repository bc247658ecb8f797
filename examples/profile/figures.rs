//! A run by the profiler and by the stopwatch: the reports that answers read, and the summary's line.

use serde_json::Value;
use tallow::Result;
use tallow::bench::EndToEndRow;
use tallow::probe::Kind;
use tallow::profile::{
    Balance, DeviceRates, Grouping, LineKind, ProfileReport, Recording, Row, Selection, Span,
};
use tallow::report::{Column, Statistics};

/// A run's steps, recorded and timed.
pub struct Profiled {
    pub recording: Recording,
    /// The rows of the stopwatch, without a profiler: the phases, and the whole step last.
    pub stopwatch: Vec<EndToEndRow>,
    pub balance: Balance,
    /// A GPU's kernels where they were recorded, else ops.
    pub whole: ProfileReport,
    pub forward: ProfileReport,
    /// `None` if no op of backward was recorded, as in forward alone or with reference ops.
    pub backward: Option<ProfileReport>,
    /// The ops of forward by path.
    pub forward_paths: ProfileReport,
    /// The whole step with floors at these rates, if asked for.
    pub floors: Option<(ProfileReport, DeviceRates)>,
}

/// A phase, or the whole step, by the profiler and by the stopwatch.
#[derive(Clone, Debug)]
pub struct Timed {
    pub phase: String,
    pub profiler: Statistics,
    pub stopwatch: Statistics,
}

impl Profiled {
    /// Reports on a recording, which must have ops of forward.
    pub fn new(recording: Recording, stopwatch: Vec<EndToEndRow>) -> Result<Self> {
        let grouping = match recording.kernels.is_empty() {
            true => Grouping::Name,
            false => Grouping::Kernel,
        };
        let report = |selection: Selection| ProfileReport::new(&recording, &selection, grouping);
        let forward = Selection::phase("forward");
        Ok(Self {
            stopwatch,
            balance: Balance::new(&recording),
            whole: report(Selection::default())?,
            forward: report(forward.clone())?,
            backward: report(Selection::phase("backward")).ok(),
            forward_paths: ProfileReport::new(&recording, &forward, Grouping::Path)?,
            floors: None,
            recording,
        })
    }

    pub fn ranges_per_step(&self) -> f64 {
        self.recording.spans.len() as f64 / self.balance.steps.unwrap_or(1) as f64
    }

    /// Returns whether a phase ran, also one whose ops were not recorded.
    pub fn has_phase(&self, phase: &str) -> bool {
        self.balance.lines.iter().any(|line| line.phase == phase)
    }

    /// Returns whether backward ran and was not recorded, as that of reference ops.
    pub fn is_backward_missing(&self) -> bool {
        self.has_phase("backward") && self.backward.is_none()
    }

    /// Returns phases and the whole step by both clocks, except phases of which nothing was recorded.
    pub fn timed(&self) -> Vec<Timed> {
        let spans = || self.recording.spans.iter();
        let timed = self.stopwatch.iter().enumerate().filter_map(|(i, row)| {
            let is_whole = i + 1 == self.stopwatch.len();
            let recorded_ns = match is_whole {
                true => self.balance.wall_ns,
                false => self.balance.sum_ns(|line| line.phase == row.phase),
            };
            let mean_ms = self.balance.ms_per_step(recorded_ns);
            let is_own = |span: &&Span| match is_whole {
                true => span.kind == Kind::Step,
                false => span.kind == Kind::Phase && span.phase == row.phase,
            };
            // A planned step enters a phase several times.
            let ms_in = |step: &Span| -> f64 {
                let is_inside =
                    |span: &&Span| (step.start_ns..step.end_ns).contains(&span.start_ns);
                let own = spans().filter(is_own).filter(is_inside);
                own.map(|span| span.duration_ns() as f64 / 1e6).sum()
            };
            let steps = spans().filter(|span| span.kind == Kind::Step);
            let samples = match is_whole || self.recording.kernels.is_empty() {
                true => steps.map(ms_in).collect(),
                false => vec![mean_ms], // kernels of a planned step outlast their ranges
            };
            let mut profiler = Statistics::new(&samples).ok().filter(|_| recorded_ns > 0)?;
            profiler.mean_ms = mean_ms;
            Some(Timed {
                phase: row.phase.clone(),
                profiler,
                stopwatch: row.statistics()?.clone(),
            })
        });
        timed.collect()
    }

    /// Returns the floor of a step, without ops that have no formula.
    pub fn floor_ms(&self) -> Option<f64> {
        let (floors, _) = self.floors.as_ref()?;
        let floor_ns: f64 = floors.rows.iter().filter_map(|row| row.floor_ns).sum();
        Some(floor_ns * floors.ms_per_step(1))
    }

    /// Returns the summary's columns, each with the value of this run.
    pub fn summary(&self) -> Vec<(Column, Value)> {
        let (balance, timed) = (&self.balance, self.timed());
        let kinds = [
            LineKind::Ops,
            LineKind::Plan,
            LineKind::Idle,
            LineKind::Unexplained,
        ];
        let [ops, plan, idle, unexplained] = kinds.map(|kind| {
            let ns = balance.sum_ns(|line| line.kind == kind);
            share(ns, balance.wall_ns)
        });
        let candle = (100.0 - ops - plan - idle - unexplained).max(0.0);
        let if_any = |percent: f64| (percent > 0.0).then_some(percent);
        let profiled_ms = balance.ms_per_step(balance.wall_ns);
        let stopwatch_ms = timed.last().map(|whole| whole.stopwatch.mean_ms);
        let floor_percent = self.floor_ms().map(|ms| 100.0 * ms / profiled_ms);
        let is_complete = !self.is_backward_missing();
        let of_step = shares(&self.whole).map(|percent| is_complete.then_some(percent));
        let of_forward = shares(&self.forward).map(Some);
        let (time, step, forward) = ("Step time", "% of a step", "% of forward");
        let figures = [
            (time, "profiler", Some(profiled_ms)),
            (time, "stopwatch", stopwatch_ms),
            (time, "floor", self.floor_ms()),
            (step, "floor", floor_percent),
            (step, "matmul", of_step[0]),
            (step, "softmax", of_step[1]),
            (step, "GPU idle", if_any(idle)),
            (step, "ops", Some(ops)),
            (step, "between", Some(candle)),
            (step, "between calls", if_any(plan)),
            (step, "unexplained", Some(unexplained)),
            (forward, "matmul", of_forward[0]),
            (forward, "softmax", of_forward[1]),
        ];
        let columns = figures.into_iter().map(|(group, title, value)| {
            let key = format!("{group} {title}");
            let column = match group == time {
                true => Column::ms(key, title),
                false => Column::number(key, title, "", 1),
            };
            (column.group(group), Value::from(value))
        });
        let longest = longest(&self.whole).map(name);
        let longest = (Column::text("longest", "Longest"), Value::from(longest));
        columns.chain([longest]).collect()
    }
}

/// Returns a time in percent of the whole.
pub fn share(ns: u64, whole_ns: u64) -> f64 {
    100.0 * ns as f64 / whole_ns.max(1) as f64
}

/// Returns the time of matmuls, of softmax, and of kernels that compute both in one (flash attention), in percent.
pub fn shares(report: &ProfileReport) -> [f64; 3] {
    let parts = report.sum("", |_| true).parts;
    let each = [parts.matmul_ns, parts.softmax_ns, parts.attention_ns];
    each.map(|ns| share(ns, report.whole_ns))
}

/// Returns the op or kernel with the largest share.
pub fn longest(report: &ProfileReport) -> Option<&Row> {
    let rows = report.rows.iter().filter(|row| !row.is_gap());
    rows.rev().max_by_key(|row| row.total_ns) // the first of equal ones
}

/// Returns a row's name; of a kernel, with the op that launched it most often.
pub fn name(row: &Row) -> String {
    let launches = row.launches.as_ref();
    match launches.and_then(|launches| launches.ops.first()) {
        None => row.name.clone(),
        Some((op, _)) => format!("{} (of {op})", row.short_name()),
    }
}
