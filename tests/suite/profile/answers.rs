//! The answers of `examples/profile` to the handout's questions (a) to (e), from invented recordings.

use super::sentences::{self, Profiled, Timed};
use super::span;
use candle_core::DType;
use tallow::bench::{EndToEndRow, PhaseTime};
use tallow::probe::Kind;
use tallow::profile::{
    Cost, DeviceRates, Grouping, Parts, ProfileReport, Recording, Row, Selection, Span,
};
use tallow::report::{Column, Statistics};

fn stopwatch(phases: &[(&str, f64)]) -> Vec<EndToEndRow> {
    let row = |(phase, ms): &(&str, f64)| EndToEndRow {
        phase: phase.to_string(),
        time: Some(PhaseTime {
            statistics: Statistics::new(&[*ms]).unwrap(),
            samples_ms: vec![*ms],
            warmup_ms: vec![],
            tokens_per_s: None,
            flops: None,
            flops_per_s: None,
            mfu_percent: None,
        }),
        ..Default::default()
    };
    phases.iter().map(row).collect()
}

/// Returns the recording with a million times its times: ms in place of ns.
fn in_ms(mut recording: Recording) -> Recording {
    let mut times = vec![&mut recording.duration_ns];
    for span in &mut recording.spans {
        times.extend([&mut span.start_ns, &mut span.end_ns]);
        times.extend([&mut span.parts.matmul_ns, &mut span.parts.softmax_ns]);
        times.extend([&mut span.parts.scores_ns, &mut span.parts.values_ns]);
    }
    for kernel in &mut recording.kernels {
        times.extend([&mut kernel.start_ns, &mut kernel.end_ns]);
    }
    times.into_iter().for_each(|ns| *ns *= 1_000_000);
    recording
}

fn profiled(recording: Recording, phases: &[(&str, f64)]) -> Profiled {
    Profiled::new(recording, stopwatch(phases)).unwrap()
}

/// Returns a value of the summary's line by its heading; NaN if it is null.
fn line(profiled: &Profiled, heading: &str) -> f64 {
    let (columns, line) = profiled.summary();
    let heads = |column: &&Column| format!("{} {}", column.group, column.title) == heading;
    let column = columns.iter().find(heads).unwrap();
    line.get(&column.key).unwrap().as_f64().unwrap_or(f64::NAN)
}

/// Returns all answers as one text.
fn answers_text(profiled: &Profiled) -> String {
    let answers = sentences::answers(profiled).into_iter();
    answers.map(|answer| answer.answer + "\n").collect()
}

fn paths(recording: &Recording) -> ProfileReport {
    ProfileReport::new(recording, &Selection::phase("forward"), Grouping::Path).unwrap()
}

fn assert_parts(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
}

fn close(pairs: &[(f64, f64)]) {
    for (got, expected) in pairs {
        assert!((got - expected).abs() < 1e-9, "{got}, not {expected}");
    }
}

#[test]
fn answers_of_a_gpu_add_up() {
    let recording = in_ms(super::kernels::invented_recording());
    let phases = [
        ("forward", 300.0),
        ("backward", 500.0),
        ("train step", 990.0),
    ];
    let run = profiled(recording.clone(), &phases);
    close(&[
        (line(&run, "Step time profiler"), 1000.0),
        (line(&run, "% of a step ops"), 25.0),
        (line(&run, "% of a step between"), 8.0),
        (line(&run, "% of a step GPU idle"), 67.0),
        (line(&run, "% of a step unexplained"), 0.0),
        (line(&run, "% of forward matmul"), 100.0 * 110.0 / 300.0),
        (line(&run, "% of a step matmul"), 21.0),
        (line(&run, "% of forward softmax"), 100.0 * 40.0 / 300.0),
        (line(&run, "% of a step softmax"), 4.0),
    ]);
    assert_parts(
        &answers_text(&run),
        &[
            "Forward matches within 0.0%. The whole matches within 1.0%. forward 300.000 ms by the profiler, 300.000 ms by the \
             stopwatch (+0.0%)",
            "A step has 330.000 ms of kernels; the GPU is idle for 670.000 ms.",
            "In forward: nvjet_tst_96x128 (of linear), 23.3% of the time, 1 times a step.",
            "In forward and backward together it is the same: nvjet_tst_96x128 (of linear), 21.2% of the time, 2 times",
            "Other parts of forward from 1% on: softmax_forward_f32 13.3%, badd_f32 6.7%.",
            "from 1% on: badd_f32 7.0%, softmax_forward_f32 4.0%, set memory 1.0%.",
        ],
    );
    // The attention of this recording has no operands, hence no FLOPs.
    assert_eq!(sentences::softmax_against_matmuls(&run.forward_paths), None);
    let mut recording = recording;
    recording.spans[4].cost = Some(Cost::default());
    let text = sentences::softmax_against_matmuls(&paths(&recording)).unwrap();
    assert_parts(
        &text,
        &["matmuls 40.000 ms, softmax 40.000 ms, scale and mask included"],
    );
}

/// Returns a planned step of 1000 ms on the CPU: attention 400 (matmuls 100, softmax 200), swiglu 300 (matmuls 250), a
/// norm 200, and 100 between the calls.
fn planned() -> Recording {
    let call = |path: &str, times, cost, [scores_ns, matmul_ns, softmax_ns]: [u64; 3]| {
        let mut call = span(Kind::Op, path, "forward", times, Some(2));
        call.cost = Some(cost);
        call.parts = Parts {
            matmul_ns,
            scores_ns,
            values_ns: if scores_ns > 0 {
                matmul_ns - scores_ns
            } else {
                0
            },
            softmax_ns,
            attention_ns: 0,
        };
        call
    };
    let cost = |matmul_mflops, other_mflops| Cost {
        matmul_flops: 1e6 * matmul_mflops,
        other_flops: 1e6 * other_mflops,
        ..Default::default()
    };
    in_ms(Recording {
        spans: vec![
            span(Kind::Step, "", "", (0, 1000), None),
            span(Kind::Phase, "", "train step", (0, 1000), Some(0)),
            span(Kind::Phase, "", "forward", (0, 1000), Some(1)),
            call(
                "layers.0/attention",
                (0, 400),
                Cost {
                    softmax_flops: 100e6,
                    ..cost(600.0, 115.0)
                },
                [40, 100, 200],
            ),
            call(
                "layers.0/swiglu",
                (400, 700),
                cost(900.0, 30.0),
                [0, 250, 0],
            ),
            call("layers.0/rms_norm", (700, 900), cost(0.0, 50.0), [0, 0, 0]),
        ],
        threads: vec!["main".into()],
        duration_ns: 1000,
        ..Default::default()
    })
}

#[test]
fn answers_of_a_cpu_add_up() {
    let run = profiled(planned(), &[("train step", 1000.0)]);
    close(&[
        (line(&run, "Step time profiler"), 1000.0),
        (line(&run, "% of a step ops"), 90.0),
        (line(&run, "% of a step between calls"), 10.0),
        (line(&run, "% of a step between"), 0.0),
        (line(&run, "% of forward matmul"), 35.0),
        (line(&run, "% of a step matmul"), 35.0),
        (line(&run, "% of forward softmax"), 20.0),
    ]);
    assert_parts(
        &answers_text(&run),
        &[
            "The whole matches within 0.0%.",
            "softmax of attention 20.0%, rms_norm 20.0%, the rest of attention 10.0%, the rest of swiglu 5.0%",
            "matmuls 100.000 ms (scores 40.000, values 60.000), softmax 200.000 ms",
            // The FLOPs of rope, planned in the same call, do not count as softmax.
            "0.50 times the time of softmax with scale and mask, for 6.0 times the FLOPs",
            "For one FLOP softmax takes 12 times as long",
        ],
    );
}

/// Matmuls take 200 and 300 ms at this rate: half of the step.
#[test]
fn a_step_is_compared_with_its_floor() {
    let rates = DeviceRates {
        matmul_flops: vec![(DType::F32, 3e9), (DType::BF16, 2e12)],
        memory_bytes: 5e9,
    };
    let (recording, all) = (planned(), Selection::default());
    let mut floors = ProfileReport::with_floors(&recording, &all, Grouping::Path, &rates).unwrap();
    let mut run = profiled(recording, &[("train step", 1000.0)]);
    assert!(line(&run, "Step time floor").is_nan() && line(&run, "% of a step floor").is_nan());
    let text = |run: &Profiled| sentences::answers(run).pop().unwrap().answer;
    run.floors = Some((floors.clone(), rates.clone()));
    close(&[
        (line(&run, "Step time floor"), 500.0),
        (line(&run, "% of a step floor"), 50.0),
    ]);
    let known = text(&run);
    assert!(!known.contains("without a formula"), "{known}");
    floors.rows.push(Row {
        total_ns: 7_000_000,
        instances: 1,
        ..Default::default()
    });
    run.floors = Some((floors, rates));
    let text = text(&run);
    assert_parts(
        &text,
        &[
            "A step takes 1000.000 ms by the profiler. Its floor is 500.000 ms, 50.0% of that.",
            "Rates measured here: matmuls 3 GFLOP/s in f32, 2000 GFLOP/s in bf16; a copy 5 GB/s,",
            "Most time above the floor: layers.0/attention 200.000 ms, layers.0/rms_norm 200.000 ms, between the plan's \
             calls, forward 100.000 ms.",
            "Ops without a formula take 7.000 ms and are not in the floor.",
        ],
    );
    assert!(!text.contains("swiglu"), "{text}");
}

/// Times of 10 steps.
fn times(phase: &str, profiler: (f64, f64), stopwatch: (f64, f64)) -> Timed {
    let time = |(mean_ms, std_ms): (f64, f64)| {
        let distance = std_ms * 0.9f64.sqrt();
        let samples = [[mean_ms - distance; 5], [mean_ms + distance; 5]];
        Statistics::new(&samples.concat()).unwrap()
    };
    Timed {
        phase: phase.into(),
        profiler: time(profiler),
        stopwatch: time(stopwatch),
    }
}

#[test]
fn a_profile_matches_or_does_not_or_cannot_be_compared() {
    let answer = |profiler, stopwatch| {
        let timed = [times("forward", profiler, stopwatch)];
        sentences::matches(&timed, 100.0).unwrap()
    };
    for (profiler, stopwatch, words) in [
        ((10.2, 0.1), (10.0, 0.1), "The whole matches within 2.0%."),
        ((9.8, 0.1), (10.0, 0.1), "The whole matches within 2.0%."),
        (
            (15.0, 0.1),
            (10.0, 0.1),
            "The whole does not match (limit 10%). Recording costs time: 50.00 µs for each of 100",
        ),
        (
            (5.0, 0.1),
            (10.0, 0.1),
            "the machine was busy, or not warm, in the run with the stopwatch",
        ),
        ((101.5, 0.1), (10.0, 0.1), "(+915.0%)"),
        (
            (10.0, 0.1),
            (26.0, 30.0),
            "The whole: undecided, because the spread is too large.",
        ),
    ] {
        let got = answer(profiler, stopwatch);
        assert!(got.contains(words), "{words} in {got}");
        assert_eq!(
            got.contains("does not match"),
            words.contains("limit") || words.contains("busy") || words.contains('+')
        );
    }
}

/// A step that matches says nothing about its forward, which the question is about.
#[test]
fn forward_is_judged_by_itself() {
    let timed = [
        times("forward", (15.0, 0.1), (10.0, 0.1)),
        times("backward", (16.0, 0.1), (20.0, 0.1)),
        times("train step", (31.0, 0.1), (30.0, 0.1)),
    ];
    let answer = sentences::matches(&timed, 100.0).unwrap();
    let expected = "Forward does not match (limit 10%). The whole matches within 3.3%.";
    assert!(answer.starts_with(expected), "{answer}");
}

/// A phase that a step enters twice has one time a step.
#[test]
fn a_phase_is_timed_once_a_step() {
    let mut spans = Vec::new();
    for begin in [0, 1000] {
        let step = Some(spans.len());
        spans.push(span(Kind::Step, "", "", (begin, begin + 900), None));
        for (phase, times) in [
            ("forward", (0, 500)),
            ("backward", (500, 600)),
            ("forward", (600, 900)),
        ] {
            let times = (begin + times.0, begin + times.1);
            spans.push(span(Kind::Phase, "", phase, times, step));
            spans.push(span(
                Kind::Op,
                "linear",
                phase,
                times,
                Some(spans.len() - 1),
            ));
        }
    }
    let recording = Recording {
        spans,
        threads: vec!["main".into()],
        duration_ns: 1900,
        ..Default::default()
    };
    let timed = profiled(recording, &[("forward", 8e-4), ("train step", 9e-4)]).timed();
    let forward = &timed[0].profiler;
    assert_eq!((forward.n, forward.std_ms), (2, Some(0.0)));
    close(&[(forward.mean_ms, 8e-4)]);
}

/// Without ops of backward, the shares of a step are not known.
#[test]
fn a_backward_that_was_not_recorded_is_not_judged() {
    let recording = Recording {
        spans: vec![
            span(Kind::Step, "", "", (0, 1000), None),
            span(Kind::Phase, "", "forward", (0, 400), Some(0)),
            span(Kind::Op, "linear", "forward", (0, 400), Some(1)),
            span(Kind::Phase, "", "backward", (400, 900), Some(0)),
            span(Kind::Phase, "", "optimizer", (900, 1000), Some(0)),
            span(Kind::Op, "adamw", "optimizer", (900, 1000), Some(4)),
        ],
        threads: vec!["main".into()],
        duration_ns: 1000,
        ..Default::default()
    };
    let phases = [("forward", 4e-4), ("backward", 5e-4), ("train step", 1e-3)];
    let run = profiled(recording, &phases);
    let all = answers_text(&run);
    assert_eq!(all.matches("Backward was not recorded").count(), 2, "{all}");
    assert!(!all.contains("of the training step"), "{all}");
    assert!(line(&run, "% of a step matmul").is_nan());
}

/// Returns a step of 100 ns with these ops: name, time, instances, and the time in matmuls.
fn report(ops: &[(&str, u64, usize, u64)]) -> ProfileReport {
    let rows = ops
        .iter()
        .map(|&(name, total_ns, instances, matmul_ns)| Row {
            name: name.into(),
            total_ns,
            instances,
            parts: Parts {
                matmul_ns,
                ..Default::default()
            },
            ..Default::default()
        });
    ProfileReport {
        rows: rows.collect(),
        whole_ns: 100,
        steps: Some(1),
    }
}

#[test]
fn what_leads_and_how_shares_change_is_said_of_the_figures() {
    let forward = report(&[("linear", 60, 10, 0), ("add", 40, 5, 0)]);
    let backward = report(&[("linear backward", 80, 20, 0)]);
    let answer = sentences::most_time(&forward, Some(&backward)).unwrap();
    assert_parts(
        &answer,
        &[
            "In forward: linear, 60.0% of the time, 10 times a step.",
            "it is another: linear backward, 40.0% of the time, 20 times a step.",
        ],
    );
    let backward = report(&[("linear", 1, 2, 0), ("linear backward", 60, 10, 0)]);
    let answer = sentences::most_time(&forward, Some(&backward)).unwrap();
    let same = "it is the same: linear, 30.5% of the time, 12 times a step.";
    assert_parts(&answer, &[same]);

    let work = |matmul_percent| report(&[("linear", matmul_percent, 1, matmul_percent)]);
    for (before, whole, words) in [
        (70, 60, "10.0 points less"),
        (70, 85, "15.0 points more"),
        (70, 70, "nearly the same"),
    ] {
        let answer = sentences::matmul_share(&work(before), &work(whole), "the training step");
        assert_parts(&answer, &[words]);
    }
    let mut nearly = report(&[("linear", 705, 1, 705)]);
    nearly.whole_ns = 1000;
    let answer = sentences::matmul_share(&work(70), &nearly, "the training step");
    assert_parts(&answer, &["nearly the same"]);
    assert_eq!(
        sentences::others(&work(99), "forward"),
        "Nothing else takes 1% of forward."
    );

    let op = |name: &str, ns, parts, flops| {
        let [matmul_flops, softmax_flops, other_flops] = flops;
        Row {
            name: name.into(),
            total_ns: ns,
            instances: 1,
            parts,
            cost: Some(Cost {
                matmul_flops,
                softmax_flops,
                other_flops,
                ..Default::default()
            }),
            ..Default::default()
        }
    };
    let (mut softmax, mut matmul) = (Parts::default(), Parts::default());
    (softmax.softmax_ns, matmul.matmul_ns) = (1_000_000, 2_000_000);
    let paths = ProfileReport {
        rows: vec![
            op("attn/scores/matmul", 2_000_000, matmul, [1e6, 0.0, 0.0]),
            op("attn/mask", 1_000_000, Parts::default(), [0.0, 0.0, 4e5]),
            op("attn/softmax", 1_000_000, softmax, [0.0, 6e5, 6e5]),
            op("ffn/matmul", 9_000_000, matmul, [1e9, 0.0, 0.0]),
        ],
        steps: Some(1),
        ..Default::default()
    };
    assert_parts(
        &sentences::softmax_against_matmuls(&paths).unwrap(),
        &[
            "matmuls 2.000 ms (scores 2.000, values 0.000), softmax 1.000 ms, scale and mask 1.000 ms apart from it",
            "1.00 times the time of softmax with scale and mask, for 1.0 times the FLOPs (0.5 and 0.5 GFLOP/s)",
            "takes no longer here",
        ],
    );
}

/// With such a variation between steps, shares are not conclusive.
#[test]
fn unsteady_steps_leave_shares_open() {
    let with = |std_ns: f64| {
        let distance = (std_ns * 0.9f64.sqrt()) as u64;
        let steps = (0..10).flat_map(|step: usize| {
            let start = 1_000_000_000 * step as u64;
            let end = start
                + if step < 5 {
                    10_000_000 - distance
                } else {
                    10_000_000 + distance
                };
            let parent = Some(3 * step);
            [
                span(Kind::Step, "", "", (start, end), None),
                span(Kind::Phase, "", "forward", (start, end), parent),
                span(
                    Kind::Op,
                    "linear",
                    "forward",
                    (start, end),
                    parent.map(|step| step + 1),
                ),
            ]
        });
        let recording = Recording {
            spans: steps.collect::<Vec<Span>>(),
            threads: vec!["main".into()],
            duration_ns: 10_000_000_000,
            ..Default::default()
        };
        answers_text(&profiled(recording, &[("forward", 10.0)]))
    };
    let unsteady = with(9e6);
    let doubt = "Undecided: the standard deviation of the recorded steps is 90% of their mean.";
    assert_eq!(unsteady.matches(doubt).count(), 2, "{unsteady}"); // (b) and (c)
    assert!(!with(1e6).contains("decide"));
}
