//! A run by the profiler and by the stopwatch: the summary's line, the answers to the handout's questions (a) to (e), and
//! how far a step is from its floor.

use super::words;
use std::cmp::Reverse;
use tallow::Result;
use tallow::bench::EndToEndRow;
use tallow::probe::Kind;
use tallow::profile::{
    Balance, DeviceRates, Grouping, LineKind, ProfileReport, Recording, Row, Selection, Span,
};
use tallow::report::{Answer, Column, Fields, Speedup, Statistics};

/// The times match if they differ by at most this, in percent.
const MATCH_PERCENT: f64 = 10.0;

/// Shares of steps whose standard deviation is a larger part of the mean say little, in percent.
const STEADY_PERCENT: f64 = 20.0;

/// A part of the time under this share is not named, in percent.
const NAMED_FROM_PERCENT: f64 = 1.0;

/// Follows an answer about a step whose backward was not recorded.
const MISSING: &str = " Backward was not recorded, because that of reference ops is candle's own: these figures do not \
                       decide. Profile without --reference-ops.";

const QUESTIONS: [&str; 6] = [
    "(a) How long is forward? Does the profile match the stopwatch?",
    "(b) What takes the most time in forward, and is it the same with backward?",
    "(c) What else takes time in forward, apart from matmuls?",
    "(d) How does the share of matmuls change from forward to a whole step?",
    "(e) How do softmax and matmuls of attention compare, in time and in FLOPs?",
    "How far is a step from its floor, and where is the time lost?",
];

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

    /// Returns the columns of the summary, and this run's line in it.
    pub fn summary(&self) -> (Vec<Column>, Fields) {
        let (balance, timed) = (&self.balance, self.timed());
        let of = |kind| share(balance.sum_ns(|line| line.kind == kind), balance.wall_ns);
        let (ops, plan) = (of(LineKind::Ops), of(LineKind::Plan));
        let (idle, unexplained) = (of(LineKind::Idle), of(LineKind::Unexplained));
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
        let (mut columns, mut line) = (Vec::new(), Fields::new());
        for (group, title, value) in figures {
            let key = format!("{group} {title}");
            line.insert(&key, value);
            let column = match group == time {
                true => Column::ms(key, title),
                false => Column::number(key, title, "", 1),
            };
            columns.push(column.group(group));
        }
        line.insert("longest", longest(&self.whole.rows).map(name));
        columns.push(Column::text("longest", "Longest"));
        (columns, line)
    }
}

/// Returns a time in percent of the whole.
fn share(ns: u64, whole_ns: u64) -> f64 {
    100.0 * ns as f64 / whole_ns.max(1) as f64
}

/// Returns the time of matmuls, of softmax, and of kernels that compute both in one (flash attention), in percent.
fn shares(report: &ProfileReport) -> [f64; 3] {
    let parts = report.sum("", |_| true).parts;
    let each = [parts.matmul_ns, parts.softmax_ns, parts.attention_ns];
    each.map(|ns| share(ns, report.whole_ns))
}

/// Returns the op or kernel with the largest share.
fn longest(rows: &[Row]) -> Option<&Row> {
    let rows = rows.iter().filter(|row| !row.is_gap());
    rows.rev().max_by_key(|row| row.total_ns) // the first of equal ones
}

/// Returns a row's name; of a kernel, with the op that launched it most often.
fn name(row: &Row) -> String {
    let launches = row.launches.as_ref();
    match launches.and_then(|launches| launches.ops.first()) {
        None => row.name.clone(),
        Some((op, _)) => format!("{} (of {op})", row.short_name()),
    }
}

/// Returns the answers of one run.
pub fn answers(run: &Profiled) -> Vec<Answer> {
    let timed = run.timed();
    let cv = timed.last().and_then(|Timed { profiler, .. }| {
        let cv = 100.0 * profiler.std_ms? / profiler.mean_ms;
        (cv > STEADY_PERCENT).then_some(cv)
    });
    let if_steady = |text: String| match cv {
        Some(cv) => format!(
            "{text} Undecided: the standard deviation of the recorded steps is {cv:.0}% of their mean. More --steps on a \
             quiet machine would decide."
        ),
        None => text,
    };
    let balance = &run.balance;
    let idle_ns = balance.sum_ns(|line| line.kind == LineKind::Idle);
    let [busy, idle] = [balance.wall_ns - idle_ns, idle_ns].map(|ns| balance.ms_per_step(ns));
    let kernels = match run.recording.kernels.is_empty() {
        true => String::new(),
        false => format!(" A step has {busy:.3} ms of kernels; the GPU is idle for {idle:.3} ms."),
    };
    let missing = run.is_backward_missing().then_some(MISSING);
    let ranges_per_step = run.recording.spans.len() as f64 / balance.steps.unwrap_or(1) as f64;
    let longest = most_time(&run.forward, run.backward.as_ref());
    let [matmul, _, fused] = shares(&run.forward);
    let others = others(&run.forward, "forward");
    let whole_name = match run.has_phase("optimizer") {
        true => Some("the training step"),
        false => run.has_phase("backward").then_some("forward and backward"),
    };
    let fused = (fused > 0.0).then(|| {
        "Kernels of flash attention compute both in one: --attention naive tells them apart.".into()
    });
    let attention = softmax_against_matmuls(&run.forward_paths).map(if_steady);
    let answers = [
        matches(&timed, ranges_per_step).map(|text| text + &kernels),
        longest.map(|text| if_steady(text + missing.unwrap_or_default())),
        Some(if_steady(format!("{others} Matmuls take {matmul:.1}%."))),
        whole_name.map(|name| match missing {
            Some(missing) => missing.trim_start().into(),
            None => if_steady(matmul_share(&run.forward, &run.whole, name)),
        }),
        attention.or(fused),
        floor(run),
    ];
    words::answered(QUESTIONS.into_iter().zip(answers))
}

/// Returns the percent between both clocks, and whether they agree; `None` if their spread is too large for a ratio.
fn verdict(timed: &Timed) -> (f64, Option<bool>) {
    let (profiler, stopwatch) = (&timed.profiler, &timed.stopwatch);
    let percent = 100.0 * (profiler.mean_ms / stopwatch.mean_ms - 1.0);
    let is_clear = Speedup::new(profiler, stopwatch).is_none_or(|ratio| ratio.is_clear());
    (percent, is_clear.then_some(percent.abs() <= MATCH_PERCENT))
}

/// Returns whether the profiler's times match the stopwatch's, for forward and the whole step, and if not, why and what
/// to do.
pub fn matches(timed: &[Timed], ranges_per_step: f64) -> Option<String> {
    let judged = |name: &str, own: &Timed| match verdict(own) {
        (percent, Some(true)) => format!("{name} matches within {:.1}%. ", percent.abs()),
        (_, Some(false)) => format!("{name} does not match (limit {MATCH_PERCENT}%). "),
        (_, None) => format!("{name}: undecided, because the spread is too large. "),
    };
    let (whole, phases) = timed.split_last()?;
    let forward = phases.iter().find(|own| own.phase == "forward");
    let forward = forward.map_or(String::new(), |own| judged("Forward", own));
    let over_ms = whole.profiler.mean_ms - whole.stopwatch.mean_ms;
    let reason = match verdict(whole).1 {
        Some(true) => String::new(),
        Some(false) if over_ms > 0.0 => format!(
            "Recording costs time: {:.2} µs for each of {ranges_per_step:.0} recorded ranges a step. With larger sizes \
             its share falls. ",
            1e3 * over_ms / ranges_per_step.max(1.0)
        ),
        Some(false) => "A profiler makes no step faster, so the machine was busy, or not warm, in the run with the \
                        stopwatch. Repeat with more --warmup-steps and --steps. "
            .into(),
        None => "Repeat with more --steps and --warmup-steps on a quiet machine. ".into(),
    };
    let ms = |time: &Statistics| match time.std_ms {
        Some(_) => format!("{time} ms"),
        None => format!("{:.3} ms", time.mean_ms),
    };
    let times = timed.iter().map(|own| {
        let (phase, percent) = (&own.phase, verdict(own).0);
        let [profiler, stopwatch] = [&own.profiler, &own.stopwatch].map(ms);
        format!("{phase} {profiler} by the profiler, {stopwatch} by the stopwatch ({percent:+.1}%)")
    });
    let times = times.collect::<Vec<_>>().join("; ");
    Some(forward + &judged("The whole", whole) + &reason + &times + ".")
}

/// Names the longest op of forward, and that of forward and backward together.
pub fn most_time(forward: &ProfileReport, backward: Option<&ProfileReport>) -> Option<String> {
    let steps = forward.steps.unwrap_or(1) as f64;
    let words = |report: &ProfileReport, row: &Row| {
        let (name, percent) = (name(row), report.percent(row));
        let per_step = row.instances as f64 / steps;
        format!("{name}, {percent:.1}% of the time, {per_step:.0} times a step")
    };
    let own = longest(&forward.rows)?;
    let text = format!("In forward: {}.", words(forward, own));
    let Some(backward) = backward else {
        return Some(text);
    };
    let mut both = ProfileReport {
        rows: [&forward.rows[..], &backward.rows].concat(),
        whole_ns: forward.whole_ns + backward.whole_ns,
        steps: forward.steps,
    };
    let sum = |row: &Row| both.sum(&name(row), |other| other.name == row.name);
    both.rows = both.rows.iter().map(sum).collect();
    let of_both = longest(&both.rows)?;
    let is_same = of_both.name == name(own);
    let which = if is_same { "the same" } else { "another" };
    let both = words(&both, of_both);
    Some(text + &format!(" In forward and backward together it is {which}: {both}."))
}

/// Lists the parts of the time of `whole` worth naming, apart from matmuls, the largest first.
pub fn others(report: &ProfileReport, whole: &str) -> String {
    let mut others = Vec::new();
    for row in report.rows.iter().filter(|row| !row.is_gap()) {
        let name = row.short_name();
        let is_one = row.launches.is_some() || row.rest_ns() == row.total_ns || name == "softmax";
        let (softmax, rest) = match is_one {
            true => (name.into(), name.into()),
            false => (format!("softmax of {name}"), format!("the rest of {name}")),
        };
        let fused = format!("{name} (matmuls and softmax in one)");
        others.push((row.parts.attention_ns, fused));
        others.push((row.parts.softmax_ns, softmax));
        others.push((row.rest_ns(), rest));
    }
    others.sort_by_key(|(ns, _)| Reverse(*ns));
    let others = others.into_iter().take(8).filter_map(|(ns, name)| {
        let percent = share(ns, report.whole_ns);
        (percent >= NAMED_FROM_PERCENT).then(|| format!("{name} {percent:.1}%"))
    });
    let (from, list) = (NAMED_FROM_PERCENT, others.collect::<Vec<_>>().join(", "));
    match list.is_empty() {
        true => format!("Nothing else takes {from}% of {whole}."),
        false => format!("Other parts of {whole} from {from}% on: {list}."),
    }
}

/// Compares the shares of matmuls, of softmax and of other parts in forward with those in the whole, called `name`.
pub fn matmul_share(forward: &ProfileReport, whole: &ProfileReport, name: &str) -> String {
    let [[matmul, softmax, fused], of_whole] = [forward, whole].map(shares);
    let change = match of_whole[0] - matmul {
        points if points.abs() < 1.0 => "nearly the same".into(),
        points if points < 0.0 => format!("{:.1} points less", -points),
        points => format!("{points:.1} points more"),
    };
    let [matmul_of_whole, softmax_of_whole, fused_of_whole] = of_whole;
    let mut text = format!(
        "Matmuls take {matmul:.1}% of forward and {matmul_of_whole:.1}% of {name}: {change}. Softmax takes \
         {softmax:.1}% and {softmax_of_whole:.1}%. "
    );
    if fused_of_whole > 0.0 {
        text += &format!(
            "Kernels of flash attention, which compute both, take {fused:.1}% and {fused_of_whole:.1}%. "
        );
    }
    text + &others(whole, name)
}

/// Compares softmax with the matmuls of attention, in time and in FLOPs. `paths` has the ops of forward by path. Returns
/// `None` if their time or FLOPs are not known.
pub fn softmax_against_matmuls(paths: &ProfileReport) -> Option<String> {
    // With reference ops, scores, values, scale and mask are ops.
    let part = |row: &Row| {
        let mut names = row.name.rsplit('/');
        match (names.next().unwrap_or_default(), names.next()) {
            ("scale" | "mask", _) => "mask",
            ("matmul", Some("scores")) => "scores",
            ("matmul", Some("values")) => "values",
            (op, _) if op == "softmax" || op.contains("attention") => "attention",
            _ => "",
        }
    };
    let all = paths.sum("", |row| !part(row).is_empty());
    let sum = |own| paths.sum("", |row| part(row) == own);
    let [scores, values, mask] = ["scores", "values", "mask"].map(sum);
    let (cost, parts) = (all.cost?, all.parts);
    if parts.matmul_ns == 0 || parts.softmax_ns == 0 {
        return None;
    }
    let ms = |ns| paths.ms_per_step(ns);
    let [matmul, softmax, masks] = [parts.matmul_ns, parts.softmax_ns, mask.total_ns].map(ms);
    let scores = ms(parts.scores_ns + scores.parts.matmul_ns);
    let values = ms(parts.values_ns + values.parts.matmul_ns);
    let told_apart = match scores + values > 0.0 {
        true => format!(" (scores {scores:.3}, values {values:.3})"),
        false => String::new(),
    };
    let with_mask = match mask.instances {
        0 => "scale and mask included".into(),
        _ => format!("scale and mask {masks:.3} ms apart from it"),
    };
    let time_ratio = matmul / (softmax + masks);
    let softmax_flops = cost.softmax_flops + mask.cost?.other_flops;
    let flops_ratio = cost.matmul_flops / softmax_flops;
    let gflops = |flops: f64, ms: f64| paths.ms_per_step(1) * flops / ms;
    let matmul_rate = gflops(cost.matmul_flops, matmul);
    let softmax_rate = gflops(softmax_flops, softmax + masks);
    let conclusion = match flops_ratio / time_ratio {
        slower if slower > 1.0 => format!(
            "For one FLOP softmax takes {slower:.0} times as long: it uses each score for few FLOPs, a matmul each value \
             for many."
        ),
        _ => "For one FLOP softmax takes no longer here.".into(),
    };
    Some(format!(
        "Attention in forward, all layers: matmuls {matmul:.3} ms{told_apart}, softmax {softmax:.3} ms, {with_mask}. \
         Matmuls take {time_ratio:.2} times the time of softmax with scale and mask, for {flops_ratio:.1} times the FLOPs \
         ({matmul_rate:.1} and {softmax_rate:.1} GFLOP/s). {conclusion}"
    ))
}

/// Compares a step with its floor; `None` if floors were not asked for.
fn floor(run: &Profiled) -> Option<String> {
    let (floors, rates) = run.floors.as_ref()?;
    let (step_ms, floor_ms) = (floors.ms_per_step(floors.whole_ns), run.floor_ms()?);
    let lost_ms = |row: &Row| row.lost_ns().unwrap_or(0.0) * floors.ms_per_step(1);
    let mut rows: Vec<&Row> = floors.rows.iter().collect();
    rows.sort_by(|a, b| lost_ms(b).total_cmp(&lost_ms(a)));
    let lost = rows.iter().take(4).filter(|row| lost_ms(row) > 0.0);
    let lost = lost.map(|row| format!("{} {:.3} ms", row.name, lost_ms(row)));
    let lost = lost.collect::<Vec<_>>().join(", ");
    let percent = 100.0 * floor_ms / step_ms;
    let unknown_ns = floors.sum("", |row| row.floor_ns.is_none()).total_ns;
    let unknown = match floors.ms_per_step(unknown_ns) {
        0.0 => String::new(),
        ms => format!(" Ops without a formula take {ms:.3} ms and are not in the floor."),
    };
    Some(format!(
        "A step takes {step_ms:.3} ms by the profiler. Its floor is {floor_ms:.3} ms, {percent:.1}% of that. Rates \
         measured here: {rates}. Most time above the floor: {lost}.{unknown}"
    ))
}
