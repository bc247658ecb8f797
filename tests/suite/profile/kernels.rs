//! GPU kernels in recordings: invented ones on any machine, real ones on a GPU.

use super::{config, exclusive, span};
use crate::check::refusal;
use crate::child;
use crate::settings::in_precision;
use candle_core::{Device, Tensor};
use std::sync::Arc;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::probe::{self, Kind};
use tallow::profile::{
    self, Balance, Cost, Grouping, Kernel, KernelWork, Line, LineKind, ProfileReport, Profiler,
    Recording, Selection,
};

pub(super) fn kernel(name: &str, times: (u64, u64), span: usize) -> Kernel {
    Kernel {
        name: name.into(),
        stream: 7,
        start_ns: times.0,
        end_ns: times.1,
        grid: Some([8, 2, 1]),
        block: Some([128, 1, 1]),
        span: Some(span),
    }
}

/// Returns a step of 1000 ns whose kernels run after their launches: forward 100 to 400 has a linear op, an attention
/// and a kernel of candle's, backward 400 to 900 a linear op's. One kernel precedes the step.
pub(super) fn invented_recording() -> Recording {
    let spans = vec![
        span(Kind::Step, "", "", (50, 1050), None),
        span(Kind::Phase, "", "forward", (100, 400), Some(0)),
        span(Kind::Module, "layers.0", "forward", (101, 130), Some(1)),
        span(Kind::Op, "layers.0/linear", "forward", (102, 104), Some(2)),
        span(
            Kind::Op,
            "layers.0/attention::naive",
            "forward",
            (105, 109),
            Some(2),
        ),
        span(
            Kind::Range,
            "layers.0/attention::naive/mine",
            "forward",
            (106, 108),
            Some(4),
        ),
        span(Kind::Phase, "", "backward", (400, 900), Some(0)),
        span(
            Kind::OpBackward,
            "layers.0/linear",
            "backward",
            (410, 415),
            Some(6),
        ),
        span(Kind::Op, "before", "", (0, 10), None),
    ];
    let kernels = vec![
        kernel("nvjet_tst_96x128", (5, 15), 8),
        kernel("nvjet_tst_96x128", (110, 180), 3),
        kernel("nvjet_tst_64x64", (180, 200), 4),
        kernel("softmax_forward_f32", (200, 240), 5),
        kernel("nvjet_tst_64x64", (240, 260), 4),
        kernel("badd_f32", (270, 290), 2),
        kernel("nvjet_tst_96x128", (430, 530), 7),
        kernel("badd_f32", (600, 650), 6),
        kernel("set memory", (1000, 1010), 0),
    ];
    Recording {
        spans,
        kernels,
        threads: vec!["main".into()],
        duration_ns: 2000,
    }
}

#[test]
fn times_are_the_kernels_and_the_rest_is_idle() {
    let line = |phase, kind, total_ns| Line {
        phase,
        kind,
        total_ns,
    };
    let balance = Balance::new(&invented_recording());
    assert_eq!(
        balance.lines,
        [
            line("forward", LineKind::Ops, 150),
            line("forward", LineKind::CandleForward, 20),
            line("forward", LineKind::Idle, 130),
            line("backward", LineKind::Ops, 100),
            line("backward", LineKind::GradientSums, 50),
            line("backward", LineKind::Idle, 350),
            line("", LineKind::CandleForward, 10),
            line("", LineKind::Idle, 190),
        ]
    );
    assert_eq!(balance.wall_ns, 1000);

    // Calls of a plan have costs, and no line is attributed to candle's graph.
    let mut planned = invented_recording();
    planned.spans[3].cost = Some(Cost::default());
    let kinds = Balance::new(&planned)
        .lines
        .into_iter()
        .map(|line| line.kind);
    assert!(kinds.clone().any(|kind| kind == LineKind::Plan));
    assert!(
        kinds
            .into_iter()
            .all(|kind| { matches!(kind, LineKind::Ops | LineKind::Plan | LineKind::Idle) })
    );
}

#[test]
fn rows_by_kernel_say_who_launched_them() {
    let recording = invented_recording();
    let of = |selection| ProfileReport::new(&recording, &selection, Grouping::Kernel).unwrap();
    let all = of(Selection::default());
    let rows: Vec<_> = all
        .rows
        .iter()
        .map(|row| (&*row.name, row.total_ns, row.instances))
        .collect();
    assert_eq!(
        rows,
        [
            ("nvjet_tst_96x128", 170, 2),
            ("badd_f32", 70, 2),
            ("nvjet_tst_64x64", 40, 2),
            ("softmax_forward_f32", 40, 1),
            ("set memory", 10, 1),
            ("GPU idle, forward", 130, 0),
            ("GPU idle, backward", 350, 0),
            ("GPU idle, between phases", 190, 0),
        ]
    );
    assert_eq!(rows.iter().map(|(_, ns, _)| ns).sum::<u64>(), all.whole_ns);
    let launches = |i: usize| all.rows[i].launches.as_ref().unwrap();
    let one = |name: &str| (name.to_string(), 1);
    assert_eq!(launches(0).ops, [one("linear"), one("linear backward")]);
    assert_eq!(
        launches(0).places,
        [one("layers.*/linear"), one("layers.*/linear backward")]
    );
    assert_eq!(
        launches(1).ops,
        [one("candle in backward"), one("candle in forward")]
    );
    assert_eq!(launches(3).ops, [one("attention::naive")]);
    assert_eq!((launches(0).grid, launches(0).shapes), (Some([8, 2, 1]), 1));

    let parts = all.sum("", |row| !row.is_gap()).parts;
    assert_eq!((parts.matmul_ns, parts.softmax_ns), (210, 40));
    let within = of(Selection {
        within: Some("attention::naive".into()),
        ..Default::default()
    });
    assert_eq!(within.whole_ns, 80);

    // The same by op.
    let forward = Selection::phase("forward");
    let ops = ProfileReport::new(&recording, &forward, Grouping::Name).unwrap();
    let attention = ops
        .rows
        .iter()
        .find(|row| row.name == "attention::naive")
        .unwrap();
    assert_eq!(
        (
            attention.total_ns,
            attention.parts.softmax_ns,
            attention.rest_ns()
        ),
        (80, 40, 0)
    );
    assert_eq!(
        ops.rows.iter().map(|row| row.total_ns).sum::<u64>(),
        ops.whole_ns
    );

    let table = serde_json::to_value(all.fields()).unwrap();
    assert_eq!(table[0]["grid"], "8x2");
    assert_eq!(table[0]["ops"], "linear, linear backward");
}

#[test]
fn kernels_are_wanted_of_a_recording_that_has_none() {
    let recording = super::balance::invented_recording();
    let refused = ProfileReport::new(&recording, &Selection::default(), Grouping::Kernel);
    refusal(refused, &["Profiler::start_on"]);
}

#[test]
fn traces_have_the_gpus_streams() {
    let trace = invented_recording().trace();
    let events = trace["traceEvents"].as_array().unwrap();
    let softmax = events
        .iter()
        .find(|event| event["name"] == "softmax_forward_f32")
        .unwrap();
    assert_eq!(
        (&softmax["cat"], &softmax["tid"]),
        (&"kernel".into(), &1.into())
    );
    assert_eq!(softmax["args"]["path"], "layers.0/attention::naive/mine");
    assert!(
        events
            .iter()
            .any(|event| event["args"]["name"] == "GPU stream 7")
    );
}

fn recorded_on_gpu(attention: Algorithm) -> Recording {
    let device = tallow::device("cuda").unwrap();
    let size = TransformerConfig {
        d_model: 32, // heads of 16, which flash attention's kernels accept
        ..config()
    };
    let model = TransformerLM::new(&size, 5, &device).unwrap();
    let model = model.with_attention(attention).unwrap();
    let tokens = Tensor::zeros((2, 7), candle_core::DType::U32, &device).unwrap();
    let step = || {
        let _step = profile::step();
        let loss = {
            let _phase = profile::phase("forward");
            Precision::BF16
                .run(|| model.loss(&tokens, &tokens))
                .unwrap()
        };
        let _phase = profile::phase("backward");
        loss.backward().unwrap();
    };
    step();
    let profiler = Profiler::start_on(&device).unwrap();
    step();
    step();
    profiler.finish().unwrap()
}

#[test]
#[ignore = "needs a CUDA device"]
fn kernels_of_a_step_are_mapped_to_its_ops() {
    if child::ran("profile::kernels::kernels_of_a_step_are_mapped_to_its_ops") {
        return; // kernels are recorded per process
    }
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        let recording = recorded_on_gpu(attention);
        assert!(!recording.kernels.is_empty());
        assert!(recording.kernels.iter().all(|kernel| kernel.span.is_some()));
        let launched_by = |name: &str, work: KernelWork| {
            recording.kernels.iter().any(|kernel| {
                let op = kernel.span.map(|span| recording.spans[span].name());
                op.as_deref() == Some(name) && kernel.work() == work
            })
        };
        assert!(launched_by("linear", KernelWork::Matmul));
        match attention {
            Algorithm::Flash => assert!(launched_by("attention::flash", KernelWork::Attention)),
            _ => assert!(launched_by("attention::naive", KernelWork::Softmax)),
        }
        // Each kernel ran within its phase, whose time on the host includes the wait.
        for kernel in &recording.kernels {
            let mut around = kernel.span;
            while let Some(i) = around {
                let span = &recording.spans[i];
                if span.kind == Kind::Phase {
                    let slack = 200_000; // between the two clocks, in ns
                    assert!(
                        kernel.start_ns + slack >= span.start_ns,
                        "{kernel:?} {span:?}"
                    );
                    assert!(kernel.end_ns <= span.end_ns + slack, "{kernel:?} {span:?}");
                }
                around = span.parent;
            }
        }
        let report =
            ProfileReport::new(&recording, &Selection::default(), Grouping::Kernel).unwrap();
        assert_eq!(report.steps, Some(2));
        let sum: u64 = report.rows.iter().map(|row| row.total_ns).sum();
        assert_eq!(sum, report.whole_ns);
        assert!(
            report
                .rows
                .iter()
                .filter(|row| !row.is_gap())
                .all(|row| row.instances % 2 == 0)
        );
    }
}

/// Returns the kernels of two planned steps, each with its name, phase and op.
fn planned_on_gpu(plan: &StepConfig, times_phases: bool, attention: Algorithm) -> Vec<[String; 3]> {
    let device = tallow::device("cuda").unwrap();
    let size = TransformerConfig {
        d_model: 32,
        ..config()
    };
    let model = TransformerLM::new(&size, 5, &device).unwrap();
    let model = model.with_attention(attention).unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let mut step = Step::for_model(&model, &optimizer, plan).unwrap();
    step.time_phases(times_phases);
    let shape = (2 * plan.accumulation, 7);
    let tokens = Tensor::zeros(shape, candle_core::DType::U32, &device).unwrap();
    let mut run = |steps: usize| {
        for _ in 0..steps {
            let _step = profile::step();
            step.run(&mut optimizer, (&tokens, &tokens)).unwrap();
        }
    };
    run(3);
    let profiler = Profiler::start_on(&device).unwrap();
    run(2);
    let recording = profiler.finish().unwrap();
    run(1);
    let of = |kernel: &Kernel| {
        let span = &recording.spans[kernel.span.unwrap()];
        let mut around = span.parent;
        while let Some(i) = around {
            let around_it = &recording.spans[i];
            if matches!(around_it.kind, Kind::Phase | Kind::Step) {
                let slack = 200_000; // between the two clocks, in ns
                assert!(kernel.start_ns + slack >= around_it.start_ns);
                assert!(kernel.end_ns <= around_it.end_ns + slack);
            }
            around = around_it.parent;
        }
        [
            kernel.name.to_string(),
            span.phase.to_string(),
            span.path.to_string(),
        ]
    };
    recording.kernels.iter().map(of).collect()
}

/// A listener that does not accept graph replays.
struct OneByOne;
impl probe::Listener for OneByOne {}

#[test]
#[ignore = "needs a CUDA device"]
fn replayed_kernels_are_of_the_calls_that_launch_them_one_by_one() {
    if child::ran("profile::kernels::replayed_kernels_are_of_the_calls_that_launch_them_one_by_one")
    {
        return; // kernels are recorded per process
    }
    let plain = in_precision(Precision::BF16);
    let in_micro_batches = StepConfig {
        accumulation: 3,
        clip_norm: Some(1.0),
        ..plain.clone()
    };
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        for plan in [&plain, &in_micro_batches] {
            for times_phases in [false, true] {
                let replayed = planned_on_gpu(plan, times_phases, attention);
                let listening = probe::listen(Arc::new(OneByOne));
                let launched = planned_on_gpu(plan, times_phases, attention);
                drop(listening);
                assert!(replayed.iter().any(|[_, phase, _]| phase == "optimizer"));
                assert_eq!(replayed, launched);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn profilers_follow_each_other_on_a_gpu() {
    if child::ran("profile::kernels::profilers_follow_each_other_on_a_gpu") {
        return; // kernels are recorded per process
    }
    let counts = [(); 2].map(|()| recorded_on_gpu(Algorithm::Naive).kernels.len());
    assert_eq!(counts[0], counts[1]);
    let profiler = Profiler::start_waiting_for(&tallow::device("cuda").unwrap()).unwrap();
    assert_eq!(profiler.finish().unwrap().kernels, []);
}

#[test]
fn a_cpu_has_no_kernels() {
    let _lock = exclusive();
    let profiler = Profiler::start_on(&Device::Cpu).unwrap();
    assert_eq!(profiler.finish().unwrap().kernels, []);
}
