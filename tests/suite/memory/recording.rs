//! Recordings: exact on scripted allocations, with attributions that add up.

use super::{config, run};
use crate::check::refusal;
use crate::child;
use candle_core::{DType, Device, Tensor};
use std::hint::black_box;
use tallow::attention::Algorithm;
use tallow::bench::EndToEnd;
use tallow::memory::{
    MemoryKind, MemoryRecording, Mode, PhaseSpan, RecordConfig, record, timeline, tracker,
};
use tallow::precision::Precision;
use tallow::report::plot;
use tallow::{Error, probe};

const MIB: u64 = 1 << 20;

#[test]
fn scripted_allocations_are_recorded_exactly() {
    if child::ran("memory::recording::scripted_allocations_are_recorded_exactly") {
        return;
    }
    let zeros = |n: usize| Tensor::zeros(n, DType::U8, &Device::Cpu).unwrap();
    let before = zeros(3_000_000);
    let baseline_bytes = tracker::current_bytes().unwrap() - 3_000_000;
    let mut recorder = record(RecordConfig {
        baseline_bytes,
        ..Default::default()
    })
    .unwrap();
    recorder.label(MemoryKind::Weights, "before", &before);
    let kept = {
        let _phase = probe::phase("forward");
        let _layer = probe::module(|| "layer");
        drop(black_box(vec![1u8; 2_000_000])); // allocated and freed outside of an op
        vec![1u8; 1_000_000]
    };
    let gradient = {
        let _phase = probe::phase("backward");
        drop(black_box(vec![1u8; 500_000]));
        drop(black_box(kept));
        vec![1u8; 700_000]
    };
    let mut grown: Vec<u8> = Vec::with_capacity(10_000);
    grown.reserve_exact(20_000);
    drop(black_box(vec![1u8; 4095])); // below the recorded size
    drop(black_box(grown));
    let recording = recorder.finish();
    drop(gradient);

    let blocks: Vec<_> = recording
        .blocks()
        .iter()
        .filter(|b| b.bytes > 6_000)
        .collect();
    let seen: Vec<_> = blocks.iter().map(|b| (b.bytes, b.kind, b.phase)).collect();
    assert_eq!(
        seen,
        [
            (3_000_000, MemoryKind::Weights, ""),
            (2_000_000, MemoryKind::Activations, "forward"),
            (1_000_000, MemoryKind::Activations, "forward"),
            (500_000, MemoryKind::Scratch, "backward"),
            (700_000, MemoryKind::Gradients, "backward"),
            (10_000, MemoryKind::Other, ""),
            (20_000, MemoryKind::Other, ""),
        ]
    );
    assert_eq!(blocks[0].name.as_deref(), Some("before"));
    assert!(blocks[0].allocated_at.is_none() && blocks[0].freed_at.is_none());
    assert_eq!(blocks[1].path.to_string(), "layer");
    assert!(blocks[4].freed_at.is_none());
    assert!(blocks[5].freed_at < blocks[6].allocated_at);

    assert_near(recording.bytes_at(0), 3_000_000);
    let [forward, backward] = recording.phases() else {
        panic!("{:?}", recording.phases());
    };
    assert_eq!((forward.name, backward.name), ("forward", "backward"));
    assert_near(recording.peak_bytes_in(forward), 5_000_000);
    assert_near(recording.peak_bytes_in(backward), 4_500_000);
    assert_near(recording.peak_bytes(), 5_000_000);
    let held = recording.bytes_by_kind_at(recording.peak_event());
    assert_eq!(held.bytes_of(MemoryKind::Weights), 3_000_000);
    assert_eq!(held.bytes_of(MemoryKind::Activations), 2_000_000);
    assert_eq!(held.total_bytes(), recording.peak_bytes());
    assert_adds_up(&recording);
}

/// Compares bytes, with a tolerance for the recorder itself and for paths.
fn assert_near(bytes: u64, wanted: u64) {
    assert!(
        (wanted..wanted + 16_384).contains(&bytes),
        "{bytes}, not {wanted}"
    );
}

/// Checks that the recording adds up by holding, by event and by block.
pub(super) fn assert_adds_up(recording: &MemoryRecording) {
    let all = recording.bytes_by_kind();
    assert_eq!(all.len(), recording.events());
    for (event, holdings) in all.iter().enumerate() {
        assert_eq!(holdings.total_bytes(), recording.bytes_at(event));
    }
    let peak = recording.peak_event();
    assert_eq!(all[peak], recording.bytes_by_kind_at(peak));
    let blocks = recording.blocks().iter();
    let alive = blocks.filter(|block| block.is_alive_at(peak));
    assert!(alive.map(|block| block.bytes).sum::<u64>() <= recording.peak_bytes());
    assert_eq!(recording.lost_events, 0);
}

#[test]
fn threads_lose_nothing() {
    if child::ran("memory::recording::threads_lose_nothing") {
        return;
    }
    let threads = 8;
    let allocations = tracker::allocations().unwrap();
    let recorder = record(RecordConfig::default()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let _range = probe::range(format!("thread {thread}"));
                for n in 0..500 {
                    let block = vec![1u8; 5_000 + n];
                    black_box(&block);
                }
            });
        }
    });
    let recording = recorder.finish();
    assert!(tracker::allocations().unwrap() - allocations >= threads * 500);
    for thread in 0..threads {
        let path = probe::Path::ROOT.child(&format!("thread {thread}"));
        let of_thread = recording.blocks().iter().filter(|block| block.path == path);
        let of_thread: Vec<_> = of_thread.collect();
        let bytes: Vec<u64> = of_thread.iter().map(|block| block.bytes).collect();
        assert_eq!(bytes, (5_000..5_500).collect::<Vec<u64>>());
        assert!(of_thread.iter().all(|b| b.freed_at > b.allocated_at));
        assert!(of_thread.iter().all(|b| b.thread == of_thread[0].thread));
    }
    // No two blocks that are live at the same time share an address.
    for event in (0..recording.events()).step_by(97) {
        let alive = recording.blocks().iter().filter(|b| b.is_alive_at(event));
        let mut addresses: Vec<usize> = alive.map(|block| block.address).collect();
        addresses.sort();
        let count = addresses.len();
        addresses.dedup();
        assert_eq!(addresses.len(), count);
    }
}

#[test]
fn what_cannot_be_recorded_is_refused_or_counted() {
    if child::ran("memory::recording::what_cannot_be_recorded_is_refused_or_counted") {
        return;
    }
    let config = RecordConfig {
        capacity: 10,
        ..Default::default()
    };
    let recorder = record(config).unwrap();
    let refused = refusal(
        record(RecordConfig::default()),
        &["another recording is running"],
    );
    assert!(matches!(refused, Error::Order { .. }));
    for _ in 0..100 {
        black_box(vec![1u8; 10_000]);
    }
    let recording = recorder.finish();
    assert_eq!(recording.events(), 10);
    assert!(recording.lost_events >= 191, "{}", recording.lost_events);
    assert!(recording.notes()[0].contains("larger capacity"));

    let none = RecordConfig {
        capacity: 0,
        ..Default::default()
    };
    assert!(matches!(
        record(none).err(),
        Some(Error::Config {
            field: "capacity",
            ..
        })
    ));
    let endless = RecordConfig {
        capacity: usize::MAX / 2,
        ..Default::default()
    };
    assert!(matches!(
        record(endless).err(),
        Some(Error::OutOfMemory { .. })
    ));
    drop(record(RecordConfig::default()).unwrap()); // dropped without finish
    let recording = record(RecordConfig::default()).unwrap().finish();
    assert_eq!(
        recording.bytes_at(recording.peak_event()),
        recording.peak_bytes()
    );
    assert!(recording.phases().is_empty());
    // A span of another recording, beyond this one's events.
    let beyond = PhaseSpan {
        name: "forward",
        begins_at: recording.events(),
        ends_at: usize::MAX,
    };
    assert_eq!(recording.peak_bytes_in(&beyond), 0);
    assert_eq!(recording.bytes_at(usize::MAX), 0);
    let all = PhaseSpan {
        begins_at: 0,
        ..beyond
    };
    assert_eq!(recording.peak_bytes_in(&all), recording.peak_bytes());
}

#[test]
fn a_steps_memory_is_where_the_account_has_it() {
    if child::ran("memory::recording::a_steps_memory_is_where_the_account_has_it") {
        return;
    }
    let cases = [
        (Algorithm::Naive, Precision::F32),
        (Algorithm::Flash, Precision::F32),
        (Algorithm::Naive, Precision::BF16),
        (Algorithm::Flash, Precision::BF16),
    ];
    for (attention, precision) in cases {
        for mode in super::MODES {
            let base = run(&config(128, 352, 3, 1000), 16, mode);
            let step = EndToEnd {
                attention,
                step: precision.into(),
                // The buffers that kernels keep exist before the recorded step.
                warmup_steps: match attention {
                    Algorithm::Naive => 0,
                    Algorithm::Flash => 2,
                },
                ..base
            };
            let (row, profile) = step
                .profile_memory(&Device::Cpu, Default::default())
                .unwrap();
            let (peak_bytes, profile) = (row.peak_bytes().unwrap(), profile.unwrap());
            let recording = &profile.recording;
            assert_adds_up(recording);
            // Records of tensors since the last event, too small to be events.
            let unseen = peak_bytes - recording.peak_bytes();
            assert!(unseen < 16 * 1024, "{mode:?}: {unseen}");
            let names: Vec<_> = recording.phases().iter().map(|phase| phase.name).collect();
            let wanted: &[&str] = match mode {
                Mode::Forward | Mode::ForwardKeepingGraph => &["forward"],
                Mode::ForwardBackward => &["forward", "backward"],
                Mode::TrainStep => &["forward", "backward", "optimizer"],
            };
            assert_eq!(names, wanted);
            let predicted = profile.estimate.peak_bytes;
            assert!(predicted.abs_diff(peak_bytes) < MIB / 4, "{mode:?}");
            let measured = recording.bytes_by_kind_at(recording.peak_event());
            for holds in MemoryKind::ALL {
                let predicted = profile.estimate.breakdown.bytes_of(holds);
                let bytes = measured.bytes_of(holds);
                println!("{attention} {precision} {mode:?} {holds}: {predicted} {bytes}");
                // Records of tensors have no kind, and tables of positions have no label.
                let slack = match holds {
                    MemoryKind::Other => MIB / 4,
                    MemoryKind::Scratch | MemoryKind::Inputs => 65_536,
                    MemoryKind::Weights | MemoryKind::Optimizer => 0,
                    _ => predicted / 50 + 65_536,
                };
                // Without a graph, two points in time are nearly equal peaks.
                assert!(
                    mode == Mode::Forward || predicted.abs_diff(bytes) <= slack,
                    "{attention} {precision} {mode:?} {holds}: {predicted} predicted, {bytes} measured"
                );
            }
            // Every block that an op allocates has a kind.
            let lost = recording.blocks().iter().filter(|block| {
                block.kind == MemoryKind::Other && !block.phase.is_empty() && block.bytes > 65_536
            });
            assert_eq!(lost.count(), 0);
            let svg = plot::to_svg(&[timeline(recording, "a step")]).unwrap();
            // The names of phases are not checked, because they are omitted where the phase is too short.
            for name in ["weights", "activations", "logits"] {
                assert!(svg.contains(name), "{name}");
            }
        }
    }
}
