//! Errors of the profiler.

use super::exclusive;
use crate::check::refusal;
use rstest::rstest;
use std::path::Path;
use tallow::Error;
use tallow::probe::{self, Kind};
use tallow::profile::{self, Balance, Grouping, ProfileReport, Profiler, Recording, Selection};

#[test]
fn one_profiler_at_a_time() {
    let _lock = exclusive();
    let first = Profiler::start_on_this_thread().unwrap();
    let second = refusal(Profiler::start(), &["another profiler is running"]);
    assert!(matches!(second, Error::Order { .. }));
    // The refused profiler has not ended the first.
    drop(profile::range("heard"));
    assert!(Profiler::start().is_err());
    assert_eq!(first.finish().unwrap().spans.len(), 1);

    // After finish or drop, another one can start.
    drop(Profiler::start_on_this_thread().unwrap());
    drop(Profiler::start_on_this_thread().unwrap());
}

#[test]
fn ranges_out_of_order_are_named() {
    let _lock = exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    let outer = profile::range("outer");
    let inner = profile::range("inner");
    drop(outer);
    drop(inner);
    let error = refusal(
        profiler.finish(),
        &["\"outer\" ended while \"outer/inner\""],
    );
    assert!(matches!(error, Error::Order { .. }));

    // The thread can be profiled afterwards.
    assert_eq!(probe::current(), probe::Path::ROOT);
    let profiler = Profiler::start_on_this_thread().unwrap();
    drop(profile::range("next"));
    let recording = profiler.finish().unwrap();
    assert_eq!(recording.spans[0].path.to_string(), "next");
}

/// The probe itself does not notice this order, because a phase does not change the path.
#[test]
fn a_phase_that_outlives_its_range_is_named() {
    let _lock = exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    let outer = profile::range("outer");
    let phase = profile::phase("forward");
    drop(outer);
    drop(phase);
    refusal(profiler.finish(), &["\"outer\" ended while \"forward\""]);
}

#[rstest]
fn paths_that_cannot_be_written(#[values("no/such/folder/file", ".")] path: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(path);
    let recording = Recording::default();
    let saves: [fn(&Recording, &Path) -> tallow::Result<()>; 2] = [
        |recording, path| recording.save_trace(path),
        |recording, path| recording.save_flame_graph(path),
    ];
    for save in saves {
        let error = refusal(save(&recording, &path), &[&*path.to_string_lossy()]);
        assert!(
            matches!(
                error,
                Error::Io {
                    action: "write",
                    ..
                }
            ),
            "{error}"
        );
    }
}

/// Programs can build recordings themselves, so indices of missing spans are ignored.
#[test]
fn recordings_that_point_at_missing_spans_are_read() {
    let mut recording = super::kernels::invented_recording();
    recording.spans[0].parent = Some(99);
    recording.spans[3].parent = Some(5);
    recording.spans[6].end_ns = 0;
    recording.kernels[1].span = Some(99);
    recording.duration_ns = u64::MAX;
    recording.threads.push("another".into());
    let read = |recording: &Recording| {
        for grouping in [
            Grouping::Name,
            Grouping::Path,
            Grouping::Layer,
            Grouping::Kernel,
        ] {
            ProfileReport::new(recording, &Selection::default(), grouping).unwrap();
        }
        assert!(!Balance::new(recording).lines.is_empty());
        assert!(recording.flame_graph().contains("</svg>"));
        assert!(recording.trace().is_object());
    };
    read(&recording);
    recording.spans[0].kind = Kind::Range; // without steps
    read(&recording);
    recording.kernels.clear();
    let report = ProfileReport::new(&recording, &Selection::default(), Grouping::Name);
    report.unwrap();
    Balance::new(&recording);
}
