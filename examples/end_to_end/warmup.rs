//! The effect of warm-up: answers from runs of one configuration with different numbers of warm-up steps.

use super::answers::{Measured, ms};
use super::words::grouped;
use tallow::report::{Answer, Statistics, Verdict, counted, group_digits};

/// Returns the answers for each configuration and mode. `is_isolated` means that each run had its own process.
pub fn answers(all: &[Measured], is_isolated: bool) -> Vec<Answer> {
    let name = |run: &Measured| format!("{}{}", run.title, run.row.phase);
    let whole = all.iter().filter(|own| own.row.is_whole_step()).cloned();
    let groups = grouped(whole, name);
    let is_one = groups.len() == 1;
    let answers = groups.into_iter().flat_map(|(name, mut runs)| {
        runs.sort_by_key(|run| run.row.warmup_steps);
        let all = [
            ("What changes without warm-up?", without(&runs, is_isolated)),
            ("Why does the first step take longer?", why(&runs)),
            (
                "Why can results after 1 or 2 warm-up steps still differ?",
                after_few(&runs),
            ),
            ("How many warm-up steps are enough?", enough(&runs)),
        ];
        let named = move |question: &str| match is_one {
            true => question.to_string(),
            false => format!("{question} ({name})"),
        };
        let all = all.into_iter();
        all.filter_map(move |(question, answer)| Some(Answer::new(named(question), answer?)))
    });
    answers.collect()
}

/// Returns the time of the first step, warm-up or not.
fn first_ms(run: &Measured) -> Option<f64> {
    run.warmup_ms()
        .first()
        .or(run.samples_ms().first())
        .copied()
}

/// Returns the times of the measured steps, except the run's first step.
fn later_ms(run: &Measured) -> &[f64] {
    match run.row.warmup_steps {
        0 => run
            .samples_ms()
            .split_first()
            .map_or(&[], |(_, later)| later),
        _ => run.samples_ms(),
    }
}

/// Returns the mean plus two standard deviations, the limit of a usual step.
fn usual_ms(samples_ms: &[f64]) -> Option<f64> {
    let own = Statistics::new(samples_ms).ok()?;
    Some(own.mean_ms + 2.0 * own.std_ms.unwrap_or(0.0))
}

/// Describes how measuring the first step changes mean and standard deviation.
pub fn without(runs: &[Measured], is_isolated: bool) -> Option<String> {
    let cold = runs.first().filter(|run| run.row.warmup_steps == 0)?;
    let (first_ms, others) = (first_ms(cold)?, later_ms(cold));
    let mean_ms = Statistics::new(others).ok()?.mean_ms;
    if first_ms <= usual_ms(others)? {
        let why = match is_isolated {
            true => "So it has no cost that stands out here",
            false => "This process was warm already: --isolate gives each run a new one",
        };
        return Some(format!(
            "Nothing that these figures show: the first step took {first_ms:.2} ms, the others {}. {why}.",
            ms(others)
        ));
    }
    Some(format!(
        "The first step is measured too. It took {first_ms:.2} ms, {:.1} times the mean of the others, and turns {} into \
         {}. Among n steps it adds (first - mean of the others) / n to the mean.",
        first_ms / mean_ms,
        ms(others),
        ms(cold.samples_ms())
    ))
}

/// Describes what the slowest first step did that later steps did not.
pub fn why(runs: &[Measured]) -> Option<String> {
    let slowest = |a: &&Measured, b: &&Measured| {
        first_ms(a)
            .partial_cmp(&first_ms(b))
            .unwrap_or(std::cmp::Ordering::Equal)
    };
    let run = runs.iter().max_by(slowest)?;
    let (first_ms, later) = (first_ms(run)?, later_ms(run));
    let usual_ms = usual_ms(later)?;
    let took = format!(
        "The slowest first step took {first_ms:.2} ms, the measured steps after it {}.",
        ms(later)
    );
    let first = &run.row.first_step;
    let mut work = Vec::new();
    if let Some((pages, later)) = first
        .first_step_page_faults
        .zip(first.later_step_page_faults)
        && pages as f64 > later
    {
        work.push(format!(
            "touched {} new memory pages ({later:.0} in a later step)",
            group_digits(pages)
        ));
    }
    let counts = [
        ("started", first.first_step_threads, "thread"),
        (
            "compiled",
            first.first_step_kernels_compiled,
            "kernel source",
        ),
        ("loaded", first.first_step_kernels_loaded, "kernel module"),
    ];
    work.extend(counts.into_iter().filter_map(|(did, count, noun)| {
        let count = count.filter(|count| *count > 0)?;
        Some(format!("{did} {}", counted(count as usize, noun)))
    }));
    Some(match (first_ms > usual_ms, work.is_empty()) {
        (false, _) => format!("{took} It did not take longer."),
        (true, true) => {
            format!("{took} The counts of pages, threads and kernels do not explain it.")
        }
        (true, false) => format!(
            "{took} It {}, which later steps need not do. The counts do not say what each costs.",
            work.join(", ")
        ),
    })
}

/// Describes steps 2 and 3 of the run with the longest warm-up.
pub fn after_few(runs: &[Measured]) -> Option<String> {
    let longest = runs.last().filter(|run| run.row.warmup_steps > 2)?;
    let usual_ms = usual_ms(longest.samples_ms())?;
    let early = longest.warmup_ms().get(1..3)?.iter().zip(2..);
    let slow = early.filter(|(ms, _)| **ms > usual_ms);
    let slow: Vec<String> = slow
        .map(|(ms, step)| format!("step {step} took {ms:.2} ms"))
        .collect();
    let steps = match slow.is_empty() {
        true => "neither step 2 nor step 3 is slower".into(),
        false => slow.join(" and "),
    };
    Some(format!(
        "One step need not be enough: the allocator's free blocks, caches and the clock frequency can take further steps \
         to settle. In the run with {} warm-up steps, {steps}, where mean plus two standard deviations of the measured \
         steps is {usual_ms:.2} ms.",
        longest.row.warmup_steps
    ))
}

/// Describes how many warm-up steps are enough for means that agree with those after the longest warm-up.
pub fn enough(runs: &[Measured]) -> Option<String> {
    let longest = runs.last()?;
    let most = longest.row.warmup_steps;
    let others = runs.iter().filter(|run| run.row.warmup_steps < most);
    let others = others.map(|run| Some((run.row.warmup_steps, run.over(longest)?)));
    let others = others.collect::<Option<Vec<_>>>()?;
    let agrees = others
        .iter()
        .rev()
        .take_while(|(_, ratio)| ratio.verdict() == Verdict::Equal);
    let (differing, agreeing) = others.split_at(others.len() - agrees.count());
    let words = differing
        .iter()
        .map(|(steps, ratio)| match ratio.verdict() {
            Verdict::Unclear => format!("after {steps} undecided ({ratio})"),
            _ => format!("after {steps} {ratio} as long"),
        });
    let fewer = words.collect::<Vec<_>>().join(", ");
    let rule = "Means agree if 1 lies within two standard errors of their ratio, and these are at most 20% of it.";
    let nearest = others.last()?;
    Some(match (agreeing.first(), nearest.1.verdict()) {
        (Some((fewest, _)), _) if fewer.is_empty() => {
            format!(
                "{fewest}, of those tried: the means do not differ from that after {most}. {rule}"
            )
        }
        (Some((fewest, _)), _) => {
            format!(
                "{fewest}, of those tried: from there on the means agree with that after {most}. Before: {fewer}. {rule}"
            )
        }
        (None, Verdict::Unclear) => format!(
            "These figures do not decide: {fewer}, compared with {most}. More --steps and a quiet machine would. {rule}"
        ),
        (None, _) => format!(
            "More than {}: {fewer}, compared with {most}. Whether {most} are enough only a longer warm-up can show. {rule}",
            nearest.0
        ),
    })
}
