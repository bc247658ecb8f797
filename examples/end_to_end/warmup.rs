//! The effect of warm-up: answers from runs of one configuration with different numbers of warm-up steps.

use super::table::Row;
use super::words::{answered, named};
use tallow::report::{Answer, Speedup, Statistics, counted, group_digits};

/// Returns the answers for each configuration and mode. `is_isolated` means that each run had its own process.
pub fn answers(rows: &[Row], is_isolated: bool) -> Vec<Answer> {
    let whole = rows.iter().filter(|run| run.is_whole_step());
    let mut runs: Vec<&Row> = whole.filter(|run| run.time.is_some()).collect();
    runs.sort_by_key(|run| run.warmup_steps);
    let groups = named(runs, &["warmup_steps"]);
    let is_one = groups.len() == 1;
    let answers = groups.into_iter().flat_map(|(name, runs)| {
        let all = [
            ("What changes without warm-up?", without(&runs, is_isolated)),
            ("Why does the first step take longer?", why(&runs)),
            (
                "Why can results after 1 or 2 warm-up steps still differ?",
                after_few(&runs),
            ),
            ("How many warm-up steps are enough?", enough(&runs)),
        ];
        answered(all.map(|(question, answer)| match is_one {
            true => (question.to_string(), answer),
            false => (format!("{question} ({name})"), answer),
        }))
    });
    answers.collect()
}

/// Returns the time of the first step, warm-up or not, and the statistics of the measured steps after it.
fn first_and_later(run: &Row) -> Option<(f64, Statistics)> {
    let time = run.time.as_ref()?;
    let steps = [&time.warmup_ms[..], &time.samples_ms].concat();
    let later = steps.get(time.warmup_ms.len().max(1)..)?;
    Some((steps[0], Statistics::new(later).ok()?))
}

/// Returns the limit of a usual step: the mean plus two standard deviations.
fn limit_ms(steps: &Statistics) -> f64 {
    steps.mean_ms + 2.0 * steps.std_ms.unwrap_or(0.0)
}

/// Describes how measuring the first step changes mean and standard deviation.
pub fn without(runs: &[&Row], is_isolated: bool) -> Option<String> {
    let cold = runs.first().filter(|run| run.warmup_steps == 0)?;
    let (first_ms, others) = first_and_later(cold)?;
    if first_ms > limit_ms(&others) {
        return Some(format!(
            "The first step is measured too. It took {first_ms:.2} ms, {:.1} times the mean of the others, and turns \
             {others} ms into {} ms. Among n steps it adds (first - mean of the others) / n to the mean.",
            first_ms / others.mean_ms,
            cold.statistics()?
        ));
    }
    let why = match is_isolated {
        true => "So it has no cost that stands out here",
        false => "This process was warm already: --isolate gives each run a new one",
    };
    Some(format!(
        "Nothing that these figures show: the first step took {first_ms:.2} ms, the others {others} ms. {why}."
    ))
}

/// Describes what the slowest first step did that later steps did not.
pub fn why(runs: &[&Row]) -> Option<String> {
    let runs = runs
        .iter()
        .filter_map(|run| Some((run, first_and_later(run)?)));
    let slowest = runs.max_by(|(_, (a_ms, _)), (_, (b_ms, _))| a_ms.total_cmp(b_ms));
    let (run, (first_ms, later)) = slowest?;
    let of = &run.first_step;
    let pages = of.first_step_page_faults.zip(of.later_step_page_faults);
    let pages = pages.filter(|(pages, later)| *pages as f64 > *later);
    let pages = pages.map(|(pages, later)| {
        let pages = group_digits(pages);
        format!("touched {pages} new memory pages ({later:.0} in a later step)")
    });
    let counts = [
        ("started", of.first_step_threads, "thread"),
        ("compiled", of.first_step_kernels_compiled, "kernel source"),
        ("loaded", of.first_step_kernels_loaded, "kernel module"),
    ];
    let counts = counts.into_iter().filter_map(|(did, count, noun)| {
        let count = count.filter(|count| *count > 0)?;
        Some(format!("{did} {}", counted(count as usize, noun)))
    });
    let work: Vec<String> = pages.into_iter().chain(counts).collect();
    let cause = if first_ms <= limit_ms(&later) {
        "It did not take longer.".into()
    } else if work.is_empty() {
        "The counts of pages, threads and kernels do not explain it.".into()
    } else {
        let work = work.join(", ");
        format!("It {work}, which later steps need not do. The counts do not say what each costs.")
    };
    Some(format!(
        "The slowest first step took {first_ms:.2} ms, the measured steps after it {later} ms. {cause}"
    ))
}

/// Describes steps 2 and 3 of the run with the longest warm-up.
pub fn after_few(runs: &[&Row]) -> Option<String> {
    let longest = runs.last().filter(|run| run.warmup_steps > 2)?;
    let time = longest.time.as_ref()?;
    let limit_ms = limit_ms(&time.statistics);
    let early = time.warmup_ms.get(1..3)?.iter().zip(2..);
    let early = early.map(|(ms, step)| {
        let kind = if *ms > limit_ms { "slow" } else { "usual" };
        format!("step {step} took {ms:.2} ms ({kind})")
    });
    let early: Vec<String> = early.collect();
    Some(format!(
        "One step need not be enough: the allocator's free blocks, caches and the clock frequency can take further steps \
         to settle. In the run with {} warm-up steps, {}. Slow is over mean plus two standard deviations of the measured \
         steps, {limit_ms:.2} ms.",
        longest.warmup_steps,
        early.join(" and ")
    ))
}

/// Means that differ by at most this part agree, however small their spread: runs of one program differ as much.
const NEAR: f64 = 0.02;

/// Describes how many warm-up steps are enough for means that agree with those after the longest warm-up.
pub fn enough(runs: &[&Row]) -> Option<String> {
    let longest = runs.last()?;
    let most = longest.warmup_steps;
    let fewer = runs.iter().filter(|run| run.warmup_steps < most);
    let ratios = fewer.map(|run| {
        let ratio = Speedup::new(run.statistics()?, longest.statistics()?)?;
        Some((run.warmup_steps, ratio))
    });
    let ratios = ratios.collect::<Option<Vec<_>>>()?;
    let (nearest, ratio) = ratios.last()?;
    let agrees = |own: &Speedup| own.is_clear() && (own.ratio - 1.0).abs() <= own.error.max(NEAR);
    // Whatever agrees with the longest warm-up comes last.
    let differing = ratios.iter().rposition(|(_, own)| !agrees(own));
    let differing = differing.map_or(0, |last| last + 1);
    let is_slower = |own: &Speedup| !agrees(own) && (own.ratio > 1.0 || !own.is_clear());
    let verdict = match ratios.get(differing) {
        _ if !ratios[..differing].iter().all(|(_, own)| is_slower(own)) => {
            "These figures do not decide: a run with less warm-up is not slower, so runs differ by more than their \
             warm-up. More --steps and a quiet machine would."
                .into()
        }
        Some((fewest, _)) => {
            format!("{fewest}, of those tried: the means do not differ from that after {most}.")
        }
        None if !ratio.is_clear() => {
            "These figures do not decide. More --steps and a quiet machine would.".into()
        }
        None => format!(
            "More than {nearest}. Whether {most} are enough only a longer warm-up can show."
        ),
    };
    let before = ratios[..differing].iter();
    let before = before.map(|(steps, ratio)| format!(" After {steps}: {ratio} as long."));
    let percent = 100.0 * NEAR;
    Some(format!(
        "{verdict}{} Means agree within {percent}%, or if 1 lies within two standard errors of their ratio; these must \
         be at most 20% of it.",
        before.collect::<String>()
    ))
}
