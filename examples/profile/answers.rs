//! The answers to the handout's questions (a) to (e).

use super::figures::{AttentionFigures, Figures, Floors, NAMED_FROM_PERCENT, Share, Timed, Work};
use tallow::report::{Answer, Speedup, Statistics};

/// The times match if they differ by at most this, in percent.
const MATCH_PERCENT: f64 = 10.0;

/// Shares of steps whose standard deviation is a larger part of the mean say little, in percent.
const STEADY_PERCENT: f64 = 20.0;

/// Follows an answer about a step whose backward was not recorded.
const MISSING: &str = " Backward was not recorded, because that of reference ops is candle's own: these figures do not \
                       decide. Profile without --reference-ops.";

/// Returns the answers of one run.
pub fn answers(figures: &Figures) -> Vec<Answer> {
    let cv = figures.timed.last().and_then(|timed| {
        let cv = 100.0 * timed.profiler.std_ms? / timed.profiler.mean_ms;
        (cv > STEADY_PERCENT).then_some(cv)
    });
    let with_doubt = |answer: String| match cv {
        Some(cv) => format!("{answer} Undecided: the recorded steps vary by {cv:.0}%, see (a)."),
        None => answer,
    };
    let (forward, whole) = (&figures.forward, &figures.whole);
    let matches = matches(&figures.timed, figures.ranges_per_step).map(|mut answer| {
        if let Some((busy, idle)) = figures.busy_and_idle_ms {
            answer += &format!(" A step has {busy:.3} ms of kernels; the GPU is idle for {idle:.3} ms.");
        }
        if let Some(cv) = cv {
            answer += &format!(
                " The standard deviation of the recorded steps is {cv:.0}% of their mean: shares of their time do not \
                 decide. More --steps on a quiet machine would."
            );
        }
        answer
    });
    let longest = figures.longest_in_forward.as_ref();
    let longest = longest.map(|own| {
        let end = if figures.is_backward_missing {
            MISSING
        } else {
            ""
        };
        most_time(own, figures.longest_in_both.as_ref()) + end
    });
    let change = figures.beyond_forward;
    let attention = figures.attention.as_ref().map(softmax_against_matmuls);
    let fused =
        "Kernels of flash attention compute both in one: --attention naive tells them apart.";
    let mut answers = Vec::new();
    for (question, answer) in [
        (
            "(a) How long is forward? Does the profile match the stopwatch?",
            matches,
        ),
        (
            "(b) What takes the most time in forward, and is it the same with backward?",
            longest.map(with_doubt),
        ),
        (
            "(c) What else takes time in forward, apart from matmuls?",
            Some(with_doubt(besides_matmuls(forward))),
        ),
        (
            "(d) How does the share of matmuls change from forward to a whole step?",
            change.map(|name| match figures.is_backward_missing {
                true => MISSING.trim_start().into(),
                false => with_doubt(matmul_share(forward, whole, name)),
            }),
        ),
        (
            "(e) How do softmax and matmuls of attention compare, in time and in FLOPs?",
            match attention {
                None => (forward.fused_percent > 0.0).then(|| fused.into()),
                own => own.map(with_doubt),
            },
        ),
    ] {
        answers.extend(answer.map(|answer| Answer::new(question, answer)));
    }
    answers
}

/// Returns the percent between both clocks, and whether they agree; `None` if their spread is too large for a ratio.
fn verdict(timed: &Timed) -> (f64, Option<bool>) {
    let (profiler, stopwatch) = (&timed.profiler, &timed.stopwatch);
    let percent = 100.0 * (profiler.mean_ms / stopwatch.mean_ms - 1.0);
    let is_clear = Speedup::new(profiler, stopwatch).is_none_or(|ratio| ratio.is_clear());
    (percent, is_clear.then_some(percent.abs() <= MATCH_PERCENT))
}

/// Says whether the profiler's times match the stopwatch's, for forward and the whole step, and if not, why and what to
/// do.
pub fn matches(timed: &[Timed], ranges_per_step: f64) -> Option<String> {
    let words = |time: &Statistics| match time.std_ms {
        Some(_) => format!("{time} ms"),
        None => format!("{:.3} ms", time.mean_ms),
    };
    let (whole, phases) = timed.split_last()?;
    let times = timed.iter().map(|own| {
        let (phase, percent) = (&own.phase, verdict(own).0);
        let [profiler, stopwatch] = [&own.profiler, &own.stopwatch].map(words);
        format!("{phase} {profiler} by the profiler, {stopwatch} by the stopwatch ({percent:+.1}%)")
    });
    let times = times.collect::<Vec<_>>().join("; ");
    let judged = |name: &str, own: &Timed| match verdict(own) {
        (percent, Some(true)) => format!("{name} matches within {:.1}%. ", percent.abs()),
        (_, Some(false)) => format!("{name} does not match (limit {MATCH_PERCENT}%). "),
        (_, None) => format!("{name}: undecided, because the spread is too large. "),
    };
    let forward = phases.iter().find(|own| own.phase == "forward");
    let forward = forward.map(|own| judged("Forward", own));
    let over_us =
        1e3 * (whole.profiler.mean_ms - whole.stopwatch.mean_ms) / ranges_per_step.max(1.0);
    let reason = match verdict(whole) {
        (_, Some(true)) => String::new(),
        (percent, Some(false)) if percent > 0.0 => format!(
            "Recording costs time: {over_us:.2} µs for each of {ranges_per_step:.0} recorded ranges a step. With larger \
             sizes its share falls. "
        ),
        (_, Some(false)) => "A profiler makes no step faster, so the machine was busy, or not warm, in the run with the \
                             stopwatch. Repeat with more --warmup-steps and --steps. "
            .into(),
        (_, None) => "Repeat with more --steps and --warmup-steps on a quiet machine. ".into(),
    };
    let (forward, whole) = (forward.unwrap_or_default(), judged("The whole", whole));
    Some(format!("{forward}{whole}{reason}{times}."))
}

/// Names the longest op of forward, and that of forward and backward.
pub fn most_time(forward: &Share, both: Option<&Share>) -> String {
    let words = |share: &Share| {
        let (name, percent, per_step) = (&share.name, share.percent, share.per_step);
        format!("{name}, {percent:.1}% of the time, {per_step:.0} times a step")
    };
    let mut text = format!("In forward: {}.", words(forward));
    if let Some(both) = both {
        text += &match both.name == forward.name {
            true => format!(
                " It is the same in forward and backward together: {}.",
                words(both)
            ),
            false => format!(
                " In forward and backward together it is another: {}.",
                words(both)
            ),
        };
    }
    text
}

fn listed(others: &[(String, f64)]) -> String {
    let named = others.iter().take(8);
    let named = named.map(|(name, percent)| format!("{name} {percent:.1}%"));
    named.collect::<Vec<_>>().join(", ")
}

/// Lists the parts of forward worth naming, apart from matmuls.
pub fn besides_matmuls(forward: &Work) -> String {
    let (from, matmul) = (NAMED_FROM_PERCENT, forward.matmul_percent);
    match forward.others.is_empty() {
        true => format!("Nothing takes {from}% of forward."),
        false => format!(
            "Parts of forward from {from}% on: {}. Matmuls alone take {matmul:.1}%.",
            listed(&forward.others)
        ),
    }
}

/// Compares the shares of matmuls, of softmax and of other parts in forward with those in the whole.
pub fn matmul_share(forward: &Work, whole: &Work, name: &str) -> String {
    let change = match whole.matmul_percent - forward.matmul_percent {
        points if points.abs() < 1.0 => "nearly the same".into(),
        points if points < 0.0 => format!("{:.1} points less", -points),
        points => format!("{points:.1} points more"),
    };
    let mut text = format!(
        "Matmuls take {:.1}% of forward and {:.1}% of {name}: {change}. Softmax takes {:.1}% and {:.1}%.",
        forward.matmul_percent,
        whole.matmul_percent,
        forward.softmax_percent,
        whole.softmax_percent
    );
    if whole.fused_percent > 0.0 {
        text += &format!(
            " Kernels of flash attention compute matmuls and softmax in one: {:.1}% and {:.1}%.",
            forward.fused_percent, whole.fused_percent
        );
    }
    if !whole.others.is_empty() {
        let (from, others) = (NAMED_FROM_PERCENT, listed(&whole.others));
        text += &format!(" Other parts of {name} from {from}% on: {others}.");
    }
    text
}

/// Compares softmax with the matmuls of attention, in time and in FLOPs.
pub fn softmax_against_matmuls(own: &AttentionFigures) -> String {
    let (matmul_ms, only_ms) = (own.matmul_ms, own.softmax_ms);
    let parts = own
        .scores_and_values_ms
        .map(|(scores, values)| format!(" (scores {scores:.3}, values {values:.3})"));
    let parts = parts.unwrap_or_default();
    let mask = match own.mask_ms {
        Some(ms) => format!("scale and mask {ms:.3} ms apart from it"),
        None => "scale and mask included".into(),
    };
    let softmax_ms = only_ms + own.mask_ms.unwrap_or(0.0);
    let time_ratio = matmul_ms / softmax_ms;
    let flops_ratio = own.matmul_flops / own.softmax_flops;
    let gflops = |flops: f64, ms: f64| flops / ms / 1e6;
    let conclusion = match flops_ratio / time_ratio {
        slower if slower > 1.0 => format!(
            "For one FLOP softmax takes {slower:.0} times as long: it uses each score for few FLOPs, a matmul each value \
             for many."
        ),
        _ => "For one FLOP softmax takes no longer here.".into(),
    };
    format!(
        "Attention in forward, all layers: matmuls {matmul_ms:.3} ms{parts}, softmax {only_ms:.3} ms, {mask}. Matmuls \
         take {time_ratio:.2} times the time of softmax with scale and mask, for {flops_ratio:.1} times the FLOPs \
         ({:.1} and {:.1} GFLOP/s). {conclusion}",
        gflops(own.matmul_flops, matmul_ms),
        gflops(own.softmax_flops, softmax_ms),
    )
}

/// Compares a step with its floor.
pub fn floor(own: &Floors) -> Answer {
    let lost = own.lost_ms.iter().filter(|(_, ms)| *ms > 0.0);
    let lost = lost.map(|(name, ms)| format!("{name} {ms:.3} ms"));
    let mut text = format!(
        "A step takes {:.3} ms by the profiler. Its floor is {:.3} ms, {:.1}% of that. Rates measured here: \
         {}. Most time above the floor: {}.",
        own.measured_ms,
        own.floor_ms,
        own.percent(),
        own.rates,
        lost.collect::<Vec<_>>().join(", ")
    );
    if own.unknown_ms > 0.0 {
        text += &format!(
            " Ops without a formula take {:.3} ms and are not in the floor.",
            own.unknown_ms
        );
    }
    Answer::new(
        "How far is a step from its floor, and where is the time lost?",
        text,
    )
}
