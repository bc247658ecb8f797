//! Recordings on a GPU: exact on scripted allocations, and compared with the pool's own counters.

use super::recording::assert_adds_up;
use super::{MODES, config, run};
use crate::check::refusal;
use crate::child;
use candle_core::{DType, Device, Tensor};
use tallow::attention::Algorithm;
use tallow::bench::EndToEnd;
use tallow::memory::{MemoryKind, Meter, Mode, RecordConfig, Snapshot, record_on, timeline};
use tallow::precision::Precision;
use tallow::probe;
use tallow::report::plot;

const MIB: u64 = 1 << 20;

/// Runs in its own process, because recordings and CUPTI are per process.
#[test]
#[ignore = "needs a CUDA device"]
fn a_gpus_allocations_are_recorded_exactly() {
    if child::ran("memory::gpu::a_gpus_allocations_are_recorded_exactly") {
        return;
    }
    let gpu = crate::gpu();
    let zeros = |mib: usize| Tensor::zeros(mib << 20, DType::U8, &gpu).unwrap();
    let meter = Meter::new(&gpu);
    drop(zeros(1));
    gpu.synchronize().unwrap();
    let baseline_bytes = meter.current_bytes().unwrap();
    let config = RecordConfig {
        baseline_bytes,
        ..Default::default()
    };
    let before = zeros(3);
    let mut recorder = record_on(&gpu, config).unwrap();
    refusal(record_on(&gpu, config), &["another recording is running"]);
    recorder.label(MemoryKind::Weights, "before", &before);
    let host = Tensor::zeros(1 << 20, DType::U8, &Device::Cpu).unwrap();
    recorder.label(MemoryKind::Inputs, "not on the GPU", &host);
    let kept = {
        let _phase = probe::phase("forward");
        let _layer = probe::module(|| "layer");
        drop(zeros(2)); // allocated and freed outside of an op
        zeros(1)
    };
    let gradient = {
        let _phase = probe::phase("backward");
        drop(zeros(5));
        drop(kept);
        zeros(4)
    };
    let recording = recorder.finish();
    drop(zeros(7)); // after the recording
    drop(gradient);

    let blocks = recording.blocks().iter();
    let seen: Vec<_> = blocks
        .map(|b| (b.bytes / MIB, b.kind, b.phase, b.path.to_string()))
        .collect();
    let wanted = [
        (3, MemoryKind::Weights, "", "-"),
        (2, MemoryKind::Activations, "forward", "layer"),
        (1, MemoryKind::Activations, "forward", "layer"),
        (5, MemoryKind::Scratch, "backward", "-"),
        (4, MemoryKind::Gradients, "backward", "-"),
    ];
    assert_eq!(
        seen,
        wanted.map(|(mib, holds, phase, path)| (mib, holds, phase, path.to_string()))
    );
    assert_eq!(recording.bytes_at(0), 3 * MIB);
    assert_eq!(recording.peak_bytes(), 9 * MIB);
    let peaks = recording.phases().iter();
    let peaks: Vec<u64> = peaks.map(|phase| recording.peak_bytes_in(phase)).collect();
    assert_eq!(peaks, [5 * MIB, 9 * MIB]);
    assert_adds_up(&recording);
    assert_eq!((recording.lost_events, recording.unknown_blocks), (0, 0));

    // A block allocated before the recording and without a label has unknown size.
    let unlabelled = zeros(6);
    let recorder = record_on(&gpu, config).unwrap();
    drop(unlabelled);
    let recording = recorder.finish();
    assert_eq!(recording.unknown_blocks, 1);
    assert!(recording.notes()[0].contains("unknown size"));
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_steps_blocks_are_the_pools() {
    if child::ran("memory::gpu::a_steps_blocks_are_the_pools") {
        return;
    }
    let gpu = crate::gpu();
    let attentions = [Algorithm::Naive, Algorithm::Flash];
    let precisions = [Precision::F32, Precision::BF16];
    let cases = attentions
        .into_iter()
        .flat_map(|attention| precisions.map(|precision| (attention, precision)));
    for (attention, precision) in cases {
        for mode in MODES {
            let base = run(&config(128, 352, 3, 1000), 16, mode);
            let step = EndToEnd {
                attention,
                step: precision.into(),
                ..base
            };
            let (row, profile) = step.profile_memory(&gpu, Default::default()).unwrap();
            let (memory, profile) = (row.memory.unwrap(), profile.unwrap());
            let pool_bytes = memory.peak_bytes.unwrap();
            let recording = &profile.recording;
            let what = format!("{attention} {precision} {mode:?}");
            println!(
                "{what}: predicted {}, blocks {}, pool {}, reserved {:?}, {} allocations",
                profile.estimate.peak_bytes,
                recording.peak_bytes(),
                pool_bytes,
                memory.reserved_peak_bytes,
                profile.allocations
            );
            let measured = recording.bytes_by_kind_at(recording.peak_event());
            for holds in MemoryKind::ALL {
                let predicted = profile.estimate.breakdown.bytes_of(holds);
                println!("    {holds}: {predicted} {}", measured.bytes_of(holds));
            }
            for row in &recording.largest_report(6).rows {
                println!(
                    "    {:?} {:?} {:?}",
                    row.get("bytes"),
                    row.get("holds"),
                    row.get("origin")
                );
            }
            assert_adds_up(recording);
            assert_eq!(
                (recording.lost_events, recording.unknown_blocks),
                (0, 0),
                "{what}"
            );
            // The pool rounds each block up to 512 bytes.
            let rounding = 512 * (profile.allocations + 200);
            let blocks_bytes = recording.peak_bytes();
            assert!(
                blocks_bytes <= pool_bytes + rounding && pool_bytes <= blocks_bytes + rounding,
                "{what}: blocks {blocks_bytes}, pool {pool_bytes}"
            );
            assert!(memory.reserved_peak_bytes.unwrap() >= pool_bytes);
            let predicted_bytes = profile.estimate.peak_bytes;
            let difference = predicted_bytes.abs_diff(pool_bytes);
            assert!(
                difference <= pool_bytes / 1000 + 16_384,
                "{what}: predicted {predicted_bytes}, pool {pool_bytes}"
            );
            let parameters = 4 * step.config.num_parameters() as u64;
            assert_eq!(measured.bytes_of(MemoryKind::Weights), parameters);
            let state = match mode {
                Mode::TrainStep => 2 * parameters,
                _ => 0,
            };
            assert_eq!(measured.bytes_of(MemoryKind::Optimizer), state);
            assert_eq!(!profile.saved.tensors.is_empty(), mode != Mode::Forward);
            let svg = plot::to_svg(&[timeline(recording, "a step")]).unwrap();
            for name in ["weights", "activations"] {
                assert!(svg.contains(name), "{what}: {name}");
            }
            let snapshot = serde_json::to_value(Snapshot::new(recording)).unwrap();
            let active = snapshot["segments"][0]["active_size"].as_u64().unwrap();
            assert!(active >= parameters + state, "{what}: {active}");
        }
    }
}
