//! What warm-up changes: answers from runs of one configuration that differ in their number of warm-up steps.

use super::answers::Time;
use serde::Deserialize;
use tallow::report::{Answer, Speedup, Statistics, Verdict, counted, group_digits};

/// A run, as the rows of its whole steps have it.
#[derive(Clone, Debug, Deserialize)]
pub struct Run {
    pub warmup_steps: usize,
    /// The measured steps.
    pub samples_ms: Vec<f64>,
    /// The steps before them.
    pub warmup_ms: Vec<f64>,
    pub first_step_page_faults: Option<u64>,
    pub later_step_page_faults: Option<f64>,
    pub first_step_threads: Option<u64>,
    pub first_step_kernels_compiled: Option<u64>,
    pub first_step_kernels_loaded: Option<u64>,
}

impl Run {
    fn time(&self) -> Option<Time> {
        time(&self.samples_ms)
    }

    /// All steps, in the order in which they ran.
    fn steps(&self) -> Vec<f64> {
        [&self.warmup_ms[..], &self.samples_ms].concat()
    }

    /// The first step and the median of the measured ones.
    fn first_and_median(&self) -> Option<(f64, f64)> {
        let median_ms = Statistics::new(&self.samples_ms).ok()?.median_ms;
        Some((*self.steps().first()?, median_ms))
    }
}

fn time(samples_ms: &[f64]) -> Option<Time> {
    let Statistics {
        mean_ms, std_ms, n, ..
    } = Statistics::new(samples_ms).ok()?;
    Some(Time { mean_ms, std_ms, n })
}

/// How many times as long `run` took as `longest`, the run with the longest warm-up.
fn against(run: &Run, longest: &Run) -> Option<Speedup> {
    let of = |run: &Run| Statistics::new(&run.samples_ms).ok();
    Speedup::new(&of(run)?, &of(longest)?)
}

/// The answers for the runs of one configuration. `is_isolated`: each run had its own process.
pub fn answers(name: &str, runs: &[Run], is_isolated: bool) -> Vec<Answer> {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|run| run.warmup_steps);
    let of = |question: &str| match name {
        "" | "all" => question.to_string(),
        _ => format!("{question} ({name})"),
    };
    let all = [
        ("What changes without warm-up?", without(&runs, is_isolated)),
        ("Why does the first step take longer?", why(&runs)),
        (
            "Why can results after 1 or 2 warm-up steps still differ?",
            after_few(&runs),
        ),
        ("How many warm-up steps are enough?", enough(&runs)),
    ];
    let all = all.into_iter();
    all.filter_map(|(question, answer)| Some(Answer::new(of(question), answer?)))
        .collect()
}

/// What measuring the first step does to mean and standard deviation.
pub fn without(runs: &[Run], is_isolated: bool) -> Option<String> {
    let cold = runs.first().filter(|run| run.warmup_steps == 0)?;
    let (measured, rest) = (cold.time()?, time(cold.samples_ms.get(1..)?)?);
    let (first_ms, _) = cold.first_and_median()?;
    if first_ms <= rest.mean_ms + 2.0 * rest.std_ms.unwrap_or(0.0) {
        let why = match is_isolated {
            true => "on this machine that step shows no cost of its own",
            false => "this process was warm already; --isolate gives each run its own process",
        };
        return Some(format!(
            "Nothing that these figures show: the first step took {first_ms:.2} ms, the others {rest}. Perhaps {why}."
        ));
    }
    Some(format!(
        "The first step is measured too. It took {first_ms:.2} ms, {:.1} times the mean of the others, and turns \
         {rest} into {measured}: among n steps it adds (first - mean of the others) / n to the mean.",
        first_ms / rest.mean_ms
    ))
}

/// What the slowest first step did that later steps did not.
pub fn why(runs: &[Run]) -> Option<String> {
    let first = |run: &&Run| run.first_and_median().map_or(0.0, |(first_ms, _)| first_ms);
    let run = runs.iter().max_by(|a, b| first(a).total_cmp(&first(b)))?;
    let (first_ms, median_ms) = run.first_and_median()?;
    let mut work = Vec::new();
    if let Some((pages, later)) = run.first_step_page_faults.zip(run.later_step_page_faults)
        && pages as f64 > later
    {
        work.push(format!(
            "touched {} memory pages for the first time ({later:.0} in a later step)",
            group_digits(pages)
        ));
    }
    let counts = [
        ("started", run.first_step_threads, "thread"),
        ("compiled", run.first_step_kernels_compiled, "kernel source"),
        ("loaded", run.first_step_kernels_loaded, "kernel module"),
    ];
    let counts = counts.into_iter();
    work.extend(counts.filter_map(|(did, count, noun)| {
        let count = count.filter(|count| *count > 0)?;
        Some(format!("{did} {}", counted(count as usize, noun)))
    }));
    let took = format!(
        "The slowest first step took {first_ms:.2} ms, the median of its run is {median_ms:.2} ms."
    );
    Some(match work.is_empty() {
        true => format!("{took} The counts of pages, threads and kernels do not explain it."),
        false => format!(
            "{took} It {}: work that later steps find done.",
            work.join(", ")
        ),
    })
}

/// What steps 2 and 3 took, and whether the means after 1 and 2 warm-up steps differ.
pub fn after_few(runs: &[Run]) -> Option<String> {
    let longest = runs.last().filter(|run| run.warmup_steps > 2)?;
    let few = runs.iter().filter(|run| [1, 2].contains(&run.warmup_steps));
    let means = few.filter_map(|run| {
        let verdict = match against(run, longest)?.verdict() {
            Verdict::AsFast => "no difference",
            Verdict::Unclear => "undecided",
            Verdict::Faster => "slower",
            Verdict::Slower => "faster",
        };
        Some(format!(
            "after {} {} ({verdict})",
            run.warmup_steps,
            run.time()?
        ))
    });
    let means: Vec<String> = means.collect();
    let last = longest.time()?;
    let usual_ms = last.mean_ms + 2.0 * last.std_ms.unwrap_or(0.0);
    let early = longest.warmup_ms.get(1..3)?.iter().zip(2..);
    let slow = early.filter(|(ms, _)| **ms > usual_ms);
    let slow: Vec<String> = slow
        .map(|(ms, step)| format!("step {step} took {ms:.2} ms"))
        .collect();
    let steps = match slow.is_empty() {
        true => "steps 2 and 3 are not slower than the measured ones".to_string(),
        false => slow.join(" and "),
    };
    let compared = match means.is_empty() {
        true => String::new(),
        false => format!(
            " Means: {}, after {} {last}.",
            means.join(", "),
            longest.warmup_steps
        ),
    };
    Some(format!(
        "One step need not be enough: the allocator's free blocks, caches and the clock frequency can take further \
         steps to settle. In the run with {} warm-up steps, {steps} (mean plus two standard deviations of the measured \
         steps: {usual_ms:.2} ms).{compared}",
        longest.warmup_steps
    ))
}

/// From how many warm-up steps on the means agree with that of the longest warm-up.
pub fn enough(runs: &[Run]) -> Option<String> {
    let (longest, others) = runs.split_last()?;
    let most = longest.warmup_steps;
    let others = others.iter().filter(|run| run.warmup_steps < most);
    let others = others.map(|run| Some((run.warmup_steps, against(run, longest)?)));
    let others: Vec<(usize, Speedup)> = others.collect::<Option<_>>()?;
    let agrees = |speedup: &Speedup| speedup.verdict() == Verdict::AsFast;
    let agreeing = others
        .iter()
        .rev()
        .take_while(|(_, speedup)| agrees(speedup))
        .count();
    let (differing, agreeing) = others.split_at(others.len() - agreeing);
    let words = differing
        .iter()
        .map(|(steps, speedup)| match speedup.verdict() {
            Verdict::Unclear => format!("{steps}: undecided, {speedup}"),
            Verdict::AsFast => format!("{steps}: no difference"),
            _ => format!("{steps}: {speedup} of it"),
        });
    let words: Vec<String> = words.collect();
    let below = match words.is_empty() {
        true => String::new(),
        false => format!(" With fewer: {}.", words.join("; ")),
    };
    let rule = "A mean agrees if 1 lies within two standard errors of the ratio, and these are at most 20% of it.";
    match (agreeing.first(), others.is_empty()) {
        (_, true) => None,
        (Some((fewest, _)), _) => Some(format!(
            "From {fewest} on, of those tried, the mean agrees with that after {most}.{below} {rule}"
        )),
        (None, _) => Some(format!(
            "These figures do not decide: no mean after fewer than {most} warm-up steps agrees with that after {most}.\
             {} {rule} More --steps, a longer warm-up and a quiet machine would.",
            below.replace("With fewer", "Ratios")
        )),
    }
}
