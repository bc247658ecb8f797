//! Output files: they are tried before the work starts, and one that fails at the end does not lose the table.

use super::process::{assert_refused, example, run};
use std::fs;
use std::process::Command;

/// Command lines whose work would run longer than a test waits, with their output flags.
const LONG: [(&str, &str); 9] = [
    (
        "attention_benchmark --iterations 1000000000 --time-budget-ms none",
        "--output",
    ),
    ("compiled_benchmark --steps 1000000000", "--output"),
    ("e2e_benchmark SMALL --steps 1000000000", "--output"),
    (
        "memory_profile SMALL --mode forward --warmup-steps 1000000000",
        "--snapshot",
    ),
    (
        "mixed_precision_benchmark SMALL --steps 1000000000",
        "--output",
    ),
    (
        "precision_curves SMALL --data DATA --steps 1000000000",
        "--output",
    ),
    ("profile SMALL --steps 1000000000", "--trace"),
    ("custom_model --steps 1000000000", "--output"),
    ("train SMALL --data DATA --steps 1000000000", "--checkpoint"),
];

/// The flags that name pictures, with work of the same kind.
const PICTURES: [(&str, &str); 4] = [
    (
        "attention_benchmark --iterations 1000000000 --time-budget-ms none",
        "--plot",
    ),
    (
        "memory_profile SMALL --mode forward --warmup-steps 1000000000",
        "--timeline",
    ),
    (
        "precision_curves SMALL --data DATA --steps 1000000000",
        "--plot",
    ),
    ("profile SMALL --steps 1000000000", "--flame-graph"),
];

#[test]
fn outputs_are_opened_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "what stood there").unwrap();
    for (work, flag) in LONG.into_iter().chain(PICTURES) {
        let bad = [
            (
                folder.path().join("nowhere/file.svg"),
                "nowhere/file.svg: cannot write",
            ),
            (file.join("file.svg"), "file/file.svg: cannot write"),
            (
                folder.path().join(format!("{}.svg", "long".repeat(100))),
                "cannot write",
            ),
        ];
        for (path, words) in bad {
            let line = format!("{work} {flag} {}", path.display());
            assert_refused(&line, &run(example(&line)), 1, words);
        }
    }
    for (work, flag) in LONG {
        let line = format!("{work} {flag} {}", folder.path().display());
        assert_refused(&line, &run(example(&line)), 1, "");
        if cfg!(target_os = "linux") && flag != "--checkpoint" {
            let line = format!("{work} {flag} /proc/there");
            assert_refused(&line, &run(example(&line)), 1, "/proc/there: cannot write");
        }
    }
    let line = format!(
        "train SMALL --data DATA --steps 1000000000 --out {}",
        file.display()
    );
    assert_refused(&line, &run(example(&line)), 1, "file: cannot create");
    if cfg!(target_os = "linux") {
        let line = "train SMALL --data DATA --steps 1000000000 --out /proc";
        assert_refused(line, &run(example(line)), 1, "/proc/loss.svg: cannot write");
    }
    let there = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(there, 1, "trying leaves nothing behind");
}

/// A file named for two outputs is refused before the work starts, and keeps its contents.
#[test]
fn trying_an_output_keeps_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file.svg");
    fs::write(&file, "what stood there").unwrap();
    let work = "profile SMALL --steps 1000000000";
    for (flag, words) in [
        ("--flame-graph", "one file for two outputs"),
        ("--trace /x/y --output", "/x/y"),
    ] {
        let line = format!("{work} --trace {0} {flag} {0}", file.display());
        let line = line.replacen(&format!("--trace {} --trace", file.display()), "--trace", 1);
        assert_refused(&line, &run(example(&line)), 1, words);
        assert_eq!(fs::read_to_string(&file).unwrap(), "what stood there");
    }
}

#[test]
fn pictures_are_svg_or_png() {
    for (work, flag) in PICTURES {
        for name in [
            "picture.jpg",
            "picture",
            "picture.svg.gz",
            ".svg",
            "/dev/stdout",
        ] {
            let line = format!("{work} {flag} {name}");
            assert_refused(&line, &run(example(&line)), 2, "picture");
        }
    }
}

/// A limit on file sizes simulates a disk that is full after a few KiB.
#[cfg(unix)]
#[test]
fn what_cannot_be_saved_at_the_end_does_not_lose_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file.svg");
    fs::write(&file, "what stood there").unwrap();
    let works = [
        (
            "mixed_precision_benchmark SMALL --mode forward --steps 200 --rounds 1 --format json --output",
            "peak_bytes",
        ),
        (
            "attention_benchmark --sequence-length 8 16 --head-dim 8 --iterations 2 --plot",
            "F+B",
        ),
        (
            "precision_curves SMALL --data DATA --steps 20 --plot",
            "Last loss (nats)",
        ),
        (
            "memory_profile SMALL --mode train-step --timeline",
            "Largest allocations",
        ),
        (
            "profile SMALL --mode train-step --steps 2 --flame-graph",
            "Op ",
        ),
        (
            "compiled_benchmark --config 1-8-16-1-2 --steps 200 --rounds 1 --format json --output",
            "peak_bytes",
        ),
    ];
    for (line, words) in works {
        let line = format!("{line} {}", file.display());
        let mut shell = Command::new("bash");
        // The table goes through a pipe, to which the limit does not apply.
        let script = "set -o pipefail; trap '' XFSZ; (ulimit -f 2; exec \"$@\") | cat";
        shell.args(["-c", script, "bash"]);
        let command = example(&line);
        shell.arg(command.get_program()).args(command.get_args());
        let ended = run(shell);
        assert_refused(&line, &ended, 1, "file.svg: cannot write");
        assert!(
            ended.out.contains(words),
            "{line}: {words} is not in {}",
            ended.out
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), "what stood there");
    }
}

/// Paths may be any bytes that the system accepts.
#[cfg(target_os = "linux")]
#[test]
fn paths_need_not_be_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"\xff\xfe.svg"));
    let mut command =
        example("attention_benchmark --sequence-length 8 16 --head-dim 8 --iterations 2 --plot");
    command.arg(&path);
    assert_eq!(run(command).status, Some(0));
    assert!(path.is_file());
}

/// A closed terminal (SIGHUP) or a request to end (SIGTERM): the run is saved, its lock is removed, and `--resume`
/// continues it.
#[cfg(unix)]
#[test]
fn a_signal_saves_the_run() {
    for signal in [libc::SIGHUP, libc::SIGTERM] {
        saved_at(signal);
    }
}

#[cfg(unix)]
fn saved_at(signal: i32) {
    use std::process::Stdio;
    let folder = tempfile::tempdir().unwrap();
    let [checkpoint, curve] = ["run.safetensors", "loss.csv"].map(|name| folder.path().join(name));
    let line = format!(
        "train SMALL --data DATA --sample 0 --checkpoint {} --out {}",
        checkpoint.display(),
        folder.path().display()
    );
    let mut command = example(&format!("{line} --steps 1000000000 --schedule constant"));
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    // The check of outputs creates the curve's file for an instant. After the first checkpoint an evaluation writes it.
    for file in [&checkpoint, &curve] {
        while !file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
    // SAFETY: a process that this one started and has not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(128 + signal));
    assert!(!folder.path().join("run.safetensors.lock").exists());
    let bytes = std::fs::read(&checkpoint).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let (_, after) = text.split_once(r#"\"step\":"#).unwrap();
    let (step, _) = after.split_once(',').unwrap();
    let steps = step.parse::<usize>().unwrap().max(1); // the signal may come before the first step
    let resumed = format!("{line} --steps {steps} --schedule constant --resume");
    let ended = run(example(&resumed));
    assert_eq!(ended.status, Some(0), "{ended:?}");
}
