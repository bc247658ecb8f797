//! Several processes on one path: checkpoints are never mixed, each path has one writer, and dead writers leave
//! nothing.

use super::saving::names;
use super::*;
use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};

/// Weights and state come from one checkpoint, even if files are renamed over its path during the read.
#[test]
fn a_checkpoint_replaced_while_it_is_read_is_not_mixed() {
    let (folder, path) = checkpoint();
    let saved: Vec<(usize, PathBuf, _)> = [2, 5]
        .map(|steps| {
            let path = folder.path().join(format!("{steps}.safetensors"));
            let mut trainer = start(settings());
            take(&mut trainer, steps);
            trainer.save(&path).unwrap();
            (steps, path, bits(&trainer))
        })
        .into();
    fs::hard_link(&saved[0].1, &path).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let next = folder.path().join("next");
            for (_, from, _) in saved.iter().rev().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                fs::hard_link(from, &next).unwrap();
                fs::rename(&next, &path).unwrap();
            }
        });
        let mut seen = [0, 0];
        for _ in 0..600 {
            let resumed = resume(&path, settings()).unwrap();
            let which = saved
                .iter()
                .position(|(steps, _, _)| *steps == resumed.steps_taken());
            let which = which.unwrap();
            assert!(bits(&resumed) == saved[which].2, "mixed");
            seen[which] += 1;
        }
        stop.store(true, Ordering::Relaxed);
        assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
    });
}

#[test]
fn a_path_belongs_to_the_run_that_saves_there() {
    let (folder, path) = checkpoint();
    let first = start(settings());
    first.save(&path).unwrap();
    first.save(&path).unwrap(); // the owner may save again
    let saved = fs::read(&path).unwrap();

    let mut second = resume(&path, settings()).unwrap(); // anyone may read
    take(&mut second, 1);
    let owner = format!("pid {} on ", std::process::id());
    let parts = [
        "run.safetensors: cannot write",
        &owner,
        "run.safetensors.lock",
    ];
    let error = refusal(second.save(&path), &parts);
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
    let link = folder.path().join("link");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&path, &link).unwrap();
        refusal(second.save(&link), &["link: cannot write", &owner]);
        fs::remove_file(&link).unwrap();
    }
    assert!(fs::read(&path).unwrap() == saved);

    let elsewhere = folder.path().join("elsewhere.safetensors");
    second.save(&elsewhere).unwrap();
    first.save(&link).unwrap(); // releases the old path's lock
    second.save(&path).unwrap();
    drop((first, second));
    assert_eq!(
        names(folder.path()),
        ["elsewhere.safetensors", "link", "run.safetensors"]
    );
}

/// A file with the lock's name that is no lock is not overwritten.
#[test]
fn another_file_of_the_locks_name() {
    let (folder, path) = checkpoint();
    let other = folder.path().join("run.safetensors.lock");
    fs::write(&other, "dear diary").unwrap();
    refusal(
        start(settings()).save(&path),
        &["run.safetensors: cannot write", "other content"],
    );
    assert_eq!(fs::read(&other).unwrap(), b"dear diary");
    assert_eq!(names(folder.path()), ["run.safetensors.lock"]);
}

/// The error names whatever is in the lock file's place, without waiting for a pipe.
#[cfg(unix)]
#[test]
fn what_is_no_lock_file_is_named_at_once() {
    use std::os::unix::ffi::OsStrExt;
    let (folder, path) = checkpoint();
    let lock = folder.path().join("run.safetensors.lock");
    let refused = |words: &str| {
        let parts = [
            "run.safetensors: cannot write",
            "run.safetensors.lock",
            words,
        ];
        let error = refusal(start(settings()).save(&path), &parts);
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
    };
    let name = std::ffi::CString::new(lock.as_os_str().as_bytes()).unwrap();
    // SAFETY: a path that ends in a zero byte.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    refused("not a regular file");
    fs::remove_file(&lock).unwrap();
    fs::write(&lock, [0xff, 0xfe, 0, 1]).unwrap();
    refused("other content");
    fs::remove_file(&lock).unwrap();
    // A file of any length: no more of it is read than a lock file has.
    let sparse = File::create(&lock).unwrap();
    sparse.set_len(1 << 42).unwrap();
    refused("other content");
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    refused("directory");
    fs::remove_dir(&lock).unwrap();
    std::os::unix::fs::symlink("nowhere", &lock).unwrap();
    refused("its lock file");
    fs::remove_file(&lock).unwrap();
    start(settings()).save(&path).unwrap();
}

/// The environment variable with the path that the next test's second process writes to.
#[cfg(unix)]
const PATH_TO_HOLD: &str = "TALLOW_TEST_PATH_TO_HOLD";

/// Not a test: the next test runs this function in a separate process.
#[cfg(unix)]
#[test]
#[ignore = "run by a_dead_writers_path_is_free"]
fn save_and_wait() {
    if let Some(path) = std::env::var_os(PATH_TO_HOLD) {
        let trainer = start(settings());
        trainer.save(PathBuf::from(path)).unwrap();
        println!("\nholding");
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn a_dead_writers_path_is_free() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    let (folder, path) = checkpoint();
    let mut writer = Command::new(std::env::current_exe().unwrap())
        .args([
            "train::writers::save_and_wait",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env(PATH_TO_HOLD, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
    assert!(
        lines
            .map(std::io::Result::unwrap)
            .any(|line| line == "holding")
    );
    let mut ours = resume(&path, settings()).unwrap();
    take(&mut ours, 1);
    let owner = format!("pid {} on ", writer.id());
    refusal(ours.save(&path), &["run.safetensors: cannot write", &owner]);
    writer.kill().unwrap();
    writer.wait().unwrap();
    let left = ["run.safetensors", "run.safetensors.lock"];
    assert_eq!(names(folder.path()), left); // left by the killed process
    ours.save(&path).unwrap();
    assert_eq!(resume(&path, settings()).unwrap().steps_taken(), 1);
    drop(ours);
    assert_eq!(names(folder.path()), left[..1]);
}

/// Files of killed saves are removed by the next save and the next resume; files that are still being written are kept.
#[test]
fn temporary_files_of_dead_writers_are_removed() {
    let (folder, path) = checkpoint();
    let place = |name: &str| folder.path().join(name);
    let live = File::create(place(".tallow-live")).unwrap();
    live.lock().unwrap();
    fs::write(place("tallow-mine"), "").unwrap();
    let leave = || {
        for name in [".tallow-dead", ".tallow-dead too"] {
            fs::write(place(name), "half of a checkpoint").unwrap();
        }
    };
    let left = [".tallow-live", "run.safetensors", "tallow-mine"];
    leave();
    start(settings()).save(&path).unwrap();
    assert_eq!(names(folder.path()), left);
    leave();
    resume(&path, settings()).unwrap();
    assert_eq!(names(folder.path()), left);
    drop(live);
    resume(&path, settings()).unwrap();
    assert_eq!(names(folder.path()), left[1..]);
}

/// With `keep`, earlier checkpoints stay, each of them complete.
#[test]
fn earlier_checkpoints_are_kept() {
    let (folder, path) = checkpoint();
    for (keep, kept) in [
        (1, vec![6]),
        (2, vec![6, 5]),
        (3, vec![6, 5, 4]),
        (5, vec![6, 5, 4, 3, 2]),
    ] {
        let config = TrainConfig { keep, ..settings() };
        let mut trainer = start(config.clone());
        let mut states = Vec::new();
        for _ in 0..6 {
            take(&mut trainer, 1);
            trainer.save(&path).unwrap();
            trainer.save(&path).unwrap(); // saving the same step again, as after a resume, replaces no other
            states.push(bits(&trainer));
        }
        drop(trainer);
        let place = |age: usize| match age {
            0 => path.clone(),
            age => folder.path().join(format!("run.safetensors.{age}")),
        };
        assert_eq!(names(folder.path()).len(), keep);
        for (age, step) in kept.into_iter().enumerate() {
            let resumed = resume(&place(age), config.clone()).unwrap();
            assert_eq!(resumed.steps_taken(), step);
            assert!(bits(&resumed) == states[step - 1]);
            fs::remove_file(place(age)).unwrap();
        }
    }
}

/// A dangling link is refused as a path, because its target would not be written.
#[cfg(unix)]
#[test]
fn links_that_lead_nowhere_and_pipes() {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    let (folder, path) = checkpoint();
    let place = |name: &str| folder.path().join(name);
    symlink("nowhere", place("dangling")).unwrap();
    symlink("loop", place("loop")).unwrap();
    let pipe = place("pipe");
    let name = std::ffi::CString::new(pipe.as_os_str().as_bytes()).unwrap();
    // SAFETY: a path that ends in a zero byte.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let trainer = start(settings());
    for (name, part) in [
        ("dangling", "symbolic link to nowhere"),
        ("loop", "symbolic links"),
    ] {
        let wanted = format!("{}: cannot write", place(name).display());
        refusal(trainer.save(place(name)), &[&wanted, part]);
        assert!(place(name).is_symlink());
        let wanted = format!("{}: cannot read", place(name).display());
        refusal(resume(&place(name), settings()), &[&wanted, part]);
    }
    let wanted = format!("{}: cannot read", pipe.display());
    let parts = [wanted.as_str(), "regular file"];
    refusal(resume(&pipe, settings()), &parts); // without waiting
    refusal(
        TransformerLM::load(&sizes(), &pipe, &candle_core::Device::Cpu),
        &parts,
    );
    refusal(Tokens::bytes(&pipe), &parts);
    assert_eq!(names(folder.path()), ["dangling", "loop", "pipe"]);
    trainer.save(&path).unwrap();
}
