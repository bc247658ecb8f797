//! Writing checkpoints: the old file stays until the new one is complete.

use super::*;
use std::fs;

/// Returns the names of the files in the folder, sorted.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn paths_that_cannot_be_written_are_named() {
    let (folder, path) = checkpoint();
    let trainer = start(settings());
    trainer.save(&path).unwrap();
    let paths = [
        folder.path().join("missing").join("run.safetensors"),
        path.join("run.safetensors"), // below a file
        folder.path().to_path_buf(),  // a folder
    ];
    for path in paths {
        let wanted = format!("{}: cannot write", path.display());
        let error = refusal(trainer.save(&path), &[&wanted]);
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
    }
    let kept = ["run.safetensors", "run.safetensors.lock"]; // the lock lives as long as the run
    assert_eq!(names(folder.path()), kept);
    drop(trainer);
    assert_eq!(names(folder.path()), kept[..1]);
}

/// The environment variable with the path that the next test's second process writes to.
#[cfg(unix)]
const PATH_TO_DIE_ON: &str = "TALLOW_TEST_PATH_TO_DIE_ON";

/// Not a test: the next test runs this function in a separate process.
#[cfg(unix)]
#[test]
#[ignore = "run by a_process_killed_while_it_writes_leaves_the_old_checkpoint"]
fn resume_step_and_save() {
    if let Some(path) = std::env::var_os(PATH_TO_DIE_ON) {
        let path = PathBuf::from(path);
        let mut trainer = resume(&path, settings()).unwrap();
        trainer.step().unwrap();
        trainer.save(&path).unwrap();
    }
}

/// A limit on file sizes makes the system kill the process in the middle of its write.
#[cfg(unix)]
#[test]
fn a_process_killed_while_it_writes_leaves_the_old_checkpoint() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    let (folder, path) = checkpoint();
    let mut trainer = start(settings());
    take(&mut trainer, 5);
    trainer.save(&path).unwrap();
    drop(trainer);
    let old = fs::read(&path).unwrap();
    assert!(old.len() > 64 << 10, "{} bytes", old.len());

    let run = |limit: &str| {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("ulimit -f {limit} && exec \"$0\" \"$@\"")])
            .arg(this)
            .args([
                "train::saving::resume_step_and_save",
                "--exact",
                "--ignored",
            ])
            .env(PATH_TO_DIE_ON, &path);
        command.output().unwrap()
    };
    let killed = run("16"); // in blocks: 8 or 16 KiB
    assert_eq!(killed.status.signal(), Some(libc::SIGXFSZ), "{killed:?}");
    assert!(fs::read(&path).unwrap() == old);
    let is_temporary = |name: &String| name.starts_with(".tallow-");
    assert!(names(folder.path()).iter().any(is_temporary));
    assert_eq!(resume(&path, settings()).unwrap().steps_taken(), 5);

    // Without the limit the same process succeeds.
    let lived = run("unlimited");
    assert!(lived.status.success(), "{lived:?}");
    assert_eq!(resume(&path, settings()).unwrap().steps_taken(), 6);
    assert_eq!(names(folder.path()), ["run.safetensors"]); // the killed process's files are removed
}
