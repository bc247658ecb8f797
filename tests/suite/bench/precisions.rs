//! Half precision in the harness: its regimes, loss scaling, and turns.

#[path = "../../../examples/precision_curves/compared.rs"]
#[allow(dead_code)] // belongs to the example
mod curves;

use super::{fields, number, rows, run, text};
use candle_core::Device;
use rstest::rstest;
use serde_json::Value;
use tallow::bench::{EndToEnd, alternate, environment};
use tallow::memory::Mode;
use tallow::precision::{Precision, Regime};
use tallow::report::Fields;
use tallow::train::{Evaluation, History};

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
                step: precision.into(),
                ..run(mode)
            };
            for row in rows(&run) {
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
        step: Precision::F16.into(),
        ..run(Mode::TrainStep)
    };
    let rows = rows(&run);
    for row in &rows {
        let (scale, skipped) = (number(row, "loss_scale"), number(row, "skipped_steps"));
        assert_eq!(scale, 65536.0 * 0.5f64.powf(skipped));
        assert!(skipped < 6.0, "every step was skipped");
    }
}

/// A region that caches casts adds 2 bytes per element of a linear weight.
#[test]
fn kept_copies_of_weights_are_counted() {
    let of = |precision: Precision| {
        let run = EndToEnd {
            step: precision.into(),
            ..run(Mode::Forward)
        };
        let rows = rows(&run);
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
    // Fewer heads of k and v, and a head that multiplies the token embeddings; the run does not fit and is not run.
    let mut grouped = EndToEnd {
        step: Precision::BF16.into(),
        available_bytes: Some(1),
        ..run(Mode::Forward)
    };
    grouped.config.num_kv_heads = Some(1);
    grouped.config.tie_embeddings = true;
    let shapes = grouped.config.parameter_shapes();
    let matrices = shapes.iter().filter(|(_, shape)| shape.rank() == 2);
    let elements: usize = matrices.map(|(_, shape)| shape.elem_count()).sum();
    let row = &grouped.run(&Device::Cpu, |_, _| ()).unwrap()[0];
    assert_eq!(row.weight_cast_bytes, Some(2 * elements as u64));
}

#[test]
fn turns_are_taken_and_their_samples_joined() {
    let fits = run(Mode::TrainStep);
    let runs = [
        fits.clone(),
        EndToEnd {
            step: Precision::F16.into(),
            ..fits.clone()
        },
        EndToEnd {
            available_bytes: Some(1),
            ..fits
        },
    ];
    let mut turns = Vec::new();
    let rows = alternate(&runs, 3, &Device::Cpu, |i, _, ms| turns.push((i, ms))).unwrap();
    let rows: Vec<Vec<Fields>> = rows.iter().map(|rows| fields(rows)).collect();
    let order: Vec<usize> = turns.iter().map(|(i, _)| *i).collect();
    let expected: Vec<usize> = [0, 1].repeat(3).iter().flat_map(|i| [*i; 6]).collect();
    assert_eq!(order, expected); // 2 warm-up steps and 4 measured ones per turn
    assert_eq!(rows.len(), 3);
    for (i, rows) in rows[..2].iter().enumerate() {
        assert_eq!(rows.len(), 5);
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
    assert_eq!(once[0][0].statistics().unwrap().n, 4);
}

/// The batches are equal, so losses are compared step by step.
#[test]
fn losses_are_compared_by_their_spread() {
    let run = |precision, factor: fn(usize) -> f64| curves::Run {
        precision,
        history: History {
            losses: (0..20)
                .map(|i| (5.0 + (i % 3) as f64) * factor(i))
                .collect(),
            evaluations: vec![Evaluation {
                step: 20,
                loss: 4.0,
            }],
            ..Default::default()
        },
        ..Default::default()
    };
    let exact = run(Precision::F32, |_| 1.0);
    let text = |other: curves::Run| curves::answer(&[exact.clone(), other]).unwrap().answer;
    let higher = text(run(Precision::BF16, |i| 1.01 + (i % 2) as f64 * 1e-4));
    assert!(higher.contains("higher than in f32"), "{higher}");
    let noisy = text(run(Precision::BF16, |i| {
        1.0 + if i % 2 == 0 { 0.01 } else { -0.01 }
    }));
    assert!(noisy.contains("no difference beyond the spread"), "{noisy}");
    assert!(curves::answer(std::slice::from_ref(&exact)).is_none());
}

#[test]
fn the_header_says_what_half_arithmetic_there_is() {
    let header = text(&environment(&Device::Cpu), "half arithmetic");
    match tallow::hardware::bf16_matmul_unit() {
        None => assert!(header.contains("compute in f32"), "{header}"),
        Some(unit) => assert!(
            header.contains(&format!("bf16 matmuls by {unit}")),
            "{header}"
        ),
    }
    let units = tallow::hardware::half_arithmetic();
    assert_eq!(units.is_empty(), header.starts_with("none"));
    for unit in units {
        assert!(header.contains(unit.name()), "{header}");
    }
}
