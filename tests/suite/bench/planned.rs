//! Planned runs in the benchmark harness.

use super::{number, rows, run, text};
use candle_core::Device;
use tallow::bench::{EndToEnd, Execution, UPDATE};
use tallow::compile::{StepConfig, StepRanks};
use tallow::distributed::Shard;
use tallow::memory::Mode;
use tallow::precision::{Precision, Regime};
use tallow::report::Fields;

/// Sets a field of a step's settings.
type Set = fn(&mut StepConfig);

/// The settings that only a planned training step has, by field.
const SETTINGS: [(&str, Set); 6] = [
    ("optimizer_in_backward", |step| {
        step.optimizer_in_backward = true
    }),
    ("accumulation", |step| step.accumulation = 2),
    ("memory_budget_bytes", |step| {
        step.memory_budget_bytes = Some(1 << 30)
    }),
    ("clip_norm", |step| step.clip_norm = Some(1.0)),
    ("clip_value", |step| step.clip_value = Some(1.0)),
    ("dropout_seed", |step| step.dropout_seed = Some(0)),
];

/// A planned run has the phases of an eager one, and its memory estimate is exact.
#[test]
fn planned_runs_have_rows_too() {
    let expected: [(Mode, bool, &[&str]); 4] = [
        (Mode::Forward, false, &["forward"]),
        (
            Mode::ForwardBackward,
            false,
            &["forward", "backward", "forward+backward"],
        ),
        (
            Mode::TrainStep,
            false,
            &["forward", "backward", "optimizer", UPDATE, "train step"],
        ),
        (
            Mode::TrainStep,
            true, // in backward
            &["forward", "backward", "optimizer", UPDATE, "train step"],
        ),
    ];
    for (mode, optimizer_in_backward, phases) in expected {
        let run = EndToEnd {
            execution: Execution::Planned,
            step: StepConfig {
                optimizer_in_backward,
                ..Default::default()
            },
            ..run(mode)
        };
        let rows = rows(&run);
        let found: Vec<String> = rows.iter().map(|row| text(row, "phase")).collect();
        assert_eq!(found, phases);
        for row in &rows {
            assert_eq!(text(row, "execution"), "planned");
            assert_eq!(row.get("n"), Some(&4.into()));
            assert!(number(row, "min_ms") > 0.0);
            let is_optimizer = ["optimizer", UPDATE].contains(&text(row, "phase").as_str());
            assert_eq!(
                row.get("flops_per_s").is_none_or(|r| r.is_null()),
                is_optimizer
            );
            assert!(number(row, "estimate_bytes") > 0.0);
        }
        // Phases are parts of the same steps: no step is shorter than the sum of its phases.
        let samples = |row: &Fields| {
            let samples = row.get("samples_ms").and_then(|s| s.as_array()).unwrap();
            samples
                .iter()
                .map(|ms| ms.as_f64().unwrap())
                .collect::<Vec<_>>()
        };
        let (whole, parts) = rows.split_last().unwrap();
        for (step, whole) in samples(whole).into_iter().enumerate() {
            let single = parts.iter().filter(|row| text(row, "phase") != UPDATE);
            let parts: f64 = single.map(|row| samples(row)[step]).sum();
            assert!(parts <= whole, "{parts} of {whole} ms");
        }
    }
    // A loss scale is used where the precision needs one.
    for (precision, scales) in [(Precision::BF16, false), (Precision::F16, true)] {
        let run = EndToEnd {
            execution: Execution::Planned,
            step: precision.into(),
            ..run(Mode::TrainStep)
        };
        let rows = rows(&run);
        assert_eq!(text(&rows[0], "execution"), "planned");
        assert_eq!(rows[0].get("loss_scale").is_some(), scales);
    }
    // With the optimizer in backward each gradient is freed after its update: the estimate is smaller, and the row
    // records the option.
    let planned_step = |optimizer_in_backward| {
        let run = EndToEnd {
            execution: Execution::Planned,
            step: StepConfig {
                optimizer_in_backward,
                ..Default::default()
            },
            ..run(Mode::TrainStep)
        };
        let rows = rows(&run);
        assert_eq!(
            rows[0].get("optimizer_in_backward"),
            Some(&optimizer_in_backward.into())
        );
        number(&rows[0], "estimate_bytes")
    };
    assert!(planned_step(true) < planned_step(false));
    let refused = |run: EndToEnd| run.run(&Device::Cpu, |_, _| ()).unwrap_err().to_string();
    let planned = |mode| EndToEnd {
        execution: Execution::Planned,
        ..run(mode)
    };
    let text = refused(planned(Mode::ForwardKeepingGraph));
    assert!(
        text.contains("execution") && text.contains("graph"),
        "{text}"
    );
    for mode in [Mode::Forward, Mode::ForwardBackward] {
        assert!(!Execution::Planned.is_planned_step(mode));
    }
    assert!(!Execution::Eager.is_planned_step(Mode::TrainStep));
    assert!(Execution::Planned.is_planned_step(Mode::TrainStep));
    let not_planned_steps = [
        run(Mode::TrainStep),
        planned(Mode::ForwardBackward),
        planned(Mode::Forward),
    ];
    for run in not_planned_steps {
        let execution = run.execution.name();
        for (field, set) in SETTINGS {
            let mut run = run.clone();
            set(&mut run.step);
            let text = refused(run);
            let words = [
                &format!("{field} must be left at its default"),
                execution,
                "--compile",
            ];
            for words in words {
                assert!(text.contains(words), "no {words:?} in {text:?}");
            }
        }
    }
    // Also where every block is recorded.
    let budgeted = EndToEnd {
        step: StepConfig {
            memory_budget_bytes: Some(1 << 30),
            ..Default::default()
        },
        ..run(Mode::TrainStep)
    };
    let recorded = budgeted.profile_memory(&Device::Cpu, Default::default());
    let text = recorded.unwrap_err().to_string();
    assert!(text.contains("memory_budget_bytes must be"), "{text}");
    // A step of several ranks can be planned, but not run.
    let shard = Shard {
        rank: 0,
        world_size: 2,
    };
    let sharded = EndToEnd {
        step: StepConfig {
            ranks: StepRanks::FullySharded(Default::default(), shard),
            ..Default::default()
        },
        ..planned(Mode::TrainStep)
    };
    assert!(sharded.plan(&Device::Cpu).is_ok());
    let text = refused(sharded);
    assert!(text.contains("StepRanks::Single"), "{text}");
    let text = refused(EndToEnd {
        step: Precision::BF16.with_regime(Regime::Full).into(),
        ..planned(Mode::TrainStep)
    });
    assert!(
        text.contains("StepConfig: precision") && text.contains("bf16-full"),
        "{text}"
    );
}

/// A step of several micro-batches counts the tokens and FLOPs of all, and its memory estimate is exact too.
#[test]
fn a_step_of_several_micro_batches() {
    let of = |accumulation| {
        let run = EndToEnd {
            execution: Execution::Planned,
            step: StepConfig {
                accumulation,
                ..Default::default()
            },
            ..run(Mode::TrainStep)
        };
        let rows = rows(&run);
        let step = rows.last().unwrap().clone();
        assert_eq!(step.get("accumulation"), Some(&accumulation.into()));
        assert_eq!(step.get("batch_size"), Some(&3.into()));
        step
    };
    let (one, three) = (of(1), of(3));
    assert_eq!(number(&three, "flops"), 3.0 * number(&one, "flops"));
    let tokens = number(&three, "tokens_per_s") * number(&three, "median_ms") / 1e3;
    assert!((tokens / 81.0 - 1.0).abs() < 1e-12, "{tokens}");
    assert!(number(&three, "estimate_bytes") > number(&one, "estimate_bytes"));
}
