//! The figures of a recorded run for the handout's questions (a) to (e): of a GPU's kernels where they were recorded,
//! else of ops, with the matmuls and softmaxes inside them.

use tallow::Result;
use tallow::bench::EndToEndRow;
use tallow::probe::Kind;
use tallow::profile::{
    Balance, DeviceRates, Grouping, LineKind, Parts, ProfileReport, Recording, Row, Selection,
};
use tallow::report::{Fields, Statistics};

/// A part of the time under this share is not named, in percent.
pub const NAMED_FROM_PERCENT: f64 = 1.0;

/// A run's steps, recorded and timed.
pub struct Profiled {
    pub recording: Recording,
    /// The rows of the stopwatch, without a profiler.
    pub stopwatch: Vec<EndToEndRow>,
}

/// A phase, or the whole step, by the profiler and by the stopwatch.
#[derive(Clone, Debug)]
pub struct Timed {
    pub phase: String,
    pub profiler: Statistics,
    pub stopwatch: Statistics,
}

/// An op or kernel with its share of the time and its calls in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    pub name: String,
    pub percent: f64,
    pub per_step: f64,
}

/// The shares of a phase's time, or of a step's, in percent.
#[derive(Clone, Debug, Default)]
pub struct Work {
    pub matmul_percent: f64,
    pub softmax_percent: f64,
    /// The kernels of flash attention, which compute both.
    pub fused_percent: f64,
    /// Anything else from [`NAMED_FROM_PERCENT`] on, the largest first.
    pub others: Vec<(String, f64)>,
}

/// Attention's softmax and matmuls in forward, a step.
#[derive(Clone, Debug, Default)]
pub struct AttentionFigures {
    pub softmax_ms: f64,
    pub matmul_ms: f64,
    /// The matmuls' parts, where kernels tell them apart.
    pub scores_and_values_ms: Option<(f64, f64)>,
    /// Scale and mask where they are ops; else they are in the softmax.
    pub mask_ms: Option<f64>,
    pub softmax_flops: f64,
    pub matmul_flops: f64,
}

/// A step's time and its floor.
#[derive(Clone, Debug)]
pub struct Floors {
    pub rates: DeviceRates,
    pub measured_ms: f64,
    pub floor_ms: f64,
    /// The time of ops without a formula.
    pub unknown_ms: f64,
    /// The ops and gaps that lose the most, with the time that they lose.
    pub lost_ms: Vec<(String, f64)>,
}

impl Floors {
    /// Returns the floors of a report with floors of the whole step.
    pub fn new(whole: &ProfileReport, rates: &DeviceRates) -> Self {
        let floors = whole.rows.iter().filter_map(|row| row.floor_ns);
        let unknown = whole.rows.iter().filter(|row| row.floor_ns.is_none());
        let lost = whole
            .rows
            .iter()
            .filter_map(|row| Some((row.name.clone(), row.lost_ns()?)));
        let ms = |ns: f64| ns * whole.ms_per_step(1);
        let mut lost_ms: Vec<(String, f64)> = lost.map(|(name, ns)| (name, ms(ns))).collect();
        lost_ms.sort_by(|a, b| b.1.total_cmp(&a.1));
        lost_ms.truncate(4);
        Self {
            rates: rates.clone(),
            measured_ms: whole.ms_per_step(whole.whole_ns),
            floor_ms: ms(floors.sum()),
            unknown_ms: whole.ms_per_step(unknown.map(|row| row.total_ns).sum()),
            lost_ms,
        }
    }

    /// Returns the floor in percent of the measured time.
    pub fn percent(&self) -> f64 {
        100.0 * self.floor_ms / self.measured_ms
    }
}

/// All figures of a run.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The summary's line.
    pub line: Fields,
    /// The phases, and the whole step last.
    pub timed: Vec<Timed>,
    pub ranges_per_step: f64,
    /// The time in which the GPU ran kernels, and was idle, a step.
    pub busy_and_idle_ms: Option<(f64, f64)>,
    pub longest_in_forward: Option<Share>,
    pub longest_in_both: Option<Share>,
    pub forward: Work,
    pub whole: Work,
    /// The whole in words; `None` if it is forward alone.
    pub beyond_forward: Option<&'static str>,
    /// Whether backward ran and was not recorded, as that of reference ops.
    pub is_backward_missing: bool,
    pub attention: Option<AttentionFigures>,
}

impl Profiled {
    /// Returns the run's figures.
    pub fn figures(&self) -> Result<Figures> {
        let balance = Balance::new(&self.recording);
        let has_kernels = !self.recording.kernels.is_empty();
        let grouping = match has_kernels {
            true => Grouping::Kernel,
            false => Grouping::Name,
        };
        let of = |selection: &Selection| ProfileReport::new(&self.recording, selection, grouping);
        let forward = of(&Selection::phase("forward"))?;
        let backward = of(&Selection::phase("backward")).ok(); // a forward alone has none
        let whole = of(&Selection::default())?;
        let has_backward = self.stopwatch.iter().any(|row| row.phase == "backward");
        let is_backward_missing = has_backward && backward.is_none();
        let timed = self.timed(&balance);
        let (of_forward, of_whole) = (work(&forward), work(&whole));
        let longest = |report: &ProfileReport| {
            let mut rows = report.rows.iter().filter(|row| !row.is_gap());
            rows.next().map(|row| Share {
                name: name(row),
                percent: report.percent(row),
                per_step: report.instances_per_step(row).unwrap_or(0.0),
            })
        };

        let ns = |kind: LineKind| balance.sum_ns(|line| line.kind == kind);
        let percent = |kind| 100.0 * ns(kind) as f64 / balance.wall_ns.max(1) as f64;
        let (ops, plan) = (percent(LineKind::Ops), percent(LineKind::Plan));
        let (idle, unexplained) = (percent(LineKind::Idle), percent(LineKind::Unexplained));
        let candle = (100.0 - ops - idle - plan - unexplained).max(0.0);
        let stopwatch_ms = timed.last().map(|timed| timed.stopwatch.mean_ms);
        let mut line = Fields::new();
        line.insert("profiled_ms_per_step", balance.ms_per_step(balance.wall_ns));
        line.insert("stopwatch_mean_ms", stopwatch_ms);
        line.insert("ops_percent", ops);
        let of_step = |percent: f64| (!is_backward_missing).then_some(percent);
        line.insert("matmul_percent", of_step(of_whole.matmul_percent));
        line.insert("softmax_percent", of_step(of_whole.softmax_percent));
        line.insert("candle_percent", candle);
        line.insert("between_calls_percent", plan);
        line.insert("gpu_idle_percent", idle);
        line.insert("unexplained_percent", unexplained);
        line.insert("longest", longest(&whole).map(|share| share.name));
        line.insert("matmul_percent_of_forward", of_forward.matmul_percent);
        line.insert("softmax_percent_of_forward", of_forward.softmax_percent);

        let idle_ns = ns(LineKind::Idle);
        let ms = |ns| balance.ms_per_step(ns);
        Ok(Figures {
            line,
            timed,
            ranges_per_step: self.recording.spans.len() as f64 / balance.steps.unwrap_or(1) as f64,
            busy_and_idle_ms: has_kernels.then(|| (ms(balance.wall_ns - idle_ns), ms(idle_ns))),
            longest_in_forward: longest(&forward),
            longest_in_both: backward
                .as_ref()
                .and_then(|backward| longest_of(&forward, backward)),
            forward: of_forward,
            whole: of_whole,
            beyond_forward: match of(&Selection::phase("optimizer")).is_ok() {
                true => Some("the training step"),
                false => backward.map(|_| "forward and backward"),
            },
            is_backward_missing,
            attention: self.attention()?,
        })
    }

    /// Returns phases and the whole step by both clocks, except phases of which nothing was recorded.
    fn timed(&self, balance: &Balance) -> Vec<Timed> {
        let mut timed = Vec::new();
        for (i, row) in self.stopwatch.iter().enumerate() {
            let is_whole = i + 1 == self.stopwatch.len();
            let phase = row.phase.as_str();
            let recorded_ns = match is_whole {
                true => balance.wall_ns,
                false => balance.sum_ns(|line| line.phase == phase),
            };
            let mean_ms = balance.ms_per_step(recorded_ns);
            let spans = || self.recording.spans.iter();
            let steps = spans().filter(|span| span.kind == Kind::Step);
            let samples = steps.map(|step| match is_whole {
                true => step.duration_ns() as f64 / 1e6,
                false => {
                    // A planned step enters a phase several times.
                    let times = step.start_ns..step.end_ns;
                    let own =
                        spans().filter(|span| span.kind == Kind::Phase && span.phase == phase);
                    let own = own.filter(|span| times.contains(&span.start_ns));
                    own.map(|span| span.duration_ns() as f64 / 1e6).sum()
                }
            });
            let mut samples: Vec<f64> = samples.collect();
            // Kernels of a planned step outlast their ranges: then a phase has no spread.
            if samples.is_empty() || !is_whole && !self.recording.kernels.is_empty() {
                samples = vec![mean_ms];
            }
            if let (Some(stopwatch), Ok(mut profiler)) =
                (row.statistics(), Statistics::new(&samples))
                && recorded_ns > 0
            {
                profiler.mean_ms = mean_ms;
                timed.push(Timed {
                    phase: phase.into(),
                    profiler,
                    stopwatch: stopwatch.clone(),
                });
            }
        }
        timed
    }

    /// Returns softmax and matmuls of attention in forward; `None` if they were not told apart.
    fn attention(&self) -> Result<Option<AttentionFigures>> {
        let forward = Selection::phase("forward");
        let report = ProfileReport::new(&self.recording, &forward, Grouping::Path)?;
        let (mut parts, mut mask_ns) = (Parts::default(), None);
        let mut figures = AttentionFigures::default();
        let steps = report.steps.unwrap_or(1) as f64;
        for row in report.rows.iter().filter(|row| !row.is_gap()) {
            let cost = row.cost.unwrap_or_default();
            let mut names = row.name.rsplit('/');
            // Scores, values, scale and mask are ops where references ran.
            match (names.next().unwrap_or_default(), names.next()) {
                ("scale" | "mask", _) => {
                    *mask_ns.get_or_insert(0) += row.total_ns;
                    figures.softmax_flops += cost.other_flops / steps;
                }
                ("matmul", Some("scores")) => parts.scores_ns += row.parts.matmul_ns,
                ("matmul", Some("values")) => parts.values_ns += row.parts.matmul_ns,
                ("softmax", _) => {}
                (op, _) if op.contains("attention") => {}
                _ => continue,
            }
            parts += row.parts;
            figures.softmax_flops += cost.softmax_flops / steps;
            figures.matmul_flops += cost.matmul_flops / steps;
        }
        let ms = |ns| report.ms_per_step(ns);
        figures.softmax_ms = ms(parts.softmax_ns);
        figures.matmul_ms = ms(parts.matmul_ns);
        figures.mask_ms = mask_ns.map(ms);
        let is_told_apart = parts.scores_ns + parts.values_ns > 0;
        let scores_and_values_ms = (ms(parts.scores_ns), ms(parts.values_ns));
        figures.scores_and_values_ms = is_told_apart.then_some(scores_and_values_ms);
        Ok((parts.matmul_ns > 0 && parts.softmax_ns > 0).then_some(figures))
    }
}

/// Returns a row's name; of a kernel, with the op that launched it most often.
fn name(row: &Row) -> String {
    let launches = row.launches.as_ref();
    match launches.and_then(|launches| launches.ops.first()) {
        None => row.name.clone(),
        Some((op, _)) => format!("{} (of {op})", row.short_name()),
    }
}

/// Returns the op or kernel with the largest share of forward and backward together.
fn longest_of(forward: &ProfileReport, backward: &ProfileReport) -> Option<Share> {
    let both = [forward, backward];
    let rows = forward.rows.iter().chain(&backward.rows).rev();
    let shares = rows.filter(|row| !row.is_gap()).map(|row| {
        let is_same = |other: &Row| other.name == row.name && other.kind == row.kind;
        let [a, b] = both.map(|report| report.sum("", is_same));
        let whole_ns = (forward.whole_ns + backward.whole_ns).max(1);
        Share {
            name: name(row),
            percent: 100.0 * (a.total_ns + b.total_ns) as f64 / whole_ns as f64,
            per_step: (a.instances + b.instances) as f64 / forward.steps.unwrap_or(1) as f64,
        }
    });
    shares.max_by(|a, b| a.percent.total_cmp(&b.percent))
}

fn work(report: &ProfileReport) -> Work {
    let percent = |ns: u64| 100.0 * ns as f64 / report.whole_ns.max(1) as f64;
    let parts = report.sum("", |row| !row.is_gap()).parts;
    let mut others: Vec<(String, f64)> = Vec::new();
    for row in report.rows.iter().filter(|row| !row.is_gap()) {
        let name = row.short_name();
        let is_one = row.launches.is_some() || row.rest_ns() == row.total_ns || name == "softmax";
        let of = |part: &str| match is_one {
            true => name.to_string(),
            false => format!("{part} of {name}"),
        };
        let fused = format!("{name} (matmuls and softmax in one)");
        others.extend([
            (fused, percent(row.parts.attention_ns)),
            (of("softmax"), percent(row.parts.softmax_ns)),
            (of("the rest"), percent(row.rest_ns())),
        ]);
    }
    others.retain(|(_, percent)| *percent >= NAMED_FROM_PERCENT);
    others.sort_by(|a, b| b.1.total_cmp(&a.1));
    Work {
        matmul_percent: percent(parts.matmul_ns),
        softmax_percent: percent(parts.softmax_ns),
        fused_percent: percent(parts.attention_ns),
        others,
    }
}
