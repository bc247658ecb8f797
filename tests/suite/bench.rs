//! The benchmark harness: phases, rows, and runs that do not fit in memory.

mod planned;
mod precisions;

use candle_core::Device;
use rayon::ThreadPoolBuilder;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, EndToEndRow, Execution, Step, Stopwatch, UPDATE};
use tallow::memory::{Mode, Workload, estimate};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;
use tallow::report::Fields;

pub fn run(mode: Mode) -> EndToEnd {
    EndToEnd {
        size: "small".into(),
        config: TransformerConfig {
            vocab_size: 61,
            context_length: 16,
            d_model: 24,
            num_layers: 2,
            num_heads: 2,
            d_ff: 40,
            ..Default::default()
        },
        attention: Algorithm::Naive,
        checkpointing: Checkpointing::None,
        batch_size: 3,
        sequence_length: 9,
        mode,
        warmup_steps: 2,
        steps: 4,
        execution: Execution::Eager,
        step: Default::default(),
        seed: 1,
        available_bytes: Some(1 << 30),
    }
}

/// The rows of a run as reports have them, with MFU relative to 1e12 FLOP/s.
fn rows(run: &EndToEnd) -> Vec<Fields> {
    let mut rows = run.run(&Device::Cpu, |_, _| ()).unwrap();
    let times = rows.iter_mut().filter_map(|row| row.time.as_mut());
    times.for_each(|time| time.set_mfu(Some(1e12)));
    fields(&rows)
}

fn fields(rows: &[EndToEndRow]) -> Vec<Fields> {
    rows.iter().map(|row| Fields::of(row).unwrap()).collect()
}

fn text(row: &Fields, key: &str) -> String {
    row.get(key)
        .and_then(|v| v.as_str())
        .unwrap_or_else(|| panic!("{key}"))
        .to_string()
}

fn number(row: &Fields, key: &str) -> f64 {
    row.get(key)
        .and_then(|v| v.as_f64())
        .unwrap_or_else(|| panic!("{key}"))
}

#[test]
fn every_mode_has_its_phases_and_every_phase_its_samples() {
    let expected: [(Mode, &[&str]); 4] = [
        (Mode::Forward, &["forward"]),
        (Mode::ForwardKeepingGraph, &["forward"]),
        (
            Mode::ForwardBackward,
            &["forward", "backward", "forward+backward"],
        ),
        (
            Mode::TrainStep,
            &["forward", "backward", "optimizer", UPDATE, "train step"],
        ),
    ];
    for (mode, phases) in expected {
        let mut steps = Vec::new();
        let rows = run(mode)
            .run(&Device::Cpu, |step, _| steps.push(step.to_string()))
            .unwrap();
        let rows = fields(&rows);
        let found: Vec<String> = rows.iter().map(|row| text(row, "phase")).collect();
        assert_eq!(found, phases);
        assert_eq!(steps.len(), 6);
        assert_eq!(
            (steps[0].as_str(), steps[5].as_str()),
            ("warm-up 1/2", "step 4/4")
        );
        for row in &rows {
            assert_eq!(text(row, "status"), "ok");
            assert_eq!(number(row, "n"), 4.0);
            assert!(number(row, "min_ms") > 0.0);
            if text(row, "phase") == UPDATE {
                assert_eq!(row.get("tokens_per_s"), Some(&serde_json::Value::Null));
                continue;
            }
            let tokens = 27.0 / (number(row, "median_ms") / 1e3);
            assert!((number(row, "tokens_per_s") / tokens - 1.0).abs() < 1e-12);
        }
        let whole = rows.last().unwrap();
        let parts = rows[..rows.len() - 1].iter();
        let single = parts.filter(|row| text(row, "phase") != UPDATE);
        let parts: f64 = single.map(|row| number(row, "min_ms")).sum();
        assert!(number(whole, "max_ms") >= parts);
        assert_eq!(text(whole, "mode"), mode.name());
    }
}

#[test]
fn flops_and_mfu_are_the_models() {
    let rows = rows(&run(Mode::TrainStep));
    let (n, d, f, v, layers, t) = (27.0, 24.0, 40.0, 61.0, 2.0, 9.0);
    let forward =
        2.0 * n * (layers * (4.0 * d * d + 3.0 * d * f) + d * v) + 4.0 * layers * n * t * d;
    for (row, times) in [(0, 1.0), (1, 2.0), (4, 3.0)] {
        let row = &rows[row];
        assert_eq!(number(row, "flops"), times * forward);
        let mfu = 100.0 * times * forward / (number(row, "median_ms") / 1e3) / 1e12;
        assert!((number(row, "mfu_percent") / mfu - 1.0).abs() < 1e-12);
    }
    assert!(
        rows[2].get("flops").is_none_or(|flops| flops.is_null()),
        "an optimizer multiplies no matrices"
    );
}

#[test]
fn what_does_not_fit_is_a_row() {
    let run = EndToEnd {
        config: TransformerConfig::preset("10b").unwrap(),
        sequence_length: 256,
        ..run(Mode::TrainStep)
    };
    let rows = run
        .run(&Device::Cpu, |_, _| panic!("nothing may run"))
        .unwrap();
    let rows = fields(&rows);
    assert_eq!(rows.len(), 1);
    assert_eq!(text(&rows[0], "status"), "OOM");
    assert!(number(&rows[0], "estimate_bytes") > 16.0 * 12.8e9);
    assert_eq!(number(&rows[0], "available_bytes"), (1u64 << 30) as f64);
    assert!(rows[0].get("mean_ms").is_none());
}

/// Sizes for which planning would need hours or all memory are refused before the planning.
#[test]
fn absurd_sizes_are_a_row_at_once() {
    let tiny = TransformerConfig::default();
    let sized = |batch_size, context_length, num_layers, vocab_size| EndToEnd {
        config: TransformerConfig {
            context_length,
            num_layers,
            vocab_size,
            ..tiny.clone()
        },
        batch_size,
        sequence_length: context_length,
        available_bytes: Some(64 << 30),
        ..run(Mode::TrainStep)
    };
    for (batch_size, context_length, num_layers, vocab_size) in [
        (65_536, 1024, 4, 50_257),
        (4, 256, 50_000_000, 10_000),
        (4, 500_000_000, 4, 10_000),
        (
            u32::MAX as usize,
            u32::MAX as usize,
            u32::MAX as usize,
            10_000,
        ),
    ] {
        for execution in [Execution::Eager, Execution::Planned] {
            for mode in [Mode::Forward, Mode::ForwardBackward, Mode::TrainStep] {
                let run = EndToEnd {
                    mode,
                    execution,
                    ..sized(batch_size, context_length, num_layers, vocab_size)
                };
                let begun = std::time::Instant::now();
                let rows = run
                    .run(&Device::Cpu, |_, _| panic!("nothing may run"))
                    .unwrap();
                let rows = fields(&rows);
                assert!(
                    begun.elapsed().as_secs_f64() < 1.0,
                    "{mode:?} {execution:?}"
                );
                assert_eq!(text(&rows[0], "status"), "OOM");
                assert!(number(&rows[0], "estimate_bytes") > (64u64 << 30) as f64);
                if execution == Execution::Planned {
                    assert!(text(&rows[0], "reason").contains("lower bound"));
                    let error = run.plan(&Device::Cpu).unwrap_err();
                    assert!(error.is_out_of_memory(), "{error}");
                }
            }
        }
    }
}

/// Rows name the attention, and the estimate is that of the run.
#[test]
fn the_attention_is_timed_and_named() {
    let [naive, flash] = Algorithm::ALL.map(|attention| {
        let mut run = run(Mode::TrainStep);
        run.attention = attention;
        // Long enough for probabilities to exceed the tiles.
        (run.config.context_length, run.sequence_length) = (64, 64);
        // Every thread has its tiles.
        let threads = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let rows = threads.install(|| rows(&run));
        for row in &rows {
            assert_eq!(text(row, "attention"), attention.name());
        }
        number(&rows[0], "estimate_bytes")
    });
    assert!(flash < naive, "{flash} {naive}");
    let mut run = run(Mode::TrainStep);
    run.attention = Algorithm::Flash;
    run.available_bytes = Some(1);
    let rows = rows(&run);
    assert_eq!(text(&rows[0], "status"), "OOM");
    assert_eq!(text(&rows[0], "attention"), "flash");
}

/// Rows name the checkpointing.
#[test]
fn checkpointing_is_timed_and_named() {
    for strategy in ["none", "block", "sqrt"] {
        let mut run = run(Mode::TrainStep);
        run.checkpointing = strategy.parse().unwrap();
        for row in rows(&run) {
            assert_eq!(text(&row, "checkpointing"), strategy);
            assert_eq!(text(&row, "status"), "ok");
        }
    }
}

/// Each precision has its own estimate, and a run that exceeds it is a row.
#[test]
fn precision_is_timed_and_named() {
    for precision in Precision::ALL {
        let mut run = run(Mode::TrainStep);
        run.step.precision = precision;
        let workload = Workload {
            batch_size: run.batch_size,
            sequence_length: run.sequence_length,
            mode: run.mode,
            attention: run.attention,
            precision,
            checkpointing: run.checkpointing,
            ..Default::default()
        };
        let predicted = estimate(&run.config, &workload).unwrap().peak_bytes;
        for row in rows(&run) {
            assert_eq!(text(&row, "precision"), precision.name());
            assert_eq!(text(&row, "status"), "ok");
            assert_eq!(number(&row, "estimate_bytes"), predicted as f64);
        }
        run.available_bytes = Some(predicted - 1);
        let row = &rows(&run)[0];
        assert_eq!(text(row, "status"), "OOM");
        assert_eq!(number(row, "estimate_bytes"), predicted as f64);
        let parameters = number(row, "parameters");
        assert!(number(row, "estimate_bytes") >= 16.0 * parameters); // weight, gradient and AdamW's two moments
        assert_eq!(text(row, "precision"), precision.name());
    }
}

#[test]
fn precisions_have_names() {
    for precision in Precision::ALL {
        assert_eq!(precision.name().parse::<Precision>().unwrap(), precision);
        let json = serde_json::to_value(precision).unwrap();
        assert_eq!(json, precision.name());
    }
    assert_eq!("fp16".parse::<Precision>().unwrap(), Precision::F16);
    let error = "f8".parse::<Precision>().unwrap_err().to_string();
    assert!(
        error.contains("f32, bf16 or f16") && error.contains("f8"),
        "{error}"
    );
}

#[test]
fn laps_add_stretches_of_a_phase_and_keep_warm_up_apart() {
    let mut calls = 0;
    let laps = Stopwatch::new(&Device::Cpu)
        .warmup(2)
        .measure_phases(3, |lap| {
            calls += 1;
            let nap = || -> tallow::Result<()> {
                std::thread::sleep(std::time::Duration::from_millis(2));
                Ok(())
            };
            lap.time("a", nap)?;
            lap.time("b", || Ok::<_, tallow::Error>(()))?;
            lap.time("a", nap)
        })
        .unwrap();
    assert_eq!(calls, 5);
    let names: Vec<_> = laps.phases.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["a", "b"]);
    let (a, b) = (&laps.phases[0].1, &laps.phases[1].1);
    assert_eq!((a.samples_ms.len(), a.warmup_ms.len()), (3, 2));
    for i in 0..3 {
        assert!(a.samples_ms[i] >= 4.0);
        assert!(laps.whole.samples_ms[i] >= a.samples_ms[i] + b.samples_ms[i]);
    }
}

#[test]
fn errors_pass_through_and_nothing_to_measure_is_one() {
    let failed = Stopwatch::new(&Device::Cpu).measure_phases(1, |lap| {
        lap.time("fails", || {
            Err::<(), _>(tallow::Error::Plot("on purpose".into()))
        })
    });
    assert!(failed.unwrap_err().to_string().contains("on purpose"));
    let none = Stopwatch::new(&Device::Cpu).measure_phases(0, |_| Ok(()));
    assert!(
        none.unwrap_err()
            .to_string()
            .contains("steps must be at least 1")
    );
    let step = Step {
        warmup: false,
        index: 0,
        count: 1,
    };
    assert_eq!(step.to_string(), "step 1/1");
    let too_long = EndToEnd {
        sequence_length: 17,
        ..run(Mode::Forward)
    };
    let error = too_long
        .run(&Device::Cpu, |_, _| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("from 1 to 16"), "{error}");
}
