//! The answers to the handout's questions (a) to (e), and how far a step is from its floor.

use super::figures::{Profiled, Timed, longest, name, share, shares};
use super::words;
use std::cmp::Reverse;
use tallow::profile::{LineKind, ProfileReport, Row};
use tallow::report::{Answer, Speedup, Statistics};

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
    let missing = run.is_backward_missing().then_some(MISSING);
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
        matches(&timed, run.ranges_per_step()).map(|text| text + &kernels(run)),
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

/// Returns how long a GPU ran kernels, and how long it was idle.
fn kernels(run: &Profiled) -> String {
    if run.recording.kernels.is_empty() {
        return String::new();
    }
    let idle_ns = run.balance.sum_ns(|line| line.kind == LineKind::Idle);
    let times = [run.balance.wall_ns - idle_ns, idle_ns];
    let [busy, idle] = times.map(|ns| run.balance.ms_per_step(ns));
    format!(" A step has {busy:.3} ms of kernels; the GPU is idle for {idle:.3} ms.")
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
    let own = longest(forward)?;
    let text = format!("In forward: {}.", words(forward, own));
    let Some(backward) = backward else {
        return Some(text);
    };
    let both = ProfileReport {
        rows: [&forward.rows[..], &backward.rows].concat(),
        whole_ns: forward.whole_ns + backward.whole_ns,
        steps: forward.steps,
    };
    let rows = both.rows.iter().filter(|row| !row.is_gap()).rev();
    let sums = rows.map(|row| {
        both.sum(&name(row), |own| {
            own.name == row.name && own.kind == row.kind
        })
    });
    let of_both = sums.max_by_key(|sum| sum.total_ns)?;
    let which = match of_both.name == name(own) {
        true => "the same",
        false => "another",
    };
    let of_both = words(&both, &of_both);
    Some(format!(
        "{text} In forward and backward together it is {which}: {of_both}."
    ))
}

/// Lists the parts of the time of `whole` worth naming, apart from matmuls, the largest first.
pub fn others(report: &ProfileReport, whole: &str) -> String {
    let mut others = Vec::new();
    for row in report.rows.iter().filter(|row| !row.is_gap()) {
        let name = row.short_name();
        let is_one = row.launches.is_some() || row.rest_ns() == row.total_ns || name == "softmax";
        let of = |part: &str| match is_one {
            true => name.to_string(),
            false => format!("{part} of {name}"),
        };
        others.extend([
            (
                format!("{name} (matmuls and softmax in one)"),
                row.parts.attention_ns,
            ),
            (of("softmax"), row.parts.softmax_ns),
            (of("the rest"), row.rest_ns()),
        ]);
    }
    others.sort_by_key(|(_, ns)| Reverse(*ns));
    let others = others.into_iter().map(|(name, ns)| {
        let percent = share(ns, report.whole_ns);
        (percent >= NAMED_FROM_PERCENT).then(|| format!("{name} {percent:.1}%"))
    });
    let others: Vec<String> = others.take(8).flatten().collect();
    let (from, list) = (NAMED_FROM_PERCENT, others.join(", "));
    match list.is_empty() {
        true => format!("Nothing else takes {from}% of {whole}."),
        false => format!("Other parts of {whole} from {from}% on: {list}."),
    }
}

/// Compares the shares of matmuls, of softmax and of other parts in forward with those in the whole, called `name`.
pub fn matmul_share(forward: &ProfileReport, whole: &ProfileReport, name: &str) -> String {
    let [before, after] = [forward, whole].map(shares);
    let change = match after[0] - before[0] {
        points if points.abs() < 1.0 => "nearly the same".into(),
        points if points < 0.0 => format!("{:.1} points less", -points),
        points => format!("{points:.1} points more"),
    };
    let shares = |i: usize| {
        format!(
            "{:.1}% of forward and {:.1}% of {name}",
            before[i], after[i]
        )
    };
    let (matmul, softmax, fused) = (shares(0), shares(1), shares(2));
    let fused = match after[2] > 0.0 {
        true => format!(" Kernels of flash attention, which compute both, take {fused}."),
        false => String::new(),
    };
    let others = others(whole, name);
    format!("Matmuls take {matmul}: {change}. Softmax takes {softmax}.{fused} {others}")
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
    let [scores, values, mask] =
        ["scores", "values", "mask"].map(|own| paths.sum("", |row| part(row) == own));
    let (cost, parts) = (all.cost?, all.parts);
    if parts.matmul_ns == 0 || parts.softmax_ns == 0 {
        return None;
    }
    let scores_ns = parts.scores_ns + scores.parts.matmul_ns;
    let values_ns = parts.values_ns + values.parts.matmul_ns;
    let times = [
        parts.matmul_ns,
        parts.softmax_ns,
        scores_ns,
        values_ns,
        mask.total_ns,
    ];
    let [matmul, softmax, scores, values, masks] = times.map(|ns| paths.ms_per_step(ns));
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
