//! Half precision in the harness: its regimes, loss scaling, alternating runs, and the comparison with f32.

#[path = "../../../examples/mixed_precision_benchmark/compared.rs"]
#[allow(dead_code)] // belongs to the example
mod compared;
#[path = "../../../examples/precision_curves/compared.rs"]
#[allow(dead_code)] // belongs to the example
mod curves;

use super::{number, run, text};
use crate::words;
use candle_core::Device;
use compared::configurations;
use rstest::rstest;
use serde_json::Value;
use tallow::bench::{EndToEnd, alternate, environment};
use tallow::memory::Mode;
use tallow::precision::{Precision, Regime};
use tallow::report::{Fields, Speedup};

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

/// A step in f16 scales its loss; this model's gradients are finite at the initial scale.
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

/// A region that caches casts adds 2 bytes per element of a linear weight.
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
    assert_eq!(order, expected); // 2 warm-up steps and 4 measured ones per turn
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

/// Returns a row like the harness's; `None` as time means that it did not fit.
fn row(precision: &str, mode: &str, ms: Option<f64>, bytes: u64) -> Fields {
    let phase = match mode {
        "forward" => "forward",
        _ => "forward+backward",
    };
    let mut row = Fields::from_iter([("size", "tiny"), ("precision", precision), ("mode", mode)]);
    row.insert("phase", phase).insert("batch_size", 4);
    row.insert("context_length", 64)
        .insert("attention", "naive");
    row.insert("estimate_bytes", bytes);
    let status = if ms.is_some() { "ok" } else { "OOM" };
    row.insert("status", status).insert("n", 8);
    row.insert("mean_ms", ms);
    row.insert("std_ms", ms.map(|ms| 0.01 * ms));
    row.insert("peak_bytes", ms.map(|_| bytes));
    if precision == "bf16" {
        row.insert("weight_cast_bytes", 100u64 << 20);
    }
    row
}

const MIB: u64 = 1 << 20;

#[test]
fn precisions_are_compared_with_f32() {
    let mut phase = row("f32", "forward-backward", Some(1.0), 1);
    phase.insert("phase", "backward"); // not a complete step, so it is skipped
    let rows = [
        row("f32", "forward", Some(30.0), 400 * MIB),
        phase,
        row("f32", "forward-backward", Some(90.0), 1000 * MIB),
        row("bf16", "forward", Some(40.0), 450 * MIB),
        row("bf16", "forward-backward", Some(60.0), 700 * MIB),
        row("bf16-dropping-casts", "forward", Some(44.0), 360 * MIB),
    ];
    let all = configurations(&rows);
    assert_eq!(
        compared::precisions(&all),
        ["f32", "bf16", "bf16-dropping-casts"]
    );
    let [forward, both] = &all[..] else {
        panic!("{all:?}");
    };
    assert_eq!(forward.sides().count(), 3);
    assert_eq!(forward.outcome(), "ok");
    let ratio = |c: &compared::Configuration| c.speedup("f32", "bf16").unwrap().ratio;
    assert_eq!([ratio(forward), ratio(both)], [0.75, 1.5]);
    let line = forward.line();
    assert_eq!(line.get("change bf16"), Some(&"12.5% more".into()));
    assert_eq!(
        line.get("change bf16-dropping-casts"),
        Some(&"10.0% less".into())
    );
    let answers = compared::answers(&all);
    for expected in [
        "Of 2 configurations, bf16 is faster than f32 in 1, slower than f32 in 1. The ratio of means goes from 0.75x \
         (tiny B4 T64 forward) to 1.50x (tiny B4 T64 forward-backward).",
        "Of 2 configurations, bf16 uses less memory than f32 in 1, more memory than f32 in 1. The range is from 30.0% \
         less (tiny B4 T64 forward-backward: 700.0 MiB, f32 1,000.0 MiB) to 12.5% more (tiny B4 T64 forward: 450.0 \
         MiB, f32 400.0 MiB).",
        "adds a copy of each linear weight, at most 100.0 MiB here",
        "A trend needs three sizes of model",
    ] {
        let is_there = answers
            .iter()
            .any(|answer| answer.answer.contains(expected));
        assert!(is_there, "{expected}\n{answers:#?}");
    }
}

#[test]
fn a_trend_is_stated_where_a_power_law_fits_clear_ratios() {
    let clear = |ratio| Speedup { ratio, error: 0.02 };
    let trend = |ratios: &[Speedup]| {
        let sizes = [1e6, 4e6, 16e6, 64e6].into_iter();
        compared::trend(&sizes.zip(ratios.iter().copied()).collect::<Vec<_>>())
    };
    assert_eq!(
        trend(&[clear(1.0), clear(2.0), clear(4.0)]).unwrap(),
        "1.00x, 2.00x, 4.00x from the smallest model to the largest: it grows as parameters^0.50 (R^2 1.00)"
    );
    // A former version printed "grows as parameters^0.34" for this.
    let jumping = trend(&[clear(2.95), clear(2.07), clear(9.04)]).unwrap();
    assert!(
        jumping.contains("no trend: a power law has R^2 0."),
        "{jumping}"
    );
    let flat = trend(&[clear(1.5), clear(1.52), clear(1.49)]).unwrap();
    assert!(flat.contains("does not depend on the size"), "{flat}");
    let noisy = Speedup {
        ratio: 2.0,
        error: 1.5,
    };
    let noisy = trend(&[clear(1.0), noisy, clear(4.0)]).unwrap();
    assert!(noisy.contains("too large for a trend"), "{noisy}");
    assert_eq!(trend(&[clear(1.0), clear(2.0)]), None);
}

#[test]
fn speed_without_a_clear_ratio_is_undecided() {
    let noisy = Speedup {
        ratio: 1.5,
        error: 1.0,
    };
    let text = compared::speed("bf16", &[("tiny".into(), noisy)]);
    assert!(
        text.starts_with("Of 1 configuration, bf16 is undecided in 1."),
        "{text}"
    );
    assert!(
        text.contains("more steps") && !text.contains("1.50x"),
        "{text}"
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
        row("f32", "forward", f32_ms, 800 * MIB),
        row("bf16", "forward", bf16_ms, 500 * MIB),
    ];
    let all = configurations(&rows);
    assert_eq!(all[0].outcome(), expected);
    let is_compared = f32_ms.is_some() && bf16_ms.is_some();
    assert_eq!(all[0].speedup("f32", "bf16").is_some(), is_compared);
    let answers = compared::answers(&all);
    let is_told = answers
        .iter()
        .any(|answer| answer.answer.contains(expected));
    assert_eq!(is_told, expected != "ok", "{answers:?}");
}

#[test]
fn rows_without_f32_are_shown_and_not_compared() {
    let all = configurations(&[row("bf16", "forward", Some(1.0), MIB)]);
    assert_eq!(all[0].line().get("change bf16"), Some(&Value::Null));
    assert!(compared::answers(&all).is_empty());
    assert!(configurations(&[Fields::new()]).is_empty());
}

/// The batches are equal, so losses are compared step by step.
#[test]
fn losses_are_compared_by_their_spread() {
    let run = |precision: &str, factor: fn(usize) -> f64| curves::Run {
        precision: precision.into(),
        losses: (0..20)
            .map(|i| (5.0 + (i % 3) as f64) * factor(i))
            .collect(),
        validation_loss: 4.0,
        ..Default::default()
    };
    let exact = run("f32", |_| 1.0);
    let text = |other: curves::Run| curves::answer(&[exact.clone(), other]).unwrap().answer;
    let higher = text(run("bf16", |i| 1.01 + (i % 2) as f64 * 1e-4));
    assert!(higher.contains("higher than in f32"), "{higher}");
    let noisy = text(run("bf16", |i| 1.0 + if i % 2 == 0 { 0.01 } else { -0.01 }));
    assert!(noisy.contains("no difference beyond the spread"), "{noisy}");
    assert!(curves::answer(std::slice::from_ref(&exact)).is_none());
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
