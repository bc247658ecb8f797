//! Table and answers of the end-to-end benchmarks, from made-up times.

#[path = "../../examples/end_to_end/answers.rs"]
mod answers;
#[path = "../../examples/end_to_end/reasons.rs"]
#[allow(dead_code)] // the program's own
mod reasons;
#[path = "../../examples/end_to_end/table.rs"]
#[allow(dead_code)]
mod table;
#[path = "../../examples/end_to_end/warmup.rs"]
mod warmup;

use crate::words;
use answers::{of_runs, of_values};
use reasons::{Counted, reasons};
use rstest::rstest;
use serde_json::json;
use table::{Compared, Row};
use tallow::bench::{EndToEndRow, Execution, FirstStep, PhaseTime, Status, StepMemory, UPDATE};
use tallow::memory::Mode;
use tallow::precision::Precision;
use tallow::report::{Answer, Format, Report, Speedup, Statistics};

const QUIET: f64 = 0.01;
const MIB: u64 = 1 << 20;

fn time(warmup_ms: &[f64], samples_ms: &[f64]) -> Option<PhaseTime> {
    Some(PhaseTime {
        statistics: Statistics::new(samples_ms).unwrap(),
        samples_ms: samples_ms.to_vec(),
        warmup_ms: warmup_ms.to_vec(),
        tokens_per_s: Some(12_345.6),
        flops: None,
        flops_per_s: None,
        mfu_percent: Some(41.5),
    })
}

/// A configuration in all modes, as the benchmark measures it.
fn measured(length: usize, execution: Execution, ms: f64) -> Vec<Row> {
    let phases = [
        (Mode::Forward, "forward", 1.0),
        (Mode::ForwardBackward, "forward", 1.1),
        (Mode::ForwardBackward, "backward", 1.9),
        (Mode::ForwardBackward, "forward+backward", 3.0),
        (Mode::TrainStep, "forward", 1.2),
        (Mode::TrainStep, "backward", 1.8),
        (Mode::TrainStep, "optimizer", 0.5),
        (Mode::TrainStep, UPDATE, 2.3),
        (Mode::TrainStep, "train step", 3.5),
    ];
    let row = |(mode, phase, times): (Mode, &str, f64)| {
        let samples = [-1.0, 1.0].iter().cycle().take(10);
        let samples: Vec<f64> = samples.map(|d| ms * (times + d / 20.0)).collect();
        Row {
            counted: None,
            row: EndToEndRow {
                size: "tiny".into(),
                batch_size: 4,
                context_length: length,
                execution,
                warmup_steps: 5,
                mode,
                phase: phase.into(),
                time: time(&[], &samples),
                memory: Some(StepMemory {
                    peak_bytes: Some((length as u64) << 20),
                    allocated_bytes: Some(3 << 20),
                    ..Default::default()
                }),
                ..Default::default()
            },
        }
    };
    phases.map(row).to_vec()
}

fn compared(executions: &[Execution]) -> Compared {
    let names = executions.iter().map(|own| own.name()).collect();
    Compared::new(names, vec!["f32"], false)
}

fn rows(executions: &[Execution]) -> Vec<Row> {
    let of_length = |length: usize| {
        let all = executions.iter().enumerate();
        all.flat_map(move |(i, execution)| {
            measured(length, *execution, length as f64 / (20.0 + 10.0 * i as f64))
        })
    };
    [256, 1024].into_iter().flat_map(of_length).collect()
}

pub fn report(executions: &[Execution]) -> Report {
    let compared = compared(executions);
    let mut report = Report {
        columns: compared.columns(),
        ..Default::default()
    };
    compared.show(&rows(executions), &mut report);
    report
}

pub const BOTH: [Execution; 2] = [Execution::Eager, Execution::Planned];

#[test]
fn the_summary_in_80_characters() {
    let expected = "\
Configuration: model tiny; B 4; attention naive; checkpointing none; warm-up 5;
  precision f32; execution eager

   T  Forward (ms)      F+B (ms)  Ratio     Step (ms)  Backward (ms)
────  ────────────  ────────────  ─────  ────────────  ─────────────
 256  12.80 ± 0.67  38.40 ± 0.67   3.00  44.80 ± 0.67   24.32 ± 0.67
1024  51.20 ± 2.70   153.6 ± 2.7   3.00   179.2 ± 2.7   97.28 ± 2.70

   T  Optimizer (ms)  Peak (MiB)      B+O (ms)  Tokens/s  MFU (%)
";
    let text = report(&[Execution::Eager]).to_text(Some(80));
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("\n\n   T  After the step (MiB)\n"), "{text}");
}

#[test]
fn the_summary_in_100_characters() {
    let text = report(&[Execution::Eager]).to_text(Some(100));
    let expected = "   T  Forward (ms)      F+B (ms)  Ratio     Step (ms)  Backward (ms)  Optimizer (ms)  Peak (MiB)";
    assert_eq!(text.lines().nth(3), Some(expected), "{text}");
}

#[test]
fn the_summary_in_160_characters() {
    let text = report(&[Execution::Eager]).to_text(Some(160));
    let expected = "   T  Forward (ms)      F+B (ms)  Ratio     Step (ms)  Backward (ms)  Optimizer (ms)  Peak (MiB)      B+O (ms)  Tokens/s  MFU (%)  After the step (MiB)";
    assert_eq!(text.lines().nth(2), Some(expected), "{text}");
}

#[test]
fn what_is_compared_stands_together_with_its_speedup() {
    let expected = "\
Configuration: model tiny; B 4; attention naive; checkpointing none; warm-up 5; precision f32;
  status ok

                                Time (ms) ──────────────────────────  Peak (MiB) ─────
   T  Phase                            eager       planned  speed-up    eager  planned
────  ────────────────────────  ────────────  ────────────  ────────  ───────  ───────
 256  forward                   12.80 ± 0.67   8.53 ± 0.45      1.50    256.0    256.0
 256  F+B: forward              14.08 ± 0.67   9.39 ± 0.45      1.50    256.0    256.0
 256  F+B: backward             24.32 ± 0.67  16.21 ± 0.45      1.50    256.0    256.0
 256  forward+backward          38.40 ± 0.67  25.60 ± 0.45      1.50    256.0    256.0
 256  step: forward             15.36 ± 0.67  10.24 ± 0.45      1.50    256.0    256.0
 256  step: backward            23.04 ± 0.67  15.36 ± 0.45      1.50    256.0    256.0
 256  step: optimizer            6.40 ± 0.67   4.27 ± 0.45      1.50    256.0    256.0
 256  step: backward+optimizer  29.44 ± 0.67  19.63 ± 0.45      1.50    256.0    256.0
 256  train step                44.80 ± 0.67  29.87 ± 0.45      1.50    256.0    256.0
";
    let report = report(&BOTH);
    let text = report.to_text(Some(100));
    assert_eq!(text.split("1024").next(), Some(expected), "{text}");
    let mut markdown = Vec::new();
    report.write_to(Format::Markdown, &mut markdown).unwrap();
    let markdown = String::from_utf8(markdown).unwrap();
    assert!(markdown.contains("| Time speed-up |"), "{markdown}");
}

/// A run that does not fit shows its status as the time, and has no ratio.
#[test]
fn what_did_not_run_says_so_in_its_place() {
    let mut rows = measured(256, Execution::Eager, 10.0);
    let mut refused = measured(1024, Execution::Eager, 10.0).remove(0);
    refused.row.status = Status::OutOfMemory;
    refused.row.time = None;
    rows.push(refused);
    let lines = compared(&[Execution::Eager]).shown_rows(&rows);
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[1].get("forward"), Some(&json!("OOM")));
    assert_eq!(lines[1].get("ratio"), Some(&json!(null)));
    assert_eq!(lines[0].get("ratio"), Some(&json!(3.0)));
}

#[test]
fn durations_and_variability_follow_from_the_times() {
    let said = of_runs(&rows(&BOTH));
    // The table and the answer have one backward.
    let lines = compared(&[Execution::Eager]).shown_rows(&rows(&[Execution::Eager]));
    assert_eq!(lines[0].get("backward"), Some(&json!("24.32 ± 0.67")));
    for (i, words) in [
        (
            0,
            "T 256 eager: forward with loss 14.08 ± 0.67 ms, backward 24.32 ± 0.67 ms; backward takes 1.73x as long",
        ),
        (
            1,
            "is 1.5% to 10.5% of the mean (most: T 1024 eager optimizer of train-step): over 5% in 8 of 36 times.",
        ),
    ] {
        let answer = &said[i].answer;
        assert!(answer.contains(words), "{words} in {answer}");
    }
    let steady = steps(5, &[], &[10.0, 10.1, 9.9]);
    let said = of_runs(&[steady]);
    assert!(said[0].answer.contains("small, at most 5%"), "{said:?}");
}

/// Training steps after some warm-up.
fn steps(warmup_steps: usize, warmup_ms: &[f64], samples_ms: &[f64]) -> Row {
    Row {
        row: EndToEndRow {
            phase: "train step".into(),
            warmup_steps,
            time: time(warmup_ms, samples_ms),
            ..Default::default()
        },
        ..Default::default()
    }
}

#[test]
fn warm_up_is_judged_by_spread() {
    let steady = [10.0, 10.1, 9.9, 10.0];
    let longest = steps(5, &[90.0, 14.0, 10.0, 10.0, 10.0], &steady);
    let mut cold = steps(0, &[], &[100.0, 10.0, 10.1, 9.9]);
    cold.row.first_step = FirstStep {
        first_step_page_faults: Some(1000),
        later_step_page_faults: Some(2.0),
        first_step_threads: Some(1),
        ..Default::default()
    };
    let one = steps(1, &[90.0], &[12.0, 12.1, 11.9, 12.0]);
    let two = steps(2, &[90.0, 12.0], &steady);
    let runs = [&cold, &one, &two, &longest];
    let without = warmup::without(&runs, true).unwrap();
    for words in [
        "It took 100.00 ms, 10.0 times the mean of the others",
        "10.00 ± 0.10 ms into 32.50 ± 45.00 ms",
    ] {
        assert!(without.contains(words), "{without}");
    }
    let why = warmup::why(&runs).unwrap();
    assert!(
        why.contains("touched 1,000 new memory pages (2 in a later step), started 1 thread"),
        "{why}"
    );
    let few = warmup::after_few(&runs).unwrap();
    assert!(
        few.contains("step 2 took 14.00 ms (slow) and step 3 took 10.00 ms (usual)"),
        "{few}"
    );
    let enough = |runs: &[&Row]| warmup::enough(runs).unwrap();
    let decided = enough(&runs);
    assert!(
        decided.starts_with("2, of those tried") && decided.contains("After 1: 1.20x as long."),
        "{decided}"
    );
    let exact = steps(5, &[90.0; 5], &[10.0, 10.001, 9.999]);
    let cold_and_steady = steps(0, &[], &steady);
    let alike = enough(&[&cold_and_steady, &longest]);
    assert!(
        alike.starts_with("0, of those tried: the means do not differ"),
        "{alike}"
    );

    // One outlier decides nothing; a clear difference leaves open whether the longest is enough.
    let outlier = steps(5, &[90.0; 5], &[10.0, 10.0, 10.0, 80.0]);
    assert!(
        enough(&[&steps(2, &[90.0; 2], &steady), &outlier])
            .starts_with("These figures do not decide")
    );
    let slower = steps(2, &[90.0; 2], &[15.0, 15.1, 14.9]);
    let contradiction = enough(&[&cold_and_steady, &slower, &longest]);
    assert!(
        contradiction.starts_with("These figures do not decide: a run with less warm-up"),
        "{contradiction}"
    );
    // A difference between runs that no one would measure for, though their spread is smaller.
    let near = steps(2, &[90.0; 2], &[10.15, 10.151, 10.149]);
    assert!(enough(&[&near, &exact]).starts_with("2, of those tried"));
    let faster = steps(2, &[90.0; 2], &[9.0, 9.1, 8.9]);
    let contradiction = enough(&[&faster, &longest]);
    assert!(
        contradiction.starts_with("These figures do not decide: a run with less warm-up"),
        "{contradiction}"
    );
    let slower = enough(&[&slower, &longest]);
    assert!(
        slower.starts_with("More than 2. ") && slower.contains("After 2: 1.50x as long."),
        "{slower}"
    );
    let warm = steps(0, &[], &[10.0, 10.1, 9.9, 10.0]);
    assert!(
        warmup::without(&[&warm], false)
            .unwrap()
            .contains("--isolate")
    );
    let unexplained = warmup::why(&[&steps(0, &[], &[100.0, 10.0, 10.0])]).unwrap();
    assert!(unexplained.contains("do not explain it"), "{unexplained}");
    // Each mode has its own answers.
    let mut forward = cold.clone();
    (forward.row.mode, forward.row.phase) = (Mode::Forward, "forward".into());
    let all = warmup::answers(&[forward, cold], true);
    assert!(
        all.iter().any(|own| own.question.ends_with("(train step)")),
        "{all:?}"
    );
}

/// Runs with several warm-ups are one group for each configuration, named as the program names them.
#[test]
fn warm_up_is_answered_once_for_each_configuration() {
    let questions = |executions: &[Execution]| -> Vec<String> {
        let all = [0, 1, 5].into_iter().flat_map(|warmup_steps| {
            let mut rows = rows(executions);
            rows.retain(|row| row.context_length == 256 && row.mode == Mode::TrainStep);
            for row in &mut rows {
                row.row.warmup_steps = warmup_steps;
                row.row.time.as_mut().unwrap().warmup_ms = vec![50.0; warmup_steps];
            }
            rows
        });
        let answers = warmup::answers(&all.collect::<Vec<_>>(), true).into_iter();
        answers.map(|own| own.question).collect()
    };
    let all = [
        "What changes without warm-up?",
        "Why does the first step take longer?",
        "Why can results after 1 or 2 warm-up steps still differ?",
        "How many warm-up steps are enough?",
    ];
    assert_eq!(questions(&[Execution::Eager]), all);
    let named = BOTH.map(|own| all.map(|one| format!("{one} ({} train step)", own.name())));
    assert_eq!(questions(&BOTH), named.concat());
}

/// A whole step in one precision; without a time it did not fit.
fn row(precision: Precision, mode: Mode, ms: Option<f64>, bytes: u64) -> Row {
    let phase = match mode {
        Mode::Forward => "forward",
        _ => "forward+backward",
    };
    let samples = |ms: f64| time(&[], &[ms * (1.0 - QUIET), ms, ms * (1.0 + QUIET)]);
    Row {
        counted: None,
        row: EndToEndRow {
            size: "tiny".into(),
            batch_size: 4,
            context_length: 64,
            precision,
            mode,
            phase: phase.into(),
            status: ms.map_or(Status::OutOfMemory, |_| Status::Ok),
            time: ms.and_then(samples),
            memory: ms.map(|_| StepMemory {
                peak_bytes: Some(bytes),
                ..Default::default()
            }),
            estimate_bytes: bytes,
            weight_cast_bytes: (precision == Precision::BF16).then_some(100 * MIB),
            ..Default::default()
        },
    }
}

const DROPPING: Precision = Precision::BF16.with_dropped_casts(true);

/// The answers on rows in f32, bf16 and bf16 that drops its casts.
fn answers_of(rows: &[Row]) -> Vec<Answer> {
    let values: Vec<&str> = [Precision::F32, Precision::BF16, DROPPING]
        .into_iter()
        .filter(|own| rows.iter().any(|row| row.precision == *own))
        .map(Precision::name)
        .collect();
    let compared = Compared::new(vec!["eager"], values, false);
    of_values(&compared.comparisons(rows), &compared)
}

#[test]
fn precisions_are_compared_with_f32() {
    let mut phase = row(Precision::F32, Mode::ForwardBackward, Some(1.0), 1);
    phase.row.phase = "backward".into(); // no whole step: no answer is on it
    let rows = [
        row(Precision::F32, Mode::Forward, Some(30.0), 400 * MIB),
        phase,
        row(
            Precision::F32,
            Mode::ForwardBackward,
            Some(90.0),
            1000 * MIB,
        ),
        row(Precision::BF16, Mode::Forward, Some(40.0), 450 * MIB),
        row(
            Precision::BF16,
            Mode::ForwardBackward,
            Some(60.0),
            700 * MIB,
        ),
        row(DROPPING, Mode::Forward, Some(44.0), 360 * MIB),
    ];
    let compared = Compared::new(
        vec!["eager"],
        vec!["f32", "bf16", "bf16-dropping-casts"],
        false,
    );
    let all = compared.comparisons(&rows);
    let [forward, _, both] = &all[..] else {
        panic!("{} comparisons", all.len());
    };
    assert_eq!(forward.outcome(), "ok");
    let ratio = |own: &table::Comparison| own.speedup("f32", "bf16").unwrap().ratio;
    assert_eq!([ratio(forward), ratio(both)], [0.75, 1.5]);
    let line = &compared.shown_rows(&rows)[0];
    assert_eq!(line.get("change bf16"), Some(&"12.5% more".into()));
    assert_eq!(
        line.get("change bf16-dropping-casts"),
        Some(&"10.0% less".into())
    );
    let answers = answers_of(&rows);
    for expected in [
        "Speed-ups of bf16 over f32, ratios of mean times.",
        " forward: 0.75x (40.00 ± 0.40 against 30.00 ± 0.30 ms). \
         forward+backward: 1.50x (60.00 ± 0.60 against 90.00 ± 0.90 ms).",
        "Peak of bf16: forward 12.5% more (450.0 MiB, f32 400.0 MiB); forward+backward 30.0% less (700.0 MiB, f32 \
         1,000.0 MiB).",
        "adds a copy of each linear weight, at most 100.0 MiB here",
        "A trend needs three sizes of model",
    ] {
        let is_there = answers.iter().any(|own| own.answer.contains(expected));
        assert!(is_there, "{expected}\n{answers:#?}");
    }
}

#[test]
fn a_trend_is_stated_where_a_power_law_fits_clear_ratios() {
    let clear = |ratio| Speedup { ratio, error: 0.02 };
    let trend = |ratios: &[Speedup]| {
        let sizes = [1e6, 4e6, 16e6, 64e6].into_iter();
        answers::trend(sizes.zip(ratios.iter().copied()).collect())
    };
    assert_eq!(
        trend(&[clear(1.0), clear(2.0), clear(4.0)]).unwrap(),
        "1.00x, 2.00x, 4.00x from the smallest model to the largest: it changes as parameters^0.50 (R^2 1.00)"
    );
    // Once printed as "grows as parameters^0.34".
    let jumping = trend(&[clear(2.95), clear(2.07), clear(9.04)]).unwrap();
    assert!(
        jumping.contains("no trend, a power law has R^2 0."),
        "{jumping}"
    );
    let flat = trend(&[clear(1.5), clear(1.52), clear(1.49)]).unwrap();
    assert!(flat.contains("it does not depend on the size"), "{flat}");
    let noisy = Speedup {
        ratio: 2.0,
        error: 1.5,
    };
    let noisy = trend(&[clear(1.0), noisy, clear(4.0)]).unwrap();
    assert!(noisy.contains("too large for a trend"), "{noisy}");
    assert_eq!(trend(&[clear(1.0), clear(2.0)]), None);
}

#[rstest]
#[case(None, Some(1.0), "bf16 avoids OOM")]
#[case(Some(1.0), None, "bf16 OOM")]
#[case(None, None, "OOM")]
#[case(Some(1.0), Some(1.0), "ok")]
fn what_fits_in_one_precision_only_is_said(
    #[case] f32_ms: Option<f64>,
    #[case] bf16_ms: Option<f64>,
    #[case] expected: &str,
) {
    let rows = [
        row(Precision::F32, Mode::Forward, f32_ms, 800 * MIB),
        row(Precision::BF16, Mode::Forward, bf16_ms, 500 * MIB),
    ];
    let compared = Compared::new(vec!["eager"], vec!["f32", "bf16"], false);
    let all = compared.comparisons(&rows);
    assert_eq!(all[0].outcome(), expected);
    let is_compared = f32_ms.is_some() && bf16_ms.is_some();
    assert_eq!(all[0].speedup("f32", "bf16").is_some(), is_compared);
    let line = &compared.shown_rows(&rows)[0];
    assert_eq!(line.get("outcome"), Some(&json!(expected)));
}

#[test]
fn rows_without_f32_are_shown_and_not_compared() {
    let rows = [row(Precision::BF16, Mode::Forward, Some(1.0), MIB)];
    let line = &Compared::new(vec!["eager"], vec!["f32", "bf16"], false).shown_rows(&rows)[0];
    assert_eq!(line.get("change bf16"), Some(&json!(null)));
    assert!(answers_of(&rows).is_empty());
    assert!(of_values(&[], &Compared::new(vec!["eager"], vec![], false)).is_empty());
}

/// One phase of a model in eager and in planned execution.
fn pair(model: &str, phase: &str, [eager_ms, planned_ms]: [f64; 2], spread: f64) -> [Row; 2] {
    let row = |execution: Execution, ms: f64| Row {
        counted: Some(Counted {
            calls: 1200,
            plan_ms: (execution == Execution::Planned).then_some(10.0),
        }),
        row: EndToEndRow {
            size: model.into(),
            execution,
            mode: match phase {
                "forward" => Mode::Forward,
                _ => Mode::TrainStep,
            },
            phase: phase.into(),
            time: time(&[], &[ms * (1.0 - spread), ms, ms * (1.0 + spread)]),
            ..Default::default()
        },
    };
    [
        row(Execution::Eager, eager_ms),
        row(Execution::Planned, planned_ms),
    ]
}

#[track_caller]
fn assert_says(text: &str, sentences: &[&str]) {
    for sentence in sentences {
        assert!(text.contains(sentence), "{sentence:?} is not in {text:?}");
    }
}

#[test]
fn phases_are_compared_by_configuration() {
    let speedups = |pairs: &[[Row; 2]]| {
        let compared = compared(&BOTH);
        let answers = of_values(&compared.comparisons(&pairs.concat()), &compared);
        let mut answers = answers.into_iter();
        answers.find(|own| own.question.starts_with("How does planned change"))
    };
    let one = [
        pair("a", "forward", [9.0, 4.5], QUIET),
        pair("a", "train step", [9.0, 4.5], 0.9),
    ];
    assert_says(
        &speedups(&one).unwrap().answer,
        &[
            "forward: 2.00x (4.50 ± 0.04 against 9.00 ± 0.09 ms).",
            "train step: unclear, between ",
            "more steps on a quiet machine would decide",
        ],
    );
    let mut several = one.to_vec();
    several.push(pair("b", "forward", [8.0, 16.0], QUIET));
    several.push(pair("b", "train step", [8.0, 16.0], 0.9));
    assert_says(
        &speedups(&several).unwrap().answer,
        &[
            " forward: a 2.00x; b 0.50x.",
            " train step: a unclear, between ",
        ],
    );
    assert_eq!(speedups(&[]), None);
    let alike = speedups(&[pair("a", "forward", [10.0, 10.0], QUIET)]).unwrap();
    assert_says(&alike.answer, &["forward: 1.00x"]);
}

#[test]
fn reasons_are_given_for_a_step_that_is_faster() {
    let reasons = |times_ms: [f64; 2], spread: f64| {
        let shorter = pair("b", "train step", [1.0, 9.0], spread);
        let rows = [pair("a", "train step", times_ms, spread), shorter].concat();
        reasons(&compared(&BOTH).comparisons(&rows)).unwrap()
    };
    assert_says(
        &reasons([8.0, 4.0], QUIET),
        &[
            "a train step: a planned step is 2.00x as fast as an eager one.",
            "It makes 1,200 calls of fused kernels in one arena; the eager step runs 1,200 ops",
            "Planning took 10.00 ms: the gain of 3 steps.",
        ],
    );
    for (times_ms, spread, verdict) in [
        ([4.0, 8.0], QUIET, "a planned step is 0.50x as fast"),
        ([4.0, 3.0], 0.9, "these figures do not decide"),
        (
            [4.4, 4.0],
            0.1,
            "no difference between a planned step and an eager one is shown (1.10x ± 0.18)",
        ),
    ] {
        let text = reasons(times_ms, spread);
        assert_says(&text, &[verdict]);
        assert!(!text.contains("Planning"), "{text}");
    }
}
