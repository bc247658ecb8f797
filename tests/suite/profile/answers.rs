//! The answers of `examples/profile` to the handout's questions (a) to (e), from invented recordings.

use super::figures::{AttentionFigures, Figures, Floors, Profiled, Share, Timed, Work};
use super::{sentences, span};
use candle_core::DType;
use tallow::bench::{EndToEndRow, PhaseTime};
use tallow::probe::Kind;
use tallow::profile::{Cost, DeviceRates, Grouping, Parts, ProfileReport, Recording, Selection};
use tallow::report::Statistics;

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

fn figures(recording: Recording, stopwatch: Vec<EndToEndRow>) -> Figures {
    let profiled = Profiled {
        recording,
        stopwatch,
    };
    profiled.figures().unwrap()
}

/// Returns all answers as one text.
fn answers_text(figures: &Figures) -> String {
    let answers = sentences::answers(figures).into_iter();
    answers.map(|answer| answer.answer + "\n").collect()
}

fn close(pairs: &[(f64, f64)]) {
    for (got, expected) in pairs {
        assert!((got - expected).abs() < 1e-9, "{got}, not {expected}");
    }
}

#[test]
fn answers_of_a_gpu_add_up() {
    let timed = stopwatch(&[
        ("forward", 3e-4),
        ("backward", 5e-4),
        ("train step", 9.9e-4),
    ]);
    let figures = figures(super::kernels::invented_recording(), timed);
    let attention = figures.attention.as_ref().unwrap();
    let line = |key: &str| figures.line.get(key).unwrap().as_f64().unwrap();
    let (busy_ms, _) = figures.busy_and_idle_ms.unwrap();
    close(&[
        (line("profiled_ms_per_step"), 1e-3),
        (busy_ms, 330e-6),
        (line("ops_percent"), 25.0),
        (line("candle_percent"), 8.0),
        (line("gpu_idle_percent"), 67.0),
        (line("unexplained_percent"), 0.0),
        (line("matmul_percent_of_forward"), 100.0 * 110.0 / 300.0),
        (line("matmul_percent"), 21.0),
        (line("softmax_percent_of_forward"), 100.0 * 40.0 / 300.0),
        (line("softmax_percent"), 4.0),
        (attention.matmul_ms, 40e-6),
        (attention.softmax_ms, 40e-6),
    ]);
    let all = answers_text(&figures);
    for part in [
        "Forward matches within 0.0%. The whole matches within 1.0%. forward 0.000 ms by the profiler, 0.000 ms by the stopwatch (+0.0%)",
        "In forward: nvjet_tst_96x128 (of linear), 23.3% of the time, 1 times a step.",
        "It is the same in forward and backward together: nvjet_tst_96x128 (of linear), 21.2% of the time, 2 times",
        "Parts of forward from 1% on: softmax_forward_f32 13.3%, badd_f32 6.7%.",
        "from 1% on: badd_f32 7.0%, softmax_forward_f32 4.0%, set memory 1.0%.",
    ] {
        assert!(all.contains(part), "{part} in {all}");
    }
}

/// Returns a planned step of 1000 ns on the CPU: attention 400 (matmuls 100, softmax 200), swiglu 300 (matmuls 250), a
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
    let cost = |matmul_flops, other_flops| Cost {
        matmul_flops,
        other_flops,
        ..Default::default()
    };
    Recording {
        spans: vec![
            span(Kind::Step, "", "", (0, 1000), None),
            span(Kind::Phase, "", "train step", (0, 1000), Some(0)),
            span(Kind::Phase, "", "forward", (0, 1000), Some(1)),
            call(
                "layers.0/attention",
                (0, 400),
                Cost {
                    softmax_flops: 100.0,
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
    }
}

#[test]
fn answers_of_a_cpu_add_up() {
    let figures = figures(planned(), stopwatch(&[("train step", 1e-3)]));
    let attention = figures.attention.as_ref().unwrap();
    let line = |key: &str| figures.line.get(key).unwrap().as_f64().unwrap();
    let (scores_ms, values_ms) = attention.scores_and_values_ms.unwrap();
    close(&[
        (line("profiled_ms_per_step"), 1e-3),
        (line("ops_percent"), 90.0),
        (line("between_calls_percent"), 10.0),
        (line("candle_percent"), 0.0),
        (line("matmul_percent_of_forward"), 35.0),
        (line("matmul_percent"), 35.0),
        (line("softmax_percent_of_forward"), 20.0),
        (attention.matmul_ms / attention.softmax_ms, 0.5),
        // The FLOPs of rope, planned in the same call, do not count as softmax.
        (attention.matmul_flops / attention.softmax_flops, 6.0),
        (scores_ms, 40e-6),
        (values_ms, 60e-6),
    ]);
    let all = answers_text(&figures);
    let others = "softmax of attention 20.0%, rms_norm 20.0%, the rest of attention 10.0%, the rest of swiglu 5.0%";
    for part in [
        "The whole matches within 0.0%.",
        others,
        "0.50 times the time of softmax with scale and mask, for 6.0 times the FLOPs",
        "For one FLOP softmax takes 12 times as long",
    ] {
        assert!(all.contains(part), "{part} in {all}");
    }
}

/// Matmuls take 200 and 300 ns at this rate: half of the step.
#[test]
fn a_step_is_compared_with_its_floor() {
    let rates = DeviceRates {
        matmul_flops: vec![(DType::F32, 3e9), (DType::BF16, 2e12)],
        memory_bytes: 5e9,
    };
    let (recording, all) = (planned(), Selection::default());
    let report = ProfileReport::with_floors(&recording, &all, Grouping::Path, &rates).unwrap();
    let floors = Floors::new(&report, &rates);
    close(&[
        (floors.measured_ms, 1e-3),
        (floors.floor_ms, 5e-4),
        (floors.percent(), 50.0),
        (floors.unknown_ms, 0.0),
    ]);
    let lost: Vec<&str> = floors
        .lost_ms
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    let gap = "between the plan's calls, forward";
    let expected = [
        "layers.0/attention",
        "layers.0/rms_norm",
        gap,
        "layers.0/swiglu",
    ];
    assert_eq!(lost, expected);
    let floors = Floors {
        unknown_ms: 7.0,
        ..floors
    };
    let text = sentences::floor(&floors).answer;
    for part in [
        "Its floor is 0.001 ms, 50.0% of that. Rates measured here: matmuls 3 GFLOP/s in f32, 2000 GFLOP/s in bf16; a copy 5 GB/s,",
        "Most time above the floor: layers.0/attention",
        "Ops without a formula take 7.000 ms and are not in the floor.",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
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
    let timed = figures(
        recording,
        stopwatch(&[("forward", 8e-4), ("train step", 9e-4)]),
    )
    .timed;
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
    let figures = figures(recording, stopwatch(&phases));
    let all = answers_text(&figures);
    assert_eq!(all.matches("Backward was not recorded").count(), 2, "{all}");
    assert!(!all.contains("of the training step"), "{all}");
    assert!(figures.line.get("matmul_percent").unwrap().is_null());
}

#[test]
fn what_leads_and_how_shares_change_is_said_of_the_figures() {
    let share = |name: &str, percent, per_step| Share {
        name: name.into(),
        percent,
        per_step,
    };
    let (forward, both) = (
        share("linear", 60.0, 10.0),
        share("linear backward", 40.0, 20.0),
    );
    let answer = sentences::most_time(&forward, Some(&both));
    assert!(
        answer.contains("it is another: linear backward, 40.0% of the time, 20 times a step."),
        "{answer}"
    );
    let answer = sentences::most_time(&forward, Some(&share("linear", 30.0, 10.0)));
    assert!(answer.contains("It is the same"), "{answer}");

    let work = |matmul_percent| Work {
        matmul_percent,
        ..Default::default()
    };
    for (whole, words) in [
        (60.0, "10.0 points less"),
        (85.0, "15.0 points more"),
        (70.5, "nearly the same"),
    ] {
        let answer = sentences::matmul_share(&work(70.0), &work(whole), "the training step");
        assert!(answer.contains(words), "{answer}");
    }
    assert_eq!(
        sentences::besides_matmuls(&work(99.5)),
        "Nothing takes 1% of forward."
    );

    let attention = AttentionFigures {
        softmax_ms: 1.0,
        matmul_ms: 2.0,
        mask_ms: Some(1.0),
        softmax_flops: 1e6,
        matmul_flops: 1e6,
        ..Default::default()
    };
    let answer = sentences::softmax_against_matmuls(&attention);
    assert!(
        answer.contains("1.00 times the time") && answer.contains("takes no longer here"),
        "{answer}"
    );
}

/// With such a variation between steps, shares are not conclusive.
#[test]
fn unsteady_steps_leave_shares_open() {
    let with = |std_ms| Figures {
        timed: vec![times("train step", (10.0, std_ms), (10.0, std_ms))],
        longest_in_forward: Some(Share {
            name: "linear".into(),
            percent: 50.0,
            per_step: 1.0,
        }),
        ..Default::default()
    };
    assert!(
        answers_text(&with(9.0))
            .contains("is 90% of their mean: shares of their time do not decide.")
    );
    assert!(!answers_text(&with(1.0)).contains("decide"));
}
