//! The figures of a recorded run that the handout's questions (a) to (e) ask for: of a GPU's kernels where they were
//! recorded, else of ops, with the matmuls and softmaxes inside them.

use serde::{Deserialize, Serialize};
use tallow::Result;
use tallow::probe::Kind;
use tallow::profile::{
    Balance, Grouping, LineKind, Parts, ProfileReport, Recording, Row, Selection,
};
use tallow::report::{Fields, Statistics};

/// A part of the time under this share is not named, in percent.
pub const NAMED_FROM_PERCENT: f64 = 1.0;

/// A run's steps, recorded and timed.
pub struct Profiled {
    pub recording: Recording,
    /// The rows of the stopwatch, without a profiler.
    pub stopwatch: Vec<Fields>,
}

/// A timing: mean and standard deviation of `n` steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Time {
    pub mean_ms: f64,
    pub std_ms: Option<f64>,
    pub n: usize,
}

/// A phase, or the whole step, by the profiler and by the stopwatch.
#[derive(Clone, Debug)]
pub struct Timed {
    pub phase: String,
    pub profiler: Time,
    pub stopwatch: Time,
}

/// Something with its share of the time and how often it runs in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    pub name: String,
    pub percent: f64,
    pub per_step: f64,
}

/// What a phase, or all of them, spends its time on, in percent.
#[derive(Clone, Debug, Default)]
pub struct Work {
    pub matmul_percent: f64,
    pub softmax_percent: f64,
    /// In kernels of flash attention, which compute both.
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

/// What the summary's line shows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Line {
    pub profiled_ms_per_step: f64,
    pub stopwatch_mean_ms: Option<f64>,
    pub ops_percent: f64,
    pub matmul_percent: f64,
    pub softmax_percent: f64,
    pub candle_percent: f64,
    pub between_calls_percent: f64,
    pub gpu_idle_percent: f64,
    pub unexplained_percent: f64,
    pub longest: String,
    pub matmul_percent_of_forward: f64,
    pub softmax_percent_of_forward: f64,
}

/// All figures of a run.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub line: Line,
    /// The phases, and the whole step last.
    pub timed: Vec<Timed>,
    pub ranges_per_step: f64,
    /// The time in which the GPU ran kernels, and was idle, a step.
    pub busy_and_idle_ms: Option<(f64, f64)>,
    pub longest_in_forward: Option<Share>,
    pub longest_in_both: Option<Share>,
    pub forward: Work,
    pub whole: Work,
    pub has_backward: bool,
    pub has_optimizer: bool,
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
        let idle_ns = balance.sum_ns(|line| line.kind == LineKind::Idle);
        let ms = |ns| balance.ms_per_step(ns);
        let longest = |report: &ProfileReport| {
            report
                .rows
                .iter()
                .find(|row| !row.is_gap())
                .map(|row| share(report, row))
        };
        let work = [&forward, &whole].map(work);
        let timed = self.timed(&balance);
        let steps = balance.steps.unwrap_or(1) as f64;
        let line = Line {
            stopwatch_mean_ms: timed.last().map(|timed| timed.stopwatch.mean_ms),
            longest: longest(&whole).map_or(String::new(), |share| share.name),
            matmul_percent: work[1].matmul_percent,
            softmax_percent: work[1].softmax_percent,
            matmul_percent_of_forward: work[0].matmul_percent,
            softmax_percent_of_forward: work[0].softmax_percent,
            ..parts_of_the_time(&balance)
        };
        let [of_forward, of_whole] = work;
        Ok(Figures {
            line,
            timed,
            ranges_per_step: self.recording.spans.len() as f64 / steps,
            busy_and_idle_ms: has_kernels.then(|| (ms(balance.wall_ns - idle_ns), ms(idle_ns))),
            longest_in_forward: longest(&forward),
            longest_in_both: backward
                .as_ref()
                .and_then(|backward| longest_of(&forward, backward)),
            forward: of_forward,
            whole: of_whole,
            has_backward: backward.is_some(),
            has_optimizer: of(&Selection::phase("optimizer")).is_ok(),
            attention: self.attention()?,
        })
    }

    /// Phases and the whole step, by both clocks.
    fn timed(&self, balance: &Balance) -> Vec<Timed> {
        #[derive(Deserialize)]
        struct Named {
            phase: String,
        }
        let rows = self.stopwatch.iter();
        let rows = rows.filter_map(|row| Some((row.read::<Named>()?.phase, row.read::<Time>()?)));
        let rows: Vec<(String, Time)> = rows.collect();
        let count = rows.len();
        let timed = rows.into_iter().enumerate().map(|(i, (phase, stopwatch))| {
            let profiler = match i + 1 == count {
                true => self.steps(balance),
                false => self.phase(balance, &phase)?,
            };
            Some(Timed {
                phase,
                profiler,
                stopwatch,
            })
        });
        timed.flatten().collect()
    }

    fn steps(&self, balance: &Balance) -> Time {
        let steps = self
            .recording
            .spans
            .iter()
            .filter(|span| span.kind == Kind::Step);
        let samples: Vec<f64> = steps.map(|step| step.duration_ns() as f64 / 1e6).collect();
        Time {
            mean_ms: balance.ms_per_step(balance.wall_ns),
            ..time(&samples)
        }
    }

    /// A phase's time; `None` where nothing of it was recorded. Kernels of a planned step outlast their ranges: then
    /// there is no spread.
    fn phase(&self, balance: &Balance, phase: &str) -> Option<Time> {
        let recorded_ns = balance.sum_ns(|line| line.phase == phase);
        let spans = self.recording.spans.iter();
        let spans = spans.filter(|span| span.kind == Kind::Phase && span.phase == phase);
        let samples: Vec<f64> = spans.map(|span| span.duration_ns() as f64 / 1e6).collect();
        let measured = match self.recording.kernels.is_empty() {
            true => time(&samples),
            false => Time::default(),
        };
        (recorded_ns > 0).then(|| Time {
            mean_ms: balance.ms_per_step(recorded_ns),
            ..measured
        })
    }

    /// Softmax and matmuls of attention in forward; `None` if one of them was not told apart.
    fn attention(&self) -> Result<Option<AttentionFigures>> {
        let forward = Selection::phase("forward");
        let report = ProfileReport::new(&self.recording, &forward, Grouping::Path)?;
        let (mut parts, mut mask_ns) = (Parts::default(), None);
        let mut figures = AttentionFigures::default();
        let steps = report.steps.unwrap_or(1) as f64;
        for (row, op) in attention_rows(&report) {
            let cost = row.cost.unwrap_or_default();
            parts += row.parts;
            match op {
                "scores" => parts.scores_ns += row.parts.matmul_ns,
                "values" => parts.values_ns += row.parts.matmul_ns,
                "mask" => {
                    *mask_ns.get_or_insert(0) += row.total_ns;
                    figures.softmax_flops += cost.other_flops / steps;
                }
                _ => {}
            }
            figures.softmax_flops += cost.softmax_flops / steps;
            figures.matmul_flops += cost.matmul_flops / steps;
        }
        let ms = |ns| report.ms_per_step(ns);
        figures.softmax_ms = ms(parts.softmax_ns);
        figures.matmul_ms = ms(parts.matmul_ns);
        figures.mask_ms = mask_ns.map(ms);
        let is_told = parts.scores_ns + parts.values_ns > 0;
        figures.scores_and_values_ms = is_told.then(|| (ms(parts.scores_ns), ms(parts.values_ns)));
        Ok((parts.matmul_ns > 0 && parts.softmax_ns > 0).then_some(figures))
    }
}

fn time(samples_ms: &[f64]) -> Time {
    Statistics::new(samples_ms).map_or_else(
        |_| Time::default(),
        |Statistics {
             mean_ms, std_ms, n, ..
         }| Time { mean_ms, std_ms, n },
    )
}

/// The rows of attention by path, each with what it is: `attention` or `softmax`, and where references ran `scores`,
/// `values` and `mask` (scale too).
fn attention_rows(report: &ProfileReport) -> impl Iterator<Item = (&Row, &str)> {
    report
        .rows
        .iter()
        .filter(|row| !row.is_gap())
        .filter_map(|row| {
            let mut names = row.name.rsplit('/');
            let kind = match (names.next()?, names.next()) {
                ("scale" | "mask", _) => "mask",
                ("matmul", Some(around @ ("scores" | "values"))) => around,
                ("softmax", _) => "softmax",
                (op, _) if op.contains("attention") => "attention",
                _ => return None,
            };
            Some((row, kind))
        })
}

fn parts_of_the_time(balance: &Balance) -> Line {
    let percent = |kind: LineKind| {
        100.0 * balance.sum_ns(|line| line.kind == kind) as f64 / balance.wall_ns.max(1) as f64
    };
    let [ops, idle, plan, unexplained] = [
        LineKind::Ops,
        LineKind::Idle,
        LineKind::Plan,
        LineKind::Unexplained,
    ]
    .map(percent);
    Line {
        profiled_ms_per_step: balance.ms_per_step(balance.wall_ns),
        ops_percent: ops,
        candle_percent: (100.0 - ops - idle - plan - unexplained).max(0.0),
        between_calls_percent: plan,
        gpu_idle_percent: idle,
        unexplained_percent: unexplained,
        ..Default::default()
    }
}

/// A row's name; of a kernel, with the op that launched it most often.
fn name(row: &Row) -> String {
    let op = row
        .launches
        .as_ref()
        .and_then(|launches| launches.ops.first());
    match op {
        None => row.name.clone(),
        Some((op, _)) => format!("{} (of {op})", row.short_name()),
    }
}

fn share(report: &ProfileReport, row: &Row) -> Share {
    Share {
        name: name(row),
        percent: report.percent(row),
        per_step: report.instances_per_step(row).unwrap_or(0.0),
    }
}

/// What takes most of forward and backward together.
fn longest_of(forward: &ProfileReport, backward: &ProfileReport) -> Option<Share> {
    let rows = forward.rows.iter().chain(&backward.rows).rev();
    let shares = rows.filter(|row| !row.is_gap()).map(|row| {
        let both = [forward, backward]
            .map(|report| report.sum("", |other| other.name == row.name && other.kind == row.kind));
        let ns = both[0].total_ns + both[1].total_ns;
        let instances = both[0].instances + both[1].instances;
        let whole_ns = (forward.whole_ns + backward.whole_ns).max(1);
        Share {
            name: name(row),
            percent: 100.0 * ns as f64 / whole_ns as f64,
            per_step: instances as f64 / forward.steps.unwrap_or(1) as f64,
        }
    });
    shares.max_by(|a, b| a.percent.total_cmp(&b.percent))
}

fn work(report: &ProfileReport) -> Work {
    let percent = |ns: u64| 100.0 * ns as f64 / report.whole_ns.max(1) as f64;
    let parts = report.sum("", |row| !row.is_gap()).parts;
    let mut others: Vec<(String, f64)> = Vec::new();
    let mut add = |name: String, ns| {
        if percent(ns) >= NAMED_FROM_PERCENT {
            others.push((name, percent(ns)));
        }
    };
    for row in report.rows.iter().filter(|row| !row.is_gap()) {
        let name = row.short_name();
        let is_one = row.launches.is_some() || row.rest_ns() == row.total_ns || name == "softmax";
        let of = |part: &str| match is_one {
            true => name.to_string(),
            false => format!("{part} of {name}"),
        };
        add(
            format!("{name} (matmuls and softmax in one)"),
            row.parts.attention_ns,
        );
        add(of("softmax"), row.parts.softmax_ns);
        add(of("the rest"), row.rest_ns());
    }
    others.sort_by(|a, b| b.1.total_cmp(&a.1));
    Work {
        matmul_percent: percent(parts.matmul_ns),
        softmax_percent: percent(parts.softmax_ns),
        fused_percent: percent(parts.attention_ns),
        others,
    }
}
