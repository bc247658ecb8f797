//! The memory breakdown against the tracker, and the reported limits.

use super::{alone, attention, module, number, rows};
use crate::child;
use candle_core::{DType, Device, Var};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::LazyLock;
use tallow::attention::{Algorithm, AttentionConfig, Mask, flash};
use tallow::bench::{AttentionResult, AttentionRun, AttentionStatus, AttentionTask, Execution};
use tallow::memory::{
    AttentionWorkload, MemoryBreakdown, SelfAttentionWorkload, Target, attention_breakdown,
    self_attention_breakdown, tracker,
};
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::precision::{Precision, Regime};
use tallow::report::Fields;

/// Runs two iterations; the reported memory is the last one's.
fn twice() -> AttentionRun {
    AttentionRun {
        warmup_steps: 0,
        iterations: 2,
        ..Default::default()
    }
}

/// The bytes of a thread's matmul packing buffers, which the breakdown omits.
const PACKING_BYTES: usize = 64 << 10;

/// The packing buffers of a thread in half precision, where matmuls pack all operands: blocks of at most 512 x 192, 192
/// x 48, 16 x 192 and 512 x 480 in f32.
const HALF_PACKING_BYTES: usize = 4 * (512 * 192 + 192 * 48 + 16 * 192 + 512 * 480);

/// A pool that lives until the end: the buffers that its thread frees on exit would be missing in the next measurement.
static ONE_THREAD: LazyLock<ThreadPool> =
    LazyLock::new(|| ThreadPoolBuilder::new().num_threads(1).build().unwrap());

/// Checks measured memory against `breakdown`.
fn check(
    rows: &[Fields],
    what: &str,
    breakdown: impl Fn() -> MemoryBreakdown + Send,
    packing_bytes: usize,
) {
    let whole = &rows[2];
    let pair = |predicted, measured| (number(whole, predicted), number(whole, measured));
    let (predicted, measured) = pair("estimate_before_backward_bytes", "before_backward_bytes");
    // The measurement includes the records of tensors and ops.
    assert!(
        (predicted - measured).abs() < 0.01 * measured + 16.0 * 1024.0,
        "{what}: before backward predicted {predicted}, measured {measured}"
    );
    let (predicted, measured) = pair("estimate_bytes", "peak_bytes");
    println!("{what}: {predicted} {measured} {:.4}", predicted / measured);
    let packing = (packing_bytes * rayon::current_num_threads()) as f64;
    assert!(
        measured < 1.03 * predicted + packing,
        "{what}: peak predicted {predicted}, measured {measured}"
    );
    // On a busy machine the threads may never hold their buffers at the same time.
    let at_least = ONE_THREAD.install(breakdown).peak_bytes() as f64;
    assert!(
        measured > 0.85 * at_least,
        "{what}: peak predicted {at_least} on one thread, measured {measured}"
    );
}

#[test]
fn attention_takes_what_its_account_says() {
    if child::ran("attention_benchmark::memory::attention_takes_what_its_account_says") {
        return;
    }
    let shapes = [
        (8, 1, 512, 16),
        (8, 1, 300, 64),
        (2, 6, 257, 40),
        (1, 1, 1024, 64),
        (1, 3, 600, 128),
    ];
    for algorithm in Algorithm::ALL {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for mask in [Mask::Full, Mask::Causal] {
                for (batch_size, heads, sequence_length, head_dim) in shapes {
                    let workload = AttentionWorkload {
                        documents: 1,
                        algorithm,
                        batch_size,
                        heads,
                        sequence_length,
                        head_dim,
                        mask,
                        dtype,
                    };
                    let run = AttentionRun {
                        task: AttentionTask::Alone(workload),
                        ..twice()
                    };
                    let rows = rows(&run);
                    let breakdown = || attention_breakdown(&workload, Target::Cpu).unwrap();
                    check(&rows, &format!("{workload:?}"), breakdown, PACKING_BYTES);
                }
            }
        }
    }
}

/// Runs on the CPU the reference that a GPU runs in f64.
#[test]
fn flash_without_a_kernel_takes_what_its_account_says() {
    if child::ran("attention_benchmark::memory::flash_without_a_kernel_takes_what_its_account_says")
    {
        return;
    }
    for shape @ (batch_size, heads, sequence_length, head_dim) in
        [(8, 1, 300, 64), (1, 1, 1024, 64)]
    {
        let workload = AttentionWorkload {
            algorithm: Algorithm::Flash,
            batch_size,
            heads,
            sequence_length,
            head_dim,
            dtype: DType::F64,
            ..Default::default()
        };
        let breakdown = attention_breakdown(&workload, Target::Cuda).unwrap();
        let measured = || {
            let start = tracker::current_bytes().unwrap();
            let [q, k, v] = [0; 3].map(|_| Var::zeros(shape, DType::F64, &Device::Cpu).unwrap());
            tracker::reset_peak();
            let out = with_kernel_policy(KernelPolicy::Reference, || {
                flash(&q, &k, &v, &AttentionConfig::default()).unwrap()
            });
            let before_backward = tracker::current_bytes().unwrap() - start;
            out.backward().unwrap();
            (before_backward, tracker::peak_bytes().unwrap() - start)
        };
        measured(); // allocates the buffers that matmuls keep
        let (before_backward, peak) = measured();
        let near = |predicted: u64, measured: u64| {
            let ratio = predicted as f64 / measured as f64;
            assert!((0.95..1.01).contains(&ratio), "{workload:?}: {ratio}");
        };
        near(breakdown.before_backward_bytes, before_backward);
        near(breakdown.peak_bytes(), peak);
    }
}

#[test]
fn the_module_takes_what_its_account_says() {
    if child::ran("attention_benchmark::memory::the_module_takes_what_its_account_says") {
        return;
    }
    let shapes = [
        (8, 128, 256, 1), // activations dominate
        (8, 16, 512, 2),  // weights dominate
        (4, 512, 64, 1),  // probabilities dominate
        (8, 64, 512, 4),
    ];
    for algorithm in Algorithm::ALL {
        for dtype in [DType::F32, DType::F64] {
            for (batch_size, sequence_length, d_model, heads) in shapes {
                let workload = SelfAttentionWorkload {
                    algorithm,
                    batch_size,
                    sequence_length,
                    d_model,
                    heads,
                    dtype,
                    ..Default::default()
                };
                let run = AttentionRun {
                    task: AttentionTask::Layer(workload),
                    ..twice()
                };
                let rows = rows(&run);
                let breakdown = || self_attention_breakdown(&workload, Target::Cpu).unwrap();
                check(&rows, &format!("{workload:?}"), breakdown, PACKING_BYTES);
                check_columns(&rows[2], &workload);
            }
        }
    }
}

#[test]
fn the_module_in_half_precision_takes_what_its_account_says() {
    if child::ran(
        "attention_benchmark::memory::the_module_in_half_precision_takes_what_its_account_says",
    ) {
        return;
    }
    let shapes = [(8, 128, 512, 2), (4, 16, 1024, 4), (2, 1024, 64, 1)];
    let precisions = [
        Precision::BF16,
        Precision::BF16.with_dropped_casts(true),
        Precision::F16.with_regime(Regime::CpuAutocast),
        Precision::BF16.with_regime(Regime::Full),
    ];
    for algorithm in Algorithm::ALL {
        for precision in precisions {
            for (batch_size, sequence_length, d_model, heads) in shapes {
                let workload = SelfAttentionWorkload {
                    algorithm,
                    batch_size,
                    sequence_length,
                    d_model,
                    heads,
                    ..Default::default()
                }
                .with_precision(precision);
                let run = AttentionRun {
                    task: AttentionTask::Layer(workload),
                    ..twice()
                };
                let rows = rows(&run);
                let breakdown = || self_attention_breakdown(&workload, Target::Cpu).unwrap();
                check(
                    &rows,
                    &format!("{workload:?}"),
                    breakdown,
                    HALF_PACKING_BYTES,
                );
            }
        }
    }
}

/// Checks the columns of the layer's table: weights and x, then with the graph, then with gradients instead of the
/// graph.
fn check_columns(row: &Fields, w: &SelfAttentionWorkload) {
    let width = w.dtype.size_in_bytes();
    let weights = 4 * w.d_model * w.d_model * width;
    let x = w.batch_size * w.sequence_length * w.d_model * width;
    let near = |key: &str, expected: usize| {
        let found = number(row, key);
        let slack = 0.01 * expected as f64 + 16.0 * 1024.0;
        assert!(
            (found - expected as f64).abs() <= slack,
            "{key}: {found}, not {expected}"
        );
    };
    near("model_bytes", weights + x);
    near("model_forward_backward_bytes", 2 * weights + x);
    let [model, forward, backward] = [
        "model_bytes",
        "model_forward_bytes",
        "model_forward_backward_bytes",
    ]
    .map(|key| number(row, key));
    assert_eq!(number(row, "forward_bytes"), forward - model);
    assert_eq!(number(row, "backward_bytes"), backward - forward);
    assert_eq!(number(row, "before_backward_bytes"), forward);
}

#[test]
fn forward_and_backward_have_peaks_of_their_own() {
    if child::ran("attention_benchmark::memory::forward_and_backward_have_peaks_of_their_own") {
        return;
    }
    let mut run = attention(Algorithm::Naive);
    alone(&mut run).sequence_length = 256;
    let rows = rows(&run);
    let [forward, backward, whole] = [0, 1, 2].map(|i| number(&rows[i], "peak_bytes"));
    assert!(forward < backward, "{forward} {backward}");
    assert_eq!(whole, backward);
    assert!(forward >= number(&rows[0], "before_backward_bytes"));
}

#[test]
fn the_account_grows_as_its_algorithm_does() {
    let peak = |algorithm, sequence_length| {
        let workload = AttentionWorkload {
            algorithm,
            sequence_length,
            ..Default::default()
        };
        attention_breakdown(&workload, Target::Cpu)
            .unwrap()
            .peak_bytes() as f64
    };
    let ratio = |algorithm| peak(algorithm, 1 << 16) / peak(algorithm, 1 << 15);
    assert!((3.9..4.0).contains(&ratio(Algorithm::Naive)));
    assert!((1.9..=2.0).contains(&ratio(Algorithm::Flash)));
}

#[test]
fn sizes_beyond_any_machine_are_counted_not_overflowed() {
    let most = usize::MAX;
    for algorithm in Algorithm::ALL {
        for dtype in [DType::F32, DType::BF16] {
            let workload = AttentionWorkload {
                documents: 1,
                algorithm,
                batch_size: most,
                heads: most,
                sequence_length: most,
                head_dim: 64,
                mask: Mask::Causal,
                dtype,
            };
            for kernels in [Target::Cpu, Target::Cuda] {
                let breakdown = attention_breakdown(&workload, kernels).unwrap();
                assert_eq!(breakdown.peak_bytes(), u64::MAX);
            }
            assert_eq!(workload.composed_bytes(), u64::MAX);
            let workload = SelfAttentionWorkload {
                algorithm,
                batch_size: most,
                sequence_length: most,
                d_model: most,
                heads: 1,
                dtype,
                ..Default::default()
            };
            let breakdown = self_attention_breakdown(&workload, Target::Cpu).unwrap();
            assert_eq!(breakdown.peak_bytes(), u64::MAX);
        }
    }
}

#[test]
fn the_limit_is_the_first_that_does_not_fit() {
    for algorithm in Algorithm::ALL {
        let mut run = attention(algorithm);
        let workload = *alone(&mut run);
        let limit = run.limit(&Device::Cpu).unwrap();
        let at = |sequence_length| AttentionWorkload {
            documents: 1,
            sequence_length,
            ..workload
        };
        let peak = |length| {
            attention_breakdown(&at(length), Target::Cpu)
                .unwrap()
                .peak_bytes()
        };
        let available = run.available_bytes.unwrap();
        let (length, breakdown) = (limit.context_length, limit.breakdown.unwrap());
        assert!(length.is_power_of_two());
        assert!(peak(length) > available);
        assert!(peak(length / 2) <= available);
        assert_eq!(breakdown.peak_bytes(), peak(length));
        assert_eq!(limit.implementation, algorithm.name());
        assert_eq!(limit.status, AttentionStatus::OutOfMemory);
        let table = breakdown.report();
        let sum = table.rows.last().and_then(|row| row.get("bytes")?.as_u64());
        assert_eq!(sum, Some(breakdown.peak_bytes()));
    }
    let mut nobody_knows = attention(Algorithm::Naive);
    nobody_knows.available_bytes = None;
    assert_eq!(nobody_knows.limit(&Device::Cpu), None);
    let mut too_wide = attention(Algorithm::Flash);
    alone(&mut too_wide).head_dim = 257;
    assert_eq!(too_wide.limit(&Device::Cpu), None);

    // 4 D^2 weights and 6 D^2 of gradients, 4 bytes each, exceed 1 GiB from about D 5,000.
    let limit = module(Algorithm::Naive).limit(&Device::Cpu).unwrap();
    assert_eq!(limit.d_model, Some(8192));
    assert_eq!(
        module(Algorithm::Flash).limit(&Device::Cpu),
        None,
        "no heads of that width"
    );
    let mut endless = attention(Algorithm::Naive);
    endless.available_bytes = Some(u64::MAX);
    assert_eq!(endless.limit(&Device::Cpu), None);
}

/// Any size gives rows of `OOM` or errors, without allocating for the workload.
#[test]
fn predictions_allocate_nothing_for_the_workload() {
    if child::ran("attention_benchmark::memory::predictions_allocate_nothing_for_the_workload") {
        return;
    }
    tallow::memory::system::reserve_scratch(Precision::F32).unwrap(); // belongs to the process
    const LARGE: usize = 1_000_000_000;
    let limited = AttentionRun {
        available_bytes: Some(1 << 30),
        ..Default::default()
    };
    let check_memory = |what: &str, before: u64| {
        let taken = tracker::peak_bytes().unwrap() - before;
        assert!(taken < 16 << 20, "{what} took {taken} bytes");
    };
    let check = |what: &str, result: tallow::Result<AttentionResult>, before: u64| {
        if let Ok(result) = result {
            assert_eq!(result.status, AttentionStatus::OutOfMemory, "{what}");
        }
        check_memory(what, before);
    };
    let start = || {
        tracker::reset_peak();
        tracker::current_bytes().unwrap()
    };
    for execution in [Execution::Eager, Execution::Planned] {
        for algorithm in Algorithm::ALL {
            for large in [LARGE, LARGE * LARGE, usize::MAX] {
                let ways: [(usize, usize, usize, usize); 6] = [
                    (large, 1024, 1, 1),
                    (large, 1024, 2, 1),
                    (large, 1, 2, 1),
                    (1, large, 2, 1),
                    (1, large, large, 1),
                    (large, large, large, large),
                ];
                for (batch_size, sequence_length, documents, heads) in ways {
                    let workload = AttentionWorkload {
                        algorithm,
                        batch_size,
                        sequence_length,
                        documents,
                        heads,
                        ..Default::default()
                    };
                    let run = AttentionRun {
                        task: AttentionTask::Alone(workload),
                        execution,
                        ..limited.clone()
                    };
                    let before = start();
                    let result = run.run(&Device::Cpu, |_, _| panic!("nothing may run"));
                    check(&format!("{execution:?} {workload:?}"), result, before);
                    let before = start();
                    run.limit(&Device::Cpu);
                    check_memory("the limit", before);
                }
                for (batch_size, sequence_length, d_model) in [
                    (large, 1, 64),
                    (1, large, 64),
                    (1, 1, large),
                    (large, large, large),
                ] {
                    let workload = SelfAttentionWorkload {
                        algorithm,
                        batch_size,
                        sequence_length,
                        d_model,
                        ..Default::default()
                    };
                    let run = AttentionRun {
                        task: AttentionTask::Layer(workload),
                        execution,
                        ..limited.clone()
                    };
                    let before = start();
                    let result = run.run(&Device::Cpu, |_, _| panic!("nothing may run"));
                    match result {
                        // Heads too wide for flash.
                        Ok(result) if result.status == AttentionStatus::Unsupported => {}
                        result => check(&format!("{execution:?} {workload:?}"), result, before),
                    }
                }
            }
        }
    }
}

/// First keys are those of documents as equal in length as possible; without memory for them there is an error.
#[test]
fn first_keys_of_the_workload_are_checked() {
    let workload = AttentionWorkload {
        batch_size: 2,
        sequence_length: 8,
        documents: 3,
        ..Default::default()
    };
    let first_keys = workload.config().unwrap().first_keys.unwrap();
    let row = [0, 0, 2, 2, 2, 5, 5, 5];
    assert_eq!(first_keys.tensor().to_vec2::<u32>().unwrap(), [row, row]);
    for large in [1 << 40, usize::MAX] {
        for (batch_size, sequence_length) in [(large, 8), (2, large)] {
            let workload = AttentionWorkload {
                batch_size,
                sequence_length,
                ..workload
            };
            let error = workload.config().unwrap_err().to_string();
            assert!(
                error.starts_with("AttentionWorkload") || error.contains("bytes of memory"),
                "{error}"
            );
        }
    }
}
