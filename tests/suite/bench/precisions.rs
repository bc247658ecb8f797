//! Half precision in the harness: its regimes, loss scaling, turns, and the comparison with f32.

#[path = "../../../examples/mixed_precision_benchmark/analysis/mod.rs"]
#[allow(dead_code)] // the example's own
mod analysis;

use super::{number, run, text};
use analysis::PrecisionAnalysis;
use candle_core::Device;
use rstest::rstest;
use serde_json::Value;
use tallow::bench::{EndToEnd, OptimizerChoice, alternate, environment};
use tallow::memory::Mode;
use tallow::precision::{Precision, Regime};
use tallow::report::Fields;

const REGIMES: [Regime; 3] = [Regime::CudaAutocast, Regime::CpuAutocast, Regime::Full];

#[rstest]
fn every_regime_runs_every_mode(
    #[values(Precision::BF16, Precision::F16)] dtype: Precision,
    #[values(
        Mode::Forward,
        Mode::ForwardKeepingGraph,
        Mode::ForwardBackward,
        Mode::TrainStep
    )]
    mode: Mode,
) {
    for regime in REGIMES {
        for drops in [false, true] {
            let precision = dtype.with_regime(regime).with_dropped_casts(drops);
            let run = EndToEnd {
                precision,
                ..run(mode)
            };
            for row in run.run(&Device::Cpu, |_, _| ()).unwrap() {
                assert_eq!(text(&row, "status"), "ok");
                assert_eq!(text(&row, "precision"), precision.name());
                let scales = mode == Mode::TrainStep && dtype == Precision::F16;
                assert_eq!(row.get("loss_scale").is_some(), scales, "{precision}");
            }
        }
    }
}

/// f16's step scales its loss; this model's gradients stay finite at the scale it begins with.
#[test]
fn f16_scales_its_loss() {
    let run = EndToEnd {
        precision: Precision::F16,
        ..run(Mode::TrainStep)
    };
    let rows = run.run(&Device::Cpu, |_, _| ()).unwrap();
    for row in &rows {
        let (scale, skipped) = (number(row, "loss_scale"), number(row, "skipped_steps"));
        assert_eq!(scale, 65536.0 * 0.5f64.powf(skipped));
        assert!(skipped < 6.0, "every step was skipped");
    }
}

#[test]
fn candles_optimizer_takes_bf16_parameters_and_refuses_f16() {
    let with = |precision: Precision| {
        EndToEnd {
            optimizer: OptimizerChoice::CandleAdamW(Default::default()),
            precision: precision.with_regime(Regime::Full),
            ..run(Mode::TrainStep)
        }
        .run(&Device::Cpu, |_, _| ())
    };
    assert_eq!(with(Precision::BF16).unwrap().len(), 4);
    let error = with(Precision::F16).unwrap_err().to_string();
    assert!(error.contains("optimizer must be adamw"), "{error}");
}

/// 2 bytes for each element of a linear weight, where a region keeps copies.
#[test]
fn kept_copies_of_weights_are_counted() {
    let of = |precision| {
        let run = EndToEnd {
            precision,
            ..run(Mode::Forward)
        };
        let rows = run.run(&Device::Cpu, |_, _| ()).unwrap();
        rows[0].get("weight_cast_bytes").and_then(Value::as_u64)
    };
    let shapes = run(Mode::Forward).config.parameter_shapes();
    let linear = shapes
        .iter()
        .filter(|(name, shape)| shape.rank() == 2 && !name.starts_with("token_embeddings"));
    let elements: usize = linear.map(|(_, shape)| shape.elem_count()).sum();
    assert_eq!(of(Precision::BF16), Some(2 * elements as u64));
    let cpu = Precision::F16.with_regime(Regime::CpuAutocast);
    assert_eq!(of(cpu), Some(2 * elements as u64));
    assert_eq!(of(Precision::F32), None);
    assert_eq!(of(Precision::BF16.with_dropped_casts(true)), None);
    assert_eq!(of(Precision::BF16.with_regime(Regime::Full)), None);
}

#[test]
fn turns_are_taken_and_their_samples_joined() {
    let fits = run(Mode::TrainStep);
    let runs = [
        fits.clone(),
        EndToEnd {
            precision: Precision::F16,
            ..fits.clone()
        },
        EndToEnd {
            available_bytes: Some(1),
            ..fits
        },
    ];
    let mut turns = Vec::new();
    let rows = alternate(&runs, 3, &Device::Cpu, |i, _, ms| turns.push((i, ms))).unwrap();
    let order: Vec<usize> = turns.iter().map(|(i, _)| *i).collect();
    let expected: Vec<usize> = [0, 1].repeat(3).iter().flat_map(|i| [*i; 6]).collect();
    assert_eq!(order, expected); // 2 warm-up steps and 4 measured ones a turn
    assert_eq!(rows.len(), 3);
    for (i, rows) in rows[..2].iter().enumerate() {
        assert_eq!(rows.len(), 4);
        assert_eq!(rows[0].get("loss_scale").is_some(), i == 1);
        let whole = rows.last().unwrap();
        assert_eq!(number(whole, "n"), 12.0);
        let samples = |key: &str| whole.get(key).unwrap().as_array().unwrap().clone();
        assert_eq!(samples("warmup_ms").len(), 6);
        let own: Vec<f64> = turns.iter().filter(|t| t.0 == i).map(|t| t.1).collect();
        let measured = own.chunks(6).flat_map(|turn| turn[2..].to_vec());
        assert_eq!(samples("samples_ms"), measured.collect::<Vec<_>>());
        assert_eq!(number(&rows[1], "n"), 12.0);
    }
    assert_eq!(rows[2].len(), 1);
    assert_eq!(text(&rows[2][0], "status"), "OOM");
    let once = alternate(&runs[..1], 0, &Device::Cpu, |_, _, _| ()).unwrap();
    assert_eq!(number(&once[0][0], "n"), 4.0);
}

/// A row as the harness makes it; without a time it did not fit.
fn row(precision: &str, mode: &str, length: usize, ms: Option<f64>, bytes: u64) -> Fields {
    let phase = match mode {
        "forward" => "forward",
        _ => "forward+backward",
    };
    let mut row = Fields::from_iter([("size", "tiny"), ("precision", precision), ("mode", mode)]);
    row.insert("phase", phase).insert("batch_size", 4);
    row.insert("context_length", length);
    row.insert("attention", "naive");
    row.insert("estimate_bytes", bytes);
    let status = if ms.is_some() { "ok" } else { "OOM" };
    row.insert("status", status).insert("median_ms", ms);
    row.insert("peak_bytes", ms.map(|_| bytes));
    if precision == "bf16" {
        row.insert("weight_cast_bytes", 100u64 << 20);
    }
    row
}

const MIB: u64 = 1 << 20;

#[test]
fn precisions_are_held_against_f32() {
    let mut phase = row("f32", "forward-backward", 64, Some(1.0), 1);
    phase.insert("phase", "backward"); // no whole step: passed over
    let rows = [
        row("f32", "forward", 64, Some(30.0), 400 * MIB),
        phase,
        row("f32", "forward-backward", 64, Some(90.0), 1000 * MIB),
        row("bf16", "forward", 64, Some(40.0), 450 * MIB),
        row("bf16", "forward-backward", 64, Some(60.0), 700 * MIB),
        row("bf16-dropping-casts", "forward", 64, Some(44.0), 360 * MIB),
    ];
    let analysis = PrecisionAnalysis::of(&rows);
    assert_eq!(
        analysis.precisions(),
        ["f32", "bf16", "bf16-dropping-casts"]
    );
    let [forward, both] = &analysis.configurations[..] else {
        panic!("{analysis:?}");
    };
    assert_eq!(forward.sides.len(), 3);
    assert_eq!(forward.outcome(), "ok");
    let bf16 = forward.side("bf16").unwrap();
    assert_eq!(bf16.speedup, Some(0.75));
    assert_eq!(bf16.memory_saved_percent, Some(-12.5));
    assert_eq!(bf16.predicted_saved_percent, Some(-12.5));
    assert_eq!(forward.side("f32").unwrap().speedup, None);
    let bf16 = both.side("bf16").unwrap();
    assert_eq!(bf16.speedup, Some(1.5));
    assert!((bf16.memory_saved_percent.unwrap() - 30.0).abs() < 1e-9);

    let notes = analysis.notes();
    for expected in [
        "bf16 runs at 1.06x the speed of f32 (medians; geometric mean of 2), from 0.75x (tiny B4 T64 forward) to 1.50x \
         (tiny B4 T64 forward-backward).",
        "bf16 takes less memory than f32 in 1 of 2: from 12.5% more (tiny B4 T64 forward) to 30.0% less (tiny B4 T64 \
         forward-backward).",
        "Dropping casts of the weights, peak and time: tiny B4 T64 forward bf16 450.0 MiB to 360.0 MiB 1.10x.",
        "bf16-dropping-casts takes 10.0% less memory than f32 (tiny B4 T64 forward).",
    ] {
        assert!(
            notes.iter().any(|note| note == expected),
            "{expected}\n{notes:#?}"
        );
    }
    let copies = analysis.copies().unwrap();
    let saved = |row: usize| -> Vec<f64> {
        let keys = ["saved_bytes", "rest_saved_bytes", "weight_cast_bytes"];
        keys.map(|key| number(&copies.rows[row], key) / MIB as f64)
            .to_vec()
    };
    assert_eq!(saved(0), [-50.0, 50.0, 100.0]);
    assert_eq!(saved(1), [300.0, 400.0, 100.0]);
}

/// Speed-ups that grow with the square root of the parameters, at three sizes; two sizes have no trend.
#[test]
fn the_trend_of_the_speedup_is_fitted() {
    let rows = |sizes: &[u64]| -> Vec<Fields> {
        let pairs = sizes.iter().flat_map(|size| {
            let of = |precision, ms| {
                let mut row = row(precision, "forward", 64, Some(ms), MIB);
                row.insert("parameters", *size);
                row
            };
            [of("f32", 100.0), of("bf16", 100.0 / (*size as f64).sqrt())]
        });
        pairs.collect()
    };
    let notes = PrecisionAnalysis::of(&rows(&[1, 4, 16])).notes();
    let expected = "bf16, forward: the speed-up grows with the model's size, as parameters^0.50 (least squares in \
        logs, 3 configurations).";
    assert!(notes.iter().any(|note| note == expected), "{notes:#?}");
    let notes = PrecisionAnalysis::of(&rows(&[1, 4])).notes();
    assert!(
        !notes.iter().any(|note| note.contains("least squares")),
        "{notes:#?}"
    );
}

#[rstest]
#[case(None, Some(1.0), "bf16 avoids OOM")]
#[case(Some(1.0), None, "bf16 OOM")]
#[case(None, None, "OOM in all")]
#[case(Some(1.0), Some(1.0), "ok")]
fn what_fits_in_one_precision_only_is_said(
    #[case] f32_ms: Option<f64>,
    #[case] bf16_ms: Option<f64>,
    #[case] expected: &str,
) {
    let rows = [
        row("f32", "forward", 64, f32_ms, 800 * MIB),
        row("bf16", "forward", 64, bf16_ms, 500 * MIB),
    ];
    let analysis = PrecisionAnalysis::of(&rows);
    let only = &analysis.configurations[0];
    assert_eq!(only.outcome(), expected);
    let compared = f32_ms.is_some() && bf16_ms.is_some();
    let bf16 = only.side("bf16").unwrap();
    assert_eq!(bf16.speedup.is_some(), compared);
    assert_eq!(bf16.memory_saved_percent.is_some(), compared);
    assert_eq!(bf16.predicted_saved_percent, Some(37.5));
    let notes = analysis.notes();
    let told = notes.iter().any(|note| note.contains(expected));
    assert_eq!(told, expected != "ok", "{notes:?}");
}

#[test]
fn rows_without_f32_are_shown_and_not_compared() {
    let rows = [row("bf16", "forward", 64, Some(1.0), MIB)];
    let analysis = PrecisionAnalysis::of(&rows);
    assert_eq!(analysis.configurations[0].sides[0].speedup, None);
    assert_eq!(analysis.notes(), Vec::<String>::new());
    assert_eq!(PrecisionAnalysis::of(&[Fields::new()]), Default::default());
}

#[test]
fn the_header_says_what_half_arithmetic_there_is() {
    let header = text(&environment(&Device::Cpu), "half arithmetic");
    match tallow::hardware::bf16_products() {
        None => assert!(header.contains("compute in f32"), "{header}"),
        Some(unit) => assert!(
            header.contains(&format!("bf16 products by {unit}")),
            "{header}"
        ),
    }
    let units = tallow::hardware::half_arithmetic();
    assert_eq!(units.is_empty(), header.starts_with("none"));
    for unit in units {
        assert!(header.contains(unit.name()), "{header}");
    }
}
