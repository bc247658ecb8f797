//! Tests that need a process of their own.

use std::process::Command;

/// Runs the ignored test called `name` alone in a fresh process, and fails with its output. Its pool has two threads, whatever the
/// machine has: what threads hold for themselves is counted.
pub fn run(name: &str) {
    let executable = std::env::current_exe().unwrap();
    let arguments = [
        name,
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ];
    let mut command = Command::new(executable);
    let command = command.args(arguments).env("RAYON_NUM_THREADS", "2");
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "no test called {name}: {out}");
}
