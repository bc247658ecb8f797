//! The answers to the handout's questions (a) to (e). Each function takes plain figures.

use super::figures::{AttentionFigures, Figures, NAMED_FROM_PERCENT, Share, Time, Timed, Work};
use tallow::report::{Answer, Fields, Speedup, mean_and_std, speedup};

/// The times match if they differ by at most this, in percent.
const MATCH_PERCENT: f64 = 10.0;

/// Shares of steps whose standard deviation is a larger part of the mean say little, in percent.
const STEADY_PERCENT: f64 = 20.0;

/// The answer where kernels of flash attention hide the parts of attention.
const FUSED: &str =
    "Kernels of flash attention compute both in one: --attention naive tells them apart.";

/// The answers of one run.
pub fn answers(figures: &Figures) -> Vec<Answer> {
    let whole = match (figures.has_backward, figures.has_optimizer) {
        (_, true) => "the training step",
        (true, _) => "forward and backward",
        _ => "forward",
    };
    let cv = figures
        .timed
        .last()
        .and_then(|timed| unsteady(&timed.profiler));
    let with_doubt = |answer: String| match cv {
        Some(cv) => format!("{answer} Undecided: the recorded steps vary by {cv:.0}%, see (a)."),
        None => answer,
    };
    let doubt = cv.map_or(String::new(), |cv| {
        format!(
            " The standard deviation of the recorded steps is {cv:.0}% of their mean: shares of their time do not \
             decide. More --steps on a quiet machine would."
        )
    });
    let busy = figures
        .busy_and_idle_ms
        .map_or(String::new(), |(busy, idle)| {
            format!(" A step has {busy:.3} ms of kernels; the GPU is idle for {idle:.3} ms.")
        });
    let longest = figures.longest_in_forward.as_ref();
    let all = [
        (
            "(a) How long is forward? Does the profile match the stopwatch?",
            matches(&figures.timed, figures.ranges_per_step).map(|answer| answer + &busy + &doubt),
        ),
        (
            "(b) What takes the most time in forward, and is it the same with backward?",
            longest.map(|own| with_doubt(most_time(own, figures.longest_in_both.as_ref()))),
        ),
        (
            "(c) What else takes time in forward, apart from matmuls?",
            Some(with_doubt(besides_matmuls(&figures.forward))),
        ),
        (
            "(d) How does the share of matmuls change from forward to a whole step?",
            figures
                .has_backward
                .then(|| with_doubt(matmul_share(&figures.forward, &figures.whole, whole))),
        ),
        (
            "(e) How do softmax and matmuls of attention compare, in time and in FLOPs?",
            match &figures.attention {
                Some(own) => Some(with_doubt(softmax_against_matmuls(own))),
                None => (figures.forward.fused_percent > 0.0).then(|| FUSED.into()),
            },
        ),
    ];
    let all = all.into_iter();
    all.filter_map(|(question, answer)| Some(Answer::new(question, answer?)))
        .collect()
}

/// The standard deviation of steps in percent of their mean, if shares of their time say little.
fn unsteady(steps: &Time) -> Option<f64> {
    let cv = 100.0 * steps.std_ms? / steps.mean_ms;
    (cv > STEADY_PERCENT).then_some(cv)
}

fn words(time: &Time) -> String {
    let fields = Fields::of(time).unwrap_or_default();
    match (time.std_ms, mean_and_std(&fields).as_str()) {
        (Some(_), Some(cell)) => format!("{cell} ms"),
        _ => format!("{:.3} ms", time.mean_ms),
    }
}

/// Whether the two clocks agree: by percent, and where both have a spread only if that leaves the ratio meaningful.
fn verdict(
    Timed {
        profiler,
        stopwatch,
        ..
    }: &Timed,
) -> (f64, Option<bool>) {
    let fields = |time| Fields::of(time).unwrap_or_default();
    let ratio = speedup(&fields(profiler), &fields(stopwatch));
    let percent = 100.0 * (profiler.mean_ms / stopwatch.mean_ms - 1.0);
    let is_clear = ratio.as_ref().is_none_or(Speedup::is_clear);
    (percent, is_clear.then_some(percent.abs() <= MATCH_PERCENT))
}

/// Whether the profiler's times match the stopwatch's, phase by phase, and if not, why and what to do.
pub fn matches(timed: &[Timed], ranges_per_step: f64) -> Option<String> {
    let whole = timed.last()?;
    let times = timed.iter().map(|own| {
        let (percent, _) = verdict(own);
        let [profiler, stopwatch] = [&own.profiler, &own.stopwatch].map(words);
        format!(
            "{} {profiler} by the profiler, {stopwatch} by the stopwatch ({percent:+.1}%)",
            own.phase
        )
    });
    let times = times.collect::<Vec<_>>().join("; ");
    let (percent, matches) = verdict(whole);
    let over_us =
        1e3 * (whole.profiler.mean_ms - whole.stopwatch.mean_ms) / ranges_per_step.max(1.0);
    let conclusion = match matches {
        Some(true) => format!("The whole step matches within {:.1}%.", percent.abs()),
        None => "These figures do not decide whether they match: the spread is too large. Repeat with more --steps \
                 and --warmup-steps on a quiet machine."
            .into(),
        Some(false) if percent > 0.0 => format!(
            "They do not match (limit {MATCH_PERCENT}%): recording costs time. The difference is {over_us:.2} µs for \
             each of {ranges_per_step:.0} recorded ranges a step. With larger sizes its share falls."
        ),
        Some(false) => format!(
            "They do not match (limit {MATCH_PERCENT}%). A profiler makes no step faster, so the machine was busy, or \
             not warm, in the run with the stopwatch. Repeat with more --warmup-steps and --steps."
        ),
    };
    Some(format!("{conclusion} {times}."))
}

/// What takes most of forward, and what takes most of forward and backward.
pub fn most_time(forward: &Share, both: Option<&Share>) -> String {
    let words = |share: &Share| {
        format!(
            "{}, {:.1}% of the time, {:.0} times a step",
            share.name, share.percent, share.per_step
        )
    };
    let first = format!("In forward: {}.", words(forward));
    match both {
        None => first,
        Some(both) if both.name == forward.name => {
            format!(
                "{first} It is the same in forward and backward together: {}.",
                words(both)
            )
        }
        Some(both) => format!(
            "{first} In forward and backward together it is another: {}.",
            words(both)
        ),
    }
}

fn listed(others: &[(String, f64)]) -> String {
    let named = others.iter().take(8);
    let named: Vec<String> = named
        .map(|(name, percent)| format!("{name} {percent:.1}%"))
        .collect();
    named.join(", ")
}

/// What takes a part of forward worth naming, apart from matmuls.
pub fn besides_matmuls(forward: &Work) -> String {
    match forward.others.is_empty() {
        true => format!("Nothing takes {NAMED_FROM_PERCENT}% of forward."),
        false => format!(
            "Parts of forward from {NAMED_FROM_PERCENT}% on: {}. Matmuls alone take {:.1}%.",
            listed(&forward.others),
            forward.matmul_percent
        ),
    }
}

/// The share of matmuls, of softmax and of what else there is, in forward and in the whole.
pub fn matmul_share(forward: &Work, whole: &Work, name: &str) -> String {
    let points = whole.matmul_percent - forward.matmul_percent;
    let change = match points {
        _ if points.abs() < 1.0 => "nearly the same".into(),
        _ if points < 0.0 => format!("{:.1} points less", -points),
        _ => format!("{points:.1} points more"),
    };
    let fused = match whole.fused_percent > 0.0 {
        true => format!(
            " Kernels of flash attention compute matmuls and softmax in one: {:.1}% and {:.1}%.",
            forward.fused_percent, whole.fused_percent
        ),
        false => String::new(),
    };
    let others = match whole.others.is_empty() {
        true => String::new(),
        false => format!(
            " Other parts of {name} from {NAMED_FROM_PERCENT}% on: {}.",
            listed(&whole.others)
        ),
    };
    format!(
        "Matmuls take {:.1}% of forward and {:.1}% of {name}: {change}. Softmax takes {:.1}% and {:.1}%.{fused}{others}",
        forward.matmul_percent,
        whole.matmul_percent,
        forward.softmax_percent,
        whole.softmax_percent
    )
}

/// Softmax against the matmuls of attention, in time and in FLOPs.
pub fn softmax_against_matmuls(own: &AttentionFigures) -> String {
    let matmuls = match own.scores_and_values_ms {
        Some((scores, values)) => {
            format!(
                "matmuls {:.3} ms (scores {scores:.3}, values {values:.3})",
                own.matmul_ms
            )
        }
        None => format!("matmuls {:.3} ms", own.matmul_ms),
    };
    let mask = match own.mask_ms {
        Some(ms) => format!("scale and mask {ms:.3} ms apart from it"),
        None => "scale and mask included".into(),
    };
    let softmax_ms = own.softmax_ms + own.mask_ms.unwrap_or(0.0);
    let time_ratio = own.matmul_ms / softmax_ms;
    let flops_ratio = own.matmul_flops / own.softmax_flops;
    let rate = |flops: f64, ms: f64| flops / ms / 1e6; // in GFLOP/s
    let conclusion = match flops_ratio / time_ratio {
        slower if slower > 1.0 => format!(
            "For one FLOP softmax takes {slower:.0} times as long: it reads and writes each score for few FLOPs, while a \
             matmul uses each value many times."
        ),
        _ => "For one FLOP softmax takes no longer here.".into(),
    };
    format!(
        "Attention in forward, all layers: {matmuls}, softmax {:.3} ms, {mask}. Matmuls take {time_ratio:.2} times the time of softmax with scale \
         and mask, for {flops_ratio:.1} times the FLOPs ({:.1} and {:.1} GFLOP/s). {conclusion}",
        own.softmax_ms,
        rate(own.matmul_flops, own.matmul_ms),
        rate(own.softmax_flops, softmax_ms),
    )
}
