//! The memory breakdown: exact counts, and estimates near measurements.

mod cases;
mod checkpointing;
mod fit;
#[cfg(feature = "cuda")]
mod gpu;
mod graphs;
mod on_gpus;
mod packing;
mod precisions;
mod recording;
pub mod refused;
mod saved;
mod snapshot;
mod verification;

use crate::check::refusal;
use crate::child;
use candle_core::Device;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution, Status};
use tallow::compile::StepConfig;
use tallow::memory::{Mode, Workload, estimate, system, tracker};
use tallow::model::TransformerConfig;
use tallow::nn::Architecture;
use tallow::optim::{MuonConfig, Rule};

const MODES: [Mode; 4] = [
    Mode::Forward,
    Mode::ForwardKeepingGraph,
    Mode::ForwardBackward,
    Mode::TrainStep,
];

fn config(d_model: usize, d_ff: usize, layers: usize, vocab_size: usize) -> TransformerConfig {
    TransformerConfig {
        vocab_size,
        context_length: 128,
        d_model,
        num_layers: layers,
        num_heads: 4,
        d_ff,
        ..Default::default()
    }
}

fn run(config: &TransformerConfig, batch_size: usize, mode: Mode) -> EndToEnd {
    EndToEnd {
        config: config.clone(),
        batch_size,
        sequence_length: config.context_length,
        mode,
        warmup_steps: 1,
        steps: 2,
        ..Default::default()
    }
}

#[rstest]
fn parts_follow_the_formulas(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let config = config(64, 100, 3, 500);
    let plan = |mode| {
        let workload = Workload {
            batch_size: 2,
            sequence_length: 128,
            mode,
            attention,
            ..Default::default()
        };
        estimate(&config, &workload).unwrap()
    };
    let parameters = config.num_parameters() as u64;
    let (n, d, f) = (256, 64, 100);
    let kept = match attention {
        Algorithm::Naive => 2 * 4 * 128 * 128,
        Algorithm::Flash => 2 * 2 * 4 * 128,
    };
    let graph = 3 * (16 * n * d + 3 * n * f + kept + 2 * n) + 2 * n * d + n;
    let step = plan(Mode::TrainStep);
    assert_eq!(step.parameter_bytes, 4 * parameters);
    assert_eq!(step.gradient_bytes, 4 * parameters);
    assert_eq!(step.optimizer_bytes, 8 * parameters);
    assert_eq!(step.activation_bytes, 4 * graph);
    assert_eq!(step.logit_bytes, 4 * (256 * 500 + 2 * 256 + 1)); // and the loss, and two numbers per row
    let gpt2 = TransformerConfig {
        architecture: Architecture::Gpt2,
        ..config.clone()
    };
    let workload = Workload {
        batch_size: 2,
        sequence_length: 128,
        attention,
        ..Default::default()
    };
    let graph = 3 * (14 * n * d + 2 * n * f + kept + 4 * n) + 3 * n * d + 2 * n;
    let step = estimate(&gpt2, &workload).unwrap();
    assert_eq!(step.parameter_bytes, 4 * gpt2.num_parameters() as u64);
    assert_eq!(step.activation_bytes, 4 * graph);
    let peaks = MODES.map(|mode| plan(mode).peak_bytes);
    assert!(peaks.is_sorted(), "{peaks:?}");
    assert_eq!(plan(Mode::Forward).gradient_bytes, 0);
    assert_eq!(plan(Mode::ForwardBackward).optimizer_bytes, 0);
}

#[test]
fn sizes_beyond_any_machine_are_counted_not_overflowed() {
    let workload = Workload {
        batch_size: usize::MAX,
        sequence_length: usize::MAX,
        mode: Mode::TrainStep,
        ..Default::default()
    };
    let plan = estimate(&TransformerConfig::preset("10b").unwrap(), &workload).unwrap();
    assert_eq!(plan.peak_bytes, u64::MAX);
}

#[test]
fn heads_that_flash_attention_does_not_take() {
    let [naive, flash] = Algorithm::ALL.map(|attention| Workload {
        batch_size: 1,
        sequence_length: 256,
        attention,
        ..Default::default()
    });
    let wide = TransformerConfig::preset("wide").unwrap();
    estimate(&wide, &naive).unwrap();
    refusal(estimate(&wide, &flash), &["flash for heads of 800"]);
}

/// In f32 naive attention saves B H T (T - 2) elements per layer more.
#[test]
fn flash_attention_is_linear_in_the_sequence() {
    let bytes = |length, attention| {
        let workload = Workload {
            batch_size: 3,
            sequence_length: length,
            attention,
            ..Default::default()
        };
        let config = TransformerConfig::preset("small").unwrap();
        estimate(&config, &workload).unwrap().activation_bytes
    };
    for length in [1, 128, 4096] {
        let more = 4 * 12 * 3 * 12 * (length * length) as u64;
        let naive = bytes(length, Algorithm::Naive) + 4 * 12 * 3 * 12 * 2 * length as u64;
        assert_eq!(naive, bytes(length, Algorithm::Flash) + more);
        let double = bytes(2 * length, Algorithm::Flash);
        assert_eq!(double, 2 * bytes(length, Algorithm::Flash));
    }
}

/// Runs steps and compares peaks. The caller runs in its own process, because the tracker counts per process.
fn measure_peaks(attention: Algorithm) {
    let configs = [
        (config(128, 352, 3, 1000), 24),
        (config(64, 512, 2, 8000), 8),   // logits dominate
        (config(256, 256, 6, 300), 8),   // blocks dominate
        (config(256, 2048, 4, 4000), 2), // weights dominate
        (config(64, 128, 3, 300), 64),   // naive attention's probabilities dominate
    ];
    for (config, batch_size) in &configs {
        for mode in MODES {
            let run = EndToEnd {
                attention,
                ..run(config, *batch_size, mode)
            };
            let rows = run.run(&candle_core::Device::Cpu, |_, _| ()).unwrap();
            let memory = rows[0].memory.as_ref().unwrap();
            let peak = memory.peak_bytes.unwrap() as f64;
            let predicted = rows[0].estimate_bytes as f64;
            println!("{mode:?} {peak} {predicted} {:.4}", predicted / peak);
            // The packing buffers of matmuls (up to 5 MiB here) are not in the breakdown.
            let slack = 0.01 * peak + 5.0 * 1048576.0;
            assert!(
                (predicted - peak).abs() < slack,
                "{mode:?}, {config:?}, batch {batch_size}: predicted {predicted}, measured {peak}"
            );
            assert!(memory.resident_peak_bytes.unwrap() as f64 > 0.9 * peak);
        }
    }
}

#[test]
fn estimates_are_near_the_measured_peak() {
    if child::ran("memory::estimates_are_near_the_measured_peak") {
        return;
    }
    measure_peaks(Algorithm::Naive);
}

#[test]
fn estimates_are_near_the_measured_peak_of_flash_attention() {
    if child::ran("memory::estimates_are_near_the_measured_peak_of_flash_attention") {
        return;
    }
    measure_peaks(Algorithm::Flash);
}

/// A batch of Muon's matrices needs scratch memory. With little else it is the peak of a step.
#[test]
fn estimates_with_muon_are_near_the_measured_peak() {
    if child::ran("memory::estimates_with_muon_are_near_the_measured_peak") {
        return;
    }
    let peaks = [Rule::default(), MuonConfig::default().into()].map(|optimizer| {
        [Execution::Eager, Execution::Planned].map(|execution| {
            let run = EndToEnd {
                attention: Algorithm::Flash,
                execution,
                step: StepConfig {
                    optimizer,
                    ..Default::default()
                },
                sequence_length: 16,
                ..run(&config(256, 1024, 2, 300), 1, Mode::TrainStep)
            };
            let rows = run.run(&candle_core::Device::Cpu, |_, _| ()).unwrap();
            let peak = rows[0].memory.as_ref().unwrap().peak_bytes.unwrap() as f64;
            let predicted = rows[0].estimate_bytes as f64;
            let slack = 0.01 * peak + 5.0 * 1048576.0;
            let what = format!("{optimizer}, {execution:?}");
            assert!(
                (predicted - peak).abs() < slack,
                "{what}: {predicted}, measured {peak}"
            );
            predicted
        })
    });
    assert!(
        peaks[1]
            .iter()
            .zip(peaks[0])
            .all(|(muon, adamw)| *muon > adamw)
    );
}

#[test]
fn the_tracker_counts_exactly() {
    if child::ran("memory::the_tracker_counts_exactly") {
        return;
    }
    let current = || tracker::current_bytes().unwrap();
    let before = current();
    tracker::reset_peak();
    let first = vec![0u8; 1_000_000];
    let second: Vec<u64> = Vec::with_capacity(1_000);
    assert_eq!(current() - before, 1_008_000);
    drop(first);
    assert_eq!(current() - before, 8_000);
    assert_eq!(tracker::peak_bytes().unwrap() - before, 1_008_000);
    tracker::reset_peak();
    assert_eq!(tracker::peak_bytes().unwrap() - before, 8_000);
    drop(second);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 1..1_000 {
                    std::hint::black_box(vec![1u8; n]);
                }
            });
        }
    });
    // Threads leave a few bytes of the runtime.
    assert!(
        current().abs_diff(before) < 64 * 1024,
        "{} {before}",
        current()
    );
}

#[test]
fn the_system_says_what_is_there() {
    let available = tallow::hardware::available_bytes().unwrap();
    assert!(available <= tallow::hardware::total_bytes().unwrap());
    assert!((1 << 20..1 << 50).contains(&available), "{available}");
    assert!(system::resident_peak_bytes().unwrap() > 1 << 20);
}

/// A small model's forward fits; a training step of 128.6 M parameters needs 2 GiB or more.
#[test]
#[cfg(target_os = "linux")]
fn what_ulimit_leaves_is_what_there_is() {
    if child::ran_within(1_500_000, "memory::what_ulimit_leaves_is_what_there_is") {
        return;
    }
    let total = tallow::hardware::total_bytes().unwrap();
    assert_eq!(total, 1_500_000 << 10);
    let available = tallow::hardware::available_bytes().unwrap();
    assert!((1 << 20..total).contains(&available), "{available}");
    let small = TransformerConfig::preset("small").unwrap();
    for execution in [Execution::Eager, Execution::Planned] {
        for (config, mode, expected) in [
            (&config(64, 100, 2, 500), Mode::Forward, Status::Ok),
            (&small, Mode::ForwardBackward, Status::OutOfMemory),
            (&small, Mode::TrainStep, Status::OutOfMemory),
        ] {
            let run = EndToEnd {
                execution,
                available_bytes: tallow::hardware::available_bytes(),
                ..run(config, 4, mode)
            };
            let rows = run.run(&Device::Cpu, |_, _| ()).unwrap();
            assert_eq!(rows[0].status, expected, "{mode:?} {execution:?}");
        }
    }
}

#[test]
fn reserved_scratch_is_all_that_products_keep() {
    if child::ran("memory::reserved_scratch_is_all_that_products_keep") {
        return;
    }
    use tallow::internals::gemm::{MatRef, Threads, matmul, reserve_scratch};
    reserve_scratch(false).unwrap();
    let before = tracker::current_bytes().unwrap();
    // Sizes of this crate's own matmuls with AVX-512, and of the gemm crate's.
    for side in [48, 300] {
        let a = vec![1f32; side * side];
        rayon::broadcast(|_| {
            let mut c = vec![0f32; side * side];
            let a = MatRef::new(&a, side, side);
            matmul(a, a, &mut c, false, Threads::One);
            matmul(a, a.t(), &mut c, false, Threads::One);
        });
    }
    let kept = tracker::current_bytes().unwrap().saturating_sub(before);
    assert!(kept < 4096, "{kept} bytes more are kept");
}
