//! Attribution of a step's wall time.

use super::{record, span};
use tallow::attention::Algorithm;
use tallow::precision::Precision;
use tallow::probe::Kind;
use tallow::profile::{Balance, Line, LineKind, Recording};

/// Returns a step of 1000 ns: forward 100 to 400 with an op in a layer, backward 400 to 800 with two ops, one of them
/// containing another, and the optimizer 850 to 950 with an op. One op precedes the step.
pub(super) fn invented_recording() -> Recording {
    let spans = vec![
        span(Kind::Op, "warm/linear", "", (0, 40), None),
        span(Kind::Step, "", "", (50, 1050), None),
        span(Kind::Phase, "", "forward", (100, 400), Some(1)),
        span(Kind::Module, "layers.0", "forward", (110, 390), Some(2)),
        span(Kind::Op, "layers.0/linear", "forward", (120, 320), Some(3)),
        span(Kind::Phase, "", "backward", (400, 800), Some(1)),
        span(
            Kind::OpBackward,
            "layers.0/linear",
            "backward",
            (405, 605),
            Some(5),
        ),
        span(
            Kind::Op,
            "layers.0/linear/cast",
            "backward",
            (505, 525),
            Some(6),
        ),
        span(
            Kind::OpBackward,
            "layers.0/relu",
            "backward",
            (645, 745),
            Some(5),
        ),
        span(Kind::Phase, "", "optimizer", (850, 950), Some(1)),
        span(Kind::Op, "adamw", "optimizer", (851, 949), Some(9)),
    ];
    Recording {
        spans,
        threads: vec!["main".into()],
        duration_ns: 2000,
        ..Default::default()
    }
}

#[test]
fn every_nanosecond_is_somebodys() {
    let balance = Balance::new(&invented_recording());
    let line = |phase, kind, total_ns| Line {
        phase,
        kind,
        total_ns,
    };
    assert_eq!(
        balance.lines,
        [
            line("forward", LineKind::Ops, 200),
            line("forward", LineKind::CandleForward, 100),
            line("backward", LineKind::Ops, 300),
            line("backward", LineKind::GraphSort, 5),
            line("backward", LineKind::GradientSums, 40),
            line("backward", LineKind::GraphFree, 55),
            line("optimizer", LineKind::Ops, 98),
            line("optimizer", LineKind::Unexplained, 2),
            line("", LineKind::Unexplained, 200),
        ]
    );
    assert_eq!((balance.wall_ns, balance.steps), (1000, Some(1)));
    assert_eq!(balance.sum_ns(|_| true), 1000);
    assert_eq!(balance.explained(), Some(0.798));
    let text = balance.to_string();
    assert!(text.contains("gradient sums and bookkeeping"), "{text}");
    assert!(text.lines().count() == 10, "{text}");
}

#[test]
fn without_steps_the_recording_is_one() {
    let mut recording = invented_recording();
    recording.spans.truncate(1);
    let balance = Balance::new(&recording);
    assert_eq!((balance.wall_ns, balance.steps), (2000, None));
    assert_eq!(balance.sum_ns(|line| line.kind == LineKind::Ops), 40);
    assert_eq!(
        balance.sum_ns(|line| line.kind == LineKind::Unexplained),
        1960
    );
    assert_eq!(Balance::new(&Recording::default()).explained(), None);
}

#[test]
fn a_training_steps_parts_make_the_whole() {
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        let recording = record(attention, Precision::F32);
        let balance = Balance::new(&recording);
        let steps = recording
            .spans
            .iter()
            .filter(|span| span.kind == Kind::Step);
        let wall_ns: u64 = steps.map(|step| step.duration_ns()).sum();
        assert_eq!(
            (balance.wall_ns, balance.steps),
            (wall_ns, Some(super::STEPS))
        );
        assert_eq!(balance.sum_ns(|_| true), wall_ns);
        for phase in ["forward", "backward", "optimizer"] {
            let of_phase = recording.spans.iter();
            let of_phase = of_phase.filter(|s| s.kind == Kind::Phase && s.phase == phase);
            let phase_ns: u64 = of_phase.map(|span| span.duration_ns()).sum();
            assert_eq!(balance.sum_ns(|line| line.phase == phase), phase_ns);
            let ops_ns = balance.sum_ns(|l| l.phase == phase && l.kind == LineKind::Ops);
            assert!(
                0 < ops_ns && ops_ns <= phase_ns,
                "{phase}: {ops_ns} of {phase_ns}"
            );
        }
    }
}
