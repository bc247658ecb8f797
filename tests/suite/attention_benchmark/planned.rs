//! Planned attention, measured next to the other implementations.

use super::{
    alone, attention, check_measured, is_missing, layer, module, number, rows, rows_unrun, text,
};
use crate::child;
use candle_core::{DType, Device};
use rayon::ThreadPoolBuilder;
use rstest::rstest;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, AttentionTask, Execution};
use tallow::memory::{
    AttentionWorkload, Target, attention_breakdown, planned_attention_breakdown,
    planned_self_attention_breakdown,
};
use tallow::precision::{Precision, Regime};
#[cfg(feature = "cuda")]
use tallow::{
    memory::{SelfAttentionWorkload, self_attention_breakdown},
    report::Fields,
};

fn planned() -> AttentionRun {
    planned_by(Algorithm::Naive)
}

fn planned_by(algorithm: Algorithm) -> AttentionRun {
    AttentionRun {
        execution: Execution::Planned,
        ..attention(algorithm)
    }
}

#[rstest]
fn it_has_a_row_for_each_phase(
    #[values((Algorithm::Naive, "planned"), (Algorithm::Flash, "planned-flash"))] (algorithm, name): (
        Algorithm,
        &str,
    ),
    #[values(Mask::Full, Mask::Causal)] mask: Mask,
) {
    let mut run = planned_by(algorithm);
    alone(&mut run).mask = mask;
    let rows = rows(&run);
    let pairs = match mask {
        Mask::Full => 37.0 * 37.0,
        _ => 37.0 * 38.0 / 2.0,
    };
    let forward = 4.0 * 6.0 * 24.0 * pairs;
    check_measured(&rows, [forward, 2.0 * forward], 3.0 * 37.0);
    assert_eq!(text(&rows[0], "implementation"), name);
}

#[test]
fn it_runs_out_of_memory_in_a_row_too() {
    let mut run = planned();
    alone(&mut run).sequence_length = 16_384;
    run.available_bytes = Some(1 << 20);
    let rows = rows_unrun(&run);
    assert_eq!(rows.len(), 1);
    assert_eq!(text(&rows[0], "status"), "OOM");
    assert!(is_missing(&rows[0], "mean_ms"));
    // 3 x 2 x 16,384 x 16,384 x 4 bytes.
    let reason = text(&rows[0], "reason");
    assert!(reason.contains("activation 6,144.0 MiB"), "{reason}");
    // More than a plan can count.
    let absurd = AttentionWorkload {
        sequence_length: 500_000_000,
        ..*alone(&mut run)
    };
    for algorithm in Algorithm::ALL {
        let mut absurd = AttentionRun {
            task: AttentionTask::Alone(absurd),
            ..run.clone()
        };
        alone(&mut absurd).algorithm = algorithm;
        assert_eq!(text(&rows_unrun(&absurd)[0], "status"), "OOM");
    }
    let limit = run.limit(&Device::Cpu).unwrap();
    assert_eq!(limit.implementation, "planned");
    assert!(limit.breakdown.unwrap().peak_bytes() > 1 << 20);
}

#[test]
fn f64_is_not_planned() {
    let mut run = planned();
    alone(&mut run).dtype = DType::F64;
    let rows = rows_unrun(&run);
    assert_eq!(text(&rows[0], "status"), "unsupported");
    let reason = text(&rows[0], "reason");
    assert!(
        reason.contains("planned in f32, bf16 or f16, on the CPU"),
        "{reason}"
    );
}

#[test]
fn it_takes_what_its_account_says() {
    if child::ran("attention_benchmark::planned::it_takes_what_its_account_says") {
        return;
    }
    let ways = [
        (Mask::Full, DType::F32),
        (Mask::Causal, DType::F32),
        (Mask::Full, DType::BF16),
        (Mask::Causal, DType::F16),
    ];
    for (mask, dtype) in ways {
        for (batch_size, heads, sequence_length, head_dim) in [(8, 1, 300, 64), (1, 1, 1100, 40)] {
            for algorithm in Algorithm::ALL {
                let mut run = planned_by(algorithm);
                *alone(&mut run) = AttentionWorkload {
                    batch_size,
                    heads,
                    sequence_length,
                    head_dim,
                    mask,
                    dtype,
                    ..*alone(&mut run)
                };
                check_memory(&mut run);
            }
        }
    }
}

/// Checks the memory in its rows against its breakdown.
fn check_memory(run: &mut AttentionRun) {
    let breakdown = planned_attention_breakdown(alone(run), Target::Cpu).unwrap();
    let (before, peak) = (breakdown.before_backward_bytes, breakdown.peak_bytes());
    let w = *alone(run);
    let width = w.dtype.size_in_bytes();
    let heads = (w.batch_size * w.heads * w.sequence_length * w.head_dim * width) as u64;
    // q, k, v, d_out and out exist before backward; the gradients in the arena do not.
    assert!(
        5 * heads <= before && before + 3 * heads <= peak,
        "{before} of {peak}"
    );
    let scratch = peak as f64; // the kernels' own, if no thread is idle
    for row in rows(run) {
        let expected = [
            ("before_backward_bytes", before, 0.0),
            ("peak_bytes", peak, scratch),
        ];
        for (key, expected, less) in expected {
            let found = number(&row, key);
            // Calls and buffers, and the pool's task queue.
            let beside = found - expected as f64;
            assert!(
                (-less..32e3).contains(&beside),
                "{key}: {found}, not {expected}"
            );
        }
    }
}

/// The planned layer, with the projections: its phases and their FLOPs, and its estimated memory.
#[test]
fn its_layer_is_planned_too() {
    if child::ran("attention_benchmark::planned::its_layer_is_planned_too") {
        return;
    }
    let one_thread = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for (algorithm, name) in [
        (Algorithm::Naive, "planned"),
        (Algorithm::Flash, "planned-flash"),
    ] {
        for precision in [Precision::F32, Precision::BF16] {
            let mut run = AttentionRun {
                execution: Execution::Planned,
                ..module(algorithm)
            };
            layer(&mut run).d_model = 512;
            *layer(&mut run) = layer(&mut run).with_precision(precision);
            let workload = *layer(&mut run);
            let rows = one_thread.install(|| rows(&run));
            let (n, d, pairs) = (3.0 * 19.0, 512.0, 19.0 * 20.0 / 2.0);
            let attention = 4.0 * 3.0 * d * pairs;
            let forward = 8.0 * n * d * d + attention;
            let backward = 10.0 * n * d * d + 2.0 * attention;
            check_measured(&rows, [forward, backward], n);
            let breakdown = one_thread
                .install(|| planned_self_attention_breakdown(&workload, &Device::Cpu).unwrap());
            for row in &rows {
                assert_eq!(text(row, "implementation"), name);
                let [model, after_forward, after_backward, peak] = [
                    "model_bytes",
                    "model_forward_bytes",
                    "model_forward_backward_bytes",
                    "peak_bytes",
                ]
                .map(|key| number(row, key));
                let weights = 4.0 * d * d * 4.0;
                let x = n * d * 4.0;
                // x exists twice, because the step reads a copy; plus calls and buffers.
                let beside = model - weights - 2.0 * x;
                assert!((-x..64e3).contains(&beside), "{model}: {beside}");
                assert!(after_forward > model && after_forward < peak);
                assert!(
                    after_backward >= model + weights,
                    "gradients of four weights"
                );
                // The copy of x and the kernels' workspace are predicted too.
                let expected = breakdown.peak_bytes() as f64;
                assert!(
                    (-x..64e3).contains(&(peak - expected)),
                    "{peak}, not {expected}: {breakdown}"
                );
            }
        }
    }
    let mut refused = AttentionRun {
        execution: Execution::Planned,
        ..module(Algorithm::Naive)
    };
    let half = Precision::BF16.with_regime(Regime::Full);
    *layer(&mut refused) = layer(&mut refused).with_precision(half);
    let rows = rows_unrun(&refused);
    assert_eq!(text(&rows[0], "status"), "unsupported");
    assert!(text(&rows[0], "reason").contains("weights in f32"));
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn on_a_gpu_too() {
    if child::ran("attention_benchmark::planned::on_a_gpu_too") {
        return;
    }
    let gpu = tallow::device("cuda:0").unwrap();
    let rows_on =
        |gpu: &Device, run: &AttentionRun| run.run(gpu, |_, _| ()).unwrap().rows().unwrap();
    let ways = [DType::F32, DType::BF16].map(|dtype| Algorithm::ALL.map(|by| (by, dtype)));
    for (algorithm, dtype) in ways.into_iter().flatten() {
        let mut run = planned_by(algorithm);
        (alone(&mut run).sequence_length, alone(&mut run).dtype) = (700, dtype);
        let breakdown = planned_attention_breakdown(alone(&mut run), Target::Cuda).unwrap();
        let peak = |row: &Fields| number(row, "peak_bytes");
        for row in rows_on(&gpu, &run) {
            assert_eq!(text(&row, "status"), "ok");
            for (taken, predicted) in [
                (
                    number(&row, "before_backward_bytes"),
                    breakdown.before_backward_bytes,
                ),
                (peak(&row), breakdown.peak_bytes()),
            ] {
                let mib = (taken - predicted as f64) / f64::from(1 << 20);
                assert!((0.0..0.1).contains(&mib), "{mib} MiB more");
            }
        }
        for algorithm in Algorithm::ALL {
            let mut eager = attention(algorithm);
            *alone(&mut eager) = AttentionWorkload {
                algorithm,
                ..*alone(&mut run)
            };
            let breakdown = attention_breakdown(alone(&mut eager), Target::Cuda).unwrap();
            let rows = rows_on(&gpu, &eager);
            let before_backward = number(&rows[2], "before_backward_bytes");
            for (predicted, measured) in [
                (breakdown.before_backward_bytes, before_backward),
                (breakdown.peak_bytes(), peak(&rows[2])),
            ] {
                // The pool rounds a block up to 512 bytes.
                let beside = measured - predicted as f64;
                assert!(beside.abs() < 16e3, "{measured}: {breakdown}");
            }
        }

        run.available_bytes = Some(1 << 20);
        let refused = rows_on(&gpu, &run);
        assert_eq!(text(&refused[0], "status"), "OOM");
        if algorithm == Algorithm::Flash {
            continue;
        }
        for term in ["activation", "workspace 32.0 MiB"] {
            assert!(text(&refused[0], "reason").contains(term), "{refused:?}");
        }
    }
    let precisions = [
        Precision::F32,
        Precision::BF16,
        Precision::BF16.with_dropped_casts(true),
        Precision::F16.with_regime(Regime::Full),
    ];
    for (algorithm, precision) in Algorithm::ALL
        .into_iter()
        .flat_map(|algorithm| precisions.map(|precision| (algorithm, precision)))
    {
        let workload = SelfAttentionWorkload {
            algorithm,
            batch_size: 4,
            sequence_length: 300,
            d_model: 512,
            heads: 8,
            ..Default::default()
        };
        let workload = workload.with_precision(precision);
        let run = AttentionRun {
            task: AttentionTask::Layer(workload),
            ..attention(algorithm)
        };
        let breakdown = self_attention_breakdown(&workload, Target::Cuda).unwrap();
        let rows = rows_on(&gpu, &run);
        for (predicted, key) in [
            (breakdown.before_backward_bytes, "before_backward_bytes"),
            (breakdown.peak_bytes(), "peak_bytes"),
        ] {
            let measured = number(&rows[2], key);
            println!("{algorithm} {precision} {key}: {predicted} {measured}");
            let beside = measured - predicted as f64;
            assert!(
                beside.abs() < 16e3,
                "{algorithm} {precision} {key} {measured}: {breakdown}"
            );
        }
    }
}

/// The estimate for a GPU includes the score gradients of the heads that are processed together, without a GPU too. In
/// half precision it also includes those of the probabilities in f32.
#[test]
fn a_gpu_need_not_be_there() {
    for (dtype, width, gradients) in [(DType::F32, 4, 1), (DType::BF16, 2, 3)] {
        for (length, at_once) in [(700, 8), (16_384, 1), (32_768, 1)] {
            let workload = AttentionWorkload {
                sequence_length: length as usize,
                dtype,
                ..Default::default()
            };
            let (heads, scores) = (8 * length * 64 * width, length * length * width);
            let eager = attention_breakdown(&workload, Target::Cuda).unwrap();
            assert_eq!(eager.before_backward_bytes, 4 * heads + 8 * scores);
            assert_eq!(
                eager.peak_bytes(),
                8 * heads + (8 + gradients * at_once) * scores
            );
            let planned = planned_attention_breakdown(&workload, Target::Cuda).unwrap();
            // Only the plan has a cuBLASLt workspace.
            let beside = planned.peak_bytes() - eager.peak_bytes();
            assert_eq!(beside, 32 << 20, "{planned}");
        }
    }
}
