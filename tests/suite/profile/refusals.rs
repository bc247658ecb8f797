//! What a profiler refuses, and says.

use super::alone;
use rstest::rstest;
use std::path::Path;
use tallow::profile::{self, Profiler, Recording};
use tallow::{Error, probe};

#[test]
fn one_profiler_at_a_time() {
    let _alone = alone();
    let first = Profiler::start_on_this_thread().unwrap();
    let second = Profiler::start().err().unwrap();
    assert!(matches!(second, Error::Order { .. }));
    assert!(
        second.to_string().contains("another profiler is running"),
        "{second}"
    );
    // The refused one has not ended the first.
    drop(profile::range("heard"));
    assert!(Profiler::start().is_err());
    assert_eq!(first.finish().unwrap().spans.len(), 1);

    // Finished or dropped, it makes room.
    drop(Profiler::start_on_this_thread().unwrap());
    drop(Profiler::start_on_this_thread().unwrap());
}

#[test]
fn ranges_out_of_order_are_named() {
    let _alone = alone();
    let profiler = Profiler::start_on_this_thread().unwrap();
    let outer = profile::range("outer");
    let inner = profile::range("inner");
    drop(outer);
    drop(inner);
    let error = profiler.finish().err().unwrap();
    assert!(matches!(error, Error::Order { .. }));
    let message = error.to_string();
    assert!(
        message.contains("\"outer\" ended while \"outer/inner\""),
        "{message}"
    );

    // The thread is none the worse for it.
    assert_eq!(probe::current(), probe::Path::ROOT);
    let profiler = Profiler::start_on_this_thread().unwrap();
    drop(profile::range("next"));
    let recording = profiler.finish().unwrap();
    assert_eq!(recording.spans[0].path.to_string(), "next");
}

/// The probe takes this for good order, since a phase leaves the path as it is.
#[test]
fn a_phase_that_outlives_its_range_is_named() {
    let _alone = alone();
    let profiler = Profiler::start_on_this_thread().unwrap();
    let outer = profile::range("outer");
    let phase = profile::phase("forward");
    drop(outer);
    drop(phase);
    let message = profiler.finish().err().unwrap().to_string();
    assert!(
        message.contains("\"outer\" ended while \"forward\""),
        "{message}"
    );
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
        let error = save(&recording, &path).unwrap_err();
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
        assert!(
            error.to_string().contains(&*path.to_string_lossy()),
            "{error}"
        );
    }
}
